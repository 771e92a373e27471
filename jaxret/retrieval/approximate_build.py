"""Building an index of FAISS from an encoded corpus, and measuring what it finds.

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
from tqdm import tqdm

from jaxret.retrieval.approximate import (
    Approximate,
    Mapped,
    Settings,
    identity_of,
    load,
    require_one_query_vector,
)
from jaxret.retrieval.backends import select_backend
from jaxret.retrieval.dense import BLOCK_ROWS
from jaxret.retrieval.encoded import EncodedCorpus
from jaxret.retrieval.factory import (
    bytes_per_vector,
    effort_of,
    faiss_library,
    make_index,
    sample_sizes,
    seed_training,
)
from jaxret.retrieval.kept import require_finite
from jaxret.retrieval.proof import recall_at
from jaxret.retrieval.rounding import upper_norms
from jaxret.retrieval.search import search
from jaxret.storage import StorageError, atomic_write, sealed, sha256_bytes, sha256_file, write_json

DEPTHS = (1, 10, 100)  # k at which recall is measured
GOOD = 0.95  # recall@10 that is enough for a setting to be the one that is kept
Say = Callable[[str], None]


@dataclass(frozen=True)
class Questions:
    """Vectors [Q,D] float32 to measure with. own: the row that each is of, where passages stand for questions: it is
    left out of what both searches find."""

    vectors: np.ndarray
    source: str
    own: np.ndarray | None = None


def build(corpus: EncodedCorpus, folder: Path, factory: str, sample: int, seed: int, say: Say, progress: bool) -> None:
    """Trains an index on a sample (0: as many vectors as sample_sizes says), adds all vectors of a corpus, and writes
    it into a folder, with a manifest that knows no recall yet. Raises what make_index raises, and ValueError for too
    few vectors to train on."""
    width, begun = require_one_query_vector(corpus), time.perf_counter()
    index = make_index(factory, corpus.dimension)
    total = corpus.total_rows * width
    size = bytes_per_vector(index) * total
    say(f"{factory} of {total:,} vectors of {corpus.dimension} numbers: about {size / 2**20:,.0f} MiB in memory")
    trained = _train(index, corpus, factory, sample, seed, say)
    ready, largest = time.perf_counter(), 0.0
    with tqdm(total=total, unit="vector", unit_scale=True, desc="index", disable=not progress, delay=1) as bar:
        for rows, block in _blocks(corpus):
            norms = upper_norms(block)
            require_finite(corpus, rows, norms.reshape(-1, width).max(axis=1))
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
        "factory": factory,
        "training": {"vectors": trained, "asked": sample, "seed": seed},
        "corpus": identity_of(corpus),
        "vectors": total,
        "dimension": corpus.dimension,
        "vectors_per_passage": width,
        "largest_norm": largest,
        "made": made | {"peak_memory_bytes": peak_memory()},
        "index": {"bytes": path.stat().st_size, "sha256": sha256_file(path)},
    }
    write_json(folder / "manifest.json", sealed(manifest))
    say(
        f"trained in {made['train_seconds']:,.1f} s, added in {made['add_seconds']:,.1f} s; "
        f"{path.stat().st_size / 2**20:,.1f} MiB on disk, {path.stat().st_size / total:,.0f} bytes a vector; "
        f"this process held {peak_memory() / 2**20:,.0f} MiB at most"
    )


def _train(index: Any, corpus: EncodedCorpus, factory: str, sample: int, seed: int, say: Say) -> int:
    """Trains an index, if it is to be; on how many vectors."""
    least, content, default = sample_sizes(index)
    if not least:
        return 0
    width = corpus.shards[0].vectors_per_row
    rows = min(-(-(sample or default) // width), corpus.total_rows)
    if rows * width < least:
        all_of_them = rows == corpus.total_rows
        whose, remedy = ("corpus", "take fewer lists or bits") if all_of_them else ("sample", "raise --train_vectors")
        raise ValueError(
            f"--factory={factory} needs {least:,} vectors to train on at least, and the {whose} has {rows * width:,}: "
            f"{remedy}"
        )
    chosen = np.random.default_rng(seed).choice(corpus.total_rows, rows, replace=False, shuffle=False)
    vectors = take_rows(corpus, np.sort(chosen)).reshape(-1, corpus.dimension)
    few = f"; FAISS advises {content:,} at least" if len(vectors) < content else ""
    say(f"training on {len(vectors):,} vectors, drawn with seed {seed}{few}")
    seed_training(index, seed)
    index.train(vectors)
    return len(vectors)


def take_rows(corpus: EncodedCorpus, rows: np.ndarray) -> np.ndarray:
    """The vectors [n,V,D] float32 of ascending rows."""
    found = np.empty((len(rows), corpus.shards[0].vectors_per_row, corpus.dimension), np.float32)
    for first, shard in corpus:
        begin, end = np.searchsorted(rows, [first, first + len(shard)])
        found[begin:end] = shard[rows[begin:end] - first]
    return found


def _blocks(corpus: EncodedCorpus) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(rows, their vectors [rows * V, D] float32), some at a time."""
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
    """Bytes that this process has held at most, pages of mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def passages_as_questions(corpus: EncodedCorpus, count: int, seed: int) -> Questions:
    """A vector of each of some passages, drawn from a seed."""
    random = np.random.default_rng([seed, 1])
    rows = np.sort(random.choice(corpus.total_rows, min(count, corpus.total_rows), replace=False, shuffle=False))
    vectors = take_rows(corpus, rows)
    which = random.integers(vectors.shape[1], size=len(rows))
    source = "passages' own vectors in place of questions, each without itself"
    return Questions(vectors[np.arange(len(rows)), which], source, rows)


def measure(
    corpus: EncodedCorpus,
    folder: Path,
    manifest: dict[str, Any],
    asked: Questions,
    efforts: Sequence[int],
    candidates: int,
    progress: bool,
) -> dict[str, Any]:
    """Recall of exact search at DEPTHS for each effort, and milliseconds a question of the deepest; written into the
    manifest.

    Recall@k is the share of exact search's k best that a search for k finds; of equal scores it does not matter which.
    The setting that is kept is the least with recall@10 of GOOD or more, or the last.
    """
    index = load(folder / "index.faiss", manifest)
    depths = [depth for depth in DEPTHS if depth < corpus.total_rows] or [1]
    k = max(depths) + (asked.own is not None)
    exact = search(asked.vectors, corpus, k, select_backend("faiss-cpu"), progress)
    best = _others(exact.scores, exact.rows, asked.own)
    made = Approximate(
        index, manifest["factory"], manifest["vectors_per_passage"], manifest["largest_norm"], Settings(1, 1)
    )
    measured, mapped = list[dict[str, Any]](), Mapped(corpus)
    for effort in efforts:
        trial = replace(made, settings=Settings(candidates, effort))
        recall = dict[str, float]()
        for depth in depths:  # each of a search for so many: for more, an index may look harder
            begun = time.perf_counter()
            result = trial.search(asked.vectors, mapped, depth + (asked.own is not None))
            each = 1000 * (time.perf_counter() - begun) / len(asked.vectors)
            found = _others(result.scores, result.rows, asked.own)
            recall[str(depth)] = round(recall_at(found, best, depth), 4)
        measured.append({"effort": effort, "candidates": candidates, "recall": recall, "ms": round(each, 3)})
    deciding = "10" if 10 in depths else "1"
    chosen = next((row for row in measured if row["recall"][deciding] >= GOOD), measured[-1])
    questions = {"count": len(asked.vectors), "source": asked.source, "sha256": sha256_bytes(asked.vectors.tobytes())}
    found_all = {
        "questions": questions,
        "measured": measured,
        "chosen": {"candidates": chosen["candidates"], "effort": chosen["effort"]},
    }
    write_json(folder / "manifest.json", sealed(manifest | {"recall": found_all}))
    return found_all


def _others(scores: np.ndarray, rows: np.ndarray, own: np.ndarray | None) -> np.ndarray:
    """Scores [Q,k] without those of each query's own row; of a query that has not found it, without the last."""
    if own is None:
        return scores
    last = np.argsort(rows == own[:, None], axis=1, kind="stable")[:, :-1]
    return np.take_along_axis(scores, last, axis=1)


def default_efforts(index: Any, candidates: int) -> list[int]:
    """What recall is measured with unless other values are given: from little to much."""
    name, most = effort_of(index)
    if not name:
        return [0]
    values = (1, 4, 16, 64, 256) if name == "nprobe" else (candidates, 2 * candidates, 4 * candidates)
    return sorted({min(value, most) for value in values})
