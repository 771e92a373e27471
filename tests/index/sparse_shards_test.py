"""Shards of words and weights: written, read, damaged; and rows that stay sparse."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.index.shard_set import open_shards
from jaxret.index.shards import ShardError, ShardWriter, VectorError
from jaxret.types import Ragged, SparseRows


def dense_rows(rows: int = 7, dimension: int = 30, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    dense = np.where(random.random((rows, dimension)) < 0.2, random.random((rows, dimension)), 0).astype(np.float32)
    dense[2] = 0  # a text without a word
    return dense


def written(folder: Path, dense: np.ndarray, dtype: str = "float32") -> None:
    writer = ShardWriter(folder, len(dense), 3, {"run": 1})
    for shard in writer.shards:
        rows = SparseRows.from_dense(dense[shard.start : shard.stop]).astype(dtype)
        writer.write(shard, rows, [f"p{i}" for i in range(shard.start, shard.stop)])
    writer.finish()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dimension", [30, 70_000])
def test_sparse_shards_round_trip(tmp_path: Path, dtype: str, dimension: int) -> None:
    dense = dense_rows(dimension=dimension)
    written(tmp_path, dense, dtype)
    shards = open_shards(tmp_path)
    assert (shards.sparse, shards.ragged, shards.dimension, shards.total_rows) == (True, False, dimension, 7)
    parts = [shard for _, shard in shards]
    assert parts[0].words.dtype == ("<u2" if dimension == 30 else "<u4")
    np.testing.assert_array_equal(SparseRows.concatenate(parts).flat, dense.astype(dtype))
    assert shards.ids([6, 2]) == ["p6", "p2"]


@pytest.mark.parametrize("name", ["words", "weights", "offsets", "ids"])
def test_a_damaged_file_is_an_error_and_written_again(tmp_path: Path, name: str) -> None:
    dense = dense_rows()
    written(tmp_path, dense)
    (path,) = tmp_path.glob(f"{name}-00001*")
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardError, match=rf"{name}-00001.* damaged"):
        open_shards(tmp_path)
    assert [shard.index for shard in ShardWriter(tmp_path, 7, 3, {"run": 1}).pending()] == [1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"weights": np.array([1, np.nan], np.float32)},
            VectorError,
            r"passage 'b' \(row 1\) has a weight that",
        ),
        (
            {"weights": np.array([0, 1], np.float32)},
            VectorError,
            r"passage 'a' \(row 0\) .*0",
        ),
        ({"weights": np.array([1, np.inf], np.float16)}, VectorError, r"float16 holds nothing above 65504"),
        ({"weights": np.array([1, 3e38], np.float32)}, VectorError, r"passage 'b' \(row 1\) .*too large"),
        ({"weights": np.array([1, 2], np.float64)}, ValueError, r"float64 weights"),
        ({"offsets": np.array([0, 1])}, ValueError, r"needs words of 2 rows"),
    ],
)
def test_impossible_weights_are_not_written(tmp_path: Path, change: Any, error: Any, message: str) -> None:
    fields: dict[str, Any] = {
        "words": np.array([3, 4], np.uint16),
        "weights": np.array([1, 2], np.float32),
        "offsets": np.array([0, 1, 2]),
    }
    writer = ShardWriter(tmp_path, 2, 2, {})
    with pytest.raises(error, match=message):
        writer.write(writer.shards[0], SparseRows(**(fields | change), dimension=9), ["a", "b"])
    writer.write(writer.shards[0], SparseRows(**fields, dimension=9), ["a", "b"])


def test_an_overflow_of_float16_is_an_error_without_a_warning() -> None:
    """The error names the passage; NumPy's warning came before it."""
    ragged = Ragged(np.array([[1e9]], np.float32), np.array([0, 1]))
    sparse = SparseRows(np.array([0], np.uint16), np.array([1e9], np.float32), np.array([0, 1]), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isinf(ragged.astype("float16").flat).all()
        assert np.isinf(sparse.astype("float16").weights).all()


def test_the_heaviest_words_are_kept() -> None:
    dense = np.array([[0.5, 0, 2, 0.5, 1, 0.5], [0, 0, 0, 0, 0, 3]], np.float32)
    rows = SparseRows.from_dense(dense, 3)
    assert rows.words.tolist() == [0, 2, 4, 5], "in ascending order; of equal weights, the lower ids"
    assert rows.weights.tolist() == [0.5, 2, 1, 3]
    np.testing.assert_array_equal(SparseRows.from_dense(dense).flat, dense)


def test_rows_are_selected_cut_and_padded() -> None:
    dense = dense_rows()
    rows = SparseRows.from_dense(dense)
    order = np.array([4, 2, 2, 6])
    np.testing.assert_array_equal(rows.take(order).flat, dense[order])
    np.testing.assert_array_equal(rows.part(1, 5).flat, dense[1:5])
    np.testing.assert_array_equal([row[0] for row in rows], dense)
    items, mask = rows.padded([3, -1], 1)
    np.testing.assert_array_equal(items[:, 0], [dense[3], np.zeros(30)])
    assert mask.tolist() == [[True], [False]]
    small = np.array([[1e-9, 1.0]], np.float32)
    assert SparseRows.from_dense(small).astype("float16").words.tolist() == [1], "the weight of word 0 is 0 in float16"


@pytest.mark.parametrize("name", ["words", "weights"])
def test_a_mapped_file_that_was_cut_is_an_error(tmp_path: Path, name: str) -> None:
    """Reading behind the new end would end the process."""
    written(tmp_path, dense_rows())
    shards = open_shards(tmp_path)
    assert shards.mapped_files == 2 * len(shards.shards) == 6
    shards.require_unwritten(np.array([1, 4]))
    (path,) = tmp_path.glob(f"{name}-00001*")
    os.truncate(path, 10)
    shards.require_unwritten(np.array([1]))
    with pytest.raises(ShardError, match=f"{name}-00001"):
        shards.require_unwritten(np.array([1, 4]))
