"""A corpus in memory: search gives the results of a corpus on disk, and nothing is loaded twice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.index.encoded_corpus import EncodedCorpus, open_encoded
from jaxret.index.shard_set import ShardSet
from jaxret.index.shards import ShardWriter
from jaxret.search.backends.faiss_backend import FEW_QUERIES, FaissCpu
from jaxret.search.backends.xla_backend import Xla
from jaxret.search.proof import best_columns
from jaxret.search.vectors import in_memory
from jaxret.search.vectors.exact import search
from jaxret.search.vectors.in_memory import InMemoryCorpus, hold_in_memory, vectors_of
from jaxret.types import Ragged

ROWS, DIMENSION = 50, 8


def shards(folder: Path, layout: str, dtype: str = "float32") -> EncodedCorpus:
    """50 rows in shards of 20, with 1 or 3 vectors per row, or 1 to 4."""
    random = np.random.default_rng(0)
    writer = ShardWriter(folder, ROWS, 20, {"corpus": layout})
    for shard in writer.shards:
        counts = {"one": 1, "three": 3}.get(layout)
        offsets = np.concatenate([[0], np.cumsum(random.integers(1, 5, shard.rows))])
        size = shard.rows * counts if counts else int(offsets[-1])
        flat = random.standard_normal((size, DIMENSION)).astype(dtype)
        vectors: Any = flat.reshape(shard.rows, counts, DIMENSION) if counts else Ragged(flat, offsets)
        writer.write(shard, vectors, [f"p{row}" for row in range(shard.start, shard.stop)])
    writer.finish()
    return open_encoded(folder)


class Counting:
    """A backend that counts the blocks it loads."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.loaded = backend, 0
        self.name, self.multi_vector, self.precision = backend.name, backend.multi_vector, backend.precision
        self.max_rows, self.description = backend.max_rows, backend.description

    def load(self, block: Any) -> Any:
        self.loaded += 1
        return self.backend.load(block)


@pytest.mark.parametrize(
    ("layout", "dtype"), [("one", "float32"), ("one", "float16"), ("three", "float32"), ("lists", "float32")]
)
def test_results_equal_those_from_disk(layout: str, dtype: str, tmp_path: Path) -> None:
    encoded = shards(tmp_path, layout, dtype)
    held = hold_in_memory(encoded)
    assert isinstance(held, InMemoryCorpus)
    backend = Counting(Xla.open("test"))
    queries = np.random.default_rng(1).standard_normal((3, DIMENSION), dtype=np.float32)
    for part in (queries, queries[:1], -queries):
        before = backend.loaded
        result, expected = search(part, held, 7, backend), search(part, encoded, 7, Xla.open("test"))
        np.testing.assert_array_equal(result.rows, expected.rows)
        np.testing.assert_array_equal(result.scores, expected.scores)
        assert (backend.loaded > before) == (part is queries), "after the first search, the backend keeps the block"
        assert held.ids(result.rows[0]) == encoded.ids(result.rows[0])
    rows = np.array([41, 0, 41, 20])
    for one, other in zip(vectors_of(held, rows), vectors_of(encoded, rows), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(vectors_of(held, rows)[0], vectors_of(held, rows)[1]), (
        "control: the vectors of two rows differ"
    )


@pytest.mark.parametrize("layout", ["one", "three", "lists"])
def test_large_corpora_stay_on_disk(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = shards(tmp_path, layout)
    vectors = sum(shard.lengths.sum() if layout == "lists" else shard[..., 0].size for _, shard in encoded)
    monkeypatch.setattr(in_memory, "MEMORY_BYTES", 4 * DIMENSION * vectors)
    assert isinstance(hold_in_memory(encoded), InMemoryCorpus)
    monkeypatch.setattr(in_memory, "MEMORY_BYTES", 4 * DIMENSION * vectors - 1)
    assert hold_in_memory(encoded) is encoded


def test_ids_are_read_once_wherever_vectors_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = shards(tmp_path, "one")
    monkeypatch.setattr(in_memory, "IDS_AT_ONCE", 7)
    monkeypatch.setattr(in_memory, "MEMORY_BYTES", 0)
    held = hold_in_memory(encoded, on_devices=True)
    assert isinstance(held, InMemoryCorpus)
    assert held.vectors is None
    rows = np.array([41, 0, 41, 49, 20])
    expected = encoded.ids(rows)
    monkeypatch.setattr(ShardSet, "ids", None)
    assert held.ids(rows) == held.ids(rows.tolist()) == expected == ["p41", "p0", "p41", "p49", "p20"]


def test_of_a_limited_backend_the_smallest_blocks_are_kept(tmp_path: Path) -> None:
    """These blocks serve all of the many depths; each size is half of the one before."""
    held, queries = hold_in_memory(shards(tmp_path, "three")), np.ones((1, DIMENSION), np.float32)
    for most, sizes in ((120, [50, 25]), (90, [25]), (45, [12])):  # passages, of 150 vectors
        backend = Counting(Xla.open("test"))
        backend.max_rows = most
        assert isinstance(held, InMemoryCorpus)
        kept = InMemoryCorpus(held._corpus, held.vectors)
        seen = []
        for k in (1, 2, 12, 3, 11):
            search(queries, kept, k, backend)
            assert kept.blocks
            assert len(kept.blocks) == math.ceil(50 / kept.block_size)
            seen.append(kept.block_size)
        assert list(dict.fromkeys(seen)) == sizes
        assert backend.loaded == sum(math.ceil(50 / size) for size in sizes), "each block is loaded once"


def test_a_nan_vector_is_an_error_at_every_search(tmp_path: Path) -> None:
    held = hold_in_memory(shards(tmp_path, "one"))
    assert isinstance(held, InMemoryCorpus)
    held.vectors[33] = np.nan  # type: ignore[index]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"passage row 33 .*'p33' .*NaN"):
            search(np.ones((1, DIMENSION), np.float32), held, 3, Xla.open("test"))


def test_few_and_many_queries_give_equal_results() -> None:
    if FaissCpu.available():
        pytest.skip(str(FaissCpu.available()))
    random = np.random.default_rng(0)
    queries = random.standard_normal((FEW_QUERIES + 1, DIMENSION), dtype=np.float32)
    passages = random.standard_normal((60, 2, DIMENSION), dtype=np.float32)
    passages[30:] = passages[:30]
    top = FaissCpu.open("test").load(passages)
    many, few = top(queries, 9), [top(queries[i : i + 1], 9) for i in range(len(queries))]
    for name in ("scores", "bound"):
        one_by_one = np.concatenate([getattr(result, name) for result in few])
        np.testing.assert_allclose(one_by_one, getattr(many, name), rtol=1e-5)
    assert np.ptp(many.bound) > 0.01, "control: the bounds of two queries differ"


def test_the_best_columns() -> None:
    scores = np.array([[1, 5, 3, 4], [0, -1, -2, -3]], np.float32)
    result, columns, left_out = best_columns(scores, 2)
    assert result.tolist() == [[5, 4], [0, -1]]
    assert columns.tolist() == [[1, 3], [0, 1]]
    assert left_out.tolist() == [3, -2]
