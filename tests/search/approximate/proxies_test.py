"""One vector for a list of vectors, against values by hand, and against loops written from the paper."""

from __future__ import annotations

import numpy as np
import pytest

from jaxret.search.approximate.proxies import PROXIES, MeanProxy, MuveraProxy, query_proxies
from jaxret.types import Ragged

G = np.array([[1, 0], [0, 1], [1, -1], [0.5, 0.5]], np.float32)
P = np.array([[1, -1], [1, 1], [-1, 1], [-1, -1]], np.float32)
QUERY = np.array([[0.6, 0.8, 0, 0], [0, 0.6, 0, -0.8]], np.float32)
PASSAGE = np.array([[1, 0, 0, 0], [0, 0.8, 0.6, 0], [0, 0, 0, -1]], np.float32)


def test_an_encoding_by_hand() -> None:
    """One repetition of four buckets: the query's vectors are in 3 and 1, the passage's in 2, 3 and 0. Bucket 1 has
    none: it gets the first vector whose signs differ in one place."""
    proxy = MuveraProxy(G[None], P[None])
    query, passage = proxy.query(QUERY), proxy.passage(PASSAGE)
    np.testing.assert_allclose(query, [0, 0, 0.989949, 0.989949, 0, 0, 0.989949, 0.141421], atol=1e-6)
    filled = [0.707107, 0.707107, 0.141421, 0.989949, 0.707107, -0.707107, 0.141421, 0.989949]
    np.testing.assert_allclose(passage, filled, atol=1e-6)
    assert float(query @ passage) == pytest.approx(1.4, abs=1e-6)
    assert (QUERY @ PASSAGE.T).max(axis=1).sum() == pytest.approx(1.44)
    unfilled = passage.copy()
    unfilled[2:4] = 0
    assert float(query @ unfilled) != pytest.approx(1.4, abs=0.1), "control: filling the empty bucket matters"


def test_encodings_equal_loops_over_vectors_and_buckets() -> None:
    random = np.random.default_rng(0)
    proxy = MuveraProxy.of(6, repetitions=3, bits=3, width=4)
    for count in (1, 2, 9):
        vectors = random.standard_normal((count, 6), dtype=np.float32)
        query, passage = [], []
        for planes, signs in zip(proxy.planes.astype(np.float64), proxy.signs.astype(np.float64), strict=True):
            signatures = [tuple(bool(product > 0) for product in vector @ planes) for vector in vectors]
            y = vectors @ signs / 4**0.5
            for bucket in range(8):
                own = tuple(bool(bucket >> shift & 1) for shift in (2, 1, 0))
                inside = [y[i] for i in range(count) if signatures[i] == own]
                apart = [sum(a != b for a, b in zip(signature, own, strict=True)) for signature in signatures]
                query.append(np.sum(inside, axis=0) / 3 if inside else np.zeros(4))
                passage.append(np.mean(inside, axis=0) if inside else y[apart.index(min(apart))])
        np.testing.assert_allclose(proxy.query(vectors), np.concatenate(query), atol=1e-6)
        np.testing.assert_allclose(proxy.passage(vectors), np.concatenate(passage), atol=1e-6)
        assert proxy.query(vectors).shape == (proxy.size,)


def test_the_product_of_means_is_the_mean_of_products() -> None:
    random = np.random.default_rng(1)
    query, passage = (random.standard_normal((count, 5), dtype=np.float32) for count in (3, 7))
    proxy = MeanProxy.of(5)
    expected = (query.astype(np.float64) @ passage.astype(np.float64).T).mean(axis=1).sum()
    assert float(proxy.query(query) @ proxy.passage(passage)) == pytest.approx(expected, rel=1e-5)
    assert proxy.size == 5


@pytest.mark.parametrize("name", list(PROXIES))
def test_a_proxy_is_deterministic(name: str) -> None:
    vectors = np.random.default_rng(2).standard_normal((9, 6), dtype=np.float32)
    queries = Ragged(vectors, np.array([0, 4, 9]))
    first, again = (PROXIES[name].of(6) for _ in range(2))
    np.testing.assert_array_equal(first.passage(vectors), again.passage(vectors))
    proxies = query_proxies(first, queries)
    assert proxies.shape == (2, first.size)
    assert proxies.dtype == np.float32
    np.testing.assert_array_equal(proxies[1], first.query(vectors[4:]))


def test_the_default_encoding_has_5120_numbers() -> None:
    assert MuveraProxy.of(6).size == 5120
