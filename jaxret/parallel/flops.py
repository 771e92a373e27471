"""FLOPs of the matrix products of a traced program, computed from their shapes. Nothing is compiled.

JAX's name stack says to which part of the program a product belongs: `RetrieverModel.encode` opens the scopes `queries`
and `passages`, `head` and `pooling` are modules, and JAX marks transposed and recomputed products. Elementwise
operations (a few per cent of a transformer) are not counted, except in the optimizer, which has no products.
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
from jax.interpreters import partial_eval  # not a stable interface of JAX

from jaxret.parallel.chips import Chip

PROGRAM_PARTS = ("queries", "passages", "head", "loss", "optimizer")
PHASES = ("forward", "backward", "recomputation")
_HEAD = re.compile(r"\b(query_|passage_)?head\b|\bpooling\b")
_SIDE = re.compile(r"\b(queries|passages)\b")


class ProductKind(NamedTuple):
    """The kind of a matrix product."""

    part: str  # one of PROGRAM_PARTS
    phase: str  # one of PHASES
    precision: str  # one of chips.PRODUCT_PRECISIONS


Flops = Counter[ProductKind]


def count_flops(program: Any) -> Flops:
    """Return the FLOPs of a traced program by kind, for all devices together. A multiply-add counts as two."""
    jaxpr = program.jaxpr
    # Remove dead code first, because JAX also traces unused products, such as the last product of a recomputed layer.
    live_jaxpr, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    flops: Flops = Counter()
    for times, stack, equation in _products(live_jaxpr, 1, ""):
        flops[_kind(stack, equation)] += times * product_flops(equation)
    return flops


def seconds_at_full_rate(flops: Mapping[ProductKind, int], chip: Chip) -> float:
    """Return the seconds that products take on one chip at the peak rates of their precisions."""
    return sum((number / chip.rates[kind.precision] for kind, number in flops.items()), 0.0)


def count_elementwise(function: Any, *arguments: Any) -> int:
    """Return the number of elementwise operations of a function: one for each number that an equation computes."""
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
    """Return the FLOPs of a dot_general: 2 x size of the result x length of the summed axes."""
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
        options = option if isinstance(option, tuple) else (option,)
        precision = "float32 exact" if jax.lax.Precision.HIGHEST in options else "float32"
    return ProductKind(part, phase, precision)


def _products(jaxpr: Jaxpr, times: int, stack: str) -> Iterator[tuple[int, str, Any]]:
    for product in _equations(jaxpr, times, stack):
        if product[2].primitive.name == "dot_general":
            yield product


def _equations(jaxpr: Jaxpr, times: int, stack: str) -> Iterator[tuple[int, str, Any]]:
    """Yield (number of runs on all devices together, name stack, equation) for every equation without inner
    programs."""
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
    """Return the branch of accelerators if the platform decides, else the branch with the most products."""
    if platforms:
        return next(branch for branch, names in zip(branches, platforms, strict=True) if "cpu" not in (names or ()))
    return max(branches, key=lambda branch: sum(times for times, _, _ in _products(branch, 1, "")))


def _repeats(equation: Any) -> int:
    """Return the number of runs of an equation's inner program, on all devices together."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"]
    if name == "shard_map":  # the inner program has the shapes of one device
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    if name == "pallas_call":  # the kernel has the shapes of one step of its grid
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
