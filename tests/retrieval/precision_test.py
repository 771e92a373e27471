"""Vectors in fewer bits: what was lost is measured, and bounds what a product may be."""

from __future__ import annotations

import numpy as np
import pytest

from jaxret.retrieval.precision import (
    INT8,
    LONGEST_INT8,
    PRECISIONS,
    Compressed,
    Precision,
    compress,
    find_precision,
    losses,
    rounded_up,
)

NAMES = ["float16", "bfloat16", "int8"]
HARD = ["gaussian", "zeros", "one large", "tiny", "huge"]


def vectors(kind: str, count: int = 60, dimension: int = 24) -> np.ndarray:
    found = np.random.default_rng(len(kind)).standard_normal((count, dimension), dtype=np.float32)
    if kind == "zeros":
        found[::2] = 0
    if kind == "one large":
        found[:, 3] *= 1000
    if kind == "tiny":
        found *= np.float32(1e-36)
    if kind == "huge":
        found *= np.float32(1e15)
    return found


def back(found: Compressed) -> np.ndarray:
    """The numbers that a compressed vector stands for, float64."""
    numbers: np.ndarray = found.numbers.astype(np.float64)
    return numbers if found.scale is None else numbers * found.scale.astype(np.float64)[:, None]


def test_a_vector_by_hand() -> None:
    """q = (1, 2, -1, .5), d = (.3, -.7, .11, .05): z, |e|, the product of q and d', how far it may be from q.d."""
    query, document = np.array([[1, 2, -1, 0.5]]), np.array([[0.3, -0.7, 0.11, 0.05]])
    found = compress(document.astype(np.float32), PRECISIONS["int8"])
    assert found.numbers.tolist() == [[54, -127, 20, 9]]
    np.testing.assert_allclose(found.error, 0.0024064, rtol=2e-4)
    assert (query @ document.T).item() == pytest.approx(-1.185)
    assert (query @ back(found).T).item() == pytest.approx(-1.187795, abs=1e-6)
    assert (np.linalg.norm(query) * found.error).item() == pytest.approx(0.0060161, rel=2e-4)


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("name", NAMES)
def test_norms_and_errors_are_those_of_float64_rounded_up(name: str, kind: str) -> None:
    given = vectors(kind)
    found = compress(given, PRECISIONS[name])
    exact, short = given.astype(np.float64), back(found)
    error, norms = (np.linalg.norm(x, axis=1) for x in (exact - short, short))
    assert (found.error >= error).all()
    assert (found.norm >= np.maximum(norms, np.linalg.norm(exact, axis=1))).all()
    assert (found.error <= error * 1.001 + 1e-6 * np.linalg.norm(exact, axis=1) + 1e-17).all(), "no larger than need be"
    assert (norms <= np.linalg.norm(exact, axis=1) * (1 + PRECISIONS[name].growth * 24**0.5) + 1e-30).all()


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("name", NAMES)
def test_a_product_is_within_what_was_lost(name: str, kind: str) -> None:
    given, queries = vectors(kind), vectors("gaussian", 20)
    some, documents = compress(queries, PRECISIONS[name]), compress(given, PRECISIONS[name])
    exact = queries.astype(np.float64) @ given.astype(np.float64).T
    off = np.abs(exact - back(some) @ back(documents).T)
    bound = losses(some, documents)
    assert (off <= bound).all()
    if kind != "tiny":  # whose norms are rounded up far above them (`upper_norms`)
        assert (off > bound / 100).any(), "control: a bound a hundred times smaller is none"


def test_what_was_lost_of_gaussian_vectors() -> None:
    """Of bfloat16 .42 of 2^-8 |d|; of int8 a half of the step times sqrt(n) is 1.7 times what is measured."""
    given = np.random.default_rng(0).standard_normal((300, 384), dtype=np.float32)
    norms = np.linalg.norm(given, axis=1)
    bf16, int8 = (compress(given, PRECISIONS[name]) for name in ("bfloat16", "int8"))
    assert np.median(bf16.error / (2.0**-8 * norms)) == pytest.approx(0.42, abs=0.02)
    assert np.median(384**0.5 * int8.scale / 2 / int8.error) == pytest.approx(1.73, abs=0.05)


def test_float32_loses_nothing() -> None:
    given = vectors("gaussian")
    found = compress(given, PRECISIONS["float32"])
    assert found.numbers is given
    assert (found.scale, found.norm, found.error) == (None, None, None)
    assert not losses(found, found).any()


def test_products_of_the_longest_int8_vectors_are_exact() -> None:
    assert LONGEST_INT8 == 133_144
    assert LONGEST_INT8 * INT8**2 <= 2**31 - 1 < (LONGEST_INT8 + 1) * INT8**2
    with pytest.raises(ValueError, match=r"vectors of 133145 numbers are too long for int8 \(133144\)"):
        compress(np.ones((1, LONGEST_INT8 + 1), np.float32), PRECISIONS["int8"])


def test_rounded_up() -> None:
    values = np.array([1.0, 1 + 2.0**-30, 0.1, 0.0])
    found = rounded_up(values)
    assert found.dtype == np.float32
    assert (found >= values).all()
    np.testing.assert_array_equal(found, np.array([1, 1 + 2.0**-23, 0.1, 0], np.float32))
    assert (values.astype(np.float32) < values).any(), "control: rounding to the nearest is below"


def test_an_unknown_precision_is_an_error() -> None:
    assert isinstance(find_precision("int8"), Precision)
    with pytest.raises(
        ValueError, match="unknown search precision 'int4'; it must be one of float32, float16, bfloat16"
    ):
        find_precision("int4")
