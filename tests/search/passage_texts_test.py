"""The texts of passages that were found: from files of every format, in threads, from a folder that nobody can write;
and from a damaged corpus.json, no other texts."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxret.data.formats import Corpus, Policy
from jaxret.data.records import Passage
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.passages import Passages
from jaxret.index.shards import ShardError
from jaxret.runs.run import Run, open_run
from jaxret.search.searcher import Searcher
from tests.pipeline import copied_run, encoded_folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/, and run/: an untrained run that has encoded them."""
    return encoded_folder(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def run(root: Path) -> Run:
    return open_run(root / "run")


@pytest.mark.table
@pytest.mark.parametrize("name", ["psgs.tsv", "psgs.tsv.gz", "reordered.tsv", "corpus.jsonl.gz", "corpus.json"])
def test_passages_are_read_from_files_of_any_format(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows over several lines, a header with another order, no newline at the end, and a repeated id. A format without
    lines is copied once; after that, only the requested passages are read."""
    rows = [Passage(f"p{i}", f'line\none "{i}"' if i % 3 else "one\ttwo", f"title {i}") for i in range(20)]
    path = tmp_path / name
    if name == "corpus.json":
        text = json.dumps([{"_id": p.id, "title": p.title, "text": p.text} for p in rows])
    elif "jsonl" in name:
        text = "".join(json.dumps({"_id": p.id, "title": p.title, "text": p.text}) + "\n" for p in rows)
    else:
        columns = ["title", "id", "text"] if name == "reordered.tsv" else ["id", "text", "title"]
        table = io.StringIO()
        writer = csv.writer(table, delimiter="\t", lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([[getattr(p, c) for c in columns] for p in [*rows, Passage("p4", "another", "t")]])
        text = table.getvalue().removesuffix("\n")
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    run = copied_run(root, tmp_path / "mine")
    folder = encode_corpus(run, Corpus.open(path), options=EncodeOptions(on_error="skip"), progress=False).folder
    searcher = Searcher(run, folder)
    expected = {passage.id: passage for passage in Corpus.open(path).read(Policy("skip"))}
    assert len(expected) == 20
    for ids in (["p7"], ["p19", "p4", "p0"], list(expected)):
        assert searcher.texts.read(ids) == {key: expected[key] for key in ids if key in expected}
    copy = folder / "passages.jsonl"
    assert copy.exists() == (name in ("psgs.tsv.gz", "corpus.jsonl.gz", "corpus.json"))
    again = Searcher(run, folder)
    monkeypatch.setattr(Corpus, "read_located", None)  # `read_located` reads the whole corpus
    assert again.texts.read(["p7"]) == {"p7": expected["p7"]}
    assert 0 < again.texts.bytes_read < len(text) / 5
    monkeypatch.undo()
    if copy.exists():
        copy.write_bytes(copy.read_bytes().replace(b"line", b"mine"))
        assert Searcher(run, folder).texts.read(["p7"]) == {"p7": expected["p7"]}


def test_threads_read_their_own_texts(run: Run, root: Path) -> None:
    """The threads of a server share one index."""
    texts, interval = Passages(corpus_folder(run.workdir)), sys.getswitchinterval()
    expected = {passage.id: passage for passage in Corpus.open(root / "data").read()}
    some = [list(expected)[start : start + 3] for start in range(0, 60, 3)] * 5
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            result = list(threads.map(texts.read, some))
    finally:
        sys.setswitchinterval(interval)
    assert result == [{key: expected[key] for key in keys} for keys in some]


def test_a_kept_empty_passage_is_read_by_position(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "corpus.jsonl"
    texts = ["river", "", *(["stone"] * 50)]
    path.write_text("".join(json.dumps({"_id": f"p{i}", "text": text}) + "\n" for i, text in enumerate(texts)))
    run = copied_run(root, tmp_path / "mine")
    searcher = Searcher(
        run, encode_corpus(run, Corpus.open(path), options=EncodeOptions(on_error="keep"), progress=False).folder
    )
    searcher.texts.read(["p0"])
    read = searcher.texts.bytes_read
    for reader in ("read_located", "read"):  # both functions read the whole corpus
        monkeypatch.setattr(Corpus, reader, None)
    assert searcher.texts.read(["p0", "p1"]) == {"p0": Passage("p0", "river"), "p1": Passage("p1", "")}
    assert 2 * read < searcher.texts.bytes_read < path.stat().st_size / 10  # the line of the empty passage is read, too


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_passages_of_an_unwritable_folder(name: str, root: Path, tmp_path: Path) -> None:
    text = (root / "data" / "corpus.jsonl").read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    run = copied_run(root, tmp_path / "mine")
    folder = encode_corpus(run, Corpus.open(tmp_path / name), "read-only", progress=False).folder
    before = sorted(path.name for path in folder.iterdir())
    folder.chmod(0o500)
    passages = Searcher(run, folder).texts.read(["p3", "p4"])
    folder.chmod(0o700)
    assert {key: passage.id for key, passage in passages.items()} == {"p3": "p3", "p4": "p4"}
    assert all(passage.text for passage in passages.values())
    assert sorted(path.name for path in folder.iterdir()) == before


def damaged(good: bytes, random: np.random.Generator) -> bytes:
    data = bytearray(good)
    data[random.integers(len(data))] ^= 1 << random.integers(8)
    return bytes(data)


def test_damage_to_corpus_json_changes_no_text(root: Path, run: Run, tmp_path: Path) -> None:
    """The text is the same, or an error names the file."""
    shutil.copytree(corpus_folder(run.workdir), tmp_path / "shards")
    path = tmp_path / "shards" / "corpus.json"
    good, random = path.read_bytes(), np.random.default_rng(0)
    expected = Passages(tmp_path / "shards").read(["p1"])
    edits = [b"{}", b"[]", b"null", b'{"path": 3}', b'{"path": null}', b'{"path": "\\u0000"}', b"\xff", b"[" * 10**5]
    for number, text in enumerate([*edits, *(damaged(good, random) for _ in range(100))]):
        path.write_bytes(text)
        try:
            passages = Passages(tmp_path / "shards").read(["p1"])
        except (ShardError, FileNotFoundError) as error:
            named = str(error)
        else:
            named = str(path) if passages == expected and number >= len(edits) else ""
        assert str(path) in named, text
