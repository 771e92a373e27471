"""Exact search of sparse vectors against a brute force in exact arithmetic, including ties and queries of few words."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxret.search.backends import sparse_xla
from jaxret.search.backends.accelerators import ROW_AXIS
from jaxret.search.backends.sparse_scipy import best_products
from jaxret.search.proof import MARGIN
from jaxret.search.vectors import inverted_lists
from jaxret.search.vectors.inverted_lists import (
    InvertedLists,
    SparseBlockSearch,
    check_sparse,
    sparse_backend,
)
from jaxret.types import SparseRows
from tests.tiny import SparseBlocks

D = 50


def random_rows(count: int, share: float, seed: int, levels: int = 0) -> SparseRows:
    """Rows with about this share of words; weights of few levels make ties."""
    random = np.random.default_rng(seed)
    weights = random.random((count, D)) if not levels else random.integers(1, levels + 1, (count, D)) / 4
    return SparseRows.from_dense(np.where(random.random((count, D)) < share, weights, 0).astype(np.float32))


def by_hand(queries: SparseRows, passages: SparseRows, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute scores as fractions, rounded once; sort by score descending, then row ascending."""
    scores, rows = [], []
    dense = [[(i, Fraction(float(x))) for i, x in enumerate(row) if x] for row in passages.flat]
    for query in queries.flat:
        weights = [Fraction(float(x)) for x in query]
        exact = [np.float32(float(sum((weights[i] * x for i, x in row), Fraction(0)))) for row in dense]
        order = sorted(range(len(dense)), key=lambda row: (-exact[row], row))[:k]
        scores.append([exact[row] for row in order])
        rows.append(order)
    return np.array(scores, np.float32), np.array(rows)


@pytest.mark.parametrize("backend", ["scipy", "xla"])
@pytest.mark.parametrize("levels", [0, 2], ids=["distinct", "ties"])
@pytest.mark.parametrize("k", [1, 7, 200])
def test_results_equal_a_brute_force(k: int, levels: int, backend: str) -> None:
    passages = random_rows(130, 0.1, 0, levels)
    passages = SparseRows.concatenate([passages, passages.part(0, 20)])  # ties within a block and between blocks
    queries = random_rows(9, 0.06, 1, levels)
    empty = SparseRows.from_dense(np.zeros((2, D), np.float32))
    queries = SparseRows.concatenate([queries, empty])
    scores, rows = by_hand(queries, passages, k)
    assert (scores == 0).any() or k < 50
    for cuts in ([0, 150], [0, 1, 40, 149, 150]):
        blocks = [passages.part(a, b) for a, b in pairwise(cuts)]
        for hold in (False, True):
            result = InvertedLists(SparseBlocks(blocks), hold, sparse_backend(backend)).search(queries, k)
            np.testing.assert_array_equal(result.rows, rows)
            np.testing.assert_array_equal(result.scores, scores)
    other = by_hand(random_rows(11, 0.06, 2, levels), passages, k)
    assert (other[1] != rows).any(), "control: other queries have other results"


