"""Cut vectors: equal to those of a new encoding to the byte, equal in searches from disk and on the fly, and part of
the contract."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.api import Index, Retriever
from jaxret.data.formats import Corpus, DataError, QuerySource
from jaxret.experiments.explain import explain_in_run
from jaxret.experiments.explain_request import ExplainRequest
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_files import search_sizes
from jaxret.experiments.searches.search_job import parse_sizes
from jaxret.index.encoded_corpus import EncodedCorpus, open_encoded
from jaxret.index.encoding.cut_corpus import find_larger_vectors
from jaxret.index.encoding.encode import cut_encoded, encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.encode_request import EncodeRequest
from jaxret.index.encoding.ray_encode import EncodeJob
from jaxret.index.encoding.run_encode import run_encode
from jaxret.index.encoding.update import append_corpus, delete_ids
from jaxret.index.shards import ShardError, ShardWriter, read_manifest
from jaxret.runs.cut_vectors import cut_vectors
from jaxret.runs.mismatch import ContractError
from jaxret.runs.ray_cluster import EngineOptions, RunOpening
from jaxret.runs.run import Run, open_run
from jaxret.runs.run_warnings import read_warnings
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import read_json
from jaxret.storage.lockfile import FolderLock, LockedError
from jaxret.types import Ragged
from tests.index.runs import RunsByKind, write_parts
from tests.pipeline import untrained_run

SIZE = 5
KINDS: dict[str, dict[str, Any]] = {
    "one_vector": {"head__token": "mean", "normalize": True},
    "two_vectors": {"head__name": "mlr", "head__mlr__chosen": (1, 3)},
    "late": {"head__name": "colbert", "head__colbert__late": True, "head__colbert__projection": 8, "normalize": True},
}
DAILY = "one_vector"
CASES = [pytest.param(kind, marks=[] if kind == DAILY else pytest.mark.exhaustive) for kind in KINDS]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("cut"), {"first": slice(70), "more": slice(70, None)})


@pytest.fixture(scope="module")
def runs(root: Path) -> RunsByKind:
    """Encode `first`, and cut it as first-5."""

    def encode(run: Run, root: Path) -> None:
        encode_corpus(run, Corpus.open(root / "first.jsonl"), progress=False)
        encode_corpus(run, Corpus.open(root / "first.jsonl"), options=EncodeOptions(dimension=SIZE), progress=False)

    return RunsByKind(root, KINDS, encode)


def all_vectors(encoded_corpus: EncodedCorpus) -> np.ndarray:
    parts = [
        shard.take(np.arange(len(shard))).flat if encoded_corpus.ragged else shard[:] for _, shard in encoded_corpus
    ]
    return np.concatenate([part.reshape(-1, encoded_corpus.dimension) for part in parts])


def by_hand(vectors: np.ndarray, normalize: bool) -> np.ndarray:
    first = vectors[:, :SIZE].astype(np.float64)
    return first / np.linalg.norm(first, axis=1, keepdims=True) if normalize else first


def rankings(run: Run, name: str, root: Path, dimension: int = 0) -> Any:
    searcher = Searcher(run, run.workdir.embeddings(name), SearchOptions(dimension=dimension), many=True)
    return searcher.search(QuerySource.open(root / "data" / "queries.jsonl").read(), 10).rankings


@pytest.mark.daily("one_vector")
@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_cut_vectors_equal_a_fresh_encoding(kind: str, root: Path, runs: RunsByKind) -> None:
    run = runs[kind]
    fresh = encode_corpus(run.with_dimension(SIZE), Corpus.open(root / "first.jsonl"), f"fresh-{SIZE}", progress=False)
    stored, cut = open_encoded(run.workdir.embeddings("first")), open_encoded(run.workdir.embeddings(f"first-{SIZE}"))
    expected = by_hand(all_vectors(stored), run.model.module.normalize)
    assert np.abs(all_vectors(cut) - expected).max() < 1e-7
    for path in sorted(fresh.folder.glob("*-of-*")):
        assert path.read_bytes() == (cut.folder / path.name).read_bytes(), path.name
    assert fresh.shards > 1
    whole, contract = (read_manifest(c.folder / "manifest.json").fingerprint["contract"] for c in (stored, cut))
    assert contract == {**whole, "dimension": SIZE}
    assert cut.bytes_per_passage < stored.bytes_per_passage


@pytest.mark.daily("one_vector")
@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_searching_cut_vectors_equals_searching_the_cut_corpus(kind: str, root: Path, runs: RunsByKind) -> None:
    run = runs[kind]
    results = rankings(run, f"first-{SIZE}", root)
    assert results == rankings(run, "first", root, SIZE)
    assert results != rankings(run, "first", root), "control: whole vectors"
    normalize, late = run.model.module.normalize, run.model.late_interaction
    encoded_corpus = open_encoded(run.workdir.embeddings("first"))
    lists = [by_hand(np.asarray(v, np.float32), normalize) for _, shard in encoded_corpus for v in shard]
    ids = encoded_corpus.ids(np.arange(encoded_corpus.total_rows))
    queries = list(QuerySource.open(root / "data" / "queries.jsonl").read())[:5]
    vectors = run.embedder()(run.tokenizer.queries([query.text for query in queries]), "query")
    for query, own in zip(queries, vectors, strict=True):
        of_query = by_hand(own, normalize)
        scores = {key: (of_query @ passage.T).max(1).sum() for key, passage in zip(ids, lists, strict=True)}
        for key, score in results[query.id]:
            assert score == pytest.approx(scores[key], abs=2e-6)
        assert results[query.id][0][1] == pytest.approx(max(scores.values()), abs=2e-6)
    assert late or len(vectors.flat) == len(queries)


@pytest.mark.slow
def test_the_score_of_a_cut_corpus_is_explained(root: Path, runs: RunsByKind) -> None:
    run = runs[DAILY]
    query = next(iter(QuerySource.open(root / "data" / "queries.jsonl").read()))
    (passage, score), *_ = rankings(run, f"first-{SIZE}", root)[query.id]
    request = ExplainRequest(str(run.workdir), query.text, passage_id=passage, encoded_name=f"first-{SIZE}")
    assert f"score {score:.4f}" in explain_in_run(request)


@pytest.mark.slow
def test_appends_and_deletes_apply_to_the_cut_corpus(root: Path) -> None:
    run = untrained_run(root / "changing", root / "encoder", root / "data", **KINDS[DAILY])
    options = EncodeOptions(dimension=SIZE)
    encode_corpus(run, Corpus.open(root / "first.jsonl"), progress=False)
    folder = encode_corpus(run, Corpus.open(root / "first.jsonl"), options=options, progress=False).folder
    for each in (folder, run.workdir.embeddings("first")):
        append_corpus(run, Corpus.open(root / "more.jsonl"), each, progress=False)
        delete_ids(each, {"p1": "here", "p2": "here"})
    appended = all_vectors(open_encoded(folder))
    again = cut_encoded(run, "first", options, f"again-{SIZE}", progress=False)
    assert np.array_equal(all_vectors(open_encoded(again.folder)), appended)
    assert again.passages == len(appended), "the passages of all parts, without deleted ones"
    assert open_encoded(again.folder).corpus_identity == open_encoded(run.workdir.embeddings("first")).corpus_identity
    assert rankings(run, f"again-{SIZE}", root) == rankings(run, "first", root, SIZE)
    with pytest.raises(ValueError, match=r"dimension=3: the vectors in .* have dimension 5"):
        append_corpus(run, Corpus.open(root / "more.jsonl"), folder, EncodeOptions(dimension=3), progress=False)


@pytest.mark.slow
def test_a_changed_file_is_not_cut_from_old_vectors(root: Path, tmp_path: Path) -> None:
    run = untrained_run(tmp_path / "run", root / "encoder", root / "data", **KINDS[DAILY])
    file, options = tmp_path / "texts.jsonl", EncodeOptions(dimension=SIZE)
    file.write_bytes((root / "first.jsonl").read_bytes())
    encode_corpus(run, Corpus.open(file), progress=False)
    assert find_larger_vectors(run.with_dimension(SIZE), Corpus.open(file), tmp_path) is not None
    file.write_bytes((root / "more.jsonl").read_bytes())
    folder = encode_corpus(run, Corpus.open(file), options=options, progress=False).folder
    fresh = encode_corpus(run, Corpus.open(root / "more.jsonl"), f"fresh-{SIZE}", options, progress=False).folder
    assert np.array_equal(all_vectors(open_encoded(folder)), all_vectors(open_encoded(fresh)))


@pytest.mark.slow
def test_a_path_is_refused_as_a_name(
    root: Path, tmp_path: Path, runs: RunsByKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever, options = Retriever(runs[DAILY]), EncodeOptions(dimension=SIZE)
    monkeypatch.chdir(tmp_path)
    assert len(Index.build(retriever, "first", "by-name", options, progress=False))
    Path("first").mkdir()
    with pytest.raises(DataError, match=r"first/corpus\.jsonl: .*exist"):
        Index.build(retriever, "first", "by-name", options, progress=False)
    with pytest.raises(DataError, match=r"second: .*exist"):
        Index.build(retriever, "second", "by-name", options, progress=False)


@pytest.mark.slow
def test_changes_of_a_cut_corpus_are_not_undone(root: Path, tmp_path: Path) -> None:
    run = untrained_run(tmp_path / "run", root / "encoder", root / "data", **KINDS[DAILY])
    options, corpus = EncodeOptions(dimension=SIZE), Corpus.open(root / "first.jsonl")
    whole = encode_corpus(run, corpus, progress=False).folder
    cut = cut_encoded(run, "first", options, progress=False).folder
    append_corpus(run, Corpus.open(root / "more.jsonl"), cut, progress=False)
    before = (cut / "parts.json").read_bytes()
    with pytest.raises(ContractError, match=r"appended .*deleted"):
        cut_encoded(run, "first", options, progress=False)
    append_corpus(run, Corpus.open(root / "more.jsonl"), whole, progress=False)
    cut_encoded(run, "first", options, progress=False)
    assert (cut / "parts.json").read_bytes() == before
    delete_ids(cut, {"p1": "here"})
    before = (cut / "parts.json").read_bytes()
    with pytest.raises(ContractError, match=r"appended .*deleted"):
        cut_encoded(run, "first", options, progress=False)
    assert (cut / "parts.json").read_bytes() == before
    delete_ids(whole, {"p1": "here", "p2": "here"})
    cut_encoded(run, "first", options, progress=False)
    assert open_encoded(cut).corpus_identity == open_encoded(whole).corpus_identity


@pytest.mark.slow
def test_encode_dimension_applies_to_all_vectors_of_a_run(root: Path) -> None:
    run = untrained_run(root / "short", root / "encoder", root / "data", **KINDS[DAILY], encode__dimension=SIZE)
    assert read_json(run.workdir.contract)["dimension"] == SIZE
    folder = encode_corpus(run, Corpus.open(root / "first.jsonl"), progress=False).folder
    assert open_encoded(folder).dimension == SIZE
    results = rankings(run, "first", root)
    assert results == rankings(open_run(run.workdir), "first", root)
    with pytest.raises(ValueError, match=r"dimension .*9, .*5"):
        rankings(run, "first", root, 9)


def test_an_interrupted_cut_continues_and_is_no_complete_corpus(
    root: Path, runs: RunsByKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, written = runs[DAILY], []
    write = ShardWriter.write

    def fail_at_second(self: Any, shard: Any, *rest: Any) -> None:
        if shard.index == 1:
            raise KeyboardInterrupt
        written.append(shard.index)
        write(self, shard, *rest)

    options = EncodeOptions(dimension=3)
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", fail_at_second)
        with pytest.raises(KeyboardInterrupt):
            cut_encoded(run, "first", options, progress=False)
    assert written == [0]
    assert "first-3" not in run.workdir.corpora
    result = cut_encoded(run, "first", options, progress=False)
    assert result.shards_written == result.shards - 1
    assert "first-3" in run.workdir.corpora


def test_a_job_waits_for_another_that_cuts_the_same_vectors(
    runs: RunsByKind, capsys: pytest.CaptureFixture[str]
) -> None:
    run, cut = runs[DAILY], open_encoded(runs[DAILY].workdir.embeddings(f"first-{SIZE}"))
    lock = FolderLock(cut.folder, "cutting vectors")
    # The lock's holder cuts nothing, so the wait ends with an error.
    with pytest.raises(LockedError, match="in use: cutting vectors"):
        cut_encoded(run, "first", EncodeOptions(dimension=SIZE, lease=1.0), progress=False)
    waiting = threading.Timer(1, lock.release)
    waiting.start()
    assert cut_encoded(run, "first", EncodeOptions(dimension=SIZE), progress=False).shards_written == 0
    waiting.join()
    assert capsys.readouterr().err.count("waiting: ") == 2


def test_a_cut_keeps_the_warnings_on_its_texts(root: Path, runs: RunsByKind, tmp_path: Path) -> None:
    shutil.copytree(runs[DAILY].workdir, tmp_path / "run")
    run, lines = open_run(tmp_path / "run"), (root / "more.jsonl").read_text().splitlines()[:9]
    long = json.dumps({"_id": "long", "text": "river " * 99})
    (tmp_path / "texts.jsonl").write_text("\n".join([*lines, long]) + "\n")
    corpus = Corpus.open(tmp_path / "texts.jsonl")
    for options in (EncodeOptions(), EncodeOptions(dimension=SIZE), EncodeOptions(dimension=SIZE)):
        encode_corpus(run, corpus, options=options, progress=False)
    jobs = read_warnings(run.workdir)
    assert [one.kind for one in jobs["encode texts"]] == ["truncation"]
    assert jobs["encode texts-5"] == jobs["encode texts"]


def test_workers_of_ray_do_not_cut(root: Path, runs: RunsByKind) -> None:
    """The command cuts once; in a bucket, each worker would otherwise cut its own copy."""
    workdir, options = runs[DAILY].workdir, EncodeOptions(dimension=SIZE)
    opening = RunOpening(str(workdir), "best", "", {})
    assert EncodeJob(opening, str(root / "first.jsonl"), "of-ray", options).encode() == ""
    assert not workdir.embeddings("of-ray").exists()
    with pytest.raises(ValueError, match=r"--engine=ray: .* first is an encoded corpus"):
        run_encode(EncodeRequest(str(workdir), "first", options=options, engine=EngineOptions("ray")))


@pytest.mark.slow
def test_damaged_vectors_are_not_cut(root: Path) -> None:
    run = untrained_run(root / "damaged", root / "encoder", root / "data", **KINDS[DAILY])
    folder = encode_corpus(run, Corpus.open(root / "first.jsonl"), progress=False).folder
    path = next(folder.glob("vectors-00000*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardError, match="damaged"):
        cut_encoded(run, "first", EncodeOptions(dimension=3), progress=False)


def test_vectors_of_another_checkpoint_are_not_cut(root: Path, runs: RunsByKind) -> None:
    other = replace(runs[DAILY], checkpoint={"step": 7, "digest": "0"})
    with pytest.raises(ContractError, match="checkpoint"):
        encode_corpus(other, Corpus.open(root / "first.jsonl"), "first", EncodeOptions(dimension=SIZE), progress=False)


@pytest.mark.slow
def test_quality_by_size_is_a_table(root: Path, runs: RunsByKind, capsys: pytest.CaptureFixture[str]) -> None:
    run, source = runs[DAILY], EvaluationSource.open(root / "data", root / "data")
    evaluation = EvaluationOptions(latency=0)
    sizes = parse_sizes(["all", "5", "2"])
    measured = search_sizes(run, sizes, source, evaluation, encoded_name="first")
    assert list(measured) == [run.model.dimension, 5, 2]
    table = capsys.readouterr().out.split("by number of dimensions:")[1].splitlines()
    assert [line.split()[0] for line in table if line.strip()][-4:-1] == ["2", "5", str(run.model.dimension)]
    stored = read_json(run.workdir.evaluation("data.test.dimension-5"))
    assert stored["provenance"]["search"]["dimension"] == 5
    (direct,) = search_sizes(run, (0,), source, replace(evaluation, label="cut"), encoded_name=f"first-{SIZE}").values()
    assert direct.mean == measured[5].mean
    assert (
        read_json(run.workdir.evaluation(f"data.test.cut.dimension-{SIZE}"))["provenance"]["search"]["dimension"]
        == SIZE
    )
    search_sizes(run, (0,), source, replace(evaluation, label="whole"), encoded_name="first")
    assert "dimension" not in read_json(run.workdir.evaluation("data.test.whole"))["provenance"]["search"]
    with pytest.raises(ValueError, match=r"--dimension=99: .*vectors .*corpus"):
        search_sizes(run, (99,), source, evaluation, encoded_name="first")
    with pytest.raises(ValueError, match="give --qrels too"):
        search_sizes(run, (2, 5), replace(source, judgements=None), evaluation, encoded_name="first")


@pytest.mark.parametrize("texts", [["0"], ["-1"], ["whole"], ["5", "5"]])
def test_wrong_sizes(texts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"--dimension[:=]"):
        parse_sizes(texts)


@pytest.mark.slow
def test_heads_that_cannot_be_cut_are_errors(root: Path) -> None:
    parts = {"head__aggretriever__mlm": False, "head__aggretriever__lexical_dim": 8, "head__aggretriever__cls_dim": 4}
    run = untrained_run(root / "parts", root / "encoder", root / "data", head__name="aggretriever", **parts)
    with pytest.raises(ValueError, match=r"--dimension .*5, .*'aggretriever' joins"):
        encode_corpus(run, Corpus.open(root / "first.jsonl"), options=EncodeOptions(dimension=SIZE), progress=False)


def test_cutting_and_scaling_of_vectors() -> None:
    """A vector has the same numbers alone and in a batch; float16 is kept, and a vector of zeros stays zero."""
    vectors = np.random.default_rng(0).normal(size=(50, 2, 12)).astype(np.float32)
    cut = cut_vectors(vectors, SIZE, True)
    assert np.abs(np.linalg.norm(cut, axis=-1) - 1).max() < 1e-6
    assert all(np.array_equal(cut_vectors(vectors[i, j], SIZE, True), cut[i, j]) for i in range(50) for j in range(2))
    assert np.array_equal(cut_vectors(vectors, SIZE, False), vectors[..., :SIZE])
    assert cut_vectors(vectors.astype(np.float16), SIZE, True).dtype == np.float16
    assert not cut_vectors(np.zeros((3, 8), np.float32), SIZE, True).any()
    assert Ragged.from_stacked(cut).flat.shape == (100, SIZE)
