"""Vectors in fewer bits: the loss of rounding is measured, and bounds the error of a product."""

from __future__ import annotations

import numpy as np
import pytest

from jaxret.search.backends.precision import (
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
    numbers = np.random.default_rng(len(kind)).standard_normal((count, dimension), dtype=np.float32)
    if kind == "zeros":
        numbers[::2] = 0
    if kind == "one large":
        numbers[:, 3] *= 1000
    if kind == "tiny":
        numbers *= np.float32(1e-36)
    if kind == "huge":
        numbers *= np.float32(1e15)
    return numbers


def back(compressed: Compressed) -> np.ndarray:
    """Return the float64 numbers that compressed vectors represent."""
    numbers: np.ndarray = compressed.numbers.astype(np.float64)
    return numbers if compressed.scale is None else numbers * compressed.scale.astype(np.float64)[:, None]


def test_a_vector_by_hand() -> None:
    """q = (1, 2, -1, .5), d = (.3, -.7, .11, .05): numbers, |e|, the product of q and d', and the bound of its
    error."""
    query, passage = np.array([[1, 2, -1, 0.5]]), np.array([[0.3, -0.7, 0.11, 0.05]])
    compressed = compress(passage.astype(np.float32), PRECISIONS["int8"])
    assert compressed.numbers.tolist() == [[54, -127, 20, 9]]
    np.testing.assert_allclose(compressed.error, 0.0024064, rtol=2e-4)
    assert (query @ passage.T).item() == pytest.approx(-1.185)
    assert (query @ back(compressed).T).item() == pytest.approx(-1.187795, abs=1e-6)
    assert (np.linalg.norm(query) * compressed.error).item() == pytest.approx(0.0060161, rel=2e-4)


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("name", NAMES)
def test_norms_and_errors_are_those_of_float64_rounded_up(name: str, kind: str) -> None:
    numbers = vectors(kind)
    compressed = compress(numbers, PRECISIONS[name])
    exact, short = numbers.astype(np.float64), back(compressed)
    error, norms = (np.linalg.norm(x, axis=1) for x in (exact - short, short))
    assert (compressed.error >= error).all()
    assert (compressed.norm >= np.maximum(norms, np.linalg.norm(exact, axis=1))).all()
    assert (compressed.error <= error * 1.001 + 1e-6 * np.linalg.norm(exact, axis=1) + 1e-17).all(), (
        "not larger than necessary"
    )
    assert (norms <= np.linalg.norm(exact, axis=1) * (1 + PRECISIONS[name].growth * 24**0.5) + 1e-30).all()


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("name", NAMES)
def test_products_are_within_the_rounding_loss(name: str, kind: str) -> None:
    numbers, queries = vectors(kind), vectors("gaussian", 20)
    some, passages = compress(queries, PRECISIONS[name]), compress(numbers, PRECISIONS[name])
    exact = queries.astype(np.float64) @ numbers.astype(np.float64).T
    off = np.abs(exact - back(some) @ back(passages).T)
    bound = losses(some, passages)
    assert (off <= bound).all()
    if kind != "tiny":  # whose norms are rounded up by far (`upper_norms`)
        assert (off > bound / 100).any(), "control: a hundredth of the bound would not hold"


def test_rounding_loss_of_gaussian_vectors() -> None:
    """In bfloat16, .42 of 2^-8 |d|; in int8, half of the step times sqrt(n) is 1.7 times the measured loss."""
    numbers = np.random.default_rng(0).standard_normal((300, 384), dtype=np.float32)
    norms = np.linalg.norm(numbers, axis=1)
    bf16, int8 = (compress(numbers, PRECISIONS[name]) for name in ("bfloat16", "int8"))
    assert np.median(bf16.error / (2.0**-8 * norms)) == pytest.approx(0.42, abs=0.02)
    assert np.median(384**0.5 * int8.scale / 2 / int8.error) == pytest.approx(1.73, abs=0.05)


def test_float32_loses_nothing() -> None:
    numbers = vectors("gaussian")
    compressed = compress(numbers, PRECISIONS["float32"])
    assert compressed.numbers is numbers
    assert (compressed.scale, compressed.norm, compressed.error) == (None, None, None)
    assert not losses(compressed, compressed).any()


def test_products_of_the_longest_int8_vectors_are_exact() -> None:
    assert LONGEST_INT8 == 133_144
    assert LONGEST_INT8 * INT8**2 <= 2**31 - 1 < (LONGEST_INT8 + 1) * INT8**2
    with pytest.raises(ValueError, match=r"133145 .*int8 .*133144"):
        compress(np.ones((1, LONGEST_INT8 + 1), np.float32), PRECISIONS["int8"])


def test_rounded_up() -> None:
    values = np.array([1.0, 1 + 2.0**-30, 0.1, 0.0])
    rounded = rounded_up(values)
    assert rounded.dtype == np.float32
    assert (rounded >= values).all()
    np.testing.assert_array_equal(rounded, np.array([1, 1 + 2.0**-23, 0.1, 0], np.float32))
    assert (values.astype(np.float32) < values).any(), "control: rounding to nearest can round down"


def test_an_unknown_precision_is_an_error() -> None:
    assert isinstance(find_precision("int8"), Precision)
    with pytest.raises(ValueError, match=r"precision 'int4'; .*float32, float16, bfloat16"):
        find_precision("int4")
