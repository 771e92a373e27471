"""Files that change while an index is open: an error names them; no search returns other texts, or ends by a signal."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxret.data.formats import Corpus
from jaxret.data.records import Passage
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.passages import Passages
from jaxret.index.shards import ShardError
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import Run, open_run
from jaxret.search.approximate.faiss_index import FaissIndex, MappedCorpus, open_faiss_index
from jaxret.search.backends.select import select_backend
from jaxret.search.searcher import Searcher
from jaxret.search.vectors.exact import search
from tests.pipeline import untrained_run, write_data, write_encoder
from tests.search.approximate.faiss_index_test import D, built, vectors, written

TEXTS = [Passage(f"p{i}", f"text number {i:02d}", f"title {i}") for i in range(20)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("changed")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    untrained_run(folder / "run", folder / "encoder", folder / "data", head__token="mean", normalize=True)
    return open_run(folder / "run")


def write(path: Path, text: Callable[[Passage], str] = lambda passage: passage.text) -> None:
    """Write a corpus in the format of its suffix."""
    rows = [{"_id": p.id, "title": p.title, "text": text(p)} for p in TEXTS]
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def replaced_with_its_old_time(path: Path) -> None:
    """Replace the file with another of the same size and time, like a restored file."""
    stat = path.stat()
    write(path.with_name("new" + path.suffix), lambda p: p.text.replace("text", "TEXT"))
    os.utime(path.with_name("new" + path.suffix), ns=(stat.st_atime_ns, stat.st_mtime_ns))
    path.with_name("new" + path.suffix).rename(path)


def rewritten_with_its_old_time(path: Path) -> None:
    """Write other bytes into the same file, like `rsync --inplace --times`."""
    stat = path.stat()
    write(path, lambda p: p.text.replace("text", "TEXT"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "edited": lambda path: write(path, lambda p: p.text.replace("text", "TEXT")),
    "longer": lambda path: write(path, lambda p: p.text + " and more"),
    "cut": lambda path: os.truncate(path, 0 if path.suffix == ".json" else path.stat().st_size // 2),
    "replaced": replaced_with_its_old_time,
    "rewritten": rewritten_with_its_old_time,
}


@pytest.mark.table
@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz", "corpus.json"])
def test_a_corpus_that_changes_while_it_is_open(name: str, run: Run, tmp_path: Path) -> None:
    """Texts from a copy would still be right, but the vectors no longer belong to the corpus."""
    path, folder = tmp_path / name, tmp_path / "encoded"
    write(path)
    shutil.copytree(encode_corpus(run, Corpus.open(path), f"c-{name}", progress=False).folder, folder)
    original = path.read_bytes()
    for change, work in CHANGES.items():
        texts = Passages(folder)
        assert texts.read(["p3"]) == {"p3": TEXTS[3]}
        work(path)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"corpus\.json") as raised:
                texts.read(["p3"])
            assert isinstance(raised.value, ContractError) or change == "cut", change
        path.write_bytes(original)  # restored, with another time
        assert texts.read(["p4", "p5"]) == {"p4": TEXTS[4], "p5": TEXTS[5]}, change
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"no longer at .*corpus\.json"):
        texts.read(["p3"])
    (folder / "corpus.json").unlink()
    with pytest.raises(ShardError, match=r"corpus\.json .*exist"):
        texts.read(["p3"])


@pytest.mark.parametrize("read_before", [False, True])
def test_a_corpus_that_is_encoded_again_while_it_is_searched(read_before: bool, run: Run, tmp_path: Path) -> None:
    """The scores would be those of the old texts."""
    path, name = tmp_path / "corpus.jsonl", f"again-{read_before}"
    write(path)
    folder = encode_corpus(run, Corpus.open(path), name, progress=False).folder
    searcher = Searcher(run, folder)
    if read_before:
        assert searcher.texts.read({"p3"}) == {"p3": TEXTS[3]}
    shutil.rmtree(folder)
    write(path, lambda p: p.text.replace("text", "TEXT"))
    encode_corpus(run, Corpus.open(path), name, progress=False)
    with pytest.raises(ContractError, match=r"manifest\.json does not match"):
        searcher.texts.read({"p3"})
    assert "TEXT" in Searcher(run, folder).texts.read({"p3"})["p3"].text


def test_a_folder_of_texts_without_its_corpus(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "data" / "corpus.jsonl"
    path.parent.mkdir()
    write(path)
    texts = Passages(encode_corpus(run, Corpus.open(path.parent), "folder", progress=False).folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"no longer at .*corpus\.json"):
        texts.read(["p3"])


def test_ids_that_were_overwritten_at_the_same_time(run: Run, tmp_path: Path) -> None:
    """Size and time are unchanged, as after `touch -r`."""
    path = tmp_path / "corpus.jsonl"
    write(path)
    encoded_corpus = open_encoded(encode_corpus(run, Corpus.open(path), "ids", progress=False).folder)
    (ids,) = encoded_corpus.folder.glob("ids-*")
    whole, times = ids.read_bytes(), ids.stat()
    assert encoded_corpus.ids([3]) == ["p3"]
    for content, message in ((bytes(len(whole)), "has 0 lines for 20 rows"), (whole.replace(b"p", b"\xff"), "UTF-8")):
        ids.write_bytes(content)
        os.utime(ids, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(ShardError, match=rf"{ids.name} .*{message}"):
            encoded_corpus.ids([3])


def test_a_corpus_that_is_replaced_while_it_is_compared(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is that of the old file, but its size and time are those of the new one."""
    path = tmp_path / "corpus.jsonl"
    write(path)
    texts = Passages(encode_corpus(run, Corpus.open(path), "replaced", progress=False).folder)
    assert texts.read(["p1"]) == {"p1": TEXTS[1]}
    write(tmp_path / "new.jsonl", lambda p: p.text.upper())
    scan = type(texts.corpus).scan

    def replace_after(*arguments: object) -> object:
        done = scan(*arguments)  # type: ignore[arg-type]
        if (tmp_path / "new.jsonl").exists():
            os.replace(tmp_path / "new.jsonl", path)
        return done

    monkeypatch.setattr(type(texts.corpus), "scan", replace_after)
    os.utime(path)
    for _ in range(2):
        with pytest.raises(ContractError):
            texts.read(["p1"])


