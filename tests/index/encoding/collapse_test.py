"""A warning says that all vectors point in the same direction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxret.index.encoding.collapse import COSINE_LIMIT, SAMPLE_SIZE, collapse_warning, mean_cosine
from jaxret.index.shard_set import open_shards
from jaxret.index.shards import ShardWriter
from jaxret.types import Ragged


def pairs(passages: list[np.ndarray]) -> float:
    """Compute the definition, pair by pair."""
    result = [
        a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
        for i, one in enumerate(passages)
        for j, other in enumerate(passages)
        if i != j
        for a in one.astype(np.float64)
        for b in other.astype(np.float64)
    ]
    return float(np.mean(result))


@pytest.mark.parametrize("most", [1, 4])
def test_the_mean_over_all_pairs(most: int) -> None:
    random = np.random.default_rng(most)
    passages = [1 + random.standard_normal((int(random.integers(1, most + 1)), 5)) for _ in range(9)]
    assert mean_cosine(passages) == pytest.approx(pairs(passages), abs=1e-12)
    assert mean_cosine([-each for each in passages[:1]] + passages[1:]) != pytest.approx(pairs(passages), abs=1e-3)


def test_single_and_zero_vectors() -> None:
    assert mean_cosine([]) == mean_cosine([np.ones((3, 4))]) == mean_cosine([np.zeros((1, 4)), np.ones((1, 4))]) == 0
    assert mean_cosine([np.zeros((1, 4))] * 2) == 1


def test_vectors_of_zeros_have_collapsed(tmp_path: Path) -> None:
    """float16 rounds small numbers to zero."""
    writer = ShardWriter(tmp_path, 9, 5, {})
    for shard in writer.shards:
        writer.write(shard, np.full((shard.rows, 1, 4), 1e-9, np.float16), ["p"] * shard.rows)
    writer.finish()
    assert "have collapsed" in collapse_warning(open_shards(tmp_path))


@pytest.mark.parametrize("lists", [False, True])
def test_warning_above_the_limit(lists: bool, tmp_path: Path) -> None:
    """Only above the limit, for vectors of any length."""
    random = np.random.default_rng(0)
    for spread, expected in ((0.1, True), (1.0, False)):
        rows, folder = SAMPLE_SIZE + 7, tmp_path / str(spread)
        vectors = (1 + spread * random.standard_normal((rows, 2, 8))) * random.uniform(1, 9, (rows, 1, 1))
        assert (pairs(list(vectors[:40])) > COSINE_LIMIT) == expected
        writer = ShardWriter(folder, rows, 300, {})
        for shard in writer.shards:
            part = vectors[shard.start : shard.stop].astype(np.float32)
            lengths = np.arange(0, 2 * len(part) + 1, 2)
            writer.write(shard, Ragged(part.reshape(-1, 8), lengths) if lists else part, ["p"] * len(part))
        writer.finish()
        assert ("have collapsed" in collapse_warning(open_shards(folder))) == expected
