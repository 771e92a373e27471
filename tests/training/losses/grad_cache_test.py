"""Cached gradients equal plain gradients: the same loss and gradients in less memory, for any number of chunks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.retriever_model import RetrieverModel
from jaxret.models.scoring import similarities
from jaxret.parallel.mesh import make_mesh
from jaxret.training.losses import grad_cache
from jaxret.training.losses.grad_cache import describe_rounding, encode_in_chunks, join_chunks, split_chunks
from jaxret.training.losses.in_batch import Scores, competing_passages, total_loss
from jaxret.training.tasks.retrieval import RetrievalObjective
from jaxret.types import Batch, Embeddings, Tokens
from tests.tiny import (
    SCALAR_MIX,
    SELF_CONTRASTIVE,
    WITHOUT_DROPOUT,
    distance,
    make_batch,
    make_objective,
    make_params,
    relative_error,
)

QUERIES = 4
FAMILIES = {"self_contrastive": SELF_CONTRASTIVE, "scalar_mix": SCALAR_MIX}
TOLERANCE = 1e-6  # relative error of the whole gradient: chunks change the order of a sum
LEAF_TOLERANCE = 1e-5  # relative error of one parameter's gradient, whose sums may nearly cancel


def test_join_undoes_split() -> None:
    rows = {"x": jnp.arange(12).reshape(6, 2)}
    np.testing.assert_array_equal(split_chunks(rows, 3)["x"][1], [[4, 5], [6, 7]])
    for chunks in (1, 2, 3, 6):
        parts = split_chunks(rows, chunks)
        assert parts["x"].shape == (chunks, 6 // chunks, 2)
        np.testing.assert_array_equal(join_chunks(parts)["x"], rows["x"])


def test_chunks_must_be_equal() -> None:
    tokens = Tokens(jnp.zeros((6, 2), jnp.int32), jnp.ones((6, 2), bool))
    with pytest.raises(ValueError, match=r"6 .*encoded .*4"):
        encode_in_chunks(lambda t: Embeddings(t.ids[:, None], t.mask[:, :1]), (tokens,), 4)


@functools.partial(jax.jit, static_argnames=("retriever", "side"))
def encode(retriever: Any, params: Any, tokens: Tokens, side: Any, key: jax.Array) -> Embeddings:
    return retriever.encode(params, tokens, side, True, key)


def plain(objective: RetrievalObjective) -> Callable[[Any, Batch, jax.Array], jax.Array]:
    """Return the loss without caching: all texts at once, without recomputation."""

    def loss(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
        query_key, passage_key = jax.random.split(key)
        q = encode(objective.model, params, batch.queries, "query", query_key)
        d = encode(objective.model, params, batch.passages, "passage", passage_key)
        scores = similarities(q.vectors[:, 0], d.vectors, d.mask)
        return total_loss(Scores(scores, batch.positives, competing_passages(batch), objective.settings)).loss

    return loss


def one_device() -> Any:
    return make_mesh(devices=jax.devices()[:1])


def device_batch(queries: int) -> Batch:
    return jax.tree.map(jnp.asarray, make_batch(queries))


@pytest.mark.parametrize(
    ("family", "chunks"), [pytest.param("self_contrastive", QUERIES, marks=pytest.mark.exhaustive), ("scalar_mix", 2)]
)
def test_the_cached_gradient_equals_the_plain_one(family: str, chunks: int) -> None:
    """Dropout masks are equal, too: they depend on the text, not on the chunk."""
    objective = make_objective(FAMILIES[family], one_device(), chunk_size=QUERIES // chunks)
    params, batch, key = make_params(objective.model), device_batch(QUERIES), jax.random.key(5)
    cached = jax.jit(jax.value_and_grad(lambda p, b, k: objective(p, b, k).loss))
    expected_loss, expected = jax.jit(jax.value_and_grad(plain(objective)))(params, batch, key)
    loss, gradients = cached(params, batch, key)
    assert abs(float(loss) - float(expected_loss)) <= 1e-6 * float(expected_loss)
    assert relative_error(gradients, expected) <= TOLERANCE
    assert distance(gradients, expected) <= LEAF_TOLERANCE
    assert min(float(jnp.abs(leaf).max()) for leaf in leaves_with_gradient(gradients)) > 0
    if family == "scalar_mix":
        alpha, by_hand = gradients["pooling"]["alpha"], expected["pooling"]["alpha"]
        assert float(jnp.abs(by_hand).max()) > 1e-2, "the gradient of the mixing weights is not zero"
        np.testing.assert_allclose(alpha, by_hand, rtol=1e-4, atol=TOLERANCE)
    other_loss, other = cached(params, batch, jax.random.key(6))
    assert abs(float(other_loss) - float(expected_loss)) > 1e-3, "control: another dropout key gives another loss"
    assert distance(other, expected) > 1e-2, "control: another dropout key gives other gradients"


def leaves_with_gradient(gradients: Any) -> list[jax.Array]:
    """All leaves except the keys' biases, which add the same number to every score of a softmax."""
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return [leaf for path, leaf in leaves if "/key/bias" not in "/".join(str(getattr(k, "key", k)) for k in path)]


