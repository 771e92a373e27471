"""Detect collapsed models: all their vectors have nearly the same direction, so no search can distinguish passages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxret.index.shard_set import ShardSet

COSINE_LIMIT = 0.95  # mean cosine of random pairs above which a model has collapsed
SAMPLE_SIZE = 1000  # passages whose vectors are compared
# Largest product of sampled passages and dimension; a sparse vector is in memory with all its zeros.
SAMPLE_NUMBERS = 2**25


def collapse_warning(shards: ShardSet) -> str:
    """Return a sentence if the vectors of a finished folder have collapsed, else "".

    At most SAMPLE_SIZE passages are compared, evenly spread over the shards on this host, the same passages every time.
    If the corpus is in a bucket, these are the shards that the job wrote.
    """
    sample = max(2, min(SAMPLE_SIZE, SAMPLE_NUMBERS // shards.dimension))
    local = shards.local()
    if not (total := sum(rows for rows, _ in local)):
        return ""
    rows = np.unique(np.linspace(0, total - 1, sample).astype(np.int64))
    cosine = mean_cosine(list(_vectors(local, rows)))
    if cosine <= COSINE_LIMIT:
        return ""
    return (
        f"{shards.folder}: the vectors have collapsed: the mean cosine of two random passages is {cosine:.3f}, "
        f"above {COSINE_LIMIT}, so that their scores hardly differ. Check the training's loss, the "
        "pooling and the tokenizer"
    )


def _vectors(shards: list[tuple[int, Any]], rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the vectors [V,D] of each row. Row numbers are ascending and continue from shard to shard."""
    first = 0
    for count, open_vectors in shards:
        shard_rows = rows[(rows >= first) & (rows < first + count)]
        if len(shard_rows):
            vectors = open_vectors()
            for row in shard_rows:
                yield np.asarray(vectors[int(row) - first])
        first += count


def mean_cosine(passages: list[np.ndarray]) -> float:
    """Return the mean cosine over all pairs of vectors of two different passages, or 0 without such pairs.

    A passage has vectors [V,D], where V may differ. The cosine of two vectors of zeros is 1. The mean is computed in
    float64 from sums of unit vectors, not pair by pair.
    """
    units = [_units(vectors.astype(np.float64)) for vectors in passages]
    sums = np.array([unit_vectors.sum(axis=0) for unit_vectors in units])
    counts = np.array([len(unit_vectors) for unit_vectors in units], np.float64)
    pairs = counts.sum() ** 2 - (counts**2).sum()
    return float(((sums.sum(axis=0) ** 2).sum() - (sums**2).sum()) / pairs) if pairs else 0.0


def _units(vectors: np.ndarray) -> np.ndarray:
    """Return unit vectors [V,D+1]. Number D+1 is 1 for a vector of zeros, and 0 for other
    vectors."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.concatenate([vectors / np.where(norms > 0, norms, 1), norms == 0], axis=1)
