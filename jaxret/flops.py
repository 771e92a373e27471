"""FLOPs of a traced program: the products in it, counted from their shapes. Nothing is compiled.

What a product belongs to is read from the names that JAX keeps beside it: `queries` and `passages` are scopes that
`BiEncoder.encode` opens, `head` and `pooling` are modules, JAX itself marks what is transposed and what is computed
again. Elementwise work is left out (a few per cent of a transformer), but for the optimizer's, which is nothing else.
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

from jaxret.chips import Chip

PARTS = ("queries", "passages", "head", "loss", "optimizer")
PHASES = ("forward", "backward", "recomputation")
_HEAD = re.compile(r"\b(query_|passage_)?head\b|\bpooling\b")
_SIDE = re.compile(r"\b(queries|passages)\b")


class Kind(NamedTuple):
    """part: of PARTS; phase: of PHASES; precision: of chips.PRECISIONS."""

    part: str
    phase: str
    precision: str


Flops = Counter[Kind]


def count(traced: Any) -> Flops:
    """The FLOPs of all devices together of what `Program.trace` gives: two for each multiplication and addition."""
    closed = traced.jaxpr
    # JAX traces more than it needs, as the last product of a layer that is computed again.
    needed, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    found: Flops = Counter()
    for times, stack, equation in _products(needed, 1, ""):
        found[_kind(stack, equation)] += times * product_flops(equation)
    return found


def at_full_rate(flops: Mapping[Kind, int], chip: Chip) -> float:
    """Seconds that the products take on one chip, each at the full rate of its precision."""
    return sum((number / chip.rates[kind.precision] for kind, number in flops.items()), 0.0)


def elementwise(function: Any, *arguments: Any) -> int:
    """Operations of a function of arrays that multiplies no matrices: one for each number that each equation gives."""
    traced = jax.make_jaxpr(function)(*arguments)
    needed, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    return sum(times * _numbers(equation) for times, _, equation in _equations(needed, 1, ""))


def _numbers(equation: Any) -> int:
    moved = ("broadcast_in_dim", "reshape", "convert_element_type", "copy", "transpose", "squeeze")
    if equation.primitive.name in moved:
        return 0
    read = equation.invars if equation.primitive.name.startswith("reduce") else equation.outvars
    return sum(math.prod(variable.aval.shape) for variable in read)


def product_flops(equation: Any) -> int:
    """Of a dot_general: 2 x the numbers of its result x how many products each of them sums."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    summed = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    return 2 * math.prod(equation.outvars[0].aval.shape) * summed


def _kind(stack: str, equation: Any) -> Kind:
    side = _SIDE.search(stack)
    part = "head" if side and _HEAD.search(stack) else side[0] if side else "loss"
    phase = "backward" if "transpose(" in stack else "forward"
    phase = "recomputation" if "rematted_computation" in stack else phase
    precision = "bfloat16"
    if all(variable.aval.dtype == jnp.int8 for variable in equation.invars):
        precision = "int8"
    if any(variable.aval.dtype == jnp.float32 for variable in equation.invars):
        asked = equation.params["precision"]
        both = asked if isinstance(asked, tuple) else (asked,)
        precision = "float32 exact" if jax.lax.Precision.HIGHEST in both else "float32"
    return Kind(part, phase, precision)


def _products(jaxpr: Jaxpr, times: int, stack: str) -> Iterator[tuple[int, str, Any]]:
    for found in _equations(jaxpr, times, stack):
        if found[2].primitive.name == "dot_general":
            yield found


def _equations(jaxpr: Jaxpr, times: int, stack: str) -> Iterator[tuple[int, str, Any]]:
    """(how often it runs on all devices together, names around it, equation) of everything that computes."""
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
    """The one that runs: the accelerators', where that is what decides; else the longest is counted."""
    if platforms:
        return next(branch for branch, these in zip(branches, platforms, strict=True) if "cpu" not in (these or ()))
    return max(branches, key=lambda branch: sum(times for times, _, _ in _products(branch, 1, "")))


def _repeats(equation: Any) -> int:
    """How often an equation runs what is inside it, on all devices together."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"]
    if name == "shard_map":  # what is inside has the shapes of one device
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