@pytest.mark.parametrize("backend", ["scipy", "xla"])
def test_all_passages_are_returned_if_all_have_a_word(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes a program on one device, which has room for more passages than exist."""
    mesh = Mesh(np.array(jax.local_devices()[:1]), (ROW_AXIS,), axis_types=(AxisType.Auto,))
    monkeypatch.setattr(sparse_xla, "local_mesh", lambda: mesh)
    passages, queries = random_rows(500, 1.0, 0), random_rows(2, 1.0, 1)
    result = InvertedLists(SparseBlocks([passages]), backend=sparse_backend(backend)).search(queries, 500)
    scores, rows = by_hand(queries, passages, 500)
    np.testing.assert_array_equal(result.rows, rows)
    np.testing.assert_array_equal(result.scores, scores)
    assert result.rounds == (2,)


@pytest.mark.parametrize("backend", ["scipy", "xla"])
def test_more_ties_than_candidates_take_one_more_round(backend: str) -> None:
    """One more round is enough for any number of ties."""
    row, best = random_rows(1, 0.5, 0), random_rows(1, 1.0, 1)
    passages = SparseRows.concatenate([*[row] * (40 * MARGIN), best, random_rows(30, 0.1, 2)])
    result = InvertedLists(SparseBlocks([passages]), backend=sparse_backend(backend)).search(row, 3)
    scores, rows = by_hand(row, passages, 3)
    np.testing.assert_array_equal(result.rows, rows)
    np.testing.assert_array_equal(result.scores, scores)
    assert 0 in rows, "control: a tie is among the best"
    assert result.rounds == (1, 1)


def test_queries_and_products_are_split_into_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_xla, "QUERIES_AT_ONCE", 4)
    monkeypatch.setattr(sparse_xla, "TILE_PRODUCTS", 256)
    passages, queries = random_rows(130, 0.1, 0, 2), random_rows(9, 0.06, 1, 2)
    scores, rows = by_hand(queries, passages, 7)
    result = InvertedLists(SparseBlocks([passages]), backend=sparse_backend("xla")).search(queries, 7)
    np.testing.assert_array_equal(result.rows, rows)
    np.testing.assert_array_equal(result.scores, scores)


@pytest.mark.parametrize("backend", ["scipy", "xla"])
def test_denormal_products_rank_above_zero(backend: str) -> None:
    """Passage 0 shares no word with the query; passages 1, 2 and 3 have products that a device may flush to 0."""
    dense = np.zeros((4, D), np.float32)
    dense[0, 5], dense[1, 1], dense[2, 2], dense[3, 3] = 1.0, 1e-40, 1e-20, 1e-45
    query = np.zeros((1, D), np.float32)
    query[0, 1:4] = 1.0, 1e-20, 1.0
    queries, passages = SparseRows.from_dense(query), SparseRows.from_dense(dense)
    scores, rows = by_hand(queries, passages, 4)
    result = InvertedLists(SparseBlocks([passages]), backend=sparse_backend(backend)).search(queries, 4)
    np.testing.assert_array_equal(result.rows, rows)
    np.testing.assert_array_equal(result.scores, scores)


@pytest.mark.parametrize("backend", ["scipy", "xla"])
def test_a_wrong_backend_is_refused(backend: str) -> None:
    check_sparse(sparse_backend(backend))
    good = sparse_backend(backend)

    class Rounded:
        description = "one that rounds"

        def load(self, block: SparseRows) -> SparseBlockSearch:
            return good.load(block.astype(np.float16).astype(np.float32))

    with pytest.raises(RuntimeError, match=r"rounds .*exact .*float32"):
        check_sparse(Rounded())


def test_long_passages_are_loaded_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverted_lists, "BLOCK_WORDS", 40)
    good, sizes = sparse_backend("scipy"), list[int]()

    class Watched:
        description = "one that counts"

        def load(self, block: SparseRows) -> SparseBlockSearch:
            sizes.append(len(block) * int(block.word_counts.max()))
            return good.load(block)

    passages, queries = random_rows(130, 0.1, 0, 2), random_rows(9, 0.06, 1, 2)
    scores, rows = by_hand(queries, passages, 7)
    result = InvertedLists(SparseBlocks([passages]), keep_in_memory=True, backend=Watched()).search(queries, 7)
    np.testing.assert_array_equal(result.rows, rows)
    np.testing.assert_array_equal(result.scores, scores)
    assert max(sizes) <= 40
    assert len(sizes) > 10


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"backend=faiss-cpu: .*vectors .*searched"):
        sparse_backend("faiss-cpu")


def test_float16_weights_are_scored_as_they_are_stored() -> None:
    passages, queries = random_rows(40, 0.2, 0).astype(np.float16), random_rows(4, 0.2, 1)
    scores, rows = by_hand(queries, passages, 10)
    result = InvertedLists(SparseBlocks([passages])).search(queries, 10)
    np.testing.assert_array_equal(result.rows, rows)
    np.testing.assert_array_equal(result.scores, scores)


def test_passages_with_score_zero_follow_the_tie_rule() -> None:
    products = np.array([[0.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    hits = best_products(products, 3)
    assert hits.scores[0].tolist() == [2.0, 1.0, -np.inf]
    assert hits.rows[0, :2].tolist() == [1, 2]
    assert hits.bound.tolist() == [-np.inf, -np.inf]
    assert best_products(products, 1).bound[0] == 1.0


@pytest.mark.parametrize("weight", [np.nan, np.inf, -1.0])
def test_impossible_weights_are_errors(weight: float) -> None:
    good, bad = random_rows(6, 0.5, 0), random_rows(6, 0.5, 0)
    bad.weights[bad.offsets[4]] = weight
    with pytest.raises(ValueError, match="passage row 4 has a NaN"):
        InvertedLists(SparseBlocks([bad])).search(good, 2)
    with pytest.raises(ValueError, match=r"4 .*negative, .*infinite"):
        InvertedLists(SparseBlocks([good])).search(bad, 2)


def test_impossible_questions_are_errors() -> None:
    lists = InvertedLists(SparseBlocks([random_rows(6, 0.5, 0)]))
    with pytest.raises(ValueError, match="k is 0"):
        lists.search(random_rows(1, 0.5, 0), 0)
    with pytest.raises(ValueError, match=r"3 .*passages .*50"):
        lists.search(SparseRows.from_dense(np.ones((1, 3), np.float32)), 1)
