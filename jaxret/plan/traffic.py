"""Count the bytes that a compiled program reads from a device's main memory and writes there, by its HLO.

Arrays in the memory on a TPU's chip (memory space 1) do not count. A GPU's caches are invisible in the program: an
array that one kernel writes and the next reads counts twice, even if it never leaves the cache.
"""

from __future__ import annotations

import math
import re

from jaxret.plan.hlo import COLLECTIVES, HloModule, Instruction, array_bytes, arrays, branches, cost_in_name, trip_count

# Aliases of arrays, and control flow, whose computations are counted themselves.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "after-all",
    "partition-id",
    "replica-id",
    "optimization-barrier",
}
_PARTS = ("dynamic-slice", "slice", "gather")  # read only their result from the first operand
_WHOLE = ("convolution", "dot", "custom-call", "sort", "reduce", "scatter")  # read all of every operand
_Cache = dict[tuple[int, str, int], int]
_SHAPE = re.compile(r"\b[a-z]+[0-9]*(?:e\dm\d\w*)?\[[\d,]*\](?:\{[^}]*\})?")


def traffic(module: HloModule) -> float | None:
    """Return the bytes of one device in a run of the program; of a conditional, of its most expensive branch.

    None if the HLO does not state how often a loop runs.
    """
    total = _run(module, module.entry)
    return None if math.isinf(total) else total


def _run(module: HloModule, name: str) -> float:
    """Return the bytes of one run of a computation, by its instructions outside fusions; infinite if unknown."""
    total = 0.0
    for instruction in module.computations[name].values():
        total += _moved(module, name, instruction)
        if instruction.opcode == "while":
            length = trip_count(module, name, instruction)
            if length is None:
                return math.inf
            total += (length + 1) * _run(module, instruction.called("condition"))
            total += length * _run(module, instruction.called("body")) if length else 0.0
        elif instruction.opcode == "call":
            total += _run(module, instruction.called("to_apply"))
        elif instruction.opcode == "conditional":
            total += max(_run(module, branch) for branch in branches(instruction))
    return total


def _moved(module: HloModule, name: str, instruction: Instruction) -> float:
    kind = instruction.opcode
    if kind in _FREE or kind.endswith("-done") or kind.removesuffix("-start") in COLLECTIVES:
        return 0.0
    if kind == "copy-start":  # (to, from, a handle)
        return sum((_main(shape) for shape in _SHAPE.findall(instruction.shape)[:2]), 0.0)
    computation = module.computations[name]
    operands = [computation[operand].shape if operand in computation else "" for operand in instruction.operands]
    if inside := module.computations.get(instruction.called("calls")):  # a fusion, or an asynchronous computation
        cache: _Cache = {}
        read = sum((_read(module, inside, number, shape, cache) for number, shape in enumerate(operands)), 0.0)
        return read + _written(inside, instruction.shape if kind == "fusion" else _root(inside).shape)
    if cost := cost_in_name(instruction, "bytes"):
        return float(cost)
    if kind in _PARTS:
        return _main(instruction.shape) + (_bytes(instruction.shape) if _main(operands[0]) else 0.0)
    if kind == "dynamic-update-slice":
        return _main(operands[1]) + (_bytes(operands[1]) if _main(instruction.shape) else 0.0)
    # Of a call of cuBLAS without its workspace.
    result = _SHAPE.findall(instruction.shape)[0] if "__cublas$" in instruction.rest else instruction.shape
    return sum(map(_main, operands), _main(result))


def _read(module: HloModule, inside: dict[str, Instruction], number: int, shape: str, cache: _Cache) -> float:
    """Return the bytes that a fusion reads of an operand in main memory."""
    parameter = _parameter(inside, number)
    if parameter is None or not _main(shape):
        return 0.0
    used_count = _used(module, inside, parameter.name, _count(_root(inside)), cache)
    return _bytes(shape) * min(1.0, used_count / max(1, _count(parameter)))


def _parameter(inside: dict[str, Instruction], number: int) -> Instruction | None:
    return next((one for one in inside.values() if one.rest.startswith(f"parameter({number})")), None)


def _used(module: HloModule, inside: dict[str, Instruction], name: str, count: int, cache: _Cache) -> int:
    """Return how many numbers of an array a fusion needs for `count` numbers of its result.

    Results are cached: the number of paths from an array to the result is exponential.
    """
    key = (id(inside), name, count)
    if key not in cache:
        cache[key] = count if _root(inside).name == name else _used_by_all(module, inside, name, count, cache)
    return cache[key]


def _used_by_all(module: HloModule, inside: dict[str, Instruction], name: str, count: int, cache: _Cache) -> int:
    total = 0
    for user in (one for one in inside.values() if name in one.operands):
        position = user.operands.index(name)
        if user.opcode in _PARTS and position == 0:
            total += _count(user)
        elif user.opcode == "dynamic-update-slice" and position == 0:
            pass
        elif user.opcode == "fusion":
            within = module.computations[user.called("calls")]
            parameter = _parameter(within, position)
            if parameter:
                results = _used(module, inside, user.name, count, cache)
                total += _used(module, within, parameter.name, results, cache)
        elif _count(user) == _count(inside[name]) and user.opcode not in _WHOLE:
            total += _used(module, inside, user.name, count, cache)
        else:
            return _count(inside[name])
    return total


def _count(instruction: Instruction) -> int:
    return sum(math.prod(shape) for _, shape in arrays(instruction.shape))


def _from(inside: dict[str, Instruction], name: str) -> str:
    while inside[name].opcode == "bitcast":
        name = inside[name].operands[0]
    return name


def _written(inside: dict[str, Instruction], shape: str) -> float:
    """Return the bytes that a fusion writes; of an array that it changes in place, the changed part."""
    root = _root(inside)
    results = root.operands if root.opcode == "tuple" else (root.name,)
    total = 0.0
    for name, one in zip(results, _SHAPE.findall(shape), strict=False):
        producer = inside[_from(inside, name)]
        part = inside[producer.operands[1]].shape if producer.opcode == "dynamic-update-slice" else one
        total += _bytes(part) if _main(one) else 0.0
    return total


def _root(inside: dict[str, Instruction]) -> Instruction:
    return list(inside.values())[-1]


def _main(shape: str) -> float:
    """Return the bytes of the arrays of a shape in main memory."""
    return sum((_bytes(one) for one in _SHAPE.findall(shape) if "S(" not in one), 0.0)


def _bytes(shape: str) -> float:
    return sum((array_bytes(*array) for array in arrays(shape)), 0.0)
