"""A stack of layers: a loop with one body, and a last layer that computes only the selected positions."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxret.models.encoders.layers import RECOMPUTE, Compute
from jaxret.parallel.mesh import LAYER_PATH, map_with_names
from jaxret.types import Tree

_FIRST = "0"  # name of the first layer in parameters of `split_layers`


class Stack(nn.Module):
    """`length` layers, one after another. Their parameters have a leading layer axis.

    Compile time does not grow with depth. With one selected position, the last layer computes its feed-forward network
    at this position only, without copying the other layers' parameters. A gradient step of BERT layers on a CPU (batch
    16 x 128): 6 x 384 takes 16 % less time than flax.linen.scan over all layers and 33 MiB less temporary memory; 12 x
    768 (batch 4 x 128) takes 308 MiB less than a scan over slices of the parameters. It compiles more slowly than
    flax.linen.scan, which has no second body for the last layer: 20 s against 11 s. (python bench/stack.py)

    Raises ValueError for a name that `parallel.mesh.LAYER_PATH` does not match.
    """

    # Makes a layer, such as `partial(BertLayer, config, compute, selection)`: a module that maps (hidden, its row of
    # `per_layer` unless this is None, *common_arguments) to (hidden, selected states or None).
    layer: Callable[..., nn.Module]
    length: int
    compute: Compute

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.search(LAYER_PATH, f"{self.name}/"):
            raise ValueError(
                f"a stack of layers is called {self.name!r}; the name must be 'layers' or end with '_layers'"
            )

    def __call__(
        self,
        hidden: Float[jax.Array, "B T H"],
        *common_arguments: Any,
        per_layer: Tree = None,
        first: int | None = None,
    ) -> tuple[Float[jax.Array, "B queries H"], Tree]:
        """Return the output of the last layer, and the selected states of the layers below it on a leading axis.

        Args:
            hidden: input of the first layer.
            *common_arguments: arguments that all layers get.
            per_layer: arrays with a row for each layer.
            first: number of first positions to compute in the last layer, its argument `first`; None: all.
        """
        if self.is_initializing():
            return self._initialize(hidden, per_layer, common_arguments, first)
        if _FIRST in self.variables["params"]:
            return self._compute_split_layers(hidden, per_layer, common_arguments, first)
        # The gradient of the stack goes backward through the layers as one carry, into which each layer writes its row.
        # So the loop can end before the last layer without a copy of a slice of the stack or of its gradient.
        stack, gradient = jax.lax.stop_gradient(self.variables["params"]), _gradient(self.variables["params"])

        def compute(hidden: jax.Array, row: Tree, inputs: Tree, first: int | None) -> tuple[jax.Array, Tree]:
            index, per_layer, rngs = inputs
            params = _read_layer(stack, row, index)
            if self.compute.gatherer is not None:
                params = self.compute.gatherer.gather_layer(params)
            params = self._without_other_adapters(params, index)
            return self._apply(params, rngs, hidden, per_layer, common_arguments, first)

        def layer(carry: Tree, inputs: Tree, first: int | None = None) -> tuple[Tree, Tree]:
            hidden, gradient = carry
            row, gradient = _open_row(gradient, inputs[0])
            run_layer = self._with_recomputation(partial(compute, first=first), in_loop=first is None)
            hidden, states = run_layer(hidden, row, inputs)
            return (hidden, gradient), states

        inputs = jnp.arange(self.length), per_layer, self._keys("dropout")
        carry, states = (hidden, gradient), None
        loop_length = self.length if first is None else self.length - 1
        if loop_length:
            loop = _one_by_one if self.compute.unrolled else jax.lax.scan
            carry, states = loop(layer, carry, jax.tree.map(lambda x: x[:loop_length], inputs))
        if first is None:
            return carry[0], jax.tree.map(lambda x: x[:-1], states)
        (hidden, _), _ = layer(carry, jax.tree.map(lambda x: x[-1], inputs), first)
        return hidden, states

    def _compute_split_layers(
        self, hidden: jax.Array, per_layer: Tree, common_arguments: tuple[Any, ...], first: int | None
    ) -> tuple[jax.Array, Tree]:
        """Return the result of `__call__` for parameters of `split_layers`, without a loop or a copy of a layer."""
        inputs, states = (per_layer, self._keys("dropout")), []
        for index in range(self.length):
            params = self.variables["params"][str(index)]
            if self.compute.gatherer is not None:
                params = self.compute.gatherer.gather_layer(params)
            constants, rngs = jax.tree.map(itemgetter(index), inputs)
            last = first if index == self.length - 1 else None
            hidden, state = self._apply(params, rngs, hidden, constants, common_arguments, last)
            states.append(state)
        below = states if first is None else states[:-1]
        stack = jax.tree.map(lambda *layers: jnp.stack(layers), *below) if below else None
        return hidden, stack if first is not None else jax.tree.map(lambda x: x[:-1], stack)

    def _without_other_adapters(self, params: Tree, index: jax.Array) -> Tree:
        """Return a layer's parameters. If its adapters are not used, they become 0, and so do their gradients."""
        adapters = self.compute.adapters
        if adapters is None or len(adapters.numbers) == self.length:
            return params
        counts = jnp.isin(index + 1, jnp.array(adapters.numbers))
        return map_with_names(lambda name, x: x * counts if name.endswith(("lora_a", "lora_b")) else x, params)

    def _with_recomputation(self, function: Callable[..., Any], in_loop: bool) -> Callable[..., Any]:
        """Return the function with the recompute policy. It never saves gathered parameters, which it reads itself."""
        names = RECOMPUTE[self.compute.recompute]
        if names is None:
            return function
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        return jax.checkpoint(function, prevent_cse=not in_loop, policy=policy)

    def _apply(
        self, params: Tree, rngs: Tree, hidden: jax.Array, per_layer: Tree, common_arguments: Tree, first: int | None
    ) -> tuple[jax.Array, Tree]:
        arguments = common_arguments if per_layer is None else (per_layer, *common_arguments)
        last = {} if first is None else {"first": first}
        return self.layer(parent=None).apply({"params": params}, hidden, *arguments, rngs=rngs, **last)

    def _keys(self, name: str) -> dict[str, jax.Array]:
        """Return {name: random key of each layer}, or {} without random keys of this name."""
        return {name: jax.random.split(self.make_rng(name), self.length)} if self.has_rng(name) else {}

    def _initialize(
        self, hidden: jax.Array, per_layer: Tree, common_arguments: Tree, first: int | None
    ) -> tuple[jax.Array, Tree]:
        """Make the parameters, and return arrays with the shapes of the result of `__call__`. Their values are not
        used, because every layer gets the same input."""
        row = jax.tree.map(lambda x: x[0], per_layer)
        arguments = common_arguments if per_layer is None else (row, *common_arguments)
        layers = jax.vmap(lambda rngs: self.layer(parent=None).init_with_output(rngs, hidden, *arguments))
        (outputs, states), variables = layers(self._keys("params") | self._keys("dropout"))
        for name, value in variables["params"].items():
            self.put_variable("params", name, value)
        return outputs[0][:, :first], jax.tree.map(lambda x: x[:-1], states)


