"""Parts of every layer: products, dense layers, dropout; and the options of their computation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry2x32_p
from jaxtyping import Bool, Float

from jaxret.models.encoders.layout import TokenLayout
from jaxret.parallel.mesh import TENSOR, ParameterGatherer

MASKED_LOGIT = -1e30  # softmax makes exactly 0 of it, and no NaN of a row of nothing else

# Recompute policy -> names of activations to save for the backward pass; None saves all.
RECOMPUTE: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "cheap": ("product", "mixed"),  # activations, attention's scores and weights, norms, dropout
    "layer": (),
}


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters of dense layers, during training (lora.py)."""

    rank: int  # of the adapters
    scaling: float  # factor of their product
    dropout: float  # rate at which their input is dropped
    layers: tuple[str, ...]  # paths of the dense layers that have one, relative to a layer of the encoder
    # of the encoder's layers, from 1, whose adapters count. Those of others are there, in the same arrays, and add
    # nothing.
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Compute:
    """Options of computing an encoder and its head. All but `adapters` change results by rounding only."""

    # Of the operands of products and of activations. Parameters, sums, norms and hidden states are float32.
    dtype: Any = jnp.float32
    recompute: str = "none"  # a policy of RECOMPUTE
    # Gathers a layer's parameters inside `jax.shard_map`; None: they are not split.
    gatherer: ParameterGatherer | None = None
    attention: str = "plain"  # a key of fused.ATTENTION_PLATFORMS
    interpret: bool = False  # XLA runs kernels, so that tests can run them on a CPU
    adapters: Adapters | None = None  # None: dense layers have none
    # Layers are trained without a loop: on a CPU, a step takes an eighth less time, and compile time grows with depth.
    # Only without recomputation: outside a loop, XLA on a CPU would keep what is to be recomputed.
    unrolled: bool = False

    @property
    def tensor(self) -> int:
        """Return how many devices share each layer's products, inside `jax.shard_map`."""
        return self.gatherer.tensor if self.gatherer else 1

    def enter_parts(self, x: jax.Array) -> jax.Array:
        """Return x, which each of these devices has whole, for products with their parts of kernels: its gradient is
        summed over them."""
        return jax.lax.pcast(x, TENSOR, to="varying") if self.tensor > 1 else x


def product(spec: str, a: jax.Array, b: jax.Array, dtype: Any, out: Any) -> jax.Array:
    """Return the einsum of `a` and `b` with operands in `dtype` and sums in float32.

    Gradients are products of the same kind. They have the types of `a` and `b`, so that gradients that are subtracted
    (in a softmax) or summed over a batch are not rounded before. float32 is exact: TPUs and newer GPUs would round the
    operands by default.

    Args:
        spec: of the einsum.
        dtype: the operands are rounded to it.
        out: dtype of the result.
    """
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
    return jax.lax.platform_dependent(a, b, cpu=exact, default=fast)  # XLA on CPUs lacks this product of bfloat16


def _forward(spec: str, dtype: Any, out: Any, types: Any, a: jax.Array, b: jax.Array) -> tuple[jax.Array, Any]:
    a, b = a.astype(dtype), b.astype(dtype)
    return _einsum(spec, a, b, dtype).astype(out), (a, b)


