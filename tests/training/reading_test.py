"""Collectives of parameters in a step: which, how often, and in which type."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders.architectures import bert
from jaxret.models.encoders.architectures.bert import BertConfig
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.stack import Stack
from jaxret.parallel.mesh import make_mesh, row_sharding, shardings
from jaxret.runs.embedder import Embedder
from jaxret.types import Batch, Tokens
from tests import tiny

COLLECTIVES = ("psum", "psum_invariant", "all_gather", "reduce_scatter", "all_to_all", "ppermute")
QUERIES = 32


def inner(value: Any) -> Iterator[Any]:
    """Yield the programs among an equation's parameters."""
    for part in value if isinstance(value, tuple | list) else (value,):
        part = getattr(part, "jaxpr", part)
        if hasattr(part, "eqns"):
            yield part


def collectives(program: Any, times: int = 1) -> Counter[tuple[str, str]]:
    """(operation, type) -> bytes of results in a step, counting every iteration of loops."""
    counts: Counter[tuple[str, str]] = Counter()
    for equation in program.eqns:
        if equation.primitive.name in COLLECTIVES:
            for out in equation.outvars:
                counts[equation.primitive.name, str(out.aval.dtype)] += times * out.aval.size * out.aval.dtype.itemsize
        rounds = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            for part in inner(value):
                counts += collectives(part, times * rounds)
    return counts


def step(
    overrides: dict[str, Any], fsdp: int = 1, chunk_size: int = 0, reduce_dtype: Any = jnp.float32
) -> tuple[Counter[tuple[str, str]], int, int]:
    """(the collectives of a step's gradient, bytes of all parameters, bytes of split parameters)."""
    mesh = make_mesh(fsdp)
    objective = tiny.make_objective(overrides, mesh, tiny.WITHOUT_DROPOUT, chunk_size)
    objective = dataclasses.replace(objective, reduce_dtype=reduce_dtype)
    params = jax.eval_shape(objective.model.init, jax.random.key(0))
    places = jax.tree.leaves(shardings(mesh, params))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny.make_batch(QUERIES))
    key = jax.eval_shape(lambda: jax.random.key(0))
    program = jax.make_jaxpr(jax.grad(lambda p, b, k: objective(p, b, k).loss))(params, batch, key)
    sizes = [(4 * leaf.size, bool(place.spec)) for leaf, place in zip(jax.tree.leaves(params), places, strict=True)]
    return collectives(program.jaxpr), sum(s for s, _ in sizes), sum(s for s, split in sizes if split)


@pytest.mark.table
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk_size", [0, 8])
def test_gradients_are_summed_once(tied: bool, chunk_size: int) -> None:
    """Gradients of all chunks, and of both sides of a tied encoder, are summed together: each parameter once."""
    traffic, whole, _ = step(tiny.DUAL_ENCODER | {"encoder.tied": tied}, chunk_size=chunk_size)
    assert traffic == {("psum_invariant", "float32"): whole}


@pytest.mark.table
@pytest.mark.parametrize("chunk_size", [0, 8])
def test_split_parameters_are_gathered_and_their_gradients_scattered(chunk_size: int) -> None:
    """Each part is sent once, and no activations are sent."""
    traffic, whole, split = step(tiny.DUAL_ENCODER, fsdp=4, chunk_size=chunk_size)
    tables = traffic["all_to_all", "float32"]  # each device sends its parts to all of its group
    assert 0 < tables < split
    assert traffic == {
        ("all_gather", "float32"): split,
        ("all_to_all", "float32"): tables,
        ("reduce_scatter", "float32"): (split - tables) // 4,
        ("psum_invariant", "float32"): whole - split + split // 4,
    }


