"""Poolings against numpy, in training and in encoding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.pooling import POOLINGS
from jaxret.types import Embeddings

B, V, D = 3, 4, 5
LENGTHS = (4, 2, 0)  # how many vectors exist


@pytest.fixture
def embeddings() -> Embeddings:
    vectors = np.random.default_rng(0).standard_normal((B, V, D)).astype(np.float32)
    return Embeddings(jnp.asarray(vectors), jnp.arange(V)[None] < jnp.array(LENGTHS)[:, None])


def pool(name: str, embeddings: Embeddings, train: bool, params: Any = None) -> Embeddings:
    return POOLINGS[name](num_vectors=V).apply({"params": params or {}}, embeddings, train)


@pytest.mark.parametrize("train", [True, False])
def test_none_keeps_everything(train: bool, embeddings: Embeddings) -> None:
    pooled = pool("none", embeddings, train)
    np.testing.assert_array_equal(pooled.vectors, embeddings.vectors)
    np.testing.assert_array_equal(pooled.mask, embeddings.mask)


@pytest.mark.parametrize("train", [True, False])
def test_average_is_the_mean_of_the_vectors_that_exist(train: bool, embeddings: Embeddings) -> None:
    pooled = pool("average", embeddings, train)
    vectors = np.asarray(embeddings.vectors, np.float64)
    expected = np.stack([vectors[b, :n].mean(0) if n else np.zeros(D) for b, n in enumerate(LENGTHS)])
    np.testing.assert_allclose(pooled.vectors[:, 0], expected, atol=1e-6)
    np.testing.assert_array_equal(pooled.mask, [[True], [True], [False]])
    assert np.abs(np.asarray(pooled.vectors[1, 0]) - vectors[1].mean(0)).max() > 0.1, (
        "control: the unmasked mean differs"
    )


def test_average_ignores_padding(embeddings: Embeddings) -> None:
    garbage = embeddings.replace(vectors=jnp.where(embeddings.mask[..., None], embeddings.vectors, jnp.nan))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(pool("average", garbage, True).vectors, pool("average", embeddings, True).vectors)


def mixing_weights(alpha: np.ndarray) -> np.ndarray:
    """[B,V]: softmax over the vectors that a text has, in float64; equal weights for a text that has none."""
    exists = np.arange(V)[None] < np.array(LENGTHS)[:, None]
    powers = np.where(exists, np.exp(alpha), 0.0)
    return np.where(exists.any(1, keepdims=True), powers / np.maximum(powers.sum(1, keepdims=True), 1e-30), 1 / V)


def scalar_mix(vectors: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """allennlp's ScalarMix without layer norm, gamma = 1, over the vectors that exist."""
    return np.einsum("bv,bvd->bd", mixing_weights(alpha), vectors)


@pytest.mark.parametrize("train", [True, False])
def test_scalar_mix_and_the_gradient_of_its_weights(train: bool, embeddings: Embeddings) -> None:
    alpha = np.array([0.3, -1.0, 2.0, 0.0])
    vectors = np.asarray(embeddings.vectors, np.float64)
    toward = np.random.default_rng(1).standard_normal((B, D))

    def loss(alpha: jax.Array) -> jax.Array:
        mixed = pool("scalar_mix", embeddings, train, {"alpha": alpha})
        assert mixed.vectors.shape == (B, 1, D)
        return jnp.sum(mixed.vectors[:, 0] * jnp.asarray(toward, jnp.float32))

    pooled = pool("scalar_mix", embeddings, train, {"alpha": jnp.asarray(alpha, jnp.float32)})
    np.testing.assert_allclose(pooled.vectors[:, 0], scalar_mix(vectors, alpha), atol=1e-6)
    np.testing.assert_array_equal(pooled.mask, [[True], [True], [False]])
    # d/d alpha_k = w_k (v_k - mix) . toward
    centred = vectors - scalar_mix(vectors, alpha)[:, None]
    exists = np.array(LENGTHS)[:, None] > 0
    expected = np.einsum("bv,bvd,bd->v", mixing_weights(alpha) * exists, centred, toward)
    gradient = jax.grad(loss)(jnp.asarray(alpha, jnp.float32))
    np.testing.assert_allclose(gradient, expected, atol=1e-5)
    assert np.abs(np.asarray(gradient) - np.einsum("bvd,bd->v", vectors, toward)).max() > 0.1, (
        "control: without the softmax, the gradient differs"
    )


def test_scalar_mix_starts_as_the_mean_of_all_vectors(embeddings: Embeddings) -> None:
    module = POOLINGS["scalar_mix"](num_vectors=V)
    params = module.init(jax.random.key(0), embeddings, True)["params"]
    np.testing.assert_array_equal(params["alpha"], np.zeros(V))
    pooled = module.apply({"params": params}, embeddings, True)
    whole = np.asarray(embeddings.vectors).mean(axis=1)
    np.testing.assert_allclose(pooled.vectors[0, 0], whole[0], atol=1e-6)
    short = np.asarray(embeddings.vectors)[1, : LENGTHS[1]].mean(axis=0)
    np.testing.assert_allclose(pooled.vectors[1, 0], short, atol=1e-6)
    assert np.abs(short - whole[1]).max() > 0.1, "control: vectors that do not exist have no weight"


def test_self_contrastive_trains_on_all_vectors_and_retrieves_with_the_first(embeddings: Embeddings) -> None:
    training, inference = pool("self_contrastive", embeddings, True), pool("self_contrastive", embeddings, False)
    np.testing.assert_array_equal(training.vectors, embeddings.vectors)
    np.testing.assert_array_equal(training.mask, embeddings.mask)
    np.testing.assert_array_equal(inference.vectors, embeddings.vectors[:, :1])
    np.testing.assert_array_equal(inference.mask, embeddings.mask[:, :1])


@pytest.mark.parametrize("name", POOLINGS)
def test_inference_vectors_states_the_number_at_inference(name: str, embeddings: Embeddings) -> None:
    params = {"alpha": jnp.zeros(V)} if name == "scalar_mix" else None
    assert pool(name, embeddings, False, params).vectors.shape[1] == POOLINGS[name](V).inference_vectors()
