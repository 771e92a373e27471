"""Attention in one kernel of a TPU: scores and weights of a text never leave the chip's own memory. [Dao et al. 2022]

A block of queries sees all keys at once, so there is nothing to be carried from block to block, and the backward pass
computes its weights again from queries and keys. The numbers are those of `attention.attend`, but for rounding, and so
are the weights that dropout takes away.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Bool, Float, Int

from jaxret.models.encoders.layers import MASKED

LANES = 128  # of a TPU's registers
BLOCK = 256  # queries at a time, at most


class Kernel(NamedTuple):
    """What is known of a call before it is made. heads, queries: all of them; rate: of dropout; interpret: run by XLA,
    on anything."""

    heads: int
    queries: int
    rate: float
    interpret: bool


def flash_attention(
    query: Float[jax.Array, "B Q heads width"],
    key: Float[jax.Array, "B T heads width"],
    value: Float[jax.Array, "B T heads width"],
    mask: Bool[jax.Array, "B T"],
    rate: float = 0.0,
    keys: Int[jax.Array, "B 2"] | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "B Q heads width"]:
    """softmax(query·key) over the keys that `mask` has, in float32, times value. `rate` of the weights are dropped, as
    jax.random.bernoulli does it with `keys`, those of each text (threefry's, as int32)."""
    rows, queries, heads, _ = query.shape
    more = -queries % 64 if queries > BLOCK else 0  # else they may not be cut into equal blocks
    query = jnp.pad(query, ((0, 0), (0, more), (0, 0), (0, 0)))
    flat = (x.reshape(*x.shape[:2], -1) for x in (query, key, value))
    keys = jnp.zeros((rows, 2), jnp.int32) if keys is None else keys
    kernel = Kernel(heads, queries, rate, interpret)
    mixed = _attend(kernel, *flat, mask[:, None].astype(jnp.int32), keys.reshape(-1))
    return mixed[:, :queries].reshape(rows, queries, heads, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel: Kernel, query: Any, key: Any, value: Any, seen: Any, keys: Any) -> jax.Array:
    return _call(kernel, _forward_kernel, [query], (query, key, value), seen, keys)[0]


def _forward(kernel: Kernel, *inputs: Any) -> tuple[jax.Array, Any]:
    return _attend(kernel, *inputs), inputs


def _backward(kernel: Kernel, inputs: Any, g: jax.Array) -> tuple[Any, ...]:
    query, key, value, seen, keys = inputs
    outputs = _call(kernel, _backward_kernel, [query, key, value], (query, key, value, g), seen, keys)
    return (*outputs, None, None)


_attend.defvjp(_forward, _backward)


def heads_at_a_time(heads: int, width: int) -> int:
    """The fewest whose numbers fill whole registers; if there is no such number, all."""
    fitting = (n for n in range(1, heads) if heads % n == 0 and n * width % LANES == 0)
    return next(fitting, heads)


def block_rows(queries: int) -> int:
    """How many queries are taken at a time: all, or the most that divide a multiple of 64."""
    return queries if queries <= BLOCK else max(n for n in range(64, BLOCK + 1, 16) if queries % n == 0)


def _call(kernel: Kernel, function: Any, outputs: list[Any], inputs: tuple[Any, ...], seen: Any, keys: Any) -> Any:
    """The kernel for every text, group of heads, and block of queries. The first input and output, and a fourth input,
    have the queries' shape; the others that of the keys, whose gradients are added up over the blocks."""
    (rows, queries, hidden), length = inputs[0].shape, inputs[1].shape[1]  # queries may be padded
    width = hidden // kernel.heads
    group = heads_at_a_time(kernel.heads, width)
    block = block_rows(queries)
    of_queries = pl.BlockSpec((1, block, group * width), lambda text, head, part: (text, part, head))
    of_keys = pl.BlockSpec((1, length, group * width), lambda text, head, part: (text, 0, head))
    both = [of_queries, of_keys, of_keys, of_queries]
    total = pltpu.VMEM((length, group * width), jnp.float32)
    return pl.pallas_call(
        partial(function, kernel=kernel, group=group),
        grid=(rows, kernel.heads // group, queries // block),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((1, 1, length), lambda text, head, part: (text, 0, 0)),
            *both[: len(inputs)],
        ],
        out_specs=both[: len(outputs)],
        out_shape=[jax.eval_shape(lambda x: x, x) for x in outputs],
        scratch_shapes=[total] * (len(outputs) - 1),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(inputs, outputs),
        interpret=kernel.interpret,
        name="flash_attention" if len(outputs) == 1 else "flash_attention_backward",
    )(keys, seen, *inputs)


def _cost(inputs: tuple[Any, ...], outputs: list[Any]) -> pl.CostEstimate:
    """For XLA, which does not look into a kernel: two products forward, five backward."""
    (rows, queries, hidden), length = inputs[0].shape, inputs[1].shape[1]
    products, bytes_of = 2 if len(outputs) == 1 else 5, lambda x: x.size * x.dtype.itemsize
    return pl.CostEstimate(
        flops=products * 2 * rows * queries * length * hidden,
        transcendentals=0,
        bytes_accessed=sum(map(bytes_of, (*inputs, *outputs))),
    )


def _forward_kernel(keys: Any, seen: Any, query: Any, key: Any, value: Any, out: Any, **known: Any) -> None:
    part = _Part(keys, seen, query, key, **known)
    for own, head in part.heads:
        weights, kept = part.weights(own, head)
        out[0, :, own] = part.product(part.drop(weights, kept), value[0, :, own], (1, 0)).astype(out.dtype)


def _backward_kernel(
    keys: Any,
    seen: Any,
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    of_query: Any,
    of_key: Any,
    of_value: Any,
    key_total: Any,
    value_total: Any,
    **known: Any,
) -> None:
    part = _Part(keys, seen, query, key, **known)

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        key_total[...] = jnp.zeros_like(key_total)
        value_total[...] = jnp.zeros_like(value_total)

    for own, head in part.heads:
        weights, kept = part.weights(own, head)
        value_total[:, own] += part.product(part.drop(weights, kept), g[0, :, own], (0, 0))
        of_weights = part.drop(part.product(g[0, :, own], value[0, :, own], (1, 1)), kept)
        of_scores = weights * (of_weights - jnp.sum(of_weights * weights, axis=1, keepdims=True))
        of_scores = jnp.where(part.seen, of_scores, 0.0)
        of_query[0, :, own] = part.product(of_scores, key[0, :, own], (1, 0)).astype(of_query.dtype)
        key_total[:, own] += part.product(of_scores, query[0, :, own], (0, 0))

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        of_key[0] = key_total[...].astype(of_key.dtype)
        of_value[0] = value_total[...].astype(of_value.dtype)


class _Part:
    """What one step of the grid works on: some heads of some queries of a text, and all its keys."""

    def __init__(self, keys: Any, seen: Any, query: Any, key: Any, kernel: Kernel, group: int) -> None:
        self._keys, self._query, self._key, self._kernel = keys, query, key, kernel
        self.shape = query.shape[1], key.shape[1]  # queries of the block, keys
        self.seen = jnp.broadcast_to(seen[0], self.shape) != 0
        width = query.shape[2] // group
        first = pl.program_id(1) * group
        self.heads = [(slice(n * width, (n + 1) * width), first + n) for n in range(group)]

    def product(self, a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
        """Over an axis of each; rounded to the inputs' type and added up in float32, as in `layers.product`."""
        dtype = self._query.dtype
        a, b = a.astype(dtype), b.astype(dtype)
        exact = dtype == jnp.float32 or self._kernel.interpret  # XLA's CPU has no such product of bfloat16s
        if exact:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        dimensions = (((axes[0],), (axes[1],)), ((), ()))
        precision = jax.lax.Precision.HIGHEST if exact else None
        return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)

    def weights(self, own: slice, head: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The softmax of a head's scores, and which of its weights dropout leaves."""
        scores = jnp.where(self.seen, self.product(self._query[0, :, own], self._key[0, :, own], (1, 1)), MASKED)
        raised = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
        return raised / jnp.sum(raised, axis=1, keepdims=True), self._kept(head) if self._kernel.rate else None

    def drop(self, x: jax.Array, kept: jax.Array | None) -> jax.Array:
        return x if kept is None else jnp.where(kept, x / (1 - self._kernel.rate), 0.0)

    def _kept(self, head: jax.Array) -> jax.Array:
        """Of the numbers that JAX would draw for all heads, queries and keys of the text, those of this part."""
        first = head * self._kernel.queries + pl.program_id(2) * self.shape[0]
        row, column = (jax.lax.broadcasted_iota(jnp.int32, self.shape, axis) for axis in (0, 1))
        place = (first + row) * self.shape[1] + column
        text = 2 * pl.program_id(0)
        below = math.ceil(np.float32(1 - self._kernel.rate) * 2.0**23)  # uniform numbers are multiples of 2^-23
        return jax.lax.shift_right_logical(threefry(self._keys[text], self._keys[text + 1], place), 9) < below


def threefry(first: jax.Array, second: jax.Array, count: Int[jax.Array, "*shape"]) -> Int[jax.Array, "*shape"]:
    """The 32 bits that JAX's default generator draws at each place of an array: of a text's key, as two int32.
    [Salmon et al. 2011]"""
    keys = first, second, first ^ second ^ np.int32(0x1BD11BDA)
    a, b = jnp.full_like(count, keys[0]), count + keys[1]
    for turn in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[turn % 2]:
            a = a + b
            b = a ^ ((b << distance) | jax.lax.shift_right_logical(b, 32 - distance))
        a, b = a + keys[(turn + 1) % 3], b + (keys[(turn + 2) % 3] + np.int32(turn + 1))
    return a ^ b
