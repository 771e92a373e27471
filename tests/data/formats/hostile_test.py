"""Files that were made to break a reader: the error is one sentence with the file, and with the line if there is
one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.errors import DataError
from jaxret.data.formats import Corpus, DataSource, JudgementSource, RankingSource, TrainingSource
from jaxret.data.formats.format import DataFile
from jaxret.data.formats.parquet import read_parquet
from tests.pipeline import run_measured

LONG = "1" * 5_000  # digits; Python parses at most 4,300
HUGE = 10**400  # more than the largest float


def detect(path: Path) -> DataFile:
    return DataSource.open(path).file()


def written(path: Path, *rows: str | dict[str, Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


JUDGED = {"query-id": "q1", "corpus-id": "p1", "score": 1}
FLAG = {"query": "a", "pos": ["x"], "neg": ["y"], "pos_scores": [1.0], "neg_scores": [0.5]}
TEVATRON = {"query_id": "1", "query": "a", "positive_passages": [{"docid": "1", "text": "x", "score": HUGE}]}
FOUND = {"question": "a", "answers": ["x"], "ctxs": [{"id": "1", "score": HUGE}]}


@pytest.mark.parametrize(
    ("kind", "rows", "message"),
    [
        (JudgementSource, ["q0\tp0\t1", f"q1\tp1\t{LONG}"], "a:2: score '1111.* is not an integer"),
        (JudgementSource, ["q0 0 p0 1", f"q1 0 p1 {LONG}"], "a:2: score '1111.* is not an integer"),
        (JudgementSource, [f"q1 0 p1 {LONG}"], "a:1: score '1111.* is not an integer"),
        (JudgementSource, ["q0\tp0\t1", f"q1\tp1\t{10**17}"], "a:2: score 100000000000000000 is too large; grades"),
        (JudgementSource, ["q0\tp0\t1", "q1\tp1\t1e400"], "a:2: score '1e400' is not an integer"),
        (JudgementSource, [JUDGED, json.dumps(JUDGED).replace(": 1}", ": 1e400}")], r"a:2: score .*integer"),
        (JudgementSource, [JUDGED, JUDGED | {"score": 1e300}], "a:2: score 1000.* is too large"),
        (JudgementSource, [JUDGED, JUDGED | {"score": HUGE}], "a:2: score 1000.* is too large"),
        (JudgementSource, [JUDGED, JUDGED | {"score": str(HUGE)}], r"a:2: score .*integer"),
        (JudgementSource, [JUDGED, json.dumps(JUDGED).replace(": 1}", f": {LONG}}}")], "a:2: this is not JSON"),
        (JudgementSource, [{"query_id": "1", "doc_ids": ["2"], "labels": [HUGE]}], "a:1: 'labels' holds 1000"),
        (JudgementSource, [{"query_id": "1", "doc_ids": ["2"], "labels": [1e300]}], "a:1: score 1000.* is too large"),
        (RankingSource, ["q1 Q0 p0 1 2.5 t", f"q1 Q0 p1 {LONG} 2.5 t"], "a:2: rank '1111.* is not an integer"),
        (RankingSource, [f"q1 Q0 p0 {LONG} 2.5 t"], "a:1: rank '1111.* is not an integer"),
        (RankingSource, ["q1 Q0 p0 1_0 2.5 t"], "a:1: rank '1_0' is not an integer"),
        (RankingSource, ["q1 Q0 p0 1 2.5 t", "q1 Q0 p1 2 1e400 t"], r"a:2: .*'1e400' .*finite"),
        (RankingSource, ["q1 Q0 p0 1 2.5 t", "q1 Q0 p1 2 1_0 t"], r"a:2: .*'1_0' .*finite"),
        (RankingSource, ["q1 Q0 p0 1 2.5 t", "q1 Q0 p1 2 \u0661 t"], r"a:2: .*'١' .*finite"),
        (RankingSource, [FOUND], r"a:1.*: .*1000.*finite"),
        (TrainingSource, [FLAG, FLAG | {"pos_scores": [HUGE]}], "a:2: 'pos_scores' holds 1000"),
        (TrainingSource, [TEVATRON], "a:1.*: a passage's score is 1000"),
        (Corpus, [{"_id": "1", "text": "x"}, f'{{"_id": {LONG}, "text": "x"}}'], "a:2: this is not JSON"),
        (
            Corpus,
            [f'{{"_id": {LONG}, "text": "x"}}', {"_id": "1", "text": "x"}],
            r"a:1: .*JSON \(a .*number .*4,300 digits\)",
        ),
    ],
)
def test_numbers_that_are_too_long_or_too_large(kind: Any, rows: list[Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a", *rows)
    with pytest.raises(DataError, match=message) as raised:
        list(kind.open(path).read())
    assert len(str(raised.value)) < 400 + len(str(path))


@pytest.mark.parametrize("line", ["x, " * 70_000, '{"_id": "1", ' + "x" * 200_000, "a\rb, c"])
def test_a_long_line_that_is_no_json(line: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a(:1)?: th"):
        list(Corpus.open(written(tmp_path / "a", line)).read())
    with pytest.raises(DataError, match=r"a(:1)?: th"):
        detect(tmp_path / "a")


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.tsv.gz"])
def test_a_pipe_is_refused_at_once(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)  # no process writes into it: opening it would wait
    for read in (Corpus.open, JudgementSource.open, detect):
        with pytest.raises(DataError, match=rf"{name}: .*pipe, .*once"):
            read(tmp_path / name)
    if name == "corpus.jsonl":
        with pytest.raises(DataError, match=rf"{name}: this is a pipe"):  # also as a file of a folder
            list(Corpus.open(tmp_path).read())


@pytest.fixture
def pyarrow() -> Any:
    return pytest.importorskip("pyarrow")


@pytest.mark.slow
def test_a_small_parquet_file_with_long_values(pyarrow: Any, tmp_path: Path) -> None:
    """Two kilobytes, which are 200 references to nine megabytes."""
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = pyarrow.array([0] * 200, pyarrow.int32())
    text = pyarrow.DictionaryArray.from_arrays(rows, pyarrow.array(["x" * 9_000_000]))
    ids = [str(number) for number in range(200)]
    path = tmp_path / "corpus.parquet"
    parquet.write_table(pyarrow.table({"_id": ids, "text": text}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 2_000
    code = f"""