@pytest.mark.slow
def test_dtypes_of_sent_arrays() -> None:
    overrides = tiny.DUAL_ENCODER | {"encoder.dtype": "bfloat16"}
    traffic, _, split = step(overrides, fsdp=4)
    assert traffic["all_gather", "bfloat16"] == split // 2
    assert {kind for name, kind in traffic if name != "all_gather"} == {"float32"}
    halved, _, _ = step(overrides, fsdp=4, reduce_dtype=jnp.bfloat16)
    assert halved["reduce_scatter", "bfloat16"] == (split - 2 * halved["all_to_all", "bfloat16"]) // 8
    assert not {("reduce_scatter", "float32"), ("all_to_all", "float32")} & set(halved)
    assert halved["psum_invariant", "float32"] > 0, "biases and norms are summed in float32"


@pytest.mark.slow
def test_recomputation_gathers_a_layer_again_instead_of_keeping_it() -> None:
    plain, _, _ = step(tiny.DUAL_ENCODER, fsdp=4)
    again, _, split = step(tiny.DUAL_ENCODER | {"encoder.recompute": "cheap"}, fsdp=4)
    assert split < again["all_gather", "float32"] < 2 * split, "layers are gathered twice, tables once"
    assert {k: v for k, v in again.items() if k[0] != "all_gather"} == {
        k: v for k, v in plain.items() if k[0] != "all_gather"
    }


@pytest.mark.parametrize(("devices", "recompute", "loops"), [(1, "none", False), (2, "none", True), (1, "layer", True)])
def test_layers_are_trained_without_a_loop_on_one_cpu_alone(devices: int, recompute: str, loops: bool) -> None:
    """On one CPU a loop costs time. Elsewhere, it keeps programs small and gathers one layer at a time, and it saves
    memory if layers are recomputed."""
    overrides, mesh = tiny.DUAL_ENCODER | {"encoder.recompute": recompute}, make_mesh(1, jax.devices()[:devices])
    objective = tiny.make_objective(overrides, mesh, tiny.WITHOUT_DROPOUT)
    params = jax.eval_shape(objective.model.init, jax.random.key(0))

    def loss(params: Any, batch: Batch) -> jax.Array:
        return objective(params, batch, jax.random.key(0)).loss

    lowered = jax.jit(jax.grad(loss)).lower(params, tiny.make_batch(QUERIES)).as_text()
    assert ("stablehlo.while" in lowered) == loops


@pytest.mark.parametrize("use", ["encoding", "validation"])
def test_encoding_gathers_weights_and_nothing_else(use: str) -> None:
    """In encoding, too, each device has its own texts."""
    mesh, retriever = make_mesh(4), tiny.make_retriever({"encoder.tied": True})
    params = jax.eval_shape(retriever.init, jax.random.key(0))
    places = jax.tree.leaves(shardings(mesh, params))
    embedder, tokens = Embedder(retriever, params, mesh, 0, {"passage": 6}, 64), tiny.make_tokens(8, 6)
    program = embedder.program("passage") if use == "encoding" else tiny.ranking(embedder)
    split = sum(4 * x.size for x, place in zip(jax.tree.leaves(params), places, strict=True) if place.spec)
    assert split > 0
    assert collectives(program.trace(params, tokens).jaxpr.jaxpr) == {("all_gather", "float32"): split}


def test_layer_stacks_are_recognized_by_name() -> None:
    with pytest.raises(ValueError, match=r"layers .*'blocks'; .*'layers'"):
        Stack(bert.BertLayer, 2, Compute(), name="blocks")


ENCODERS: dict[str, Any] = {
    "bert": tiny.BERT,
    "t5": dataclasses.replace(tiny.T5, dropout=0.1),
    "modernbert": tiny.MODERNBERT,
    "gemma": dataclasses.replace(tiny.GEMMA, attention_dropout=0.1),
}


CASES = [(encoder, policy) for encoder in ENCODERS for policy in ("none", "cheap", "layer")]


