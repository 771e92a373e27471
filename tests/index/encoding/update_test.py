"""Appending to an encoded corpus and deleting from it: search equals that of a new encoding, and a change is complete
or absent."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.formats import Corpus, QuerySource
from jaxret.data.records import Passage, Query
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.encode_request import EncodeRequest
from jaxret.index.encoding.run_encode import run_encode
from jaxret.index.encoding.update import append_corpus, delete_passages, encoded_passage_length
from jaxret.index.shards import ShardError
from jaxret.index.source import inspect_corpus
from jaxret.runs.lock import hold_folder
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import Run, open_run
from jaxret.runs.run_warnings import read_warnings
from jaxret.runs.workdir import Workdir
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.search.vectors.exact import search
from jaxret.storage.atomic import read_json
from jaxret.storage.lockfile import LockedError
from jaxret.types import Ragged
from tests.index.runs import RunsByKind, write_parts
from tests.pipeline import PASSAGE_LENGTH, contents, run_script, untrained_run, write_data, write_encoder

KINDS: dict[str, dict[str, Any]] = {
    "one vector": {"head__token": "mean", "normalize": True},
    "two vectors": {"head__name": "mlr", "head__mlr__chosen": (1, 3)},
    "late": {"head__name": "colbert", "head__colbert__late": True, "head__colbert__projection": 6},
}
CASES = [
    ("one vector", "faiss-cpu"),
    pytest.param("one vector", "xla", marks=pytest.mark.exhaustive),
    pytest.param("two vectors", "faiss-cpu", marks=pytest.mark.exhaustive),
    pytest.param("two vectors", "xla", marks=pytest.mark.exhaustive),
    pytest.param("late", "xla", marks=pytest.mark.exhaustive),
]
ROWS = 10  # rows of a shard


def test_appended_passages_have_as_many_words(tmp_path: Path) -> None:
    """Otherwise, in a sparse corpus, one passage would have all its words and another only some."""
    data = write_data(tmp_path / "data")
    run = untrained_run(tmp_path / "run", write_encoder(tmp_path / "encoder"), data, head__name="splade")
    more = tmp_path / "more.jsonl"
    more.write_text('{"_id": "new", "text": "river stone garden"}\n')
    for name, options in (("all", EncodeOptions()), ("few", EncodeOptions(words=4))):
        folder = encode_corpus(run, Corpus.open(data), name, options, progress=False).folder
        with pytest.raises(ValueError, match=r"words is 2"):
            append_corpus(run, Corpus.open(more), folder, EncodeOptions(words=2), progress=False)
        with run.config.unlocked():
            run.config.encode.words = 3  # the key is changed after encoding
        append_corpus(run, Corpus.open(more), folder, progress=False)
        run.config.encode.words = 0
        parts = open_encoded(folder).shards
        assert [shards.fingerprint["encode"].get("words", 0) for shards in parts] == [options.words or 0] * 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole corpus, and the same passages in three files; the first two end at the end of a shard."""
    parts = {"whole": slice(None), "a": slice(40), "b": slice(40, 60), "c": slice(60, None)}
    return write_parts(tmp_path_factory.mktemp("change"), parts)


@pytest.fixture(scope="module")
def runs(root: Path) -> RunsByKind:
    """Encode `whole` at once, and `a`, which the tests change."""

    def encode(run: Run, root: Path) -> None:
        for name in ("whole", "a"):
            encode_corpus(
                run, Corpus.open(root / f"{name}.jsonl"), options=EncodeOptions(shard_rows=ROWS), progress=False
            )

    return RunsByKind(root, KINDS, encode)


def changed(run: Run, to: Path) -> tuple[Run, Path]:
    """Copy a run without the files of its checkpoint; return it, and the folder of its corpus `a`."""
    (to / "checkpoints" / str(run.checkpoint["step"])).mkdir(parents=True)
    shutil.copytree(run.workdir.path / "embeddings", to / "embeddings", ignore=shutil.ignore_patterns("whole"))
    other = replace(run, workdir=Workdir(to))
    return other, corpus_folder(other.workdir)


def rankings(root: Path, run: Run, folder: Path, k: int, backend: str = "xla") -> dict[str, list[tuple[str, float]]]:
    return Searcher(run, folder, SearchOptions(backend)).search(QuerySource.open(root / "data").read()[:8], k).rankings


