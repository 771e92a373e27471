"""Parquet files of an encoded corpus: complete, equal after a kill, and compared with exact search."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.formats import Corpus, QuerySource
from jaxret.export.export import export
from jaxret.export.stores.store_options import StoreOptions
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.update import delete_ids
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import open_run
from jaxret.runs.workdir import Workdir
from jaxret.search.vectors.in_memory import vectors_of
from jaxret.storage.atomic import read_with_digest
from tests.export.stores.corpora import DELETED, KINDS, RECORDS, ROWS, make_runs
from tests.index.runs import RunsByKind
from tests.pipeline import contents, environment

pa = pytest.importorskip("pyarrow", reason="needs jaxret[data]")
pq = pytest.importorskip("pyarrow.parquet")

from jaxret.export.stores.corpus_rows import CorpusRows  # noqa: E402
from jaxret.export.stores.fill_store import store_target  # noqa: E402
from jaxret.export.stores.metadata_columns import column_names, value_type  # noqa: E402
from jaxret.export.stores.parquet_files import ParquetFiles  # noqa: E402


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunsByKind:
    return make_runs(tmp_path_factory.mktemp("parquet"))


@pytest.fixture(scope="module")
def whole(runs: RunsByKind) -> Path:
    """The export of the run `one`; tests that change it work on a copy."""
    export(runs["one"].workdir.path, "parquet", runs.root / "whole")
    return runs.root / "whole"


@pytest.mark.table
@pytest.mark.parametrize("kind", KINDS)
def test_files_have_every_stored_row(runs: RunsByKind, kind: str, tmp_path: Path) -> None:
    report = export(runs[kind].workdir.path, "parquet", tmp_path / "out")
    assert f"out: {ROWS} passages, counted, of 5 shard(s). The 10 best passages of {ROWS} stored vectors" in report
    encoded_corpus = open_encoded(runs[kind].workdir.embeddings("first"))
    vectors = vectors_of(encoded_corpus, np.arange(ROWS))
    table = pq.read_table(tmp_path / "out")  # readers take the folder as one table
    assert (
        table["id"].to_pylist() == encoded_corpus.ids(np.arange(ROWS)) == [key for key in RECORDS if key not in DELETED]
    )
    assert table["row"].to_pylist() == list(range(ROWS))
    column = table["vectors" if kind in ("two", "late") else "vector"]
    number = pa.float16() if kind == "float16" else pa.float32()
    assert (column.type.value_type.value_type if kind in ("two", "late") else column.type.value_type) == number
    for row, stored in zip(column.to_pylist(), vectors, strict=True):
        np.testing.assert_array_equal(np.array(row, stored.dtype).reshape(stored.shape), stored)
    for row in table.drop_columns(table.schema.names[-1:]).to_pylist():
        record = RECORDS[row["id"]]
        own = record.get("metadata", {})
        assert (row["title"], row["text"]) == (record["title"], record["text"])
        assert (row["colour"], row["year"], row["price"]) == tuple(map(own.get, ("colour", "year", "price")))
        assert row["ID_2"] == own.get("ID")
        assert row["tags"] == sorted(own.get("tags", []))
        assert row["deep_er"] == own.get("deep", {}).get("er")
    manifest = read_with_digest(tmp_path / "out" / "_manifest.json")
    assert manifest["export"]["metadata"]["deep_er"] == "deep.er"
    assert sum(entry["rows"] for entry in manifest["shards"]) == ROWS
    assert not (tmp_path / "out" / "_journal").exists()


_KILLED = """
import os, signal, sys
from pathlib import Path
from jaxret.export.stores import fill_store, export_journal
from jaxret.export.stores.corpus_rows import CorpusRows
from jaxret.export.stores.store_options import StoreOptions
from jaxret.export.stores.vector_store import open_vector_store
from jaxret.index.encoded_corpus import open_encoded

