"""Detection of collapsed models: their vectors all point the same way, and no search can tell them apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxret.index.shard_set import ShardSet

COSINE_LIMIT = 0.95  # mean cosine of random pairs; above it something is wrong
SAMPLE_SIZE = 1000  # that are looked at
NUMBERS = 2**25  # of vectors that are held; a sparse vector is held whole


def collapse_warning(shards: ShardSet) -> str:
    """Return a sentence if the vectors of a finished folder have collapsed, else "".

    It samples SAMPLE_SIZE of them, evenly spread, the same ones every time; of a corpus in a bucket, where a job has
    only the shards that it wrote, of these.
    """
    sample = max(2, min(SAMPLE_SIZE, NUMBERS // shards.dimension))
    local = shards.local()
    if not (total := sum(rows for rows, _ in local)):
        return ""
    rows = np.unique(np.linspace(0, total - 1, sample).astype(np.int64))
    cosine = mean_cosine(list(_vectors(local, rows)))
    if cosine <= COSINE_LIMIT:
        return ""
    return (
        f"{shards.folder}: the vectors have collapsed: the mean cosine of two random passages is {cosine:.3f}, "
        f"above {COSINE_LIMIT}, so that their scores hardly differ; look at the training's loss, the "
        "pooling and the tokenizer"
    )


def _vectors(shards: list[tuple[int, Any]], rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield [V,D] of each of the rows, ascending, of shards one after another."""
    first = 0
    for count, open_vectors in shards:
        shard_rows = rows[(rows >= first) & (rows < first + count)]
        if len(shard_rows):
            vectors = open_vectors()
            for row in shard_rows:
                yield np.asarray(vectors[int(row) - first])
        first += count


def mean_cosine(passages: list[np.ndarray]) -> float:
    """Return the mean cosine of a vector of one passage and one of another, over all such pairs; 0 if there is none.

    passages: [V,D] each, V may differ. Of two vectors of zeros it is 1. In float64, from sums: no pair is computed by
    itself.
    """
    units = [_units(vectors.astype(np.float64)) for vectors in passages]
    sums = np.array([each.sum(axis=0) for each in units])
    counts = np.array([len(each) for each in units], np.float64)
    pairs = counts.sum() ** 2 - (counts**2).sum()
    return float(((sums.sum(axis=0) ** 2).sum() - (sums**2).sum()) / pairs) if pairs else 0.0


def _units(vectors: np.ndarray) -> np.ndarray:
    """Return unit vectors [V,D+1]; the last number is 1 for vectors of zeros, and 0 for others."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.concatenate([vectors / np.where(norms > 0, norms, 1), norms == 0], axis=1)