def write_ids(path: Path, ids: list[str]) -> Path:
    path.write_text("".join(f"{key}\n" for key in ids))
    return path


@pytest.mark.parametrize(("kind", "backend"), CASES)
def test_a_search_equals_that_of_a_fresh_encoding(
    kind: str, backend: str, root: Path, runs: RunsByKind, tmp_path: Path
) -> None:
    """After two appends and a deletion, the search equals that of the same passages encoded at once. The last digit of
    a vector depends on its batch: scores equal those of the same vectors to the bit, and those of a new encoding in
    order, and to 1e-5."""
    run, folder = changed(runs[kind], tmp_path / "run")
    whole = runs[kind].workdir.embeddings("whole")
    for name in "bc":
        append_corpus(run, Corpus.open(root / f"{name}.jsonl"), folder, EncodeOptions(shard_rows=ROWS), progress=False)
    total = open_encoded(whole).total_rows
    for k in (5, total + 3):
        assert rankings(root, run, folder, k, backend) == rankings(root, runs[kind], whole, k, backend)
    best = rankings(root, run, folder, 2, backend)
    gone = list(dict.fromkeys(key for ranking in best.values() for key, _ in ranking))
    assert delete_passages(folder, write_ids(tmp_path / "ids.txt", gone)) == (len(gone), total - len(gone))
    left = [passage for passage in Corpus.open(root / "data").read() if passage.id not in gone]
    lines = [json.dumps({"_id": p.id, "title": p.title, "text": p.text}) + "\n" for p in left]
    (tmp_path / "left.jsonl").write_text("".join(lines))
    fresh = encode_corpus(
        run, Corpus.open(tmp_path / "left.jsonl"), options=EncodeOptions(shard_rows=ROWS), progress=False
    ).folder

    opened_backend = Searcher(run, folder, SearchOptions(backend)).vectors.backend
    assert opened_backend
    kept = [row for row, key in enumerate(open_encoded(whole).ids(np.arange(total))) if key not in gone]
    blocks = [block for _, block in open_encoded(whole)]
    stacked = concatenated(blocks)
    queries = run.embedder()(run.tokenizer.queries(q.text for q in QuerySource.open(root / "data").read()[:8]), "query")
    for k in (5, len(kept) + 3):
        result = search(
            queries,
            [stacked.take(np.array(kept)) if isinstance(stacked, Ragged) else stacked[kept]],
            k,
            opened_backend,
        )
        actual = rankings(root, run, folder, k, backend)
        assert [[key for key, _ in ranking] for ranking in actual.values()] == [
            [left[row].id for row in ranked] for ranked in result.rows
        ]
        assert [[score for _, score in ranking] for ranking in actual.values()] == result.scores.tolist()
        again = rankings(root, run, fresh, k, backend)
        for one, other in zip(actual.values(), again.values(), strict=True):
            np.testing.assert_allclose([s for _, s in one], [s for _, s in other], atol=1e-5)
        assert {key: {p for p, _ in ranking} for key, ranking in actual.items()} == {
            key: {p for p, _ in ranking} for key, ranking in again.items()
        }


def concatenated(blocks: list[Any]) -> Any:
    if isinstance(blocks[0], Ragged):
        lengths = np.concatenate([block.lengths for block in blocks])
        return Ragged(np.concatenate([b.flat for b in blocks]), np.concatenate([[0], np.cumsum(lengths)]))
    return np.concatenate(blocks)


def test_appended_shards_equal_those_of_a_separate_corpus(root: Path, runs: RunsByKind, tmp_path: Path) -> None:
    run, folder = changed(runs["one vector"], tmp_path / "run")
    before = contents(folder)
    result = append_corpus(run, Corpus.open(root / "b.jsonl"), folder, progress=False)
    alone = encode_corpus(
        run, Corpus.open(root / "b.jsonl"), options=EncodeOptions(shard_rows=50), progress=False
    ).folder
    assert (result.passages, result.shards) == (20, 1)
    assert contents(result.folder) == contents(alone)
    after = contents(folder)
    assert {name: after[name] for name in before} == before
    assert "parts.json" in after


