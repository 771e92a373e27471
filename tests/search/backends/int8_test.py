"""Vectors in int8 compared with float32: the measured loss bounds the scores of vectors that were left out, for any
vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxret.search.backends import int8
from jaxret.search.backends.faiss_backend import FaissCpu
from jaxret.search.backends.int8 import CANDIDATE_FACTOR, MOST_CANDIDATES, Quantized
from jaxret.search.backends.precision import LONGEST_INT8
from jaxret.search.backends.select import select_backend, with_many_searches
from jaxret.search.rounding import rounding_error, upper_norms
from jaxret.search.vectors.exact import search
from jaxret.search.vectors.self_check import self_check
from jaxret.search.vectors.vector_corpus import BlockCorpus

faiss: Any = pytest.importorskip("faiss")

ROWS, DIMENSION, K = 3000, 24, 20
KINDS = ["gaussian", "zeros", "one large dimension", "one long vector", "tiny", "huge", "near ties"]


def vectors(kind: str) -> np.ndarray:
    numbers = np.random.default_rng(len(kind)).standard_normal((ROWS, DIMENSION), dtype=np.float32)
    if kind == "zeros":
        numbers[::2], numbers[:, 5] = 0, 0
    if kind == "one large dimension":
        numbers[:, 3] *= 1000
    if kind == "one long vector":
        numbers[7] *= 1000
    if kind == "tiny":
        numbers *= np.float32(1e-36)
    if kind == "huge":
        numbers *= np.float32(1e15)
    if kind == "near ties":
        numbers = numbers[:1] + np.float32(1e-3) * numbers
    return numbers


QUERY = np.random.default_rng(1).standard_normal((1, DIMENSION), dtype=np.float32)


@pytest.mark.parametrize("dimension", [16, DIMENSION])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_left_out_are_below_the_bound(kind: str, dimension: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For dimensions that FAISS multiplies in bytes (multiples of 16) and for others; vectors are rounded in parts."""
    monkeypatch.setattr(int8, "ROWS_AT_ONCE", 700)
    numbers, query = np.ascontiguousarray(vectors(kind)[:, :dimension]), QUERY[:, :dimension]
    held = Quantized(faiss, numbers)
    scores, rows, bound = held.best(query, K)
    exact = numbers.astype(np.float64) @ query[0].astype(np.float64)
    error = rounding_error(dimension, upper_norms(query), float(upper_norms(numbers).max()))[0]
    assert scores.shape == rows.shape == (1, K)
    assert len(set(rows[0].tolist())) == K
    assert (np.diff(scores) <= 0).all()
    assert (np.abs(scores[0] - exact[rows[0]]) <= error).all(), "scores are float32 products, not int8"
    others = np.delete(exact, rows[0])
    assert others.max() <= float(bound[0]) + error
    codes = held.index.reconstruct_n(0, ROWS).astype(np.float64)
    short = codes * held.scale
    lost = np.linalg.norm(numbers - short, axis=1).max()
    assert np.linalg.norm(codes, axis=1).max() <= held.longest_code
    assert lost <= held.max_error <= lost * 1.001 + 1e-5 * np.linalg.norm(numbers, axis=1).max() + 1e-17
    assert np.linalg.norm(short, axis=1).max() <= held.longest


def test_control_without_rounding_losses_the_bound_fails() -> None:
    numbers = vectors("near ties")
    exact = numbers.astype(np.float64) @ QUERY[0].astype(np.float64)
    held = Quantized(faiss, numbers)
    held.max_error = held.longest_code = 0
    _, rows, bound = held.best(QUERY, 1)
    assert np.delete(exact, rows[0]).max() > float(bound[0]), (
        "the vectors are so similar that int8 ranks other ones first"
    )


def test_faiss_multiplies_only_integers_exactly() -> None:
    """FAISS rounds a query if vectors have a multiple of 16 numbers; a version that does not would be no problem."""
    random = np.random.default_rng(0)
    codes = random.integers(-127, 128, (40, 384)).astype(np.float32)
    index = faiss.IndexScalarQuantizer(384, faiss.ScalarQuantizer.QT_8bit_direct_signed, faiss.METRIC_INNER_PRODUCT)
    index.is_trained = True
    index.add(codes)
    for query in (random.integers(-127, 128, (1, 384)), np.full((1, 384), -127), np.full((1, 384), 127)):
        scores, rows = index.search(query.astype(np.float32), 40)
        np.testing.assert_array_equal(scores[0], (codes.astype(np.int64) @ query[0])[rows[0]])


