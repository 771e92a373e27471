"""Search over lists of vectors against exact sums: the same bits, also of ties."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.shards import ShardWriter
from jaxret.search.backends import late_interaction as lists_module
from jaxret.search.backends.late_interaction import passages_of_tile
from jaxret.search.backends.precision import PRECISIONS, Compressed
from jaxret.search.backends.select import select_backend
from jaxret.search.proof import SearchResult
from jaxret.search.rounding import exact_score
from jaxret.search.vectors import multi_vector
from jaxret.search.vectors.exact import search
from jaxret.search.vectors.self_check import self_check
from jaxret.search.vectors.vector_corpus import VectorCorpus
from jaxret.types import Ragged

D, K = 8, 7


def lists(counts: list[int] | np.ndarray, seed: int, integers: bool = False) -> Ragged:
    """Random vectors; small integers give many exact ties."""
    generator = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    shape = (int(offsets[-1]), D)
    flat = generator.integers(-2, 3, shape) if integers else generator.standard_normal(shape)
    return Ragged(flat.astype(np.float32), offsets)


def brute_force(queries: Ragged, passages: Ragged, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute all pairs with `math.fsum`; sort by score descending, then row ascending."""
    scores = np.array(
        [
            [
                np.float32(math.fsum(max(math.fsum(q * v) for v in passage) for q in query))
                for passage in (passages[j].astype(np.float64) for j in range(len(passages)))
            ]
            for query in (queries[i].astype(np.float64) for i in range(len(queries)))
        ]
    )
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, axis=1).astype(np.float32) + np.float32(0), rows


def blocks(passages: Ragged, size: int) -> list[Ragged]:
    parts = [np.arange(start, min(start + size, len(passages))) for start in range(0, len(passages), size)]
    return [passages.take(part) for part in parts]


def search_lists(
    queries: Ragged, corpus: VectorCorpus | list[Ragged], k: int, precision: str = "float32"
) -> SearchResult:
    return search(queries, corpus, k, select_backend("auto", multi_vector=True, precision=precision))


def counts(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 20, number)


@pytest.mark.parametrize("integers", [False, True], ids=["gaussian", "ties"])
@pytest.mark.parametrize("query_counts", [[1] * 5, [3, 1, 6, 2, 4]], ids=["one vector", "late interaction"])
@pytest.mark.parametrize(("size", "precision"), [(300, "float32"), (37, "float32"), (300, "int8"), (300, "bfloat16")])
def test_equals_brute_force(integers: bool, query_counts: list[int], size: int, precision: str) -> None:
    queries, passages = lists(query_counts, 1, integers), lists(counts(150), 2, integers)
    expected_scores, expected_rows = brute_force(queries, passages, K)
    result = search_lists(queries, blocks(passages, size), K, precision)
    np.testing.assert_array_equal(result.rows, expected_rows)
    assert result.scores.tobytes() == expected_scores.tobytes()
    if integers:
        assert any(len(set(row)) < K for row in expected_scores.tolist()), "control: there are ties"


def test_padding_never_exceeds_a_vector() -> None:
    """If every product is negative, a padded 0 would look best; the proof would correct this, but only in a second
    round."""
    queries, passages = lists([2, 3], 1), lists(counts(150), 2)
    np.abs(queries.flat, out=queries.flat)
    np.negative(np.abs(passages.flat), out=passages.flat)
    result = search_lists(queries, blocks(passages, 150), K)
    np.testing.assert_array_equal(result.rows, brute_force(queries, passages, K)[1])
    assert len(result.rounds) == 1


def test_k_above_the_corpus_size_and_many_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_vector, "QUERY_ROWS", 8)  # several passes over a block
    monkeypatch.setattr(multi_vector, "PASSAGES_AT_ONCE", 4)  # a query's passages are scored again in two parts
    queries, passages = lists([2] * 11, 3), lists(counts(6), 4)
    result = search_lists(queries, blocks(passages, 4), 50)
    expected_scores, expected_rows = brute_force(queries, passages, 50)
    np.testing.assert_array_equal(result.rows, expected_rows)
    assert result.scores.tobytes() == expected_scores.tobytes()


