"""An Index whose corpus changes, through itself or through other processes: filters, appended and deleted passages,
rows."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxret
from jaxret.api import Index, Retriever
from jaxret.data.formats import Corpus
from jaxret.experiments.build_index import index_corpus
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.update import append_corpus, delete_passages
from jaxret.runs.mismatch import ContractError
from jaxret.runs.ray_cluster import RayWorkers
from jaxret.runs.workdir import Workdir
from jaxret.search.search_options import IndexOptions
from tests.pipeline import untrained_run, write_data, write_encoder

FAMILIES: dict[str, dict[str, Any]] = {
    "one vector": {"head__token": "mean", "normalize": True},
    "several vectors": {"head__name": "mlr", "head__mlr__chosen": (1, 3)},
    "late interaction": {"head__name": "colbert", "head__colbert__late": True},
}
QUESTIONS = ["river stone music", "silver garden"]
NO_WORKERS = RayWorkers.__new__(RayWorkers)  # without a cluster


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Retriever]:
    """Return a function that trains a run of a family in a folder for no steps."""
    root = tmp_path_factory.mktemp("changes")
    write_encoder(root / "encoder")
    write_data(root / "data")

    def opened(folder: Path, family: str = "one vector") -> Retriever:
        untrained_run(folder, root / "encoder", root / "data", **FAMILIES[family])
        return Retriever.open(folder)

    return opened


def texts(count: int, word: str) -> list[str]:
    return [f"{word} number {number} of the river" for number in range(count)]


def test_a_document_lacks_its_deleted_passages(opened: Callable[..., Retriever], tmp_path: Path) -> None:
    """A part that is appended again belongs to the document until it is deleted again."""
    parts = {"a#0": "river stone", "a#1": "secret copper", "a#2": "forest"}
    passages = [jaxret.Passage(key, text) for key, text in parts.items()]
    options = jaxret.SearchOptions(max_passage=True)
    index = Index.build(opened(tmp_path / "run"), passages, options=options, progress=False)

    def document() -> str:
        [[hit]] = index.search(QUESTIONS[:1], 1)
        return hit.text

    assert document() == "river stone secret copper forest"
    index.delete(["a#1"])
    assert document() == "river stone forest"
    index.append([jaxret.Passage("a#1", "garden")], progress=False)
    assert document() == "river stone garden forest"
    index.delete(["a#1"])
    assert document() == "river stone forest"


@pytest.mark.slow
def test_appended_and_deleted_passages(opened: Callable[..., Retriever], tmp_path: Path) -> None:
    """The result equals that of an index which was built at once from the same passages."""
    retriever = opened(tmp_path / "run")
    index = Index.build(retriever, texts(6, "stone"), progress=False)
    index.append(texts(3, "silver"), progress=False)
    named = [jaxret.Passage("mine", "a silver garden", "Garden")]
    index.append(named, progress=False)
    assert len(index) == 10
    assert index.delete(["2", "7"]) == 2
    assert len(index) == 8
    expected = [*enumerate(texts(6, "stone")), *enumerate(texts(3, "silver"), 6)]
    passages = [jaxret.Passage(str(number), text) for number, text in expected if number not in (2, 7)] + named
    whole = Index.build(retriever, passages, "whole", progress=False)
    assert index.search(QUESTIONS, 20) == whole.search(QUESTIONS, 20)
    with pytest.raises(ValueError, match=r"ids\[1\]: 1 .*2 .*passage .*: 'nobody'.*nothing"):
        index.delete(["1", "nobody"])
    with pytest.raises(ValueError, match=r"passage 'mine' is in .* already"):
        index.append([jaxret.Passage("mine", "another")], progress=False)
    with pytest.raises(ValueError, match=r"passage .*encode"):
        index.append([], progress=False)
    assert len(index) == 8
    index.append(["a new one"], progress=False)
    assert list(index.rows())[-1][0] == ["10"], "new numbers follow those of deleted passages"
    index.append(named, progress=False)  # all of `named` were appended before
    assert len(index) == 9
    index.append(["a new one"], progress=False)
    assert list(index.rows())[-1][0] == ["11"], (
        "a text without an id is a new passage, even if the index has the same text"
    )


@pytest.mark.slow
def test_changes_by_other_processes_are_visible_after_refresh(opened: Callable[..., Retriever], tmp_path: Path) -> None:
    retriever = opened(tmp_path / "run")
    index, run = Index.build(retriever, texts(6, "stone"), progress=False), retriever.run
    before, folder = index.search(QUESTIONS, 9), tmp_path / "run" / "embeddings" / "passages"
    assert not index.is_stale()
    assert not index.refresh()
    (tmp_path / "more.jsonl").write_text(json.dumps({"_id": "x", "text": "silver garden"}) + "\n")
    append_corpus(run, Corpus.open(tmp_path / "more.jsonl"), folder, progress=False)
    assert index.is_stale()
    with pytest.warns(UserWarning, match=rf"{folder} .*changed .*refresh\(\)"):
        assert index.search(QUESTIONS, 9) == before, "the same passages as before, with their texts"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert index.search(QUESTIONS, 9) == before, "control: the warning comes once"
    assert index.refresh()
    assert index.search(QUESTIONS, 9)[1][0].id == "x"
    assert not index.is_stale()
    (tmp_path / "ids.txt").write_text("x\n")
    delete_passages(folder, tmp_path / "ids.txt")
    assert index.is_stale()
    assert index.refresh()
    assert index.search(QUESTIONS, 9) == before
    encode_corpus(run, Corpus.open(folder / next(folder.glob("passages-*.jsonl")).name), "passages", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert index.search(QUESTIONS, 9) == before
    assert not index.is_stale(), "repeating the command changes nothing"
    (tmp_path / "ids.txt").write_text("".join(f"{number}\n" for number in range(6)))
    delete_passages(folder, tmp_path / "ids.txt")
    assert index.is_stale()
    with pytest.raises(ValueError, match=r"passage .*search: .*deleted"):
        index.refresh()
    assert index.search(QUESTIONS, 9, texts=False)


@pytest.mark.slow
def test_refresh_during_searches_of_other_threads(opened: Callable[..., Retriever], tmp_path: Path) -> None:
    """Every result is that of one state of the corpus."""
    index = Index.build(opened(tmp_path / "run"), texts(6, "stone"), progress=False)
    allowed, done, errors = [index.search(QUESTIONS, 9)], threading.Event(), []
    seen: list[Any] = []

    def search() -> None:
        try:
            while not done.is_set():
                seen.append(index.search(QUESTIONS, 9))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=search) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(2):
        index.append([f"silver garden {number}"], progress=False)
        allowed.append(index.search(QUESTIONS, 9))
    done.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(seen) > 1
    assert all(hits in allowed for hits in seen)


def test_errors_come_before_any_change(opened: Callable[..., Retriever], tmp_path: Path) -> None:
    retriever = opened(tmp_path / "run")
    index = Index.build(retriever, texts(4, "stone"), progress=False)
    before = index.search(QUESTIONS, 9)  # the search writes the files by which texts are found
    names = sorted((tmp_path / "run").rglob("*"))

    def build(**options: Any) -> Index:
        return Index.build(retriever, texts(2, "town"), "new", progress=False, options=jaxret.SearchOptions(**options))

    changes: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: Index.build(retriever, texts(2, "town"), progress=False), ContractError, "passages"),
        (lambda: index.append([jaxret.Passage("1", "another")], progress=False), ValueError, "passage '1' is in"),
        (lambda: index.delete(["3", "0", "1", "2"]), ValueError, "no passage .*nothing was deleted"),
        (lambda: build(index="typo"), FileNotFoundError, "no index 'typo'"),
        (lambda: build(backend="scipy"), ValueError, "scipy"),
        (lambda: build(candidates="mean:9"), ValueError, "candidates=mean:9"),
        (lambda: build(dimension=10**6), ValueError, "dimension"),
        (lambda: build(workers=NO_WORKERS), ValueError, "workers"),
        (lambda: build(all_processes=True), ValueError, "all_processes"),
        (lambda: Index.open(retriever, options=jaxret.SearchOptions(workers=NO_WORKERS)), ValueError, "workers"),
    ]
    for change, kind, problem in changes:
        with pytest.raises(kind, match=problem):
            change()
        assert sorted((tmp_path / "run").rglob("*")) == names, problem
        assert not index.is_stale(), problem
    assert index.search(QUESTIONS, 9) == before
    assert index.delete(["3", "0", "1"]) == 3, "control: one passage is left"


def test_filters(opened: Callable[..., Retriever], tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    rows = [
        {"_id": f"p{n}", "text": f"river {n}", "metadata": {"colour": ["red", "blue"][n % 2], "size": n}}
        for n in range(9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = Index.build(opened(tmp_path / "run"), path, progress=False)
    red = index.filtered("colour:red")
    assert len(red) == 5
    every = index.search(QUESTIONS, 9)
    assert red.search(QUESTIONS, 9) == [[hit for hit in hits if int(hit.id[1:]) % 2 == 0] for hits in every]
    assert [ids for ids, _ in red.filtered("size:4", "size:8").rows()] == [["p4", "p8"]]
    assert len(index) == 9
    with pytest.raises(ValueError, match=r"passage .*'red', 'blue'"):
        index.filtered("colour:green")
    with pytest.raises(ValueError, match="the fields are colour, size"):
        index.filtered("weight:1")
    red.append([jaxret.Passage("p9", "without a colour")], progress=False)
    assert len(red) == 5
    assert index.refresh()
    assert len(index) == 10


def test_passages_from_python_have_metadata(opened: Callable[..., Retriever], tmp_path: Path) -> None:
    retriever = opened(tmp_path / "run")
    fields = [{"year": 2000 + n, "tags": ["even" if n % 2 == 0 else "odd"], "origin": {"page": n}} for n in range(6)]
    data = [jaxret.Passage(f"p{n}", f"river stone {n}", metadata=of_passage) for n, of_passage in enumerate(fields)]
    index = Index.build(retriever, [*data[:3], jaxret.Passage("plain", "river")], progress=False)
    index.append(data[3:], progress=False)
    hits = index.search(["river"], k=10, metadata=True)[0]
    assert {hit.id: hit.metadata for hit in hits} == dict(zip(["p0", "p1", "p2", "p3", "p4", "p5"], fields)) | {
        "plain": {}
    }
    selected = index.filtered("year>=2001", "year<2005", "tags:odd").search(["river"], k=10)[0]
    assert {hit.id for hit in selected} == {"p1", "p3"}
    assert [hit.id for hit in index.filtered("origin.page:4").search(["river"])[0]] == ["p4"]


@pytest.mark.parametrize(
    "family", ["one vector", *(pytest.param(f, marks=pytest.mark.exhaustive) for f in list(FAMILIES)[1:])]
)
def test_rows_are_ids_and_vectors(family: str, opened: Callable[..., Retriever], tmp_path: Path) -> None:
    """Blocks contain the rows of all parts, without deleted passages."""
    retriever = opened(tmp_path / "run", family)
    data = [jaxret.Passage(f"p{n}", f"river {'stone ' * (n % 3)}{n}") for n in range(12)]
    encoding = jaxret.EncodeOptions(shard_rows=5)
    index = Index.build(retriever, data[:8], encoding=encoding, progress=False)
    index.append(data[8:], progress=False)
    index.delete(["p1", "p9"])
    kept = [passage for passage in data if passage.id not in ("p1", "p9")]
    vectors = list(retriever.encode_passages(kept))
    for block in (1, 3, 1024):
        ids, rows = list[str](), list[np.ndarray]()
        for some, of_some in index.rows(block):
            assert 1 <= len(some) == len(of_some) <= block
            assert isinstance(of_some, list) == (family == "late interaction")
            ids, rows = ids + some, rows + list(of_some)
        assert ids == [passage.id for passage in kept]
        assert all(one.dtype == np.float32 and one.shape == two.shape for one, two in zip(rows, vectors, strict=True))
        for one, two in zip(rows, vectors, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5)


@pytest.mark.slow
def test_append_and_delete_are_refused_with_an_approximate_index(
    opened: Callable[..., Retriever], tmp_path: Path
) -> None:
    retriever = opened(tmp_path / "run")
    exact = Index.build(retriever, texts(40, "stone"), progress=False)
    index_corpus(Workdir(tmp_path / "run"), IndexOptions("IVF2,Flat", sample=20))
    index = Index.open(retriever, options=jaxret.SearchOptions(index="IVF2,Flat"))
    for change in (lambda: index.append(["x"]), lambda: index.delete(["1"])):
        with pytest.raises(ValueError, match=r"IVF2,Flat cannot change"):
            change()
    before = index.search(QUESTIONS, 3)
    exact.append(["silver garden"], progress=False)
    assert index.is_stale()
    with pytest.raises(ValueError, match=r"index .*vectors"):
        index.refresh()
    assert index.search(QUESTIONS, 3) == before
