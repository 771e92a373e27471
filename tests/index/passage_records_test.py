"""The metadata of the passages of a search, from corpora of every container."""

from __future__ import annotations

import csv
import gzip
import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.api import Index, Retriever, SearchOptions
from jaxret.data.formats import Corpus, Policy
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.metadata_filters import matching_rows
from jaxret.index.passage_records import read_passage_records
from jaxret.index.passages import Passages
from jaxret.runs.run import Run, open_run
from jaxret.search.passage_texts import PassageTexts
from tests.pipeline import untrained_run, write_data, write_encoder

OWN: list[dict[str, Any]] = [
    {"year": 2015, "serial": 9_007_199_254_740_993, "author": {"name": "Knuth", "born": 1938}, "tags": ["b", "a", "b"]},
    {"year": "2016", "day": "2024-05-01", "abstract": "y" * 300, "none": None, "tags": [], "true": True},
    {},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("records")
    write_encoder(root / "encoder")
    write_data(root / "data")
    untrained_run(root / "run", root / "encoder", root / "data", head__token="mean", normalize=True)
    return root


@pytest.fixture(scope="module")
def run(root: Path) -> Run:
    return open_run(root / "run")


def encode(run: Run, path: Path, name: str, on_error: str = "error") -> PassageTexts:
    options = EncodeOptions(on_error=on_error)
    encoded = encode_corpus(run, Corpus.open(path), name, options, progress=False)
    return PassageTexts(open_encoded(encoded.folder), max_passage=False)


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz", "corpus.json"])
def test_metadata_have_the_types_and_the_nesting_of_the_record(name: str, run: Run, tmp_path: Path) -> None:
    """Lines of a plain file are read where they are; other files are copied once."""
    rows = [{"_id": f"p{n}", "text": "river", "metadata": own, "source": n} for n, own in enumerate(OWN)]
    path, lines = tmp_path / name, "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode()) if name.endswith(".gz") else lines.encode())
    if name.endswith(".json"):
        path.write_text(json.dumps(rows))
    texts = encode(run, path, name)
    expected = [{"source": n, **own} for n, own in enumerate(OWN)]
    folder = texts.encoded_corpus.folder
    assert texts.read(["p0"])["p0"].text == "river"
    assert not list(folder.glob("records*")), "control: texts alone need no copy with metadata"
    assert texts.metadata_of_rows(np.array([2, 0, 1, 0])) == [expected[2], expected[0], expected[1], expected[0]]
    assert (folder / "records.jsonl").exists() == (folder / "passages.jsonl").exists() == (name != "corpus.jsonl")
    if name != "corpus.jsonl":
        copy = folder / "records.jsonl"
        good = copy.read_bytes()
        copy.write_bytes(good.replace(b"Knuth", b"Knutt"))
        again = PassageTexts(texts.encoded_corpus, max_passage=False)
        assert again.metadata_of_rows(np.array([0])) == expected[:1], "a damaged copy is made again"
        assert copy.read_bytes() == good


@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
def test_the_deepest_levels_of_metadata_are_null(start: str, end: str, tmp_path: Path) -> None:
    """JSON of 600 levels can be parsed, but a function that calls itself for each level fails."""
    deep = start * 600 + "1" + end * 600
    (tmp_path / "corpus.jsonl").write_text(f'{{"_id": "p", "text": "river", "metadata": {{"x": {deep}, "y": [[1]]}}}}')
    (record,) = read_passage_records(Corpus.open(tmp_path).file, Policy())
    assert record.metadata["y"] == [[1]]
    text = json.dumps(record.metadata["x"], separators=(",", ":"))
    assert text == start * 99 + "null" + end * 99


def test_cells_of_a_csv_file_are_texts(run: Run, tmp_path: Path) -> None:
    with open(tmp_path / "corpus.csv", "w", newline="") as file:
        csv.writer(file).writerows([["_id", "text", "year"], ["p0", "river", "2015"], ["p1", "stone, light", "2016"]])
    texts = encode(run, tmp_path / "corpus.csv", "csv")
    assert texts.metadata_of_rows(np.array([1, 0])) == [{"year": "2016"}, {"year": "2015"}]
    assert matching_rows(texts.encoded_corpus, ["year>2015"]).tolist() == [1]


def test_columns_of_a_parquet_file(run: Run, tmp_path: Path) -> None:
    """Values that JSON lacks are texts or null, also for filters."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns: dict[str, list[Any]] = {
        "_id": ["p0", "p1"],
        "text": ["river", "stone"],
        "day": [date(2024, 5, 1), None],
        "at": [datetime(2024, 5, 1, 10, tzinfo=UTC), datetime(2023, 5, 1, 10, 0, 0, 5, tzinfo=UTC)],
        "price": [Decimal("1.50"), Decimal("2.00")],
        "serial": [9_007_199_254_740_993, 1],
        "weight": [math.nan, 0.5],
        "image": [b"\xff", b"x"],
        "author": [{"name": "Knuth"}, {"name": "Dijkstra"}],
        "tags": [["b", "a"], []],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "corpus.parquet")
    texts = encode(run, tmp_path / "corpus.parquet", "parquet")
    first, second = texts.metadata_of_rows(np.array([0, 1]))
    assert first == {
        "day": "2024-05-01",
        "at": "2024-05-01T10:00:00+00:00",
        "price": "1.50",
        "serial": 9_007_199_254_740_993,
        "weight": None,
        "image": None,
        "author": {"name": "Knuth"},
        "tags": ["b", "a"],
    }
    assert (second["weight"], second["day"], second["author"]) == (0.5, None, {"name": "Dijkstra"})
    for text, rows in {
        "at>=2024-01-01T00:00:00Z": [0],
        "at<2023-05-01T10:00:00.000006Z": [1],
        "day<=2024-05-01": [0],
        "day:2024-05-01": [0],
        "price>1.5": [1],
        "serial>9007199254740992": [0],
        "weight<1": [1],
    }.items():
        assert matching_rows(texts.encoded_corpus, [text]).tolist() == rows, text


def test_passages_without_metadata(run: Run, root: Path, tmp_path: Path) -> None:
    """A table has no names of columns. A bad record and a later record with the same id are not passages. Half of a
    surrogate pair is no text."""
    (tmp_path / "corpus.tsv").write_text("p0\triver\n")
    assert encode(run, tmp_path / "corpus.tsv", "tsv").metadata_of_rows(np.array([0])) == [{}]
    rows = [
        {"_id": "p0", "text": " "},
        {"_id": "p0", "text": "river", "n": "\ud800"},
        {"_id": "p0", "text": "x", "n": 2},
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = encode(run, tmp_path / "corpus.jsonl", "repeated", "skip")
    assert texts.metadata_of_rows(np.array([0])) == [{"n": "?"}]
    assert matching_rows(texts.encoded_corpus, ["n:?"]).tolist() == [0]


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.json"])  # the second is copied
def test_a_passage_without_text_has_metadata(name: str, run: Run, tmp_path: Path) -> None:
    rows = [{"_id": "p0", "text": "", "n": 1}, {"_id": "p1", "text": "river", "n": 2}]
    (tmp_path / name).write_text(
        json.dumps(rows) if name == "corpus.json" else "".join(json.dumps(row) + "\n" for row in rows)
    )
    texts = encode(run, tmp_path / name, f"keep-{name}", "keep")
    assert texts.metadata_of_rows(np.array([0, 1])) == [{"n": 1}, {"n": 2}]
    assert [passage.text for passage in texts.of_rows(np.array([0, 1]))] == ["", "river"]


def test_metadata_without_a_folder_that_can_be_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus.json").write_text(json.dumps([{"_id": "p0", "text": "river", "year": 2015}]))
    texts = encode(run, tmp_path / "corpus.json", "unwritable")
    monkeypatch.setattr(Passages, "_copy", lambda passages: False)
    assert texts.metadata_of_rows(np.array([0])) == [{"year": 2015}]
    assert texts.read(["p0"])["p0"].text == "river"


def test_hits_of_a_changed_corpus_and_of_documents(root: Path, tmp_path: Path) -> None:
    """A passage that was deleted and appended again has the metadata of its last record; a document those of its best
    passage."""
    for name, years in {"first": range(2000, 2006), "more": range(2010, 2013)}.items():
        rows = [{"_id": f"a#{n}", "text": f"river {n}", "year": year} for n, year in enumerate(years)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = Index.build(Retriever.open(root / "run"), tmp_path / "first.jsonl", "changed", progress=False)
    index.delete(["a#0", "a#1", "a#2", "a#5"])
    index.append(tmp_path / "more.jsonl", progress=False)
    [hits] = index.search(["river 2"], 9, metadata=True)
    year_of = {"a#0": 2010, "a#1": 2011, "a#2": 2012, "a#3": 2003, "a#4": 2004}
    assert {hit.id: hit.metadata for hit in hits} == {key: {"year": year} for key, year in year_of.items()}
    [filtered] = index.filtered("year>=2004", "year<2012").search(["river 2"], 9, texts=False, metadata=True)
    assert {hit.metadata["year"] for hit in filtered} == {2004, 2010, 2011}
    assert {hit.text for hit in filtered} == {""}
    [plain] = index.search(["river 2"], 9)
    assert [hit.metadata for hit in plain] == [{}] * 5
    assert len(set(hits)) == 5, "hits can be hashed"
    documents = Index.open(index.retriever, "changed", SearchOptions(max_passage=True))
    [[document]] = documents.search(["river 2"], 9, metadata=True)
    assert (document.id, document.metadata) == ("a", hits[0].metadata)
