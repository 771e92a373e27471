"""Decide, before the first shard of a corpus, what is stored, from the options, the run and the corpus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxret.data.formats import CorpusScan
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.shards import SHARD_DTYPES, read_entry
from jaxret.index.source import CorpusSource
from jaxret.parallel.progress import job_log
from jaxret.runs.encoded_steps import announcement_files
from jaxret.runs.run import Run
from jaxret.types import VECTOR_DTYPES

# Default of the largest number of passages per shard. A killed job loses the work of one shard: 8,192 passages take an
# accelerator seconds, and are 25 MB. Sorted by length, they need no more padding than 50,000 passages.
SHARD_ROWS = 8192
# A shard is at most a minute's work of one device at these rates. They are assumed, not measured, so that shards are
# the same on every machine with such devices.
FLOP_RATES = {"cpu": 50e9, "gpu": 100e12, "tpu": 100e12}  # floating-point operations per second
MINUTE = 60
MEGABYTE = 10**6
LEAST_ROWS = 8  # shorter shards would waste much padding
COUNT_BLOCK = 65_536  # passages whose vectors are counted at a time


@dataclass(frozen=True)
class EncodePlan:
    """The type of the vectors, the words of a passage and the size of the shards; made by `make_encode_plan`."""

    dtype: str  # type of the vectors on disk
    words: int  # for sparse vectors: largest number of words stored for a passage; 0: all words with a weight
    shard_rows: int  # passages of each shard; the last one may have fewer
    contract: dict[str, Any]  # contract of the existing shards if it is equivalent to the run's, otherwise the run's

    def fingerprint(self, run: Run, scan: CorpusScan) -> dict[str, Any]:
        """Return everything that the bytes of the shards depend on, as JSON."""
        tokens = run.config.encode.tokens_per_batch
        settings = {"dtype": self.dtype, "shard_rows": self.shard_rows, "tokens_per_batch": tokens}
        settings |= {"words": self.words} if self.words else {}
        return {
            "contract": self.contract,
            "checkpoint": run.checkpoint,
            "corpus": {"sha256": scan.sha256, "passages": scan.passages},
            "encode": settings,
        }


def make_encode_plan(
    run: Run, folder: Path, source: CorpusSource, options: EncodeOptions, progress: bool = False
) -> EncodePlan:
    """Return the plan of a corpus. The size of existing shards is kept, unless the options set another size.

    Args:
        run: the run whose checkpoint encodes.
        folder: folder of the encoded corpus, which need not exist.
        source: the passages.
        options: options of the job, which override the settings of the run.

    Raises:
        ValueError: an unknown type of vectors, or `words` although vectors are not weights of words.
    """
    words, dtype = most_words(run, options), vector_dtype(options.dtype or run.config.encode.dtype)
    rows = next((rows for entry in announced_entries(folder) if type(rows := entry.get("rows_per_shard")) is int), 0)
    if options.shard_mb or not rows or options.shard_rows not in (0, rows):
        rows = rows_per_shard(run, source, options, dtype, progress)
    return EncodePlan(dtype, words, rows, announced_contract(run, folder))


def vector_dtype(name: str) -> str:
    """Return numpy's name of the type of the vectors on disk. Raises ValueError for any other type."""
    if name not in VECTOR_DTYPES:
        raise ValueError(f"encode.dtype is {name!r}; it must be one of {', '.join(VECTOR_DTYPES)}")
    return name


def most_words(run: Run, options: EncodeOptions) -> int:
    """Return the largest number of words that are stored for a passage; 0: all words with a weight. Raises ValueError
    if vectors are not weights of words."""
    words = run.config.encode.words if options.words is None else options.words
    if words < 0:
        raise ValueError(f"encode.words is {words}; it must be at least 0, for all words that have a weight")
    if words and not run.model.sparse:
        head = run.config.head.name
        raise ValueError(f"words={words}: the vectors of head {head!r} are not weights of words; remove it")
    return words


def rows_per_shard(run: Run, source: CorpusSource, options: EncodeOptions, dtype: str, progress: bool = False) -> int:
    """Return the largest number of passages per shard within the limits of passages and of MB of vectors.

    If a passage has a vector for every token, tokens are counted first, so that the largest shard is within the limit,
    too. Shards of sparse vectors are limited only by the number of passages.

    Args:
        run: the run whose checkpoint encodes.
        source: the passages.
        options: shard_rows and shard_mb; 0: the run's settings.
        dtype: type of the vectors.
    """
    rows = options.shard_rows or min(run.config.encode.shard_rows, SHARD_ROWS, rows_a_minute(run))
    if run.model.sparse:  # a passage has few words
        return max(1, rows)
    size = np.dtype(SHARD_DTYPES[dtype]).itemsize
    vectors = (options.shard_mb or run.config.encode.shard_mb) * MEGABYTE // (run.model.dimension * size)
    per_passage = run.model.vectors_per_passage
    if per_passage is not None:
        return max(1, min(rows, vectors // per_passage))
    passages = source.open_tokens(run, progress, job_log(progress)).passages
    parts = np.array_split(np.arange(len(passages)), -(-len(passages) // COUNT_BLOCK))
    counts = np.concatenate([run.model.vector_counts(passages.take(part), "passage") for part in parts])
    return rows_within(counts, rows, vectors)


def rows_a_minute(run: Run) -> int:
    """Return how many passages of the largest length a device encodes in a minute, as a power of two; at most
    SHARD_ROWS. Only the products of the encoder's layers are counted."""
    leaves = jax.tree_util.tree_leaves_with_path(run.params)
    kernels = sum(leaf.size for path, leaf in leaves if jax.tree_util.keystr(path[-1:]).endswith("kernel']"))
    kernels //= 1 if run.config.encoder.tied else 2  # two encoders: half of the kernels are for queries
    rate = FLOP_RATES.get(run.mesh.devices.flat[0].platform, FLOP_RATES["gpu"])
    rows = int(MINUTE * rate / (2 * kernels * run.tokenizer.passage_length))
    return min(SHARD_ROWS, max(LEAST_ROWS, 1 << max(rows, 1).bit_length() - 1))


def rows_within(counts: np.ndarray, rows: int, limit: int) -> int:
    """Return a number of rows per shard, from 1 to `rows`, such that no shard has more than `limit` vectors.
    `counts` [N] has the number of vectors of each row."""
    ends = np.concatenate([[0], np.cumsum(counts)])
    rows = min(rows, len(counts))
    while rows > 1:
        starts = np.arange(0, len(counts), rows)
        largest = int((ends[np.minimum(starts + rows, len(counts))] - ends[starts]).max())
        if largest <= limit:
            break
        rows = max(1, min(rows - 1, rows * limit // largest))
    return rows


def announced_entries(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a folder's shards that exist or are announced."""
    return (read_entry(path) or {} for path in announcement_files(folder))


def announced_contract(run: Run, folder: Path) -> dict[str, Any]:
    """Return the contract of the folder's shards if it is equivalent to the run's, else the run's."""
    for entry in announced_entries(folder):
        fingerprint = entry.get("fingerprint")
        contract = fingerprint.get("contract") if isinstance(fingerprint, dict) else None
        if isinstance(contract, dict) and run.has_contract(contract):
            return contract
    return run.contract
