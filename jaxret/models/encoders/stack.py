"""A stack of layers: a loop with one body, and a last layer that computes no more than what is kept of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxret.distributed import LAYERS
from jaxret.models.encoders.layers import RECOMPUTE, Compute

Tree = Any


class Stack(nn.Module):
    """`length` layers, one after another. Parameters of all lie in one array with a leading layer axis, so that compile
    time does not grow with depth.

    layer: makes a layer, as `partial(BertLayer, config, compute, keep)`; a layer is a module (hidden, what is its own,
    what all share) -> (hidden, what it keeps or None). Raises ValueError for a name by which nobody would know that
    here are layers (`distributed.LAYERS`).
    """

    layer: Callable[..., nn.Module]
    length: int
    compute: Compute

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.search(LAYERS, f"{self.name}/"):
            raise ValueError(
                f"a stack of layers is called {self.name!r}; its name must be 'layers' or end with '_layers'"
            )

    def __call__(
        self, hidden: Float[jax.Array, "B T H"], *shared: Any, own: Tree = None, first: int | None = None
    ) -> tuple[Float[jax.Array, "B some H"], Tree]:
        """The output of the last layer, and what all layers below it keep, on a leading axis. own: arrays with a row
        for each layer. first: of the last layer only these many positions are asked for, and computed (it gets
        `first=`); None: all."""
        if self.is_initializing():
            self._initialize(hidden, own, shared)
        # The gradient of the stack goes back through the layers as one array, in which each writes its own row: the
        # loop may then end before the last layer, and neither the stack nor its gradient is ever copied to be cut.
        stack, gradient = jax.lax.stop_gradient(self.variables["params"]), _gradient(self.variables["params"])

        def compute(hidden: jax.Array, row: Tree, each: Tree, first: int | None) -> tuple[jax.Array, Tree]:
            index, own, rngs = each
            params = _read(stack, row, index)
            if self.compute.read is not None:
                params = self.compute.read.layer(params)
            return self._apply(params, rngs, hidden, own, shared, first)

        def layer(carry: Tree, each: Tree, first: int | None = None) -> tuple[Tree, Tree]:
            hidden, gradient = carry
            row, gradient = _row(gradient, each[0])
            computed = self._recomputed(partial(compute, first=first), in_loop=first is None)
            hidden, kept = computed(hidden, row, each)
            return (hidden, gradient), kept

        each = jnp.arange(self.length), own, self._keys("dropout")
        carry, kept = (hidden, gradient), None
        looped = self.length if first is None else self.length - 1
        if looped:
            carry, kept = jax.lax.scan(layer, carry, jax.tree.map(lambda x: x[:looped], each))
        if first is None:
            return carry[0], jax.tree.map(lambda x: x[:-1], kept)
        (hidden, _), _ = layer(carry, jax.tree.map(lambda x: x[-1], each), first)
        return hidden, kept

    def _recomputed(self, function: Callable[..., Any], in_loop: bool) -> Callable[..., Any]:
        """The function, of which the backward pass computes again what `compute` says. Whole parameters, read inside,
        are never kept for it."""
        kept = RECOMPUTE[self.compute.recompute]
        if kept is None:
            return function
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        return jax.checkpoint(function, prevent_cse=not in_loop, policy=policy)

    def _apply(
        self, params: Tree, rngs: Tree, hidden: jax.Array, own: Tree, shared: Tree, first: int | None
    ) -> tuple[jax.Array, Tree]:
        arguments = shared if own is None else (own, *shared)
        asked = {} if first is None else {"first": first}
        return self.layer(parent=None).apply({"params": params}, hidden, *arguments, rngs=rngs, **asked)

    def _keys(self, name: str) -> dict[str, jax.Array]:
        """A key for each layer, if there are any."""
        return {name: jax.random.split(self.make_rng(name), self.length)} if self.has_rng(name) else {}

    def _initialize(self, hidden: jax.Array, own: Tree, shared: Tree) -> None:
        first = jax.tree.map(lambda x: x[0], own)
        arguments = shared if own is None else (first, *shared)
        layers = jax.vmap(lambda rngs: self.layer(parent=None).init(rngs, hidden, *arguments)["params"])
        for name, value in layers(self._keys("params") | self._keys("dropout")).items():
            self.put_variable("params", name, value)


@jax.custom_vjp
def _gradient(stack: Tree) -> Tree:
    """What the layers hand on so that their gradients meet in it. Forward, like the rows of it, it is nothing but
    zeros, which nobody reads."""
    return jax.tree.map(jnp.zeros_like, stack)


@jax.custom_vjp
def _row(gradient: Tree, index: jax.Array) -> tuple[Tree, Tree]:
    """A layer's row, and all: backward, the row is written to where it belongs."""
    return jax.tree.map(lambda x: jnp.zeros_like(x[0]), gradient), gradient


@jax.custom_vjp
def _read(stack: Tree, row: Tree, index: jax.Array) -> Tree:
    """The parameters of a layer; backward, their gradient is that of `row`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stack)


def _write(index: jax.Array, g: tuple[Tree, Tree]) -> tuple[Tree, None]:
    row, gradient = g
    write = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda whole, part: write(whole, part, index, 0), gradient, row), None


_gradient.defvjp(lambda stack: (_gradient(stack), None), lambda _, g: (g,))
_row.defvjp(lambda gradient, index: (_row(gradient, index), index), _write)
_read.defvjp(lambda stack, row, index: (_read(stack, row, index), None), lambda _, g: (None, g, None))
