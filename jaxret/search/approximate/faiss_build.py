"""Build an index of FAISS from an encoded corpus, and measure its recall.

Memory holds the index as it grows, the training sample, and one block of vectors; never all vectors, unless the index
itself holds them (Flat, HNSW).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.parallel.progress import Progress
from jaxret.search.approximate.faiss_factory import (
    LEAST_SAMPLE,
    POINTS,
    effort_of,
    faiss_cause,
    faiss_library,
    innermost,
    make_index,
)
from jaxret.search.approximate.faiss_index import (
    MappedCorpus,
    identity_of,
    load_faiss_index,
    read_index_manifest,
    require_one_query_vector,
)
from jaxret.search.backends.select import select_backend
from jaxret.search.exact import search
from jaxret.search.in_memory import require_finite_vectors
from jaxret.search.proof import recall_at
from jaxret.search.rounding import upper_norms
from jaxret.search.search_options import IndexOptions
from jaxret.search.single_vector import BLOCK_ROWS
from jaxret.storage.atomic import StorageError, atomic_write, sha256_bytes, sha256_file, with_digest, write_json

DEPTHS = (1, 10, 100)  # k at which recall is measured
GOOD = 0.95  # recall@10 from which parameters are good enough to be the default
Log = Callable[[str], None]


@dataclass(frozen=True)
class RecallQueries:
    """Vectors to measure recall with."""

    vectors: np.ndarray  # [Q,D] float32
    source: str
    # Where passages stand for queries, the row that each is of: it is left out of the results of both searches.
    rows: np.ndarray | None = None


def build_faiss_index(corpus: EncodedCorpus, folder: Path, options: IndexOptions, log: Log, progress: bool) -> None:
    """Train an index on a sample, add all vectors of a corpus, and write it into a folder with a manifest.

    Args:
        corpus: the vectors.
        folder: folder of the index.
        options: factory, train_vectors and seed.
        log: prints a line.
        progress: show a bar.

    Raises ValueError for a factory string that makes no index here, and for too few vectors to train on.
    """
    width, begun = require_one_query_vector(corpus), time.perf_counter()
    index = make_index(options.factory, corpus.dimension, options.seed)
    total, largest = corpus.total_rows * width, 0.0
    trained = 0 if index.is_trained else _train(index, corpus, options, log)
    ready = time.perf_counter()
    with Progress("index", total, "vector", shown=progress) as bar:
        for rows, block in _blocks(corpus):
            norms = upper_norms(block)
            require_finite_vectors(corpus, rows, norms.reshape(-1, width).max(axis=1))
            index.add(block)
            largest = max(largest, float(norms.max()))
            bar.update(len(block))
    made = {
        "faiss": faiss_library().__version__,
        "train_seconds": round(ready - begun, 2),
        "add_seconds": round(time.perf_counter() - ready, 2),
    }
    (folder / "manifest.json").unlink(missing_ok=True)  # it describes the index that was there before
    path = folder / "index.faiss"
    _write(index, path)
    manifest = {
        "factory": options.factory,
        "training": {"vectors": trained, "sample": options.train_vectors, "seed": options.seed},
        "corpus": identity_of(corpus),
        "vectors": total,
        "dimension": corpus.dimension,
        "vectors_per_passage": width,
        "largest_norm": largest,
        "made": made | {"peak_memory_bytes": peak_memory()},
        "index": {"bytes": path.stat().st_size, "sha256": sha256_file(path)},
    }
    write_json(folder / "manifest.json", with_digest(manifest))
    log(
        f"trained in {made['train_seconds']:,.1f} s, added in {made['add_seconds']:,.1f} s; "
        f"{path.stat().st_size / 2**20:,.1f} MiB on disk, {path.stat().st_size / total:,.0f} bytes a vector; "
        f"this process held {peak_memory() / 2**20:,.0f} MiB at most"
    )


def _train(index: Any, corpus: EncodedCorpus, options: IndexOptions, log: Log) -> int:
    """Train an index on a sample of the vectors; return how many these are."""
    lists = int(getattr(innermost(index), "nlist", 0))
    sample = options.train_vectors or max(LEAST_SAMPLE, POINTS * lists)
    rows = min(-(-sample // corpus.shards[0].vectors_per_row), corpus.total_rows)
    drawn = np.random.default_rng(options.seed).choice(corpus.total_rows, rows, replace=False, shuffle=False)
    vectors = take_rows(corpus, np.sort(drawn)).reshape(-1, corpus.dimension)
    log(f"training on {len(vectors):,} vectors, drawn with seed {options.seed}")
    try:
        index.train(vectors)
    except RuntimeError as error:
        remedy = "take fewer lists or bits" if rows == corpus.total_rows else "raise --train_vectors"
        raise ValueError(
            f"--factory={options.factory} cannot be trained on {len(vectors):,} vectors "
            f"({faiss_cause(error)}): {remedy}"
        ) from error
    return len(vectors)


def take_rows(corpus: EncodedCorpus, rows: np.ndarray) -> np.ndarray:
    """Return the vectors [n,V,D] float32 of ascending rows."""
    vectors = np.empty((len(rows), corpus.shards[0].vectors_per_row, corpus.dimension), np.float32)
    for first, shard in corpus:
        begin, end = np.searchsorted(rows, [first, first + len(shard)])
        vectors[begin:end] = shard[rows[begin:end] - first]
    return vectors


def _blocks(corpus: EncodedCorpus) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (rows, their vectors [rows * V, D] float32), a block at a time."""
    step = max(1, BLOCK_ROWS // corpus.shards[0].vectors_per_row)
    for first, shard in corpus:
        for start in range(0, len(shard), step):
            block = np.ascontiguousarray(shard[start : start + step], np.float32)
            yield np.arange(first + start, first + start + len(block)), block.reshape(-1, corpus.dimension)


def _write(index: Any, path: Path) -> None:
    with atomic_write(path, "wb") as file:
        try:
            faiss_library().write_index(index, file.name)  # to the file that is open: it is flushed and renamed here
        except RuntimeError as error:
            cause = str(error).strip().splitlines()[0].rpartition("(")[2].rstrip(")")
            raise StorageError(f"{path} cannot be written: {cause}") from error


def peak_memory() -> int:
    """Return the bytes that this process has held at most, pages of mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def passages_as_queries(corpus: EncodedCorpus, count: int, seed: int) -> RecallQueries:
    """Return a vector of each of `count` passages, drawn from a seed."""
    random = np.random.default_rng([seed, 1])
    rows = np.sort(random.choice(corpus.total_rows, min(count, corpus.total_rows), replace=False, shuffle=False))
    vectors = take_rows(corpus, rows)
    which = random.integers(vectors.shape[1], size=len(rows))
    source = "passages' own vectors in place of questions, each without itself"
    return RecallQueries(vectors[np.arange(len(rows)), which], source, rows)


def measure_recall(
    corpus: EncodedCorpus, folder: Path, queries: RecallQueries, parameters: Sequence[str], progress: bool
) -> dict[str, Any]:
    """Measure recall of exact search at DEPTHS, and milliseconds a query of the deepest; return them, and write them
    into the manifest.

    Recall@k is the share of exact search's k best that a search for k finds; of equal scores it does not matter which.
    The first parameters with recall@10 of GOOD or more become the default, else the last.

    Args:
        corpus: the vectors.
        folder: folder of the index.
        queries: vectors to search for.
        parameters: FAISS's search parameters to measure with; empty for a range from few lists or nodes to many.
        progress: show a bar of the exact search.
    """
    manifest = read_index_manifest(folder)
    index = load_faiss_index(folder, manifest)
    depths = [depth for depth in DEPTHS if depth < corpus.total_rows] or [1]
    more = int(queries.rows is not None)
    exact = search(queries.vectors, corpus, max(depths) + more, select_backend("faiss-cpu"), progress)
    best = _without_own_row(exact.scores, exact.rows, queries.rows)
    measured, mapped = list[dict[str, Any]](), MappedCorpus(corpus)
    for text in parameters or default_parameters(index.index):
        trial, recall = replace(index, parameters=text), dict[str, float]()
        for depth in depths:  # each of a search for so many: for more, an index may look harder
            begun = time.perf_counter()
            result = trial.search(queries.vectors, mapped, depth + more)
            milliseconds = 1000 * (time.perf_counter() - begun) / len(queries.vectors)
            scores = _without_own_row(result.scores, result.rows, queries.rows)
            recall[str(depth)] = round(recall_at(scores, best, depth), 4)
        measured.append({"parameters": text, "recall": recall, "ms": round(milliseconds, 3)})
    deciding = "10" if 10 in depths else "1"
    good = next((row for row in measured if row["recall"][deciding] >= GOOD), measured[-1])
    digest = sha256_bytes(queries.vectors.tobytes())
    recalls = {
        "questions": {"count": len(queries.vectors), "source": queries.source, "sha256": digest},
        "measured": measured,
        "parameters": good["parameters"],
    }
    write_json(folder / "manifest.json", with_digest(manifest | {"recall": recalls}))
    return recalls


def _without_own_row(scores: np.ndarray, rows: np.ndarray, own: np.ndarray | None) -> np.ndarray:
    """Scores [Q,k] without those of each query's own row; of a query that has not found it, without the last."""
    if own is None:
        return scores
    last = np.argsort(rows == own[:, None], axis=1, kind="stable")[:, :-1]
    return np.take_along_axis(scores, last, axis=1)


def default_parameters(index: Any) -> list[str]:
    """Return the parameters that recall is measured with unless others are given: from few lists or nodes to many."""
    name, most = effort_of(index)
    values = (1, 4, 16, 64, 256) if name == "nprobe" else (200, 400, 800)
    return [f"{name}={value}" for value in sorted({min(value, most) for value in values})] if name else [""]