@pytest.mark.daily("modernbert-layer")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "policy"),
    [pytest.param(*case, marks=[] if case == ("bert", "cheap") else pytest.mark.exhaustive) for case in CASES],
)
def test_splitting_and_recomputation_change_no_result(encoder: str, policy: str) -> None:
    """Loss and gradients, with dropout, on eight devices with parameters split over four equal those on one device."""
    overrides = tiny.MLR | {"head.token": "mean", "encoder.recompute": policy}

    def gradient(overrides: dict[str, Any], fsdp: int, devices: int) -> Any:
        mesh = make_mesh(fsdp, jax.devices()[:devices])
        objective = tiny.make_objective(overrides, mesh, ENCODERS[encoder])
        params = tiny.make_params(objective.model)
        params = jax.device_put(params, shardings(mesh, params))
        batch = jax.device_put(tiny.make_batch(8), row_sharding(mesh))
        loss = lambda p, b: objective(p, b, jax.random.key(3)).loss  # noqa: E731
        return jax.device_get(jax.jit(jax.value_and_grad(loss))(params, batch))

    value, expected = gradient(overrides | {"encoder.recompute": "none"}, 1, 1)
    other_value, gradients = gradient(overrides, 4, 8)
    assert abs(other_value - value) <= 2e-6 * max(abs(value), 1)
    assert tiny.relative_error(gradients, expected) <= 2e-6


FREQUENT, ROWS, LENGTH = 7, 96, 32


def crowded_batch() -> Batch:
    """A batch in which one word is at a third of all places, about 1,000 times."""
    random = np.random.default_rng(0)
    ids = random.integers(8, 40, (ROWS, LENGTH))
    ids[:, 1:][random.random((ROWS, LENGTH - 1)) < 1 / 3] = FREQUENT
    ids[:, 0] = 2
    queries = random.integers(8, 40, (ROWS // 2, 8))

    def tokens(ids: np.ndarray) -> Tokens:
        return Tokens(jnp.asarray(ids, jnp.int32), jnp.ones(ids.shape, bool))

    rows = jnp.arange(ROWS)
    return Batch(tokens(queries), tokens(ids), rows[::2], rows, jnp.full((ROWS // 2, 1), -1))


TINY = dataclasses.replace(tiny.WITHOUT_DROPOUT, hidden_size=64, num_heads=4, max_positions=LENGTH)
MINILM = dataclasses.replace(TINY, hidden_size=384, num_heads=12, num_layers=6, intermediate_size=1536)


def word_gradients(token: str, shapes: BertConfig, dtype: str) -> np.ndarray:
    """The gradient of the passages' word table [vocabulary,H], for random parameters."""
    mesh = make_mesh(devices=jax.devices()[:1])
    objective = tiny.make_objective({"head.token": token, "encoder.dtype": dtype}, mesh, shapes)
    params = jax.jit(objective.model.init)(jax.random.key(0))
    gradient = jax.jit(jax.grad(lambda p, b: objective(p, b, jax.random.key(0)).loss))(params, crowded_batch())
    return np.asarray(gradient["passage_encoder"]["embeddings"]["word"]["embedding"], np.float64)


# With [CLS], the error that remains is the rounding of operands of products, forward and backward. Rare words have it,
# too; it averages out in the longer sums of wider models.
@pytest.mark.daily("mean")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "shapes", "most", "control"),
    [
        pytest.param("mean", TINY, 1e-3, 0.1, id="mean"),
        pytest.param("cls", MINILM, 0.01, 0.05, id="cls", marks=pytest.mark.exhaustive),
    ],
)
def test_bfloat16_keeps_the_gradient_of_a_frequent_word(
    token: str, shapes: BertConfig, most: float, control: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contributions nearly cancel, because a shift that all passages share changes no loss: rounding them before
    the sum loses the gradient."""
    exact = word_gradients(token, shapes, "float32")[FREQUENT]

    def error() -> float:
        low = word_gradients(token, shapes, "bfloat16")[FREQUENT]
        return float(np.linalg.norm(low - exact) / np.linalg.norm(exact))

    assert error() <= most
    half, norm = jnp.bfloat16, nn.LayerNorm.__call__  # the controls round tables before they are read, or hidden states
    monkeypatch.setattr(nn.Embed, "__call__", lambda self, ids: jnp.take(self.embedding.astype(half), ids, axis=0))
    monkeypatch.setattr(nn.LayerNorm, "__call__", lambda self, x: norm(self, x.astype(half)).astype(half))
    assert error() > control, "control: rounded tables or hidden states have a larger error"
