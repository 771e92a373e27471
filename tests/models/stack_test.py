"""A stack of layers: of the last one nothing is computed but what is kept, and that changes no number."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders.architectures import make_encoder
from jaxret.models.encoders.keep import Keep
from jaxret.models.encoders.layers import Compute
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


def states(encoder: Any, params: Any, keep: Keep, tokens: Tokens = TOKENS, compute: Compute = Compute()) -> jax.Array:
    found: HiddenStates = make_encoder(encoder, compute).apply({"params": params}, tokens, keep=keep)
    return found.states


@pytest.mark.parametrize(
    ("kind", "keep", "recompute"),
    [
        ("bert", Keep(1, layers="last"), "none"),
        ("bert", Keep(1, layers="last"), "layer"),
        ("bert", Keep(3), "cheap"),
        ("modernbert", Keep(3), "none"),
        pytest.param("modernbert", Keep(1, layers="last"), "cheap", marks=pytest.mark.exhaustive),
        pytest.param("xlm-roberta", Keep(3), "none", marks=pytest.mark.exhaustive),
        pytest.param("bert", Keep(LENGTH + 2), "none", marks=pytest.mark.exhaustive),
        pytest.param("t5", Keep(3), "none", marks=pytest.mark.exhaustive),
    ],
)
def test_what_is_kept_is_as_if_all_were_computed(kind: str, keep: Keep, recompute: str) -> None:
    """States, and the gradient of every parameter."""
    encoder, count, compute = ENCODERS[kind], min(keep.tokens or 0, LENGTH), Compute(recompute=recompute)
    params = parameters(encoder)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(count, encoder.hidden_size)), jnp.float32)

    def loss(p: Any, keep: Keep, compute: Compute = Compute()) -> jax.Array:
        found = states(encoder, p, keep, compute=compute)[:, :, :count]
        return jnp.sum(jnp.sin(found if keep.layers == "all" else found[-1:]) * weights)

    everything = Keep(layers=keep.layers)
    both = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    (value, found), (wanted, expected) = both(params, keep, compute), both(params, everything)
    assert abs(value - wanted) <= 1e-5 * max(1, abs(wanted))
    assert tiny.distance(found, expected) <= 2e-5
    if count < LENGTH:  # control: the last layer still reads every token
        short = Tokens(TOKENS.ids[:, :count], TOKENS.mask[:, :count])
        alone = states(encoder, params, everything, short)
        assert np.abs(alone[-1] - states(encoder, params, everything)[-1, :, :count]).max() > 1e-3


def shapes(program: Any) -> set[tuple[int, ...]]:
    """Of the results of all products."""
    found = {v.aval.shape for e in program.eqns if e.primitive.name == "dot_general" for v in e.outvars}
    inner = (getattr(value, "jaxpr", value) for e in program.eqns for value in e.params.values())
    return found.union(*(shapes(part) for part in inner if hasattr(part, "eqns")))


@pytest.mark.parametrize(("keep", "wide"), [(Keep(2), False), (Keep(2, mean=True), True), (Keep(), True)])
def test_the_last_layer_computes_no_more_than_what_is_kept(keep: Keep, wide: bool) -> None:
    """A stack of one layer: keys and values have every position, the feed-forward has those that are kept."""
    encoder = dataclasses.replace(tiny.WITHOUT_DROPOUT, num_layers=1)
    program = jax.make_jaxpr(lambda p: states(encoder, p, keep))(parameters(encoder))
    found = shapes(program.jaxpr)
    rows = len(TOKENS.ids)
    assert (rows, LENGTH, encoder.hidden_size) in found
    assert ((rows, LENGTH, encoder.intermediate_size) in found) == wide
    assert ((rows, 2, encoder.intermediate_size) in found) != wide


def test_parameters_are_not_copied_to_end_the_loop_early() -> None:
    """Nor are their gradients: the memory of a model whose parameters are most of it."""
    encoder = dataclasses.replace(tiny.WITHOUT_DROPOUT, num_layers=8, hidden_size=128, intermediate_size=512)
    params = parameters(encoder)
    stack = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))
    tokens = tiny.make_tokens(1, 4)

    def temporaries(keep: Keep) -> int:
        gradient = jax.jit(jax.grad(lambda p: jnp.sum(states(encoder, p, keep, tokens, Compute(recompute="layer")))))
        return gradient.lower(params).compile().memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]

    assert temporaries(Keep(1, layers="last")) < 0.5 * stack

    def cut(p: Any) -> jax.Array:
        """control: a loop over a part of an array, and the rest of it apart."""

        def layer(carry: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(carry @ kernel), None

        wide = p["layers"]["intermediate"]["kernel"][:, :, :128]
        last, _ = jax.lax.scan(layer, jnp.ones((1, 128)), wide[:-1])
        return jnp.sum(layer(last, wide[-1])[0])

    kernel = params["layers"]["intermediate"]["kernel"].nbytes // 4
    control = jax.jit(jax.grad(cut)).lower(params).compile().memory_analysis()
    assert control.temp_size_in_bytes > kernel  # type: ignore[union-attr]
