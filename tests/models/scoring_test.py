"""Scores against float64 loops: the order of the axes, the score of padding, and the type of the result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.scoring import MASKED_SCORE, late_interaction, similarities

Q, N, V, D = 3, 4, 5, 8


def score(*arrays: jax.Array) -> jax.Array:
    """[Q,N]: the best score of any vector of a passage."""
    return jnp.max(similarities(*arrays), axis=-1)


@pytest.fixture
def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    queries = generator.standard_normal((Q, D)).astype(np.float32)
    passages = generator.standard_normal((N, V, D)).astype(np.float32)
    mask = np.arange(V)[None] < np.array([5, 1, 3, 0])[:, None]
    return queries, passages, mask


def brute_force(queries: np.ndarray, passages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Compute S[i,j,k] in float64; MASKED_SCORE for a missing vector."""
    S = np.full((Q, N, V), MASKED_SCORE)
    for i in range(Q):
        for j in range(N):
            for k in range(V):
                if mask[j, k]:
                    S[i, j, k] = sum(float(a) * float(b) for a, b in zip(queries[i], passages[j, k]))
    return S


def test_similarities_are_dot_products(arrays: tuple[np.ndarray, ...]) -> None:
    S = similarities(*map(jnp.asarray, arrays))
    assert S.dtype == jnp.float32
    np.testing.assert_allclose(S, brute_force(*arrays), rtol=0, atol=1e-5)


def test_score_is_query_by_passage_and_the_maximum_over_vectors(arrays: tuple[np.ndarray, ...]) -> None:
    scores = score(*map(jnp.asarray, arrays))
    assert scores.shape == (Q, N)
    np.testing.assert_allclose(scores, brute_force(*arrays).max(axis=-1), rtol=0, atol=1e-5)
    mean = np.where(arrays[2][None], brute_force(*arrays), 0).mean(axis=-1)
    assert np.abs(np.asarray(scores) - mean).max() > 0.1, "control: the mean differs from the maximum"


def test_padding_does_not_win_when_every_score_is_negative() -> None:
    """Multiplying by a mask of 0 and 1 would give padding a score of 0, which is above that of every real passage."""
    queries = jnp.ones((1, 2))
    passages = -jnp.ones((3, 3, 2)) * jnp.array([1.0, 2.0, 3.0])[:, None, None]
    mask = jnp.array([[True, True, True], [True, False, False], [False, False, False]])
    np.testing.assert_array_equal(score(queries, passages, mask), [[-2.0, -4.0, MASKED_SCORE]])
    multiplied = jnp.max(jnp.einsum("qd,nvd->qnv", queries, passages) * mask, axis=-1)
    assert int(jnp.argmax(multiplied)) == 1, "control: with a product, a padded passage beats the full one"


def test_values_of_padding_are_ignored(arrays: tuple[np.ndarray, ...]) -> None:
    queries, passages, mask = arrays
    garbage = np.where(mask[..., None], passages, np.float32(np.nan))
    np.testing.assert_array_equal(
        score(jnp.asarray(queries), jnp.asarray(garbage), jnp.asarray(mask)),
        score(jnp.asarray(queries), jnp.asarray(passages), jnp.asarray(mask)),
    )


def test_half_precision_vectors_are_summed_in_float32() -> None:
    """bfloat16 cannot represent 256 + 1, so a sum in bfloat16 would be equal to 256."""
    vectors = jnp.array([[[16.0, 1.0]], [[16.0, 0.0]]], jnp.bfloat16)
    queries = jnp.array([[16.0, 1.0]], jnp.bfloat16)
    mask = jnp.ones((2, 1), bool)
    assert similarities(queries, vectors, mask).dtype == jnp.float32
    np.testing.assert_array_equal(score(queries, vectors, mask), [[257.0, 256.0]])
    assert jnp.bfloat16(257.0) == jnp.bfloat16(256.0)


def test_late_interaction_is_a_sum_of_maxima(arrays: tuple[np.ndarray, ...]) -> None:
    _, passages, mask = arrays
    mask[3, 0] = True
    generator = np.random.default_rng(1)
    queries = generator.standard_normal((Q, 6, D)).astype(np.float32)
    exists = np.arange(6)[None] < np.array([6, 1, 4])[:, None]
    scores = late_interaction(*map(jnp.asarray, (queries, exists, passages, mask)))
    products = np.einsum("qud,nvd->qunv", queries.astype(np.float64), passages.astype(np.float64))
    best = np.where(mask, products, -np.inf).max(axis=-1)  # [Q,U,N]
    np.testing.assert_allclose(scores, np.where(exists[..., None], best, 0).sum(axis=1), rtol=0, atol=1e-5)
    assert np.abs(np.asarray(scores) - best.sum(axis=1)).max() > 0.1, "control: a sum that includes padding of queries"
    winners = (np.where(mask, products, -np.inf) == best[..., None]) & exists[:, :, None, None]
    masks = jnp.asarray(exists), jnp.asarray(mask)
    gradients = jax.grad(lambda q, d: late_interaction(q, masks[0], d, masks[1]).sum(), (0, 1))(queries, passages)
    np.testing.assert_allclose(gradients[0], np.einsum("qunv,nvd->qud", winners, passages), rtol=0, atol=1e-5)
    np.testing.assert_allclose(gradients[1], np.einsum("qunv,qud->nvd", winners, queries), rtol=0, atol=1e-5)
    one = late_interaction(*map(jnp.asarray, (queries[:, :1], exists[:, :1], passages, mask)))
    np.testing.assert_allclose(one, score(*map(jnp.asarray, (queries[:, 0], passages, mask))), atol=1e-6)


def test_late_interaction_uses_less_memory_than_all_pairs() -> None:
    """In the forward and the backward pass, the largest array is [Q,N,V]."""
    shapes = ((5, 7, D), (5, 7), (11, 13, D), (11, 13))
    queries, exists, passages, mask = (jnp.ones(shape) for shape in shapes)

    def total(q: jax.Array, d: jax.Array) -> jax.Array:
        return late_interaction(q, exists > 0, d, mask > 0).sum()

    compiled = jax.jit(jax.grad(total, (0, 1))).lower(queries, passages).compile()
    held = compiled.memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]
    assert held < 5 * 7 * 11 * 13 * 4
