"""A stack of layers: its last layer computes only the states that are kept, which changes no number."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders.architectures import make_encoder
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.selection import Selection
from jaxret.models.encoders.stack import split_layers
from jaxret.types import HiddenStates, Tokens
from tests import tiny

LENGTH = 12
ENCODERS: dict[str, Any] = {
    "bert": tiny.WITHOUT_DROPOUT,
    "xlm-roberta": tiny.XLM_ROBERTA,
    "modernbert": dataclasses.replace(tiny.MODERNBERT, num_layers=3),
    "t5": tiny.T5,
}
TOKENS = tiny.make_tokens(4, LENGTH)


def parameters(encoder: Any) -> Any:
    return tiny.make_params(tiny.make_retriever({"encoder.tied": True, "head.token": "mean"}, encoder))["encoder"]


def states(
    encoder: Any, params: Any, selection: Selection, tokens: Tokens = TOKENS, compute: Compute = Compute()
) -> jax.Array:
    hidden: HiddenStates = make_encoder(encoder, compute).apply({"params": params}, tokens, selection=selection)
    return hidden.states


@pytest.mark.daily("bert-selection1-layer")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "selection", "recompute"),
    [
        pytest.param("bert", Selection(1, layers="last"), "none", marks=pytest.mark.exhaustive),
        ("bert", Selection(1, layers="last"), "layer"),
        pytest.param("bert", Selection(3), "cheap", marks=pytest.mark.exhaustive),
        ("modernbert", Selection(3), "none"),
        pytest.param("modernbert", Selection(1, layers="last"), "cheap", marks=pytest.mark.exhaustive),
        pytest.param("xlm-roberta", Selection(3), "none", marks=pytest.mark.exhaustive),
        pytest.param("bert", Selection(LENGTH + 2), "none", marks=pytest.mark.exhaustive),
        pytest.param("t5", Selection(3), "none", marks=pytest.mark.exhaustive),
    ],
)
def test_kept_states_equal_a_full_computation(kind: str, selection: Selection, recompute: str) -> None:
    """The states and the gradient of every parameter are equal."""
    encoder, count, compute = ENCODERS[kind], min(selection.tokens or 0, LENGTH), Compute(recompute=recompute)
    params = parameters(encoder)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(count, encoder.hidden_size)), jnp.float32)

    def loss(p: Any, selection: Selection, compute: Compute = Compute()) -> jax.Array:
        chosen = states(encoder, p, selection, compute=compute)[:, :, :count]
        return jnp.sum(jnp.sin(chosen if selection.layers == "all" else chosen[-1:]) * weights)

    everything = Selection(layers=selection.layers)
    both = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    (value, gradient), (expected_value, expected) = both(params, selection, compute), both(params, everything)
    assert abs(value - expected_value) <= 1e-5 * max(1, abs(expected_value))
    assert tiny.distance(gradient, expected) <= 2e-5
    if count < LENGTH:  # control: the last layer still reads every token
        short = Tokens(TOKENS.ids[:, :count], TOKENS.mask[:, :count])
        alone = states(encoder, params, everything, short)
        assert np.abs(alone[-1] - states(encoder, params, everything)[-1, :, :count]).max() > 1e-3


@pytest.mark.table
@pytest.mark.parametrize("selection", [Selection(1, layers="last"), Selection(3), Selection()], ids=str)
@pytest.mark.parametrize("kind", ["deep", "modernbert", "t5"])
def test_unrolled_layers_have_the_same_states(kind: str, selection: Selection) -> None:
    """Eleven layers, because in a tree the names sort as 0, 1, 10, 2."""
    encoder = dataclasses.replace(ENCODERS["bert"], num_layers=11) if kind == "deep" else ENCODERS[kind]
    params = parameters(encoder)
    program = jax.jit(lambda p: states(encoder, p, selection))
    np.testing.assert_allclose(program(split_layers(params)), program(params), atol=2e-6)
    assert "while" in program.lower(params).as_text()
    assert "while" not in program.lower(split_layers(params)).as_text()


@pytest.mark.table
@pytest.mark.parametrize(
    ("kind", "selection"),
    [("bert", Selection(1, layers="last")), ("modernbert", Selection(3)), ("t5", Selection())],
)
def test_training_without_a_loop_has_the_same_gradients(kind: str, selection: Selection) -> None:
    params = parameters(ENCODERS[kind])

    def loss(p: Any, unrolled: bool) -> jax.Array:
        return jnp.sum(jnp.sin(states(ENCODERS[kind], p, selection, compute=Compute(unrolled=unrolled))))

    program = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    (value, gradient), (expected_value, expected) = (program(params, unrolled) for unrolled in (True, False))
    assert abs(value - expected_value) <= 1e-5 * max(1, abs(expected_value))
    assert tiny.distance(gradient, expected) <= 2e-5
    loops = [program.lower(params, unrolled).as_text().count("stablehlo.while") for unrolled in (True, False)]
    assert loops[0] == 0 < loops[1]


def shapes(program: Any) -> set[tuple[int, ...]]:
    """Return the shapes of the results of all products."""
    products = {v.aval.shape for e in program.eqns if e.primitive.name == "dot_general" for v in e.outvars}
    inner = (getattr(value, "jaxpr", value) for e in program.eqns for value in e.params.values())
    return products.union(*(shapes(part) for part in inner if hasattr(part, "eqns")))


@pytest.mark.parametrize(
    ("selection", "wide"), [(Selection(2), False), (Selection(2, mean=True), True), (Selection(), True)]
)
def test_the_last_layer_computes_only_kept_positions(selection: Selection, wide: bool) -> None:
    """In a stack of one layer, keys and values have every position, the feed-forward only those that are kept."""
    encoder = dataclasses.replace(tiny.WITHOUT_DROPOUT, num_layers=1)
    stack, rows = parameters(encoder), len(TOKENS.ids)
    for params in (stack, split_layers(stack)):
        products = shapes(jax.make_jaxpr(lambda p: states(encoder, p, selection))(params).jaxpr)
        assert (rows, LENGTH, encoder.hidden_size) in products
        assert ((rows, LENGTH, encoder.intermediate_size) in products) == wide
        assert ((rows, 2, encoder.intermediate_size) in products) != wide


@pytest.mark.slow
def test_fewer_layers_copy_no_parameters() -> None:
    """Neither parameters nor gradients are copied: they are most of the memory of this model."""
    encoder = dataclasses.replace(tiny.WITHOUT_DROPOUT, num_layers=8, hidden_size=128, intermediate_size=512)
    params = parameters(encoder)
    stack = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))
    tokens = tiny.make_tokens(1, 4)

    def temporaries(selection: Selection) -> int:
        gradient = jax.jit(
            jax.grad(lambda p: jnp.sum(states(encoder, p, selection, tokens, Compute(recompute="layer"))))
        )
        return gradient.lower(params).compile().memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]

    assert temporaries(Selection(1, layers="last")) < 0.5 * stack

    def cut(p: Any) -> jax.Array:
        """The control, in which a loop reads a part of an array and another product the rest of it."""

        def layer(carry: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(carry @ kernel), None

        wide = p["layers"]["intermediate"]["kernel"][:, :, :128]
        last, _ = jax.lax.scan(layer, jnp.ones((1, 128)), wide[:-1])
        return jnp.sum(layer(last, wide[-1])[0])

    kernel = params["layers"]["intermediate"]["kernel"].nbytes // 4
    control = jax.jit(jax.grad(cut)).lower(params).compile().memory_analysis()
    assert control.temp_size_in_bytes > kernel  # type: ignore[union-attr]