def test_texts_of_all_parts_are_read(root: Path, runs: RunsByKind, tmp_path: Path) -> None:
    """One of them is the text of a passage that was deleted and appended again with another text."""
    run, folder = changed(runs["one vector"], tmp_path / "run")
    append_corpus(run, Corpus.open(root / "b.jsonl"), folder, progress=False)
    delete_passages(folder, write_ids(tmp_path / "ids.txt", ["p3"]))
    path = tmp_path / "again.jsonl"
    path.write_text('{"_id": "p3", "text": "silver river"}\n{"_id": "n3", "text": "x"}\n')
    with pytest.raises(ValueError, match=r"again\.jsonl:2: .*'n3' .*/a already, .*7"):
        append_corpus(run, Corpus.open(path), folder, progress=False)
    path = tmp_path / "new.jsonl"
    path.write_text('{"_id": "p3", "text": "silver river"}\n')
    append_corpus(run, Corpus.open(path), folder, progress=False)
    searcher = Searcher(run, folder)
    everything = {p.id: p for name in "ab" for p in Corpus.open(root / f"{name}.jsonl").read()}
    everything["p3"] = Passage("p3", "silver river")
    assert searcher.texts.read(everything) == everything
    assert searcher.encoded_corpus.total_rows == len(everything)
    assert searcher.search([Query("0", "silver river")], 100).encoded_corpus.corpus_identity["passages"] == len(
        everything
    )


def test_an_append_keeps_its_warnings(root: Path, runs: RunsByKind, tmp_path: Path) -> None:
    run, folder = changed(runs["one vector"], tmp_path / "run")
    path = tmp_path / "long.jsonl"
    path.write_text(f'{{"_id": "long", "text": "{"river " * 99}"}}\n')
    append_corpus(run, Corpus.open(path), folder, progress=False)
    kept = read_warnings(run.workdir)
    assert [one.kind for one in kept["append a 1"]] == ["truncation"]
    append_corpus(run, Corpus.open(path), folder, progress=False)
    append_corpus(run, Corpus.open(root / "b.jsonl"), folder, progress=False)
    assert read_warnings(run.workdir) == {**kept, "append a 2": []}, "also after the same append again"
    times = [read_json(run.workdir.encoding_time(f"a.append-{part}"))["passages"] for part in (1, 2)]
    assert times == [1, 20]


def test_repeating_a_change_has_no_effect(root: Path, runs: RunsByKind, tmp_path: Path, capsys: Any) -> None:
    run, folder = changed(runs["one vector"], tmp_path / "run")
    before = contents(folder)
    assert delete_passages(folder, write_ids(tmp_path / "nothing.txt", [])) == (0, 40)
    assert contents(folder) == before, "without ids, no file is made, so that a server does not open the corpus again"
    append_corpus(run, Corpus.open(root / "b.jsonl"), folder, progress=False)
    ids = write_ids(tmp_path / "ids.txt", ["p3", "", "p25", "p3"])
    assert delete_passages(folder, write_ids(tmp_path / "first.txt", ["p3"])) == (1, 59)
    assert delete_passages(folder, write_ids(tmp_path / "second.txt", ["p25"])) == (1, 58), "the first one remains"
    before = contents(folder)
    assert delete_passages(folder, ids) == (0, 58)
    assert append_corpus(run, Corpus.open(root / "b.jsonl"), folder).shards_written == 0
    assert "was appended before; 1 of its passages were deleted since" in capsys.readouterr().out
    assert contents(folder) == before
    with pytest.raises(ValueError, match=r"a\.jsonl:1: .*'p0' .*already, .*0 \(38 .*it\)"):
        append_corpus(run, Corpus.open(root / "a.jsonl"), folder, progress=False)
    next((folder / open_encoded(folder).parts[1].name).glob("ids-*")).unlink()  # the append repairs damage
    with pytest.raises(ShardError, match="does not exist"):
        Searcher(run, folder)
    assert append_corpus(run, Corpus.open(root / "b.jsonl"), folder, progress=False).shards_written == 1
    assert contents(folder) == before


def test_a_corpus_that_another_job_changes_is_refused(root: Path, runs: RunsByKind, tmp_path: Path) -> None:
    run, folder = changed(runs["one vector"], tmp_path / "run")
    before, ids = contents(folder), write_ids(tmp_path / "ids.txt", ["p3"])
    with hold_folder(folder, "indexing"):
        with pytest.raises(LockedError, match="indexing"):
            append_corpus(run, Corpus.open(root / "b.jsonl"), folder, progress=False)
        with pytest.raises(LockedError, match="indexing"):
            delete_passages(folder, ids)
    assert contents(folder) == before
    assert delete_passages(folder, ids) == (1, 39), "control: the other job has ended"


