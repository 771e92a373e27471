"""Build an index of Seismic from the words of an encoded corpus, and measure its recall.

Seismic holds all passages in memory during the build, about 12 bytes for each word of each passage.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.parallel.progress import Progress
from jaxret.search.approximate.faiss_index import MappedCorpus
from jaxret.search.approximate.index_files import read_index_manifest, write_index_manifest
from jaxret.search.approximate.recall import RecallQueries, draw_rows, record_recall
from jaxret.search.approximate.seismic_index import load_seismic_index, parse_factory, seismic_library
from jaxret.search.search_options import IndexOptions
from jaxret.search.vectors.in_memory import require_finite_vectors
from jaxret.search.vectors.inverted_lists import InvertedLists, sparse_norms
from jaxret.storage.atomic import sync
from jaxret.types import SparseRows

# The search parameters with which recall is measured by default, from few query words and blocks of a list to many.
DEFAULT_PARAMETERS = (
    "query_cut=5,heap_factor=0.7",
    "query_cut=10,heap_factor=0.7",
    "query_cut=10,heap_factor=0.9",
    "query_cut=30,heap_factor=1.0",
)
_INDEX_FILE = "index.seismic"
SUFFIX = ".index.seismic"  # Seismic appends it to the path that it is given


def build_seismic_index(encoded_corpus: EncodedCorpus, folder: Path, options: IndexOptions) -> None:
    """Build an index of all passages of a sparse corpus, and write it into a folder with a manifest.

    Args:
        options: the field factory is used.

    Raises ValueError for the factory string of another library, and for weights that are not finite.
    """
    settings, library, start = parse_factory(options.factory), seismic_library(), time.perf_counter()
    passages, largest = library.SeismicDataset(dim=encoded_corpus.dimension), 0.0
    with Progress("index", encoded_corpus.total_rows, "passage") as bar:
        for first, shard in encoded_corpus:
            norms = sparse_norms(shard)
            require_finite_vectors(encoded_corpus, first + np.arange(len(shard)), norms)
            offsets = np.asarray(shard.offsets, np.int64)
            passages.add_documents_by_id(
                [str(first + row) for row in range(len(shard))],
                np.asarray(shard.words).astype(np.int64),
                np.asarray(shard.weights).astype(np.float32),
                offsets - offsets[0],
            )
            largest = max(largest, float(norms.max()))
            bar.update(len(shard))
    (folder / "manifest.json").unlink(missing_ok=True)  # it describes the previous index, which is now replaced
    path = folder / _INDEX_FILE
    with quiet_output():
        index = library.SeismicIndex.build_from_dataset(passages, **settings)
        index.save(str(folder / "building"))
    temporary = folder / f"building{SUFFIX}"
    sync(temporary)
    os.replace(temporary, path)
    seconds = round(time.perf_counter() - start, 2)
    facts: dict[str, Any] = {"vectors": encoded_corpus.total_rows, "largest_norm": largest}
    facts["made"] = {"seismic": version("pyseismic-lsr"), "seconds": seconds}
    write_index_manifest(path, encoded_corpus, options, 0, facts)
    print(f"built in {seconds:,.1f} s; {path.stat().st_size / 2**20:,.1f} MiB on disk")


@contextmanager
def quiet_output() -> Iterator[None]:
    """Discard the output that a library's native code writes to standard output during the block."""
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)


def measure_seismic_recall(
    encoded_corpus: EncodedCorpus, folder: Path, queries: RecallQueries, parameters: Sequence[str]
) -> dict[str, Any]:
    """Measure the recall of an index of Seismic, write it into the manifest, and return it (`recall.py`).

    Args:
        queries: sparse vectors to search for.
        parameters: search parameters to measure with; empty for DEFAULT_PARAMETERS.
    """
    index, mapped_corpus = load_seismic_index(folder, read_index_manifest(folder)), MappedCorpus(encoded_corpus)
    texts = parameters or DEFAULT_PARAMETERS
    trials = {text: partial(replace(index, parameters=text).search, queries.vectors, mapped_corpus) for text in texts}
    lists = InvertedLists(encoded_corpus)
    exact = partial(lists.search, queries.vectors, progress=True)
    return record_recall(folder, queries, encoded_corpus.total_rows, exact, trials)


def sparse_passages_as_queries(encoded_corpus: EncodedCorpus, count: int, seed: int) -> RecallQueries:
    """Return the sparse vectors of `count` random passages, to search for in place of queries."""
    rows = draw_rows(encoded_corpus, count, np.random.default_rng([seed, 1]))
    parts: list[SparseRows] = []
    for first, shard in encoded_corpus:
        begin, end = np.searchsorted(rows, [first, first + len(shard)])
        if begin < end:
            parts.append(shard.take(rows[begin:end] - first))
    source = "words of passages in place of questions, each without its own passage"
    return RecallQueries(SparseRows.concatenate(parts).astype(np.float32), source, rows)
