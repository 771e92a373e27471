"""FlashAttention (Dao et al. 2022) for TPUs: scores and weights of attention never leave the on-chip memory.

A block of queries attends to all keys at once, so nothing is carried from block to block. The backward pass computes
the weights again from queries and keys. Results equal `attention.attend` up to rounding; dropout masks are identical.
In the program of a v5e for 16 texts of 512 tokens, attention and its gradient read and write 403 MB instead of 1,969,
and need no temporary memory instead of 384 MiB (docs/scale.md; compiled by tests/plan/kernels_test.py).
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

from jaxret.models.encoders.layers import MASKED_LOGIT
from jaxret.models.encoders.window import WindowMask

LANES = 128  # numbers in a row of a TPU's registers
QUERY_BLOCK = 256  # largest number of queries in a block
BLOCK_SCORES = 2**18  # largest number of scores of a head in a block, unless the block has only 64 queries


class Kernel(NamedTuple):
    """Static arguments of a kernel call."""

    heads: int  # heads of the queries
    heads_per_key: int  # query heads that one head of the keys serves
    queries: int  # queries of a text, without padding
    rate: float  # dropout rate of the weights
    interpret: bool  # whether XLA runs the kernel, which works on any device


def flash_attention(
    query: Float[jax.Array, "B Q heads width"],
    key: Float[jax.Array, "B T kv_heads width"],
    value: Float[jax.Array, "B T kv_heads width"],
    mask: Bool[jax.Array, "B T"] | WindowMask,
    rate: float = 0.0,
    keys: Int[jax.Array, "B 2"] | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "B Q heads width"]:
    """Return softmax(query·key) value. The softmax is computed in float32.

    Args:
        query: queries, already scaled.
        key, value: keys and values of the tokens to attend to. Each of their heads serves heads / kv_heads consecutive
          query heads.
        mask: keys to attend to, or a window around each query.
        rate: dropout rate of the weights.
        keys: threefry key of each text as int32, for the masks that jax.random.bernoulli draws; None: no dropout.
        interpret: whether XLA runs the kernel, which works on any device.
    """
    rows, queries, heads, _ = query.shape
    padding = -queries % 64 if queries > QUERY_BLOCK else 0  # for blocks of equal size
    query = jnp.pad(query, ((0, 0), (0, padding), (0, 0), (0, 0)))
    flat = (x.reshape(*x.shape[:2], -1) for x in (query, key, value))
    scalars = (jnp.zeros((rows, 2), jnp.int32) if keys is None else keys).reshape(-1)
    positions: tuple[jax.Array, ...] = ()
    if isinstance(mask, WindowMask):
        scalars = jnp.concatenate([scalars, jnp.stack([mask.backward, mask.forward])])
        positions = jnp.pad(mask.positions, (0, padding))[:, None], mask.positions[None]
        mask = mask.keys
    kernel = Kernel(heads, heads // key.shape[2], queries, rate, interpret)
    context = _attend(kernel, *flat, (mask[:, None].astype(jnp.int32), *positions), scalars)
    return context[:, :queries].reshape(rows, queries, heads, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel: Kernel, query: Any, key: Any, value: Any, masks: Any, scalars: Any) -> jax.Array:
    return _call(kernel, _forward_kernel, [query], (query, key, value), masks, scalars)[0]


def _forward(kernel: Kernel, *inputs: Any) -> tuple[jax.Array, Any]:
    return _attend(kernel, *inputs), inputs


def _backward(kernel: Kernel, inputs: Any, gradient: jax.Array) -> tuple[Any, ...]:
    query, key, value, masks, scalars = inputs
    outputs = _call(kernel, _backward_kernel, [query, key, value], (query, key, value, gradient), masks, scalars)
    return (*outputs, None, None)


_attend.defvjp(_forward, _backward)


def heads_at_a_time(heads: int, width: int) -> int:
    """Return the smallest number of heads that fills whole registers, or all heads if no number does."""
    divisors = (n for n in range(1, heads) if heads % n == 0 and n * width % LANES == 0)
    return next(divisors, heads)


def block_rows(queries: int, keys: int) -> int:
    """Return the number of queries in a block: all, or the largest divisor from 64 to QUERY_BLOCK that gives at most
    BLOCK_SCORES scores."""
    if queries <= QUERY_BLOCK:
        return queries
    sizes = (n for n in range(64, QUERY_BLOCK + 1, 16) if queries % n == 0 and (n == 64 or n * keys <= BLOCK_SCORES))
    return max(sizes, default=64)


def _call(kernel: Kernel, function: Any, outputs: list[Any], inputs: tuple[Any, ...], masks: Any, scalars: Any) -> Any:
    """Call a kernel for every text, group of heads, and block of queries.

    The first input, the first output and the fourth input have the shape of the queries. The other arrays have the
    shape of the keys, and the gradients among them are summed over the blocks.

    Args:
        outputs: arrays with the shapes of the outputs.
        inputs: query, key, value and, backward, the gradient of the output.
        masks: real keys [B,1,T] and, with a window, positions of queries [Q,1] and of keys [1,T].
        scalars: random key of each text, as two numbers, then the two bounds of the window.
    """
    (rows, queries, hidden), length = inputs[0].shape, inputs[1].shape[1]  # `queries` counts padding, too
    width = hidden // kernel.heads
    group = heads_at_a_time(kernel.heads // kernel.heads_per_key, width)  # heads of keys
    block = block_rows(queries, length)
    of_queries = pl.BlockSpec(
        (1, block, group * kernel.heads_per_key * width), lambda text, head, part: (text, part, head)
    )
    of_keys = pl.BlockSpec((1, length, group * width), lambda text, head, part: (text, 0, head))
    query_and_key_specs = [of_queries, of_keys, of_keys, of_queries]
    of_masks = [
        pl.BlockSpec((1, 1, length), lambda text, head, part: (text, 0, 0)),
        pl.BlockSpec((block, 1), lambda text, head, part: (part, 0)),
        pl.BlockSpec((1, length), lambda text, head, part: (0, 0)),
    ]
    total = pltpu.VMEM((length, group * width), jnp.float32)
    return pl.pallas_call(
        partial(function, kernel=kernel, group=group),
        grid=(rows, kernel.heads // kernel.heads_per_key // group, queries // block),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *of_masks[: len(masks)],
            *query_and_key_specs[: len(inputs)],
        ],
        out_specs=query_and_key_specs[: len(outputs)],
        out_shape=[jax.eval_shape(lambda x: x, x) for x in outputs],
        scratch_shapes=[total] * (len(outputs) - 1),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(inputs, outputs),
        interpret=kernel.interpret,
        name="flash_attention" if len(outputs) == 1 else "flash_attention_backward",
    )(scalars, *masks, *inputs)


def _cost(inputs: tuple[Any, ...], outputs: list[Any]) -> pl.CostEstimate:
    """Return the estimated cost of a kernel, which XLA cannot analyse: two products forward, five backward."""
    (rows, queries, hidden), length = inputs[0].shape, inputs[1].shape[1]
    products, bytes_of = 2 if len(outputs) == 1 else 5, lambda x: x.size * x.dtype.itemsize
    return pl.CostEstimate(
        flops=products * 2 * rows * queries * length * hidden,
        transcendentals=0,
        bytes_accessed=sum(map(bytes_of, (*inputs, *outputs))),
    )


def _forward_kernel(*refs: Any, kernel: Kernel, group: int) -> None:
    scalars, *masks, query, key, value, out = refs
    block = _Block(scalars, masks, query, key, kernel, group)
    for columns, key_columns, head in block.heads:
        weights, dropout = block.weights(columns, key_columns, head)
        context = block.product(block.drop(weights, dropout), value[0, :, key_columns], (1, 0))
        out[0, :, columns] = context.astype(out.dtype)


def _backward_kernel(*refs: Any, kernel: Kernel, group: int) -> None:
    *inputs, query_gradient, key_gradient, value_gradient, key_total, value_total = refs
    scalars, *masks, query, key, value, gradient = inputs
    block = _Block(scalars, masks, query, key, kernel, group)

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        key_total[...] = jnp.zeros_like(key_total)
        value_total[...] = jnp.zeros_like(value_total)

    for columns, key_columns, head in block.heads:
        weights, dropout = block.weights(columns, key_columns, head)
        value_total[:, key_columns] += block.product(block.drop(weights, dropout), gradient[0, :, columns], (0, 0))
        of_weights = block.drop(block.product(gradient[0, :, columns], value[0, :, key_columns], (1, 1)), dropout)
        of_scores = weights * (of_weights - jnp.sum(of_weights * weights, axis=1, keepdims=True))
        of_scores = jnp.where(block.mask, of_scores, 0.0)
        of_query = block.product(of_scores, key[0, :, key_columns], (1, 0))
        query_gradient[0, :, columns] = of_query.astype(query_gradient.dtype)
        key_total[:, key_columns] += block.product(of_scores, query[0, :, columns], (0, 0))

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        key_gradient[0] = key_total[...].astype(key_gradient.dtype)
        value_gradient[0] = value_total[...].astype(value_gradient.dtype)


class _Block:
    """The data of one step of the grid: a group of heads, a block of queries of a text, and all keys of the text."""

    def __init__(self, scalars: Any, masks: list[Any], query: Any, key: Any, kernel: Kernel, group: int) -> None:
        self._scalars, self._query, self._key, self._kernel = scalars, query, key, kernel
        self.shape = query.shape[1], key.shape[1]  # (queries of the block, keys)
        real, *positions = masks
        self.mask = jnp.broadcast_to(real[0], self.shape) != 0
        if positions:
            distance = positions[0][...] - positions[1][...]  # positions from a key to a query after it
            backward, forward = (scalars[scalars.shape[0] - n] for n in (2, 1))
            self.mask &= (distance <= backward) & (-distance <= forward)
        width = key.shape[2] // group
        first = pl.program_id(1) * group * kernel.heads_per_key
        # For each head of the queries: columns of its queries, columns of its keys, its index in the layer.
        self.heads = [
            (_columns(n, width), _columns(n // kernel.heads_per_key, width), first + n)
            for n in range(group * kernel.heads_per_key)
        ]

    def product(self, a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
        """Return the product of two matrices over one axis of each, with the rounding of `layers.product`."""
        dtype = self._query.dtype
        a, b = a.astype(dtype), b.astype(dtype)
        exact = dtype == jnp.float32 or self._kernel.interpret  # XLA on CPUs cannot multiply bfloat16 this way
        if exact:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        dimensions = (((axes[0],), (axes[1],)), ((), ()))
        precision = jax.lax.Precision.HIGHEST if exact else None
        return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)

    def weights(self, columns: slice, key_columns: slice, head: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the attention weights of a head, and their dropout mask; None: no dropout."""
        scores = jnp.where(
            self.mask, self.product(self._query[0, :, columns], self._key[0, :, key_columns], (1, 1)), MASKED_LOGIT
        )
        powers = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
        return powers / jnp.sum(powers, axis=1, keepdims=True), self._dropout(head) if self._kernel.rate else None

    def drop(self, x: jax.Array, dropout: jax.Array | None) -> jax.Array:
        return x if dropout is None else jnp.where(dropout, x / (1 - self._kernel.rate), 0.0)

    def _dropout(self, head: jax.Array) -> jax.Array:
        """Return this block's part of the mask that JAX would draw for all heads, queries and keys of the text."""
        first = head * self._kernel.queries + pl.program_id(2) * self.shape[0]
        row, column = (jax.lax.broadcasted_iota(jnp.int32, self.shape, axis) for axis in (0, 1))
        index = (first + row) * self.shape[1] + column
        text = 2 * pl.program_id(0)
        below = math.ceil(np.float32(1 - self._kernel.rate) * 2.0**23)  # uniform numbers are multiples of 2^-23
        return jax.lax.shift_right_logical(threefry(self._scalars[text], self._scalars[text + 1], index), 9) < below


def _columns(head: int, width: int) -> slice:
    return slice(head * width, (head + 1) * width)


def threefry(first: jax.Array, second: jax.Array, count: Int[jax.Array, "*shape"]) -> Int[jax.Array, "*shape"]:
    """Return the 32 random bits of threefry (Salmon et al. 2011), JAX's default generator, at each index of an array.

    Args:
        first, second: random key, as two int32.
        count: indices.
    """
    keys = first, second, first ^ second ^ np.int32(0x1BD11BDA)
    a, b = jnp.full_like(count, keys[0]), count + keys[1]
    for round in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[round % 2]:
            a = a + b
            b = a ^ ((b << distance) | jax.lax.shift_right_logical(b, 32 - distance))
        a, b = a + keys[(round + 1) % 3], b + (keys[(round + 2) % 3] + np.int32(round + 1))
    return a ^ b