@pytest.mark.slow
def test_invalid_changes_are_refused_without_effect(root: Path, runs: RunsByKind, tmp_path: Path) -> None:
    run, folder = changed(runs["one vector"], tmp_path / "run")
    before = contents(folder)
    other = replace(run, checkpoint={"step": 7, "digest": "ab"})
    with pytest.raises(ContractError, match=r"checkpoint\.step: 0 in .*manifest\.json, 7 in"):
        append_corpus(other, Corpus.open(root / "b.jsonl"), folder, progress=False)
    short = open_run(runs["one vector"].workdir, passage_length=8)
    with pytest.raises(ContractError, match=r"passage_length: 24 in .*, 8 in"):
        append_corpus(short, Corpus.open(root / "b.jsonl"), folder, progress=False)
    with pytest.raises(ValueError, match=r"float32.* not float16"):
        append_corpus(run, Corpus.open(root / "b.jsonl"), folder, EncodeOptions(dtype="float16"), progress=False)
    ids = write_ids(tmp_path / "ids.txt", ["p1", "x7", "p2", "x8", "x9", "y"])
    with pytest.raises(ValueError, match=r"ids\.txt:2: 4 .*6 .*passage .*: 'x7', 'x8', 'x9', \.\.\."):
        delete_passages(folder, ids)
    with pytest.raises(ValueError, match=r"ids\.txt:1: 'two words' has white space in it"):
        delete_passages(folder, write_ids(tmp_path / "ids.txt", ["two words"]))
    with pytest.raises(FileNotFoundError, match="corpus 'wiki'"):
        corpus_folder(run.workdir, "wiki", "--name")
    assert contents(folder) == before
    everything = write_ids(tmp_path / "all.txt", open_encoded(folder).ids(np.arange(40)))
    assert delete_passages(folder, everything) == (40, 0)
    with pytest.raises(ValueError, match=r"/a .*passage .*search"):
        Searcher(run, folder)
    # The folder gets all passages again.
    append_corpus(run, Corpus.open(root / "a.jsonl"), folder, EncodeOptions(shard_rows=ROWS), progress=False)
    assert rankings(root, run, folder, 40) == rankings(
        root, runs["one vector"], runs["one vector"].workdir.embeddings("a"), 40
    )


def test_results_record_the_searched_parts(root: Path, runs: RunsByKind, tmp_path: Path) -> None:
    run, folder = changed(runs["one vector"], tmp_path / "run")
    result = [Searcher(run, folder).encoded_corpus.corpus_identity]
    append_corpus(run, Corpus.open(root / "b.jsonl"), folder, progress=False)
    result.append(Searcher(run, folder).encoded_corpus.corpus_identity)
    delete_passages(folder, write_ids(tmp_path / "ids.txt", ["p3"]))
    retrieved = Searcher(run, folder).search([Query("0", "river")], 3)
    result.append(retrieved.encoded_corpus.corpus_identity)
    assert [one["passages"] for one in result] == [40, 60, 59]
    assert len({one["sha256"] for one in result}) == 3


@pytest.mark.slow
def test_appended_passages_are_cut_like_the_corpus(root: Path, runs: RunsByKind, tmp_path: Path) -> None:
    shutil.copytree(runs["one vector"].workdir, tmp_path / "run")
    run = open_run(tmp_path / "run")
    shorter = open_run(run.workdir, passage_length=PASSAGE_LENGTH - 2)
    folder = encode_corpus(shorter, Corpus.open(root / "a.jsonl"), "short", progress=False).folder
    assert encoded_passage_length(folder) == PASSAGE_LENGTH - 2
    with pytest.raises(ContractError, match="passage_length"):
        # Control: with another length, it is refused.
        append_corpus(run, Corpus.open(root / "b.jsonl"), folder, progress=False)
    done = run_script(
        "encode.py", f"--workdir={run.workdir}", "--name=short", f"--corpus={root / 'b.jsonl'}", "--append"
    )
    assert done.returncode == 0, done.stderr
    assert {shards.fingerprint["contract"]["passage_length"] for shards in open_encoded(folder).shards} == {
        PASSAGE_LENGTH - 2
    }