@pytest.mark.slow
def test_every_text_has_its_own_dropout() -> None:
    """Four equal texts give four different vectors, and the same four when they are encoded in four chunks."""
    retriever = make_objective(SELF_CONTRASTIVE, one_device()).model
    params = make_params(retriever)
    tokens = jax.tree.map(lambda x: jnp.tile(x[:1], (QUERIES, 1)), device_batch(QUERIES).queries)
    tokens = dataclasses.replace(tokens, rows=jnp.arange(QUERIES))

    def vectors(chunks: int) -> jax.Array:
        def encode_part(t: Tokens) -> Embeddings:
            return encode(retriever, params, t, "query", jax.random.key(0))

        return jax.jit(lambda: encode_in_chunks(encode_part, (tokens,), chunks).vectors)()

    encoded = vectors(4)
    np.testing.assert_allclose(encoded, vectors(1), atol=1e-5)
    for a in range(QUERIES):
        for b in range(a):
            assert float(jnp.abs(encoded[a] - encoded[b]).max()) > 1e-2


@pytest.mark.parametrize(
    ("queries", "chunk_size", "devices", "chunks"),
    [
        (16, 0, 1, 1),
        (16, 1, 1, 16),
        (16, 1, 4, 4),  # a query on each of 4 devices at a time
        (16, 1, 8, 2),
        (16, 3, 1, 4),  # 3 does not divide 16
        (16, 6, 4, 2),
        (8, 16, 8, 1),
    ],
)
def test_chunks_are_rounded_up_to_a_multiple_of_the_devices(
    queries: int, chunk_size: int, devices: int, chunks: int
) -> None:
    mesh = make_mesh(devices=jax.devices()[:devices])
    assert make_objective(SELF_CONTRASTIVE, mesh, chunk_size=chunk_size).chunks(queries) == chunks


def test_a_rounded_chunk_size_is_printed() -> None:
    message = "train.chunk_size is 3; 4 of 16 queries are encoded at the same time, the next number that divides 16"
    assert describe_rounding(16, 3, 1) == message
    assert describe_rounding(16, 1, 4) == message.replace("is 3", "is 1") + " and is a multiple of 4 devices"
    assert "; 127 of 127 queries" in describe_rounding(127, 8, 1), "a prime number of queries has no chunks"
    assert not any(describe_rounding(16, size, 4) for size in (0, 4, 8, 16, 32)), "control: these sizes are not rounded"


@pytest.mark.slow
def test_validation_is_the_same_in_chunks_and_takes_less_memory() -> None:
    batch, losses, temporary = device_batch(16), [], []
    for chunk_size in (0, 2):
        objective = without_dropout(make_objective(SELF_CONTRASTIVE, one_device(), chunk_size=chunk_size))
        params = make_params(objective.model)
        compiled = (
            jax.jit(lambda p, b, o=objective: o(p, b, jax.random.key(0), train=False)).lower(params, batch).compile()
        )
        losses.append(float(compiled(params, batch).loss))
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)  # type: ignore[union-attr]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert temporary[1] < temporary[0] / 2


def without_dropout(objective: RetrievalObjective) -> RetrievalObjective:
    """Turn dropout off, which halves the compilation."""
    module = objective.model.module
    return dataclasses.replace(objective, model=RetrieverModel(module.clone(config=WITHOUT_DROPOUT)))


@pytest.mark.exhaustive
def test_caching_takes_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the temporary memory of the compiled gradient. The control is the same scan with all values saved."""
    queries = 16
    batch, key = device_batch(queries), jax.random.key(0)

    def temporary(chunk_size: int) -> int:
        objective = without_dropout(make_objective(SELF_CONTRASTIVE, one_device(), chunk_size=chunk_size))
        params = make_params(objective.model)
        gradient = jax.jit(jax.grad(lambda p, b, k: objective(p, b, k).loss))
        return gradient.lower(params, batch, key).compile().memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]

    whole, cached = temporary(0), temporary(2)
    assert cached < whole / 2
    monkeypatch.setattr(grad_cache.jax, "checkpoint", lambda function: function)
    assert temporary(2) > 2 * cached, "control: without recomputation no memory is saved"
