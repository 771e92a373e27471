"""FLOPs of the matrix products of a traced program, counted from their shapes. Nothing is compiled.

The part that a product belongs to is read from JAX's name stack: `RetrieverModel.encode` opens the scopes `queries` and
`passages`, `head` and `pooling` are modules, and JAX marks transposed and recomputed products. Elementwise work is left
out (a few per cent of a transformer), except for the optimizer, which has no other work.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

from jaxret.parallel.chips import Chip

PARTS = ("queries", "passages", "head", "loss", "optimizer")
PHASES = ("forward", "backward", "recomputation")
_HEAD = re.compile(r"\b(query_|passage_)?head\b|\bpooling\b")
_SIDE = re.compile(r"\b(queries|passages)\b")


class ProductKind(NamedTuple):
    """Kind of a product: part (one of PARTS), phase (one of PHASES) and precision (one of chips.PRODUCT_PRECISIONS)."""

    part: str
    phase: str
    precision: str


Flops = Counter[ProductKind]


def count_flops(program: Any) -> Flops:
    """Return the FLOPs of all devices together of a traced program.

    A multiplication with its addition counts as two.
    """
    jaxpr = program.jaxpr
    # Remove dead code first: JAX also traces unused products, such as the last one of a recomputed layer.
    live_jaxpr, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    flops: Flops = Counter()
    for times, stack, equation in _products(live_jaxpr, 1, ""):
        flops[_kind(stack, equation)] += times * product_flops(equation)
    return flops


def seconds_at_full_rate(flops: Mapping[ProductKind, int], chip: Chip) -> float:
    """Return the seconds that the products take on one chip, each at the peak rate of its precision."""
    return sum((number / chip.rates[kind.precision] for kind, number in flops.items()), 0.0)


def count_elementwise(function: Any, *arguments: Any) -> int:
    """Return the operations of a function without matrix products: one for each number that each equation computes."""
    closed_jaxpr = jax.make_jaxpr(function)(*arguments)
    live_jaxpr, _ = partial_eval.dce_jaxpr(closed_jaxpr.jaxpr, [True] * len(closed_jaxpr.jaxpr.outvars))
    return sum(times * _numbers(equation) for times, _, equation in _equations(live_jaxpr, 1, ""))


def _numbers(equation: Any) -> int:
    moves = ("broadcast_in_dim", "reshape", "convert_element_type", "copy", "transpose", "squeeze")
    if equation.primitive.name in moves:
        return 0
    read = equation.invars if equation.primitive.name.startswith("reduce") else equation.outvars
    return sum(math.prod(variable.aval.shape) for variable in read)


def product_flops(equation: Any) -> int:
    """Return the FLOPs of a dot_general: 2 x size of its result x length of the summed axes."""
    (axes, _), _ = equation.params["dimension_numbers"]
    length = math.prod(equation.invars[0].aval.shape[axis] for axis in axes)
    return 2 * math.prod(equation.outvars[0].aval.shape) * length


def _kind(stack: str, equation: Any) -> ProductKind:
    side = _SIDE.search(stack)
    part = "head" if side and _HEAD.search(stack) else side[0] if side else "loss"
    phase = "backward" if "transpose(" in stack else "forward"
    phase = "recomputation" if "rematted_computation" in stack else phase
    precision = "bfloat16"
    if all(variable.aval.dtype == jnp.int8 for variable in equation.invars):
        precision = "int8"
    if any(variable.aval.dtype == jnp.float32 for variable in equation.invars):
        option = equation.params["precision"]
        both = option if isinstance(option, tuple) else (option,)
        precision = "float32 exact" if jax.lax.Precision.HIGHEST in both else "float32"
    return ProductKind(part, phase, precision)


def _products(jaxpr: Jaxpr, times: int, stack: str) -> Iterator[tuple[int, str, Any]]:
    for product in _equations(jaxpr, times, stack):
        if product[2].primitive.name == "dot_general":
            yield product


def _equations(jaxpr: Jaxpr, times: int, stack: str) -> Iterator[tuple[int, str, Any]]:
    """Yield (number of runs on all devices together, name stack, equation) of every equation that computes."""
    for equation in jaxpr.eqns:
        names = f"{stack}/{equation.source_info.name_stack}"
        inner = [sub for value in equation.params.values() for sub in _jaxprs(value)]
        if not inner:
            yield times, names, equation
        if equation.primitive.name == "cond":
            inner = [_branch(inner, equation.params.get("branches_platforms"))]
        for sub in inner:
            yield from _equations(sub, times * _repeats(equation), names)


def _branch(branches: list[Jaxpr], platforms: Any) -> Jaxpr:
    """Return the accelerator's branch if the platform decides, otherwise the branch with the most products."""
    if platforms:
        return next(branch for branch, these in zip(branches, platforms, strict=True) if "cpu" not in (these or ()))
    return max(branches, key=lambda branch: sum(times for times, _, _ in _products(branch, 1, "")))


def _repeats(equation: Any) -> int:
    """Return how often an equation runs its inner program, on all devices together."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"]
    if name == "shard_map":  # its inner program has the shapes of one device
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    if name == "pallas_call":  # a kernel has the shapes of one step of its grid
        return math.prod(params["grid_mapping"].grid)
    if name == "while":
        body = _products(params["body_jaxpr"].jaxpr, 1, "")
        if next(body, None) is not None:
            raise NotImplementedError("a loop of unknown length multiplies matrices: its FLOPs cannot be counted")
    return 1


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _jaxprs(item)