def test_duplicated_passages_are_searched_deeper() -> None:
    """There are more equal passages than the margin; the lowest rows win."""
    one = lists([5], 5)
    passages = Ragged(np.tile(one.flat, (120, 1)), np.arange(121) * 5)
    result = search_lists(lists([3], 6), blocks(passages, 50), K)
    assert result.rows.tolist() == [list(range(K))]
    assert len(result.rounds) > 1


def test_a_difference_below_rounding_is_seen_by_the_proof_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one = lists([5], 5)
    passages = Ragged(np.tile(one.flat, (400, 1)), np.arange(401) * 5)
    passages.flat[-5:] *= 1.0000001  # the last passage is best by less than float32 sums can show
    queries = lists([3], 7)
    expected = brute_force(queries, passages, K)
    result = search_lists(queries, blocks(passages, 400), K)
    np.testing.assert_array_equal(result.rows, expected[1])
    assert len(result.rounds) > 1
    monkeypatch.setattr(multi_vector.VectorLists, "errors", lambda self, *_: np.full(len(self), -np.inf))
    result = search_lists(queries, blocks(passages, 400), K)
    assert len(result.rounds) == 1
    assert 399 not in result.rows, "control: the first candidates lack the best passage"


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_of_maxima_that_may_overflow_is_refused(sign: int) -> None:
    """Each product fits into float32, but their sum does not: all scores were infinite, or no passage was returned."""
    queries = Ragged(np.full((9, 4), sign * 4e18, np.float32), np.array([0, 1, 9]))
    passages = Ragged(np.full((12, 4), 4e18, np.float32), np.arange(13))
    with pytest.raises(ValueError, match=r"1 .*NaN, .*infinity"):
        search_lists(queries, blocks(passages, 5), K)
    assert np.isfinite(search_lists(queries.part(0, 1), blocks(passages, 5), K).scores).all()


def test_a_list_of_no_vectors_is_refused() -> None:
    passages = Ragged(np.ones((5, D), np.float32), np.array([0, 1, 3, 3, 5]))
    with pytest.raises(ValueError, match="passage row 5 has no vector"):
        search_lists(lists([3], 1), [lists([2] * 3, 2), passages], K)


def test_from_disk_equals_in_memory(tmp_path: Path) -> None:
    passages = lists(counts(40), 8)
    for dtype in (np.float32, np.float16):
        folder = tmp_path / np.dtype(dtype).name
        writer = ShardWriter(folder, 40, 15, {"made": "here"})
        rounded = passages.astype(dtype)
        for shard in writer.pending():
            rows = np.arange(shard.start, shard.stop)
            writer.write(shard, rounded.take(rows), [f"p{i}" for i in rows])
        writer.finish()
        stored = open_encoded(folder)
        assert stored.ragged
        assert sum((folder / f"vectors-0000{i}-of-00003.npy").stat().st_size for i in range(3)) < (
            rounded.flat.nbytes + 3 * 256
        ), "no padding is stored"
        queries = lists([3, 2], 9)
        result = search_lists(queries, stored, K)
        expected = brute_force(queries, rounded, K)
        np.testing.assert_array_equal(result.rows, expected[1])
        assert result.scores.tobytes() == expected[0].tobytes()
        assert stored.ids(result.rows[0]) == [f"p{i}" for i in result.rows[0]]


def test_the_exact_score_depends_only_on_the_vectors() -> None:
    """2^24 + 1 + 2^-20 is just above the middle of two float32 numbers; a float32 sum would lose its last term."""
    query = np.array([[4096.0, 1.0, 2.0**-10], [0.0, 0.0, 0.0]])
    assert exact_score(query, query[:1]) == np.float32(2**24 + 2)
    assert np.float32(2**24 + 1) == np.float32(2**24), "control: without its last term, the sum is rounded down"


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_bad_numbers_name_the_row(value: float) -> None:
    queries, passages = lists([2, 2], 1), lists([3, 4, 2], 2)
    passages.flat[5, 1] = value
    with pytest.raises(ValueError, match=r"passage row 1 has a NaN"):
        search_lists(queries, blocks(passages, 2), K)
    queries.flat[3, 0] = value
    with pytest.raises(ValueError, match=r"query 1 has a NaN"):
        search_lists(queries, blocks(lists([3], 2), 2), K)