@pytest.mark.slow
def test_a_request_encodes_cuts_appends_and_deletes(
    root: Path, runs: RunsByKind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The request is that of `jaxret encode`. The corpus to cut is named by its encoded corpus."""
    shutil.copytree(runs["one vector"].workdir, tmp_path / "run")
    run, ids = str(tmp_path / "run"), str(write_ids(tmp_path / "ids.txt", ["p3", "p5"]))
    requests = [
        EncodeRequest(run, str(root / "b.jsonl"), "b"),
        EncodeRequest(run, "b", options=EncodeOptions(dimension=3)),
        EncodeRequest(run, str(root / "b.jsonl"), "a", append=True),
        EncodeRequest(run, name="a", delete=ids),
    ]
    for request in requests:
        run_encode(request)
    lines = capsys.readouterr().out.splitlines()
    folders = [Path(run, "embeddings", name) for name in ("b", "b-3", "a")]
    assert f"20 passages are in {folders[0]}" in lines
    assert f"20 passages are in {folders[1]}" in lines
    assert lines[-2].endswith(f", a part of {folders[2]}")
    assert lines[-1] == f"2 passage(s) deleted from {folders[2]}; 58 are left"
    assert [open_encoded(folder).dimension == 3 for folder in folders] == [False, True, False]


class Killed(BaseException):
    """An error that no code catches."""


@pytest.mark.daily("delete")
@pytest.mark.slow
@pytest.mark.parametrize("job", [pytest.param("append", marks=pytest.mark.exhaustive), "delete"])
def test_a_killed_change_leaves_the_old_or_the_new_corpus(
    job: str, root: Path, runs: RunsByKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed before and after each file gets its final name; then the same command runs again."""
    ids = write_ids(tmp_path / "ids.txt", ["p3", "p5"])
    store = str(tmp_path / "store")

    def act(run: Run, folder: Path) -> None:
        if job == "append":
            append_corpus(
                run, Corpus.open(root / "b.jsonl"), folder, EncodeOptions(shard_rows=ROWS, store=store), progress=False
            )
        else:
            delete_passages(folder, ids)

    run, folder = changed(runs["one vector"], tmp_path / "undisturbed")
    old = rankings(root, run, folder, 5)
    act(run, folder)
    new, expected = rankings(root, run, folder, 5), contents(folder)
    put, ended, states = os.replace, 0, []
    for number in range(1, 99):
        run, folder = changed(runs["one vector"], tmp_path / str(number))
        count = 0

        def counted(*paths: Any, at: int = number) -> None:
            nonlocal count
            count += 1
            if count == (at + 1) // 2 and at % 2:
                raise Killed
            put(*paths)
            if count == (at + 1) // 2:
                raise Killed

        monkeypatch.setattr(os, "replace", counted)
        try:
            act(run, folder)
            ended += 1
        except Killed:
            pass
        monkeypatch.setattr(os, "replace", put)
        states.append([old, new].index(rankings(root, run, folder, 5)))
        act(run, folder)
        assert contents(folder) == expected
        if ended:
            break
    assert ended
    assert states == sorted(states)
    assert states[-2] == 1  # after the last file: the new corpus
    assert states.count(0) == len(states) - 2  # before it: the old corpus


@pytest.mark.parametrize("kept", [False, True])
def test_an_existing_id_is_detected_after_repeated_ids(kept: bool, runs: RunsByKind, tmp_path: Path) -> None:
    """The id is also detected if a store has the tokens; its scan does not record which ids were repeated."""
    run, folder = changed(runs["one vector"], tmp_path / "run")
    ids = ["z1", "z2", "z1", "z2", "z3", "p0"]
    rows = "".join(json.dumps({"_id": key, "text": f"river {key}"}) + "\n" for key in ids)
    (tmp_path / "new.jsonl").write_text(rows)
    store = str(tmp_path / "stores")
    if kept:
        inspect_corpus(run, Corpus.open(tmp_path / "new.jsonl"), "skip", store, print).open_tokens(run, False, print)
    with pytest.raises(ValueError, match=r"new\.jsonl:6: .*'p0' .*already, .*0"):
        append_corpus(
            run,
            Corpus.open(tmp_path / "new.jsonl"),
            folder,
            EncodeOptions(on_error="skip", store=store),
            progress=False,
        )
