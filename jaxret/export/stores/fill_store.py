"""Fills a store with the rows of an encoded corpus, shard by shard, and keeps a journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from jaxret.data.formats import QuerySource
from jaxret.export.stores.compare_store import compare_store, encode_queries, sample_queries
from jaxret.export.stores.corpus_rows import CorpusRows
from jaxret.export.stores.export_journal import ExportJournal
from jaxret.export.stores.metadata_columns import column_names
from jaxret.export.stores.store_list import store_errors
from jaxret.export.stores.store_options import StoreOptions
from jaxret.export.stores.vector_store import StoreTarget, VectorStore, open_vector_store, without_password
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.parallel.progress import Progress
from jaxret.runs.lock import hold_folder
from jaxret.runs.run import Run
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import require_parent, sha256_file


def export_to_store(
    run: Run, kind: str, out: Path, encoded_name: str, queries: QuerySource | None, options: StoreOptions
) -> str:
    """Export an encoded corpus to a store, count the store's rows, and compare its exact search. Return sentences on
    the result. A finished export is only counted and compared.

    Args:
        run: the run that encoded the corpus.
        kind: one of STORES.
        out: folder of the journal, and of files.
        encoded_name: name of the encoded corpus, required if there are several.
        queries: queries for the comparison; None: stored vectors.
        options: table, address, sample.

    Raises:
        FileExistsError: `out` or the table exists and does not belong to this export.
        ContractError: `out` is an export of other vectors, or to another table.
        ValueError: the store cannot hold the vectors, has another number of passages, or returns other passages.
    """
    require_parent(out, "--out")
    searcher = Searcher(run, corpus_folder(run.workdir, encoded_name))
    encoded_corpus = searcher.encoded_corpus
    rows = CorpusRows(encoded_corpus, options.texts)
    address = without_password(options.url) or str(out)
    with hold_folder(out, f"export --to={kind}"), store_errors(kind, address):
        target = store_target(rows, kind, out, options)
        journal = ExportJournal(out, identity_of_rows(rows) | {"to": kind, **target.identity})
        store = open_vector_store(kind, target)
        try:
            fill_store(store, rows, journal)
            vectors = sample_queries(encoded_corpus, options.sample)
            if queries:
                vectors = encode_queries(searcher, queries, options.sample)
            result = compare_store(searcher, store, vectors, options.k)
            journal.finish(result)
        finally:
            store.close()
    noun = "queries" if queries else "stored vectors"
    comparison = f"The {result['k']} best passages of {result['queries']} {noun}, searched exactly, are those of jaxret"
    comparison += f"; scores differ by {result['largest_difference']:.1e} at most"
    if result["tied"]:
        comparison += f", and {result['tied']} passages of equal scores are in another order"
    sentence = f"{store.address}: {encoded_corpus.total_rows:,} passages, counted, of {len(journal.entries):,} shard(s)"
    return "\n".join([f"{sentence}. {comparison}.", *store.notes])


def store_target(rows: CorpusRows, kind: str, out: Path, options: StoreOptions) -> StoreTarget:
    """Return the table that options name.

    Args:
        rows: exported rows.
        kind: one of STORES.
        out: folder of the export.
        options: address and table.
    """
    encoded_corpus = rows.encoded_corpus
    name = options.table or ("" if kind == "parquet" else column_names([encoded_corpus.folder.name], ())[0])
    return StoreTarget(out, options.url, name, rows.schema, rows.dtype, encoded_corpus.dimension, encoded_corpus.ragged)


def identity_of_rows(rows: CorpusRows) -> dict[str, Any]:
    """Return the origin of the exported rows, as JSON."""
    encoded_corpus = rows.encoded_corpus
    return {
        "corpus": encoded_corpus.corpus_identity,
        "contract": encoded_corpus.fingerprint.get("contract"),
        "checkpoint": encoded_corpus.fingerprint.get("checkpoint"),
        "vectors": [sha256_file(shards.folder / "manifest.json") for shards in encoded_corpus.shards],
        "dtype": rows.dtype,
        "dimension": encoded_corpus.dimension,
        "similarity": "dot",
        "columns": {field.name: str(field.type) for field in rows.schema},
        "metadata": rows.fields,
    }


def fill_store(store: VectorStore, rows: CorpusRows, journal: ExportJournal) -> None:
    """Write the shards that are not in the journal.

    Raises FileExistsError for a table that another export wrote, and ValueError for a wrong number of passages.
    """
    if not journal.has_begun:
        if store.exists():
            problem = f"{store.address} exists already, but the export in {journal.out} did not make it"
            raise FileExistsError(f"{problem}; choose another --table")
        journal.begin()
    store.create()
    start = sum(entry["rows"] for entry in journal.entries)
    store.keep_first(start, journal.entries)
    if (count := store.count()) < start:
        raise ValueError(
            f"{store.address} has {count:,} passages, but {start:,} were written. It was changed later; give a new "
            "--out and --table"
        )
    with Progress("export", rows.encoded_corpus.total_rows, "passage", start=start) as bar:
        for number, (first, size, batches) in enumerate(rows):
            if number < len(journal.entries):
                continue
            entry = store.write(number, counted_batches(batches, size, bar))
            journal.note({"first_row": first, "rows": size, **entry})
    if (count := store.count()) != rows.encoded_corpus.total_rows:
        raise ValueError(
            f"{store.address} has {count:,} passages, but the corpus has {rows.encoded_corpus.total_rows:,}. Another "
            "job wrote to it, too; export again with a new --out and --table"
        )


def counted_batches(batches: Iterator[pa.RecordBatch], size: int, bar: Progress) -> Iterator[pa.RecordBatch]:
    """Yield batches, and show progress. Raises ValueError if they do not have `size` rows together."""
    rows = 0
    for batch in batches:
        yield batch
        rows += len(batch)
        bar.update(len(batch))
    if rows != size:
        raise ValueError(f"{rows} rows of a shard were read, but it has {size}")
