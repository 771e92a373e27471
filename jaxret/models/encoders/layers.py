"""Parts of every layer (products, dense layers, norms, dropout), and the options of their computation."""

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

MASKED_LOGIT = -1e30  # softmax turns it into exactly 0, and a row of only this value has no NaN

# Recompute policy -> names of the activations to save for the backward pass; None: all.
RECOMPUTE: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "cheap": ("product", "mixed"),  # recomputed: activation functions, scores and weights of attention, norms, dropout
    "layer": (),
}


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters of dense layers, during training (lora.py)."""

    rank: int  # rank of the product
    scaling: float  # factor of the product
    dropout: float  # dropout rate of the input
    layers: tuple[str, ...]  # paths of the dense layers with an adapter, relative to a layer of the encoder
    # Encoder layers, from 1, whose adapters are used. The arrays have rows for the other layers, too, which add
    # nothing.
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Compute:
    """Options of computing an encoder and its head. All but `adapters` change results by rounding only."""

    # Type of activations and of the operands of products. Parameters, sums, norms and hidden states are float32.
    dtype: Any = jnp.float32
    recompute: str = "none"  # a policy of RECOMPUTE
    # Gathers the parameters of a layer inside `jax.shard_map`; None: parameters are not split.
    gatherer: ParameterGatherer | None = None
    attention: str = "plain"  # a key of fused.ATTENTION_PLATFORMS
    interpret: bool = False  # whether XLA runs kernels, so that tests can use a CPU
    adapters: Adapters | None = None  # None: dense layers have no adapters
    # Whether layers are trained without a loop. On a CPU, a step then takes an eighth less time, but compile time grows
    # with depth. It is off with recomputation, because without a loop, XLA on a CPU keeps the activations that should
    # be recomputed.
    unrolled: bool = False

    @property
    def tensor(self) -> int:
        """Return the number of devices that share each product of a layer, inside `jax.shard_map`."""
        return self.gatherer.tensor if self.gatherer else 1

    def enter_parts(self, x: jax.Array) -> jax.Array:
        """Return x, of which each device has a full copy, for products with each device's part of a kernel. The
        gradient of x is summed over the devices."""
        return jax.lax.pcast(x, TENSOR, to="varying") if self.tensor > 1 else x


def product(spec: str, a: jax.Array, b: jax.Array, dtype: Any, out: Any) -> jax.Array:
    """Return the einsum of `a` and `b` with operands in `dtype` and sums in float32.

    Gradients are products of the same kind. They have the types of `a` and `b`, so that they are not rounded before
    they are subtracted (in a softmax) or summed over a batch. float32 is exact: TPUs and newer GPUs would round the
    operands by default.

    Args:
        spec: subscripts of the einsum.
        a, b: operands.
        dtype: type to which the operands are rounded.
        out: type of the result.
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

    It sums over rows of both operands. XLA on a CPU then makes a transposed copy of the left operand, so here the left
    operand is the smaller one: for 2048 rows, widths of 384 and 1536 and two cores, 23 ms instead of 29 (python
    bench/alternatives.py).
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
    """x W + b in the compute dtype, plus the product of an adapter. Sums and the gradient of b are float32."""

    features: int
    compute: Compute
    kernel_init: Any
    use_bias: bool = True
    # Positions of x, for dropout of adapters. It is passed through the layers, because `Stack` applies a layer to its
    # parameters alone, without variables of the encoder, and because the last layer may have a layout of its own.
    layout: TokenLayout | None = None
    # Which part of the kernel a device holds under mesh.tensor. "": all. "columns": the device computes the same
    # columns of y. "rows": the device has the same columns of x, and y is a sum over devices.
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
        """Return the term that the adapter adds to y, float32."""
        dtype, rows = self.compute.dtype, "abc"[: x.ndim - 1]
        if adapters.dropout:
            assert self.layout is not None, f"{'/'.join(self.path)} has dropout of its input and needs the layout"
            parts = self.compute.tensor if self.part == "rows" else 1
            x = Dropout(adapters.dropout, self.layout, parts)(x)
        uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # within +-1/sqrt(in), as in PEFT
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
        scale: learned scale.
        eps: constant that is added to the mean square.
        centred: whether to subtract the mean first, as in layer norm (without a bias).
    """
    wide = hidden.astype(jnp.float32)
    if centred:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    states = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (states * scale).astype(hidden.dtype)


class ScaledNorm(nn.Module):
    """`scaled_norm` whose scale is `offset` plus a learned parameter."""

    eps: float
    centred: bool = False
    offset: float = 0.0

    @nn.compact
    def __call__(self, hidden: Float[jax.Array, "*batch H"]) -> Float[jax.Array, "*batch H"]:
        scale = self.param("scale", nn.initializers.constant(1.0 - self.offset), (hidden.shape[-1],))
        return scaled_norm(hidden, self.offset + scale if self.offset else scale, self.eps, self.centred)


class Dropout(nn.Module):
    """Set numbers to 0 with probability `rate` and divide the other numbers by 1 - `rate`. Every call draws a new mask.
    Outside of training, it returns its input.

    A mask depends on the text's row in the full batch, which the layout holds. It does not depend on devices, chunks
    or packing.
    """

    rate: float
    layout: TokenLayout
    parts: int = 1  # devices along "tensor" among which the last axis of x is divided

    @property
    def training(self) -> bool:
        """Return whether this is a training batch, even if the rate is 0."""
        return self.layout.batch_rows is not None

    @property
    def active(self) -> bool:
        """Return whether numbers are dropped. At initialization, which every start of a run traces, none are dropped,
        because no parameter depends on dropout."""
        return self.training and self.rate > 0 and not self.is_initializing()

    @nn.compact
    def __call__(self, x: Float[jax.Array, "R ..."]) -> Float[jax.Array, "R ..."]:
        if not self.active:
            return x
        keep, keys = 1 - self.rate, self.keys()
        full_shape = (*x.shape[:-1], x.shape[-1] * self.parts)
        if self.layout.packing is None:
            keep_mask = jax.vmap(lambda key: jax.random.bernoulli(key, keep, full_shape[1:]))(keys)
        else:
            keep_mask = packed_bernoulli(keys, self.layout, keep, full_shape)
        if self.parts > 1:
            start = jax.lax.axis_index(TENSOR) * x.shape[-1]
            keep_mask = jax.lax.dynamic_slice_in_dim(keep_mask, start, x.shape[-1], axis=-1)
        return jnp.where(keep_mask, x / keep, 0)

    def keys(self) -> jax.Array:
        """Return a random key for each text; every call returns new keys."""
        key = self.make_rng("dropout")
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(self.layout.batch_rows)


def packed_bernoulli(
    keys: jax.Array, layout: TokenLayout, probability: float, shape: tuple[int, ...]
) -> Bool[jax.Array, ...]:
    """Return the mask that jax.random.bernoulli draws for padded texts, arranged for packed rows.

    The i-th number of jax.random.bernoulli(key, probability, shape) is a hash of the key and i for any shape (threefry,
    JAX's default generator, with its default jax_threefry_partitionable). i is the index in the padded array.

    Args:
        keys: random keys of the texts [N].
        layout: layout of packed rows.
        probability: probability of True.
        shape: shape of states [R,W,H] or of attention weights [R,heads,W,W].
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
    return (bits >> 9).astype(jnp.float32) * 2.0**-23 < probability  # 23 bits -> a float32 in [0, 1)
