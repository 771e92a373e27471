"""Build an index of FAISS from an encoded corpus, and measure its recall.

Memory holds the growing index, the training sample and one block of vectors. It holds all vectors only if the index
stores them (Flat, HNSW).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.parallel.progress import Progress
from jaxret.search.approximate.faiss_factory import (
    LEAST_SAMPLE,
    VECTORS_PER_LIST,
    effort_of,
    faiss_cause,
    faiss_library,
    innermost,
    make_index,
)
from jaxret.search.approximate.faiss_index import MappedCorpus, load_faiss_index, require_one_query_vector
from jaxret.search.approximate.index_files import read_index_manifest, write_index_manifest
from jaxret.search.approximate.recall import RecallQueries, draw_rows, record_recall
from jaxret.search.backends.select import select_backend
from jaxret.search.rounding import upper_norms
from jaxret.search.search_options import IndexOptions
from jaxret.search.vectors.exact import search
from jaxret.search.vectors.in_memory import require_finite_vectors
from jaxret.search.vectors.single_vector import BLOCK_ROWS
from jaxret.storage.atomic import StorageError, atomic_write


def build_faiss_index(encoded_corpus: EncodedCorpus, folder: Path, options: IndexOptions) -> None:
    """Train an index on a sample, add all vectors of a corpus, and write it into a folder with a manifest.

    Args:
        encoded_corpus: the vectors.
        options: the fields factory, train_vectors and seed are used.

    Raises ValueError for a factory string of an unsupported index, and for too few vectors to train on.
    """
    width, start_time = require_one_query_vector(encoded_corpus), time.perf_counter()
    index = make_index(options.factory, encoded_corpus.dimension, options.seed)
    total, largest = encoded_corpus.total_rows * width, 0.0
    training_rows = 0 if index.is_trained else _train(index, encoded_corpus, options)
    ready = time.perf_counter()
    with Progress("index", total, "vector") as bar:
        for rows, block in _read_blocks(encoded_corpus):
            norms = upper_norms(block)
            require_finite_vectors(encoded_corpus, rows, norms.reshape(-1, width).max(axis=1))
            index.add(block)
            largest = max(largest, float(norms.max()))
            bar.update(len(block))
    build_record = {
        "faiss": faiss_library().__version__,
        "train_seconds": round(ready - start_time, 2),
        "add_seconds": round(time.perf_counter() - ready, 2),
    }
    (folder / "manifest.json").unlink(missing_ok=True)  # it describes the previous index, which is now replaced
    path = folder / "index.faiss"
    _write_index(index, path)
    facts: dict[str, Any] = {"vectors": total, "vectors_per_passage": width, "largest_norm": largest}
    facts["made"] = build_record | {"peak_memory_bytes": peak_memory()}
    write_index_manifest(path, encoded_corpus, options, training_rows, facts)
    print(
        f"trained in {build_record['train_seconds']:,.1f} s, added in {build_record['add_seconds']:,.1f} s; "
        f"{path.stat().st_size / 2**20:,.1f} MiB on disk, {path.stat().st_size / total:,.0f} bytes per vector; "
        f"this process held {peak_memory() / 2**20:,.0f} MiB at most"
    )


def _train(index: Any, encoded_corpus: EncodedCorpus, options: IndexOptions) -> int:
    """Train an index on a sample of the vectors, and return the size of the sample."""
    lists = int(getattr(innermost(index), "nlist", 0))
    sample = options.train_vectors or max(LEAST_SAMPLE, VECTORS_PER_LIST * lists)
    rows = -(-sample // encoded_corpus.shards[0].vectors_per_row)
    sample_rows = draw_rows(encoded_corpus, rows, np.random.default_rng(options.seed))
    vectors = take_rows(encoded_corpus, sample_rows).reshape(-1, encoded_corpus.dimension)
    print(f"training on {len(vectors):,} vectors, drawn with seed {options.seed}")
    try:
        index.train(vectors)
    except RuntimeError as error:
        remedy = "take fewer lists or bits" if rows >= encoded_corpus.total_rows else "raise train_vectors"
        raise ValueError(
            f"factory={options.factory} cannot be trained on {len(vectors):,} vectors ({faiss_cause(error)}): {remedy}"
        ) from error
    return len(vectors)


def take_rows(encoded_corpus: EncodedCorpus, rows: np.ndarray) -> np.ndarray:
    """Return the vectors [n,V,D] float32 of ascending rows."""
    vectors = np.empty((len(rows), encoded_corpus.shards[0].vectors_per_row, encoded_corpus.dimension), np.float32)
    for first, shard in encoded_corpus:
        begin, end = np.searchsorted(rows, [first, first + len(shard)])
        vectors[begin:end] = shard[rows[begin:end] - first]
    return vectors


def _read_blocks(encoded_corpus: EncodedCorpus) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the rows of each block and their vectors [rows * V, D] float32."""
    step = max(1, BLOCK_ROWS // encoded_corpus.shards[0].vectors_per_row)
    for first, shard in encoded_corpus:
        for start in range(0, len(shard), step):
            block = np.ascontiguousarray(shard[start : start + step], np.float32)
            yield np.arange(first + start, first + start + len(block)), block.reshape(-1, encoded_corpus.dimension)


def _write_index(index: Any, path: Path) -> None:
    with atomic_write(path, "wb") as file:
        try:
            faiss_library().write_index(index, file.name)  # fills the open temporary file, which is then renamed
        except RuntimeError as error:
            cause = str(error).strip().splitlines()[0].rpartition("(")[2].rstrip(")")
            raise StorageError(f"{path} cannot be written: {cause}") from error


def peak_memory() -> int:
    """Return the largest memory of this process so far in bytes, including pages of mapped files."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def passages_as_queries(encoded_corpus: EncodedCorpus, count: int, seed: int) -> RecallQueries:
    """Return one random vector of each of `count` random passages, to search for in place of queries."""
    random = np.random.default_rng([seed, 1])
    rows = draw_rows(encoded_corpus, count, random)
    vectors = take_rows(encoded_corpus, rows)
    vector_numbers = random.integers(vectors.shape[1], size=len(rows))
    source = "vectors of passages in place of questions, each without its own passage"
    return RecallQueries(vectors[np.arange(len(rows)), vector_numbers], source, rows)


def measure_recall(
    encoded_corpus: EncodedCorpus, folder: Path, queries: RecallQueries, parameters: Sequence[str]
) -> dict[str, Any]:
    """Measure the recall of an index of FAISS, write it into the manifest, and return it (`recall.py`).

    Args:
        encoded_corpus: the vectors.
        queries: vectors to search for, float32 [Q,D].
        parameters: FAISS's search parameters to measure with; empty for `default_parameters`.
    """
    index = load_faiss_index(folder, read_index_manifest(folder))
    texts, mapped_corpus = parameters or default_parameters(index.index), MappedCorpus(encoded_corpus)
    vectors = queries.vectors
    trials = {text: partial(replace(index, parameters=text).search, vectors, mapped_corpus) for text in texts}
    return record_recall(
        folder,
        queries,
        encoded_corpus.total_rows,
        lambda k: search(vectors, encoded_corpus, k, select_backend("faiss-cpu"), progress=True),
        trials,
    )


def default_parameters(index: Any) -> list[str]:
    """Return the search parameters with which recall is measured by default, from few lists or nodes to many."""
    name, largest = effort_of(index)
    values = (1, 4, 16, 64, 256) if name == "nprobe" else (200, 400, 800)
    return [f"{name}={value}" for value in sorted({min(value, largest) for value in values})] if name else [""]