def _one_by_one(layer: Callable[[Tree, Tree], tuple[Tree, Tree]], carry: Tree, inputs: Tree) -> tuple[Tree, Tree]:
    """Return the result of `jax.lax.scan`, computed without a loop."""
    layer_states = []
    for index in range(len(jax.tree.leaves(inputs)[0])):
        carry, states = layer(carry, jax.tree.map(itemgetter(index), inputs))
        layer_states.append(states)
    return carry, jax.tree.map(lambda *layers: jnp.stack(layers), *layer_states)


def split_layers(params: Tree) -> Tree:
    """Return parameters in which the layers of every stack are separate arrays. A `Stack` computes them without a loop.

    The loop copies the parameters of each layer. For one text of 8 tokens, BERT-base takes 39 ms without the copies and
    57 with them, on a CPU with two cores (python bench/alternatives.py). Without the loop, compile time grows with
    depth. This is for inference: parameters are stored and trained as a stack.
    """
    if not isinstance(params, dict):
        return params
    split = {}
    for name, subtree in params.items():
        if re.search(LAYER_PATH, f"{name}/"):
            depth = len(jax.tree.leaves(subtree)[0])
            split[name] = {str(index): jax.tree.map(itemgetter(index), subtree) for index in range(depth)}
        else:
            split[name] = split_layers(subtree)
    return split


@jax.custom_vjp
def _gradient(stack: Tree) -> Tree:
    """Return the carry that collects the gradients of all layers. In the forward pass, it consists of zeros,
    which are not read."""
    return jax.tree.map(jnp.zeros_like, stack)


@jax.custom_vjp
def _open_row(gradient: Tree, index: jax.Array) -> tuple[Tree, Tree]:
    """Return a layer's row and the carry. Backward, the gradient of the row is written into the gradient of the
    carry."""
    return jax.tree.map(lambda x: jnp.zeros_like(x[0]), gradient), gradient


@jax.custom_vjp
def _read_layer(stack: Tree, row: Tree, index: jax.Array) -> Tree:
    """Return the parameters of a layer. Backward, their gradient goes to `row`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stack)


def _write_row(index: jax.Array, gradients: tuple[Tree, Tree]) -> tuple[Tree, None]:
    row, gradient = gradients
    write = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda rows, new_row: write(rows, new_row, index, 0), gradient, row), None


_gradient.defvjp(lambda stack: (_gradient(stack), None), lambda _, g: (g,))
_open_row.defvjp(lambda gradient, index: (_open_row(gradient, index), index), _write_row)
_read_layer.defvjp(lambda stack, row, index: (_read_layer(stack, row, index), None), lambda _, g: (None, g, None))