def _backward(
    spec: str, dtype: Any, out: Any, types: Any, residuals: Any, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (a, b), (left, _, right_and_result) = residuals, spec.partition(",")
    right, _, result = right_and_result.partition("->")
    of_a = _einsum(f"{result},{right}->{left}", gradient, b, dtype)
    of_b = _gradient_of_right(left, result, right, a, gradient, dtype)
    return of_a.astype(types[0]), of_b.astype(types[1])


def _gradient_of_right(left: str, result: str, right: str, a: jax.Array, gradient: jax.Array, dtype: Any) -> jax.Array:
    """Return the gradient of the right operand of a product: the einsum "left,result->right" of a and the gradient of
    the result.

    It sums over rows of both operands. XLA on a CPU then copies its left operand, transposed; here that is the smaller
    of the two.
    """

    def plain(a: jax.Array, gradient: jax.Array) -> jax.Array:
        return _einsum(f"{left},{result}->{right}", a, gradient, dtype)

    def small_first(a: jax.Array, gradient: jax.Array) -> jax.Array:
        (first, x), (second, y) = sorted(((left, a), (result, gradient)), key=lambda operand: operand[1].size)
        batch = "".join(letter for letter in right if letter in left and letter in result)
        free = [letter for names in (first, second) for letter in names if letter in right and letter not in batch]
        order = batch + "".join(free)
        product = _einsum(f"{first},{second}->{order}", x, y, dtype)
        if order == right:
            return product
        # Without the barrier, XLA would swap the operands again and transpose nothing.
        return jnp.einsum(f"{order}->{right}", jax.lax.optimization_barrier(product))

    return jax.lax.platform_dependent(a, gradient, cpu=small_first, default=plain)


_product.defvjp(_forward, _backward)


class Dense(nn.Module):
    """x W + b in the compute dtype, and what an adapter adds; sums, and the gradient of b, are float32."""

    features: int
    compute: Compute
    kernel_init: Any
    use_bias: bool = True
    layout: TokenLayout | None = None  # of the rows of x, for the dropout of adapters
    # What a device has of the kernel under mesh.tensor: all (""); "columns", and the same ones of y; or "rows", and the
    # same columns of x, and y is a sum over devices.
    part: str = ""

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*batch I"]) -> Float[jax.Array, "*batch O"]:
        dtype, rows = self.compute.dtype, "abc"[: x.ndim - 1]
        features = self.features // self.compute.tensor if self.part == "columns" else self.features
        summed = self.part == "rows" and self.compute.tensor > 1
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], features))
        y = product(f"{rows}i,io->{rows}o", x.astype(dtype), kernel, dtype, jnp.float32 if summed else dtype)
        adapters = self.compute.adapters
        if has_adapter := adapters is not None and "/".join(self.path) in adapters.layers:
            update = self.low_rank(x, adapters, features)
        if summed:
            y = jax.lax.psum(y + update if has_adapter else y, TENSOR).astype(dtype)
        y = checkpoint_name(y, "product")
        if self.use_bias:
            y = y.astype(jnp.float32) + self.param("bias", nn.initializers.zeros, (features,))
        if has_adapter and not summed:
            y = y.astype(jnp.float32) + update
        return y.astype(dtype)

    def low_rank(
        self, x: Float[jax.Array, "*batch I"], adapters: Adapters, features: int
    ) -> Float[jax.Array, "*batch O"]:
        """Return what the adapter of this layer adds to these features, float32."""
        dtype, rows = self.compute.dtype, "abc"[: x.ndim - 1]
        if adapters.dropout:
            assert self.layout is not None, f"{'/'.join(self.path)} drops numbers of its input: it needs the layout"
            parts = self.compute.tensor if self.part == "rows" else 1
            x = Dropout(adapters.dropout, self.layout, parts)(x)
        uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # +-1/sqrt(in), as PEFT's
        lora_a = self.param("lora_a", uniform, (x.shape[-1], adapters.rank))
        lora_b = self.param("lora_b", nn.initializers.zeros, (adapters.rank, features))
        if self.part == "columns":
            lora_a = self.compute.enter_parts(lora_a)
        elif self.part == "rows":
            lora_b = self.compute.enter_parts(lora_b)
        narrow = product(f"{rows}i,ir->{rows}r", x.astype(dtype), lora_a, dtype, dtype)
        return adapters.scaling * product(f"{rows}r,ro->{rows}o", narrow, lora_b, dtype, jnp.float32)


def scaled_norm(
    hidden: Float[jax.Array, "*batch H"], scale: Float[jax.Array, " H"], eps: float, centred: bool = False
) -> Float[jax.Array, "*batch H"]:
    """Return x / rms(x) * scale, computed in float32.

    Args:
        hidden: x.
        scale: learned.
        eps: added to the mean square.
        centred: subtract the mean first, which makes it layer norm without a bias.
    """
    wide = hidden.astype(jnp.float32)
    if centred:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    states = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (states * scale).astype(hidden.dtype)