folder, out, kind, shards, before = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
note = export_journal.ExportJournal.note
def killed(journal, entry):
    if before == "journal" and len(journal.entries) == shards:
        os.kill(os.getpid(), signal.SIGKILL)  # the shard is in the store, and not in the journal
    note(journal, entry)
export_journal.ExportJournal.note = killed
counted, started = fill_store.counted_batches, []
def cut(batches, size, bar):
    started.append(size)
    for batch in counted(batches, size, bar):
        if before == "shard" and len(started) > shards:
            yield batch.slice(0, len(batch) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch
fill_store.counted_batches = cut
rows = CorpusRows(open_encoded(folder))
out.mkdir(exist_ok=True)
target = fill_store.store_target(rows, kind, out, StoreOptions(url=sys.argv[6]))
identity = fill_store.identity_of_rows(rows) | {"to": kind, **target.identity}
journal = export_journal.ExportJournal(out, identity)
fill_store.fill_store(open_vector_store(kind, target), rows, journal)
"""


def kill_export(folder: Path, out: Path, kind: str, shards: int, before: str, url: str = "") -> None:
    """Export in a process that kills itself after some shards, before the next "shard" is complete, or before the
    "journal" has it."""
    words = [sys.executable, "-c", _KILLED, str(folder), str(out), kind, str(shards), before, url]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("before", ["shard", "journal"])
def test_a_killed_export_continues(runs: RunsByKind, whole: Path, before: str, tmp_path: Path) -> None:
    workdir = runs["one"].workdir
    out = tmp_path / "out"
    kill_export(workdir.embeddings("first"), out, "parquet", 3, before)
    assert sorted(p.name for p in (out / "_journal").iterdir()) == [*(f"0000{n}.json" for n in range(3)), "begun.json"]
    times = {p.name: p.stat().st_mtime_ns for p in out.glob("part-0000[012].parquet")}
    export(workdir.path, "parquet", out)
    assert {name: (out / name).stat().st_mtime_ns for name in times} == times  # finished files are not written again
    expected, actual = contents(whole), contents(out)
    # The same command again writes nothing.
    assert export(workdir.path, "parquet", out).startswith(f"{out}: {ROWS} passages")
    assert contents(out) == actual
    assert expected.keys() == actual.keys()
    assert all(expected[name] == actual[name] for name in expected if name.endswith(".parquet"))


@pytest.mark.slow
def test_a_folder_of_another_kind_is_refused(runs: RunsByKind, whole: Path, tmp_path: Path) -> None:
    out, run = tmp_path / "out", runs["one"].workdir.path
    shutil.copytree(whole, out)
    with pytest.raises(ContractError, match=r"columns\.text"):
        export(run, "parquet", out, options=StoreOptions(texts=False))
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    delete_ids(Workdir(copy).embeddings("first"), {"p3": ""})
    with pytest.raises(ContractError, match=r"corpus\.passages: 52 in .*, 51 in this export"):
        export(copy, "parquet", out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(FileExistsError, match=r"export .*store; .*folder"):
        export(run, "parquet", tmp_path / "other")
    part = next(out.glob("part-*"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"part-.*\.parquet .*written"):
        export(run, "parquet", out)


@pytest.mark.slow
def test_control_wrong_results_of_a_store_are_an_error(
    runs: RunsByKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that misses a passage, returns one twice, gives other scores, or ranks the worst passages first."""
    search = ParquetFiles.search

    def worst(store: ParquetFiles, queries: Any, k: int) -> Any:
        return search(store, [-query for query in queries], k)

    broken: dict[str, Any] = {
        r"for query 0 9 passages come instead of 10": lambda *args: [hits[1:] for hits in search(*args)],
        r"the passage 'p\d+' comes twice": lambda *args: [[*hits[:-1], hits[0]] for hits in search(*args)],
        r"scores differ by": lambda *args: [[(id, -score) for id, score in hits] for hits in search(*args)],
        r"for query 0 the passage at rank 1 is .* in jaxret 'p0'": worst,
    }
    for number, (message, other) in enumerate(broken.items()):
        monkeypatch.setattr(ParquetFiles, "search", other)
        with pytest.raises(ValueError, match=message):
            export(runs["one"].workdir.path, "parquet", tmp_path / f"{number}")
        assert not (tmp_path / f"{number}" / "_manifest.json").exists()


def test_equal_scores_may_be_in_any_order(runs: RunsByKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = ParquetFiles.search
    twins = {"p5": "p6", "p6": "p5"}
    monkeypatch.setattr(
        ParquetFiles,
        "search",
        lambda *args: [[(twins.get(id, id), score) for id, score in hits] for hits in search(*args)],
    )
    assert "passages of equal scores are in another order" in export(
        runs["one"].workdir.path, "parquet", tmp_path / "out"
    )


@pytest.mark.slow
def test_queries_of_a_file(runs: RunsByKind, tmp_path: Path) -> None:
    report = export(
        runs["float16"].workdir.path,
        "parquet",
        tmp_path / "out",
        queries=QuerySource.open(runs.root / "data"),
        options=StoreOptions(texts=False, k=60, sample=20),
    )
    assert f"The {ROWS} best passages of 20 queries, searched exactly, are those of jaxret" in report
    assert pq.read_schema(tmp_path / "out" / "part-00000.parquet").names == ["id", "row", "vector"]


@pytest.mark.slow
def test_a_cut_corpus_is_exported_as_it_is_stored(runs: RunsByKind, tmp_path: Path) -> None:
    run = open_run(shutil.copytree(runs["one"].workdir.path, tmp_path / "run"))
    options = EncodeOptions(dimension=8, shard_rows=8)
    encode_corpus(run, Corpus.open(runs.root / "second.jsonl"), "2 é", options, progress=False)
    assert f"{tmp_path / 'out'}: 24 passages" in export(
        tmp_path / "run", "parquet", tmp_path / "out", encoded_name="2 é"
    )
    table = pq.read_table(tmp_path / "out")
    stored = vectors_of(open_encoded(run.workdir.embeddings("2 é")), np.arange(24))
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), np.float32)[:, None], np.stack(stored))
    assert table["vector"].type.list_size == 8
    rows = CorpusRows(open_encoded(run.workdir.embeddings("2 é")))
    assert store_target(rows, "milvus", tmp_path, StoreOptions()).table == "_2__"  # a name that is valid in every store