def test_vectors_too_long_for_sums_of_int8_are_searched_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """127 x 127 x 133,184 is above 2^31: FAISS's sum of the two best vectors would wrap around and be the lowest."""
    monkeypatch.setattr("jaxret.search.vectors.exact.MARGIN", 0)
    dimension = 133_184
    assert dimension > LONGEST_INT8
    passages = np.full((8, 1, dimension), 0.1, np.float32)
    passages[:2], passages[2] = 1, 0.9
    query = np.ones((1, dimension), np.float32)
    result = search(query, [passages], 1, with_many_searches(select_backend("faiss-cpu")))
    assert (result.rows.item(), result.scores.item()) == (0, dimension)


def test_a_search_keeps_the_thread_count_of_faiss() -> None:
    threads = faiss.omp_get_max_threads()
    held = Quantized(faiss, vectors("gaussian"))
    try:
        faiss.omp_set_num_threads(3)
        held.best(QUERY, K)
        assert faiss.omp_get_max_threads() == 3
    finally:
        faiss.omp_set_num_threads(threads)


def test_a_zero_query_returns_k_passages() -> None:
    scores, rows, bound = Quantized(faiss, vectors("gaussian")).best(0 * QUERY, K)
    assert len(set(rows[0].tolist())) == K
    assert not scores.any()
    assert 0 <= bound[0] < 1e-6


def test_few_vectors_are_all_returned() -> None:
    numbers = vectors("gaussian")[:30]
    scores, rows, bound = Quantized(faiss, numbers).best(QUERY, 30)
    np.testing.assert_array_equal(rows[0], np.argsort(-(numbers @ QUERY[0])))
    assert bound[0] == -np.inf
    _, _, bound = Quantized(faiss, numbers).best(QUERY, 20)
    assert bound[0] == scores[0, 20], "the best of the vectors that were multiplied again but not returned"


@pytest.mark.parametrize("n_vectors", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_single_question_gives_the_result_of_a_batch(kind: str, n_vectors: int) -> None:
    """Results are equal to the bit; if int8 proves nothing, the proof uses float32."""
    passages = vectors(kind)[: ROWS // n_vectors * n_vectors].reshape(-1, n_vectors, DIMENSION)
    corpus, backend = BlockCorpus([passages[:600], passages[600:]]), with_many_searches(select_backend("faiss-cpu"))
    for k in (1, 40, MOST_CANDIDATES):
        expected = search(QUERY, corpus, k, select_backend("faiss-cpu"))
        result = search(QUERY, corpus, k, backend)
        np.testing.assert_array_equal(result.rows, expected.rows)
        np.testing.assert_array_equal(result.scores, expected.scores)


def test_int8_vectors_are_made_by_the_first_single_question(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(*arguments: Any) -> Quantized:
        made.append(arguments)
        return Quantized(*arguments)

    monkeypatch.setattr("jaxret.search.backends.faiss_backend.Quantized", make)
    once = select_backend("faiss-cpu")
    many = with_many_searches(once)
    self_check(many)
    assert isinstance(many, FaissCpu)
    assert replace(many, many=False) == once
    passages, queries = vectors("gaussian")[:, None], np.repeat(QUERY, 2, axis=0)
    made.clear()
    for backend, judged, k, count in (
        (once, QUERY, 3, 0),
        (many, queries, 3, 0),
        (many, QUERY, MOST_CANDIDATES // CANDIDATE_FACTOR + 1, 0),
    ):
        backend.load(passages)(judged, k)
        assert len(made) == count
    top = many.load(passages)
    for k in (3, MOST_CANDIDATES // CANDIDATE_FACTOR):
        top(QUERY, k)
    assert len(made) == 1, "the vectors are compressed once"


def test_control_a_float32_search_reads_four_times_as_much() -> None:
    held = Quantized(faiss, vectors("gaussian"))
    assert held.index.code_size * 4 == held.vectors[0].nbytes