class ScaledNorm(nn.Module):
    """`scaled_norm` with a learned scale, or with the sum of it and `offset`."""

    eps: float
    centred: bool = False
    offset: float = 0.0

    @nn.compact
    def __call__(self, hidden: Float[jax.Array, "*batch H"]) -> Float[jax.Array, "*batch H"]:
        scale = self.param("scale", nn.initializers.constant(1.0 - self.offset), (hidden.shape[-1],))
        return scaled_norm(hidden, self.offset + scale if self.offset else scale, self.eps, self.centred)


class Dropout(nn.Module):
    """Set numbers to 0 at `rate` and divide the others by 1 - `rate`; every call draws another mask. No-op outside of
    training.

    A mask depends on the text's row in the whole batch, which the layout has, not on the device or the chunk that
    holds it, nor on packing.
    """

    rate: float
    layout: TokenLayout
    parts: int = 1  # devices along "tensor" that have a part of x's last axis each

    @property
    def training(self) -> bool:
        """Return whether the batch is one of training, also where the rate is 0."""
        return self.layout.batch_rows is not None

    @property
    def active(self) -> bool:
        """Return whether numbers are dropped. Initializing drops none: no parameter depends on it, and each start of a
        run traces it."""
        return self.training and self.rate > 0 and not self.is_initializing()

    @nn.compact
    def __call__(self, x: Float[jax.Array, "R ..."]) -> Float[jax.Array, "R ..."]:
        if not self.active:
            return x
        keep, keys = 1 - self.rate, self.keys()
        whole = (*x.shape[:-1], x.shape[-1] * self.parts)
        if self.layout.packing is None:
            keep_mask = jax.vmap(lambda key: jax.random.bernoulli(key, keep, whole[1:]))(keys)
        else:
            keep_mask = packed_bernoulli(keys, self.layout, keep, whole)
        if self.parts > 1:
            own = jax.lax.axis_index(TENSOR) * x.shape[-1]
            keep_mask = jax.lax.dynamic_slice_in_dim(keep_mask, own, x.shape[-1], axis=-1)
        return jnp.where(keep_mask, x / keep, 0)

    def keys(self) -> jax.Array:
        """Return a key for each text, other ones at every call."""
        key = self.make_rng("dropout")
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(self.layout.batch_rows)


def packed_bernoulli(
    keys: jax.Array, layout: TokenLayout, probability: float, shape: tuple[int, ...]
) -> Bool[jax.Array, ...]:
    """Return the numbers of jax.random.bernoulli for padded texts, at the positions of packed ones.

    The i-th number of jax.random.bernoulli(key, probability, shape) is a hash of the key and i, whatever the shape is
    (threefry, JAX's default generator, with its default jax_threefry_partitionable). i counts as in the padded array.

    Args:
        keys: of the texts [N].
        layout: packed.
        probability: of True.
        shape: of states [R,W,H], or of attention weights [R,heads,W,W].
    """
    assert layout.packing is not None
    words = jax.random.key_data(keys)[layout.packing.text]  # [R,W,2]
    token, length = layout.packing.token.astype(jnp.uint32), layout.mask.shape[1]
    if len(shape) == 3:
        words = words[:, :, None]
        index = token[:, :, None] * shape[2] + jnp.arange(shape[2], dtype=jnp.uint32)
    else:
        words = words[:, None, :, None]
        heads = jnp.arange(shape[1], dtype=jnp.uint32)[:, None, None]
        index = (heads * (layout.queries or length) + token[:, None, :, None]) * length + token[:, None, None, :]
    first, second, high, low = jnp.broadcast_arrays(words[..., 0], words[..., 1], jnp.uint32(0), index)
    bits = jnp.bitwise_xor(*threefry2x32_p.bind(first, second, high, low))
    return (bits >> 9).astype(jnp.float32) * 2.0**-23 < probability  # 23 bits are a float32 in [0, 1)
