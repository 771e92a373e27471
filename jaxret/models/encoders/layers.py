"""What every layer is made of, and how it is computed: products, dense layers, dropout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry2x32_p
from jaxtyping import Bool, Float, Int

from jaxret.distributed import Reader
from jaxret.models.encoders.layout import Rows, Spots
from jaxret.types import Tokens

MASKED = -1e30  # a score that softmax turns into exactly 0, and that stays finite in a row that sees no key

# What the backward pass computes again -> the names that are kept instead; None: all is kept.
RECOMPUTE: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "cheap": ("product", "mixed"),  # activations, attention's scores and weights, norms, dropout
    "layer": (),
}


@dataclass(frozen=True)
class Compute:
    """How an encoder and its head are computed. Nothing here changes what is computed, but for rounding.

    dtype: of the operands of products, and of what lies between them; parameters, sums, norms and the stream of hidden
    states are float32. recompute: what the backward pass computes again, of RECOMPUTE. read: how the parameters of a
    layer are read where devices hold parts of them (`jax.shard_map`); None: as they are. attention: by what it is
    computed, of `fused.PLATFORMS`. interpret: kernels are run by XLA, so that tests can run them on a CPU.
    """

    dtype: Any = jnp.float32
    recompute: str = "none"
    read: Reader | None = None
    attention: str = "plain"
    interpret: bool = False


def product(spec: str, a: jax.Array, b: jax.Array, dtype: Any, out: Any) -> jax.Array:
    """einsum of `a` and `b`, rounded to `dtype`, added up in float32 and given as `out`. The gradients too are products
    of what is rounded to `dtype`, added up in float32, and have the types of `a` and `b`: what is subtracted later, as
    in a softmax, or added up over a batch, is not rounded before. float32 really is float32 (TPUs and newer GPUs would
    round the operands)."""
    return _product(spec, dtype, out, (a.dtype, b.dtype), a, b)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _product(spec: str, dtype: Any, out: Any, types: tuple[Any, Any], a: jax.Array, b: jax.Array) -> jax.Array:
    return _einsum(spec, a, b, dtype).astype(out)


def _einsum(spec: str, a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    a, b = a.astype(dtype), b.astype(dtype)

    def exact(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

    def fast(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

    if dtype == jnp.float32:
        return exact(a, b)
    return jax.lax.platform_dependent(a, b, cpu=exact, default=fast)  # XLA's CPU has no such product of bfloat16s


def _forward(spec: str, dtype: Any, out: Any, types: Any, a: jax.Array, b: jax.Array) -> tuple[jax.Array, Any]:
    a, b = a.astype(dtype), b.astype(dtype)
    return _einsum(spec, a, b, dtype).astype(out), (a, b)


def _backward(spec: str, dtype: Any, out: Any, types: Any, kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    (a, b), (left, _, right_and_result) = kept, spec.partition(",")
    right, _, result = right_and_result.partition("->")
    of_a = _einsum(f"{result},{right}->{left}", g, b, dtype)
    return of_a.astype(types[0]), _einsum(f"{left},{result}->{right}", a, g, dtype).astype(types[1])


_product.defvjp(_forward, _backward)


class Dense(nn.Module):
    """x W + b, in the compute type; b is added, and its gradient summed, in float32."""

    features: int
    compute: Compute
    kernel_init: Any
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*batch I"]) -> Float[jax.Array, "*batch O"]:
        dtype, rows = self.compute.dtype, "abc"[: x.ndim - 1]
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        y = checkpoint_name(product(f"{rows}i,io->{rows}o", x.astype(dtype), kernel, dtype, dtype), "product")
        if self.use_bias:
            y = y.astype(jnp.float32) + self.param("bias", nn.initializers.zeros, (self.features,))
        return y.astype(dtype)


def dropout_rows(tokens: Tokens, train: bool) -> Int[jax.Array, " B"] | None:
    """What the masks of dropout follow, of texts that are padded; None if this is not training."""
    if not train:
        return None
    return jnp.arange(len(tokens.ids)) if tokens.rows is None else tokens.rows


class Dropout(nn.Module):
    """Sets numbers to 0 at `rate` and divides the others by 1 - `rate`. Which ones depends on the text's row in the
    whole batch, not on the device or the chunk that holds it."""

    rate: float

    @nn.compact
    def __call__(self, x: Float[jax.Array, "B ..."], rows: Rows) -> Float[jax.Array, "B ..."]:
        if rows is None or not self.rate:
            return x
        keep = 1 - self.rate
        keys = self.keys(rows.rows if isinstance(rows, Spots) else rows)
        if isinstance(rows, Spots):
            kept = bernoulli_at(keys, rows, keep, x.shape)
        else:
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, keep, x.shape[1:]))(keys)
        return jnp.where(kept, x / keep, 0)

    def keys(self, rows: Int[jax.Array, " B"]) -> jax.Array:
        """A key for each text, other ones at every call."""
        key = self.make_rng("dropout")
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def bernoulli_at(keys: jax.Array, spots: Spots, keep: float, shape: tuple[int, ...]) -> Bool[jax.Array, ...]:
    """What `Dropout` draws for the same tokens when each text has a row of its own, for packed rows: states [R,W,H],
    or weights of attention [R,heads,W,W]. keys: of the texts.

    The i-th number of jax.random.bernoulli(key, keep, shape) is a hash of the key and i, whatever the shape is (JAX's
    default random numbers, "threefry", say so: jax_threefry_partitionable). i counts as in the padded array of a text.
    """
    words = jax.random.key_data(keys)[spots.places.text]  # [R,W,2]
    slot = spots.places.slot.astype(jnp.uint32)
    if len(shape) == 3:
        words = words[:, :, None]
        place = slot[:, :, None] * shape[2] + jnp.arange(shape[2], dtype=jnp.uint32)
    else:
        words = words[:, None, :, None]
        heads = jnp.arange(shape[1], dtype=jnp.uint32)[:, None, None]
        place = (heads * spots.asked + slot[:, None, :, None]) * spots.length + slot[:, None, None, :]
    first, second, high, low = jnp.broadcast_arrays(words[..., 0], words[..., 1], jnp.uint32(0), place)
    bits = jnp.bitwise_xor(*threefry2x32_p.bind(first, second, high, low))
    return (bits >> 9).astype(jnp.float32) * 2.0**-23 < keep  # 23 bits are a float32 in [0, 1)


class Drop(NamedTuple):
    """`Dropout` of the texts of these rows; masks differ from call to call."""

    module: Any
    rows: Any

    def __call__(self, x: Float[jax.Array, "B ..."]) -> Float[jax.Array, "B ..."]:
        return self.module(x, self.rows)

    @property
    def rate(self) -> float:
        return 0.0 if self.rows is None else self.module.rate

    def keys(self) -> jax.Array:
        """Of the masks of a call, one for each text."""
        return self.module.keys(self.rows)


def dropout(rate: float, rows: Rows) -> Drop:
    """Makes a module: to be called where those are made."""
    return Drop(Dropout(rate), rows)