def test_the_self_check_passes_and_notices_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    self_check(select_backend("xla"), multi_vector=True)
    result = lists_module.search_lists

    def rounded(queries: Compressed, owner: np.ndarray, vectors: Compressed, *rest: Any) -> Any:
        coarse = vectors.numbers.astype(jnp.bfloat16).astype(jnp.float32)
        return result(queries, owner, vectors._replace(numbers=coarse), *rest)

    monkeypatch.setattr(lists_module, "search_lists", rounded)
    with pytest.raises(RuntimeError, match="is less exact than float32"):
        self_check(select_backend("xla"), multi_vector=True)


def test_wrong_shapes_are_errors() -> None:
    passages = blocks(lists([3], 1), 2)
    with pytest.raises(ValueError, match=r"k is 0"):
        search_lists(lists([1], 1), passages, 0)
    narrow = Ragged(np.zeros((1, D - 1), np.float32), np.array([0, 1]))
    with pytest.raises(ValueError, match=r"queries are float32 \[1, 7\]; they must be float32 \[Q,8\]"):
        search_lists(narrow, passages, 1)
    with pytest.raises(ValueError, match=r"float64 \[1, 8\]"):
        search_lists(lists([1], 1).astype(np.float64), passages, 1)


def test_tiles_cover_a_block_within_the_memory_limit() -> None:
    assert passages_of_tile(64, 2**21, "cpu") == 1
    assert passages_of_tile(64, 2**19, "cpu") == 4
    assert passages_of_tile(64, 2**19 + 1, "cpu") == 2, "a tile has no room for more"
    assert passages_of_tile(64, 8, "cpu") == 64
    assert passages_of_tile(64, 2**30, "gpu") == 64


@pytest.mark.parametrize("tile", [1, 2**20])
def test_results_do_not_depend_on_tiles(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_module, "TILE_VALUES", tile)
    queries, passages = lists([3, 1, 6], 1), lists(counts(40), 2)
    result = search_lists(queries, blocks(passages, 40), K)
    np.testing.assert_array_equal(result.rows, brute_force(queries, passages, K)[1])


def test_int8_candidates_are_proven_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses add up over a query's vectors, so there are more candidates, although few of them are scored."""
    queries, passages = lists([8] * 4, 1), lists(counts(300), 2)
    result = search_lists(queries, [passages], K, "int8")
    assert result.rounds == (4,)
    monkeypatch.setattr("jaxret.search.vectors.exact.LISTS_MARGIN", 1)
    control = search_lists(queries, [passages], K, "int8")
    assert len(control.rounds) > 1
    np.testing.assert_array_equal(control.rows, result.rows)
    assert result.scored_pairs < 4 * (K + 128)


@pytest.mark.parametrize("name", ["int8", "bfloat16"])
def test_scores_in_fewer_bits_are_upper_bounds(name: str) -> None:
    """Every score in the proof is an upper bound, and not higher than the rounding losses explain."""
    queries, passages = lists([3, 5], 1), lists(counts(30), 2)
    rows = np.append(np.arange(30), [-1, -1])
    held = lists_module.put_lists_on_device(lists_module.PaddedLists(*passages.padded(rows, 20), 30), PRECISIONS[name])
    result = held(queries, 30)
    exact = np.array(
        [
            [(queries[i].astype(np.float64) @ passages[j].astype(np.float64).T).max(axis=1).sum() for j in range(30)]
            for i in range(2)
        ]
    )
    over = result.scores - np.take_along_axis(exact, result.rows, axis=1)
    norms = np.array([np.linalg.norm(queries[i], axis=1).sum() for i in range(2)])
    largest = np.linalg.norm(passages.flat, axis=1).max()
    assert (over > 0).all()
    assert (over < (norms * largest)[:, None] * (0.06 if name == "int8" else 0.02)).all()
    control = held.vectors._replace(error=jnp.zeros_like(held.vectors.error), norm=jnp.zeros_like(held.vectors.norm))
    low = lists_module.DeviceVectorLists(control, held.mask, 30, held.precision)(queries, 30)
    assert (low.scores < np.take_along_axis(exact, low.rows, axis=1)).any(), (
        "control: without the terms of errors, some scores are no bounds"
    )