def test_a_changed_corpus_file_is_read_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "corpus.jsonl"
    write(path)
    texts = Passages(encode_corpus(run, Corpus.open(path), "once", progress=False).folder)
    texts.read(["p1"])
    scans: list[int] = []
    scan = type(texts.corpus).scan
    monkeypatch.setattr(type(texts.corpus), "scan", lambda *a: (scans.append(1), scan(*a))[1])  # type: ignore[func-returns-value]
    write(path, lambda p: p.text.upper())
    for _ in range(3):
        with pytest.raises(ContractError):
            texts.read(["p1"])
    assert len(scans) == 1
    write(path)
    os.utime(path)
    assert texts.read(["p1"]) == texts.read(["p1"]) == {"p1": TEXTS[1]}
    assert len(scans) == 2, "the same passages in a file with another time"


QUERIES = np.random.default_rng(1).standard_normal((5, D)).astype(np.float32)


def opened(folder: Path) -> tuple[FaissIndex, MappedCorpus]:
    encoded_corpus = open_encoded(written(folder / "run" / "embeddings" / "c", vectors(1)))
    name = built(encoded_corpus, "IVF8,Flat").name
    return open_faiss_index(encoded_corpus, name), MappedCorpus(encoded_corpus)


@pytest.mark.table
@pytest.mark.parametrize("name", ["vectors-*.npy", "indexes/*/index.faiss"])
def test_a_mapped_file_is_truncated_or_overwritten(name: str, tmp_path: Path) -> None:
    """Reading behind the end of a mapped file would end the process (SIGBUS)."""
    index, corpus = opened(tmp_path)
    before = index.search(QUERIES, corpus, 10)
    path = sorted((tmp_path / "run" / "embeddings" / "c").glob(name))[0]
    data = path.read_bytes()
    copy = path.with_name("copy")
    copy.write_bytes(data)
    copy.rename(path)
    assert (index.search(QUERIES, corpus, 10).rows == before.rows).all(), "the mapped file is another one"

    index, corpus = opened(tmp_path / "again")
    path = sorted((tmp_path / "again" / "run" / "embeddings" / "c").glob(name))[0]
    index.search(QUERIES, corpus, 10)
    os.truncate(path, 100)
    with pytest.raises(ShardError, match=rf"{path} .*100 bytes, .*[\d,]+"):
        index.search(QUERIES, corpus, 10)
    path.write_bytes(data[:-1] + b"x")
    with pytest.raises(ShardError, match=rf"{path} .*written .*opened"):
        index.search(QUERIES, corpus, 10)


@pytest.mark.parametrize("name", ["vectors-*.npy", "ids-*.txt"])
def test_shards_that_are_read_for_each_search(name: str, tmp_path: Path) -> None:
    encoded_corpus = open_encoded(written(tmp_path, vectors(1)))
    backend = select_backend("faiss-cpu")

    def rankings() -> list[str]:
        return encoded_corpus.ids(search(QUERIES, encoded_corpus, 10, backend).rows.reshape(-1))

    before = rankings()
    assert rankings() == before
    path = sorted(tmp_path.glob(name))[0]
    data = path.read_bytes()
    path.with_name("copy").write_bytes(data)
    path.with_name("copy").rename(path)
    with pytest.raises(ShardError, match=rf"{path} .*replaced .*opened"):
        rankings()
    path.unlink()
    with pytest.raises(ShardError, match=rf"{path} does not exist any more"):
        rankings()
    path.write_bytes(data)
    encoded_corpus = open_encoded(tmp_path)
    assert rankings() == before