from jaxret.data.formats import Corpus, DataSource
assert DataSource.open({str(path)!r}).file().format.name == "beir.texts"
assert Corpus.open({str(path)!r}).scan().passages == 200
"""
    done, used = run_measured("-c", code)
    assert done.returncode == 0, done.stderr
    assert used < 10**9


@pytest.mark.slow
def test_a_parquet_column_of_json_with_many_references(pyarrow: Any, tmp_path: Path) -> None:
    """Eighty kilobytes, which are 400 references to four megabytes."""
    parquet, path, kind = (
        pytest.importorskip("pyarrow.parquet"),
        tmp_path / "corpus.parquet",
        pyarrow.json_(pyarrow.large_string()),
    )
    schema = pyarrow.schema({"_id": pyarrow.string(), "text": kind})
    with parquet.ParquetWriter(path, schema, compression="zstd", store_schema=False) as writer:
        storage = pyarrow.array(["x" * 4_000_000] * 400, pyarrow.large_string())
        text = pyarrow.ExtensionArray.from_storage(kind, storage)
        ids = [str(number) for number in range(400)]
        writer.write_table(pyarrow.table([ids, text], schema=schema), row_group_size=400)
    assert path.stat().st_size < 100_000
    code = f"from jaxret.data.formats import Corpus; assert Corpus.open({str(path)!r}).scan().passages == 400"
    done, used = run_measured("-c", code)
    assert done.returncode == 0, done.stderr
    assert used < 10**9


@pytest.mark.slow
def test_a_parquet_column_of_long_values_of_one_length(pyarrow: Any, tmp_path: Path) -> None:
    """The reader does not keep references to such values, so a small file would become a large array."""
    parquet = pytest.importorskip("pyarrow.parquet")
    values = pyarrow.array([b"x" * 9_000_000], pyarrow.binary(9_000_000))
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 200, pyarrow.int32()), values)
    table = pyarrow.table({"_id": [str(number) for number in range(200)], "text": column})
    parquet.write_table(table, tmp_path / "corpus.parquet", compression="zstd", store_schema=False)
    with pytest.raises(DataError, match=r"corpus.parquet: .*values .*9,000,000"):
        next(iter(read_parquet(tmp_path / "corpus.parquet")))


def test_a_parquet_row_with_many_references(pyarrow: Any, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    words = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2_000, pyarrow.int32()), ["x" * 100_000])
    lists = pyarrow.ListArray.from_arrays([0, 1, 2_000], words)
    parquet.write_table(pyarrow.table({"query": ["a", "b"], "pos": lists}), tmp_path / "a.parquet")
    rows = read_parquet(tmp_path / "a.parquet")
    assert next(iter(rows)) == {"query": "a", "pos": ["x" * 100_000]}
    with pytest.raises(DataError, match=r"a.parquet:row .*0: .*unpacks .*199,9\d+,\d+"):
        list(rows)


@pytest.mark.slow
def test_a_parquet_column_with_extreme_compression(pyarrow: Any, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"_id": [str(number) for number in range(30)], "text": ["x" * 9_000_000] * 30})
    path = tmp_path / "corpus.parquet"
    parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 10**6
    with pytest.raises(DataError, match=r"corpus.parquet: .*unpacks .*[\d,]+ .*270,\d+,\d+"):
        list(Corpus.open(path).read())


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "dictionary"])
@pytest.mark.parametrize("groups", [3, 100])
def test_rows_of_parquet_are_the_same_however_they_are_stored(
    kind: str, groups: int, pyarrow: Any, tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [None if number % 7 == 0 else f"text {number % 5}" for number in range(20)]
    value = pyarrow.string() if kind == "dictionary" else getattr(pyarrow, kind)()
    array = pyarrow.array(texts, value)
    array = array.dictionary_encode() if kind == "dictionary" else array
    lists = pyarrow.array([[str(number), "x"] * (number % 3) for number in range(20)], pyarrow.list_(pyarrow.string()))
    structs = pyarrow.array([{"a": str(number), "b": number} for number in range(20)])
    table = pyarrow.table({"text": array, "lists": lists, "parts": structs, "score": [0.5] * 20})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=groups)
    assert list(read_parquet(tmp_path / "a.parquet")) == table.to_pylist()
    # More than fit into a dictionary.
    many = pyarrow.table({"lists": [[f"{number:0200}", "x"] for number in range(20_000)]})
    parquet.write_table(many, tmp_path / "many.parquet")
    assert list(read_parquet(tmp_path / "many.parquet")) == many.to_pylist()
    parquet.write_table(table.slice(0, 0), tmp_path / "empty.parquet")
    assert list(read_parquet(tmp_path / "empty.parquet")) == []