def test_a_missing_package_is_named(runs: RunsByKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"--to=parquet needs pyarrow, .*: pip install 'jaxret\[data\]'"):
        export(runs["one"].workdir.path, "parquet", tmp_path / "out")


def test_flags_of_stores_are_for_stores(runs: RunsByKind, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--url, --table, --texts, --k and --sample are for --to=parquet"):
        export(runs["one"].workdir.path, "hf", tmp_path / "out", options=StoreOptions(k=3))
    with pytest.raises(ValueError, match=r"--url and --table are of stores"):
        export(runs["one"].workdir.path, "parquet", tmp_path / "out", options=StoreOptions(table="x"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-20"], "int64"),
        (["9223372036854775807", "-9223372036854775808"], "int64"),
        (["9223372036854775808"], "string"),
        (["-0"], "string"),
        (["1", "2.5"], "double"),
        (["007", "8"], "string"),
        (["true", "false"], "bool"),
        (["1e3"], "string"),
        (["1000.0", "1e+300"], "double"),
        (["99999999999999999999"], "string"),
        (["NaN"], "string"),
    ],
)
def test_a_column_keeps_values_as_they_are(values: list[str], kind: str) -> None:
    assert str(value_type(values)) == kind


def test_names_of_columns() -> None:
    names = column_names(["a.b", "a_b", "ID", "2nd", "Année", "x" * 99], ["id", "text"])
    assert names == ["a_b", "a_b_2", "ID_2", "_2nd", "Ann_e", "x" * 48]
