"""The bytes that a compiled program reads from a device's main memory and writes to it, according to its HLO.

Arrays in on-chip memory of a TPU (memory space 1) do not count. The caches of a GPU are not visible in the program: an
array that one kernel writes and the next kernel reads counts twice, even if it never leaves the cache.
"""

from __future__ import annotations

import math
import re

from jaxret.plan.hlo import COLLECTIVES, HloModule, Instruction, array_bytes, arrays, branches, cost_in_name, trip_count

# Instructions without traffic: aliases of arrays, and control flow, whose computations are counted separately.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"),
    *("after-all", "partition-id", "replica-id", "optimization-barrier"),
}
_PARTS = ("dynamic-slice", "slice", "gather")  # read only as many bytes of the first operand as the result has
_WHOLE = ("convolution", "dot", "custom-call", "sort", "reduce", "scatter")  # read all operands completely
_Cache = dict[tuple[int, str, int], int]
_SHAPE = re.compile(r"\b[a-z]+[0-9]*(?:e\dm\d\w*)?\[[\d,]*\](?:\{[^}]*\})?")


def traffic(module: HloModule) -> float | None:
    """Return the bytes that one device moves in a run of the program, with the most expensive branch of conditionals.

    Return None if the HLO does not state how often a loop runs.
    """
    total = _computation_traffic(module, module.entry)
    return None if math.isinf(total) else total


def _computation_traffic(module: HloModule, name: str) -> float:
    """Return the bytes that one run of a computation moves, or infinity if unknown."""
    total = 0.0
    for instruction in module.computations[name].values():
        total += _instruction_traffic(module, name, instruction)
        if instruction.opcode == "while":
            length = trip_count(module, name, instruction)
            if length is None:
                return math.inf
            total += (length + 1) * _computation_traffic(module, instruction.callee("condition"))
            total += length * _computation_traffic(module, instruction.callee("body")) if length else 0.0
        elif instruction.opcode == "call":
            total += _computation_traffic(module, instruction.callee("to_apply"))
        elif instruction.opcode == "conditional":
            total += max(_computation_traffic(module, branch) for branch in branches(instruction))
    return total


def _instruction_traffic(module: HloModule, name: str, instruction: Instruction) -> float:
    kind = instruction.opcode
    if kind in _FREE or kind.endswith("-done") or kind.removesuffix("-start") in COLLECTIVES:
        return 0.0
    if kind == "copy-start":  # (to, from, a handle)
        return sum((_main_bytes(shape) for shape in _SHAPE.findall(instruction.shape)[:2]), 0.0)
    computation = module.computations[name]
    operands = [computation[operand].shape if operand in computation else "" for operand in instruction.operands]
    if inside := module.computations.get(instruction.callee("calls")):  # a fusion, or an asynchronous computation
        cache: _Cache = {}
        read = sum((_bytes_read(module, inside, number, shape, cache) for number, shape in enumerate(operands)), 0.0)
        return read + _bytes_written(inside, instruction.shape if kind == "fusion" else _root(inside).shape)
    if cost := cost_in_name(instruction, "bytes"):
        return float(cost)
    if kind in _PARTS:
        return _main_bytes(instruction.shape) + (_bytes(instruction.shape) if _main_bytes(operands[0]) else 0.0)
    if kind == "dynamic-update-slice":
        return _main_bytes(operands[1]) + (_bytes(operands[1]) if _main_bytes(instruction.shape) else 0.0)
    # A call of cuBLAS returns (result, workspace).
    result = _SHAPE.findall(instruction.shape)[0] if "__cublas$" in instruction.text else instruction.shape
    return sum(map(_main_bytes, operands), _main_bytes(result))


def _bytes_read(module: HloModule, inside: dict[str, Instruction], number: int, shape: str, cache: _Cache) -> float:
    """Return the bytes that a fusion reads from one operand in main memory.

    Args:
        module: the program.
        inside: computation of the fusion.
        number: number of the operand.
        shape: shape of the operand.
        cache: results of `_numbers_needed`.
    """
    parameter = _parameter(inside, number)
    if parameter is None or not _main_bytes(shape):
        return 0.0
    used_count = _numbers_needed(module, inside, parameter.name, _count(_root(inside)), cache)
    return _bytes(shape) * min(1.0, used_count / max(1, _count(parameter)))


def _parameter(inside: dict[str, Instruction], number: int) -> Instruction | None:
    parameters = (entry for entry in inside.values() if entry.text.startswith(f"parameter({number})"))
    return next(parameters, None)


def _numbers_needed(module: HloModule, inside: dict[str, Instruction], name: str, count: int, cache: _Cache) -> int:
    """Return how many numbers of the array `name` a fusion needs for `count` numbers of its result.

    Results are cached, because the number of paths from an array to the result is exponential.
    """
    key = (id(inside), name, count)
    if key not in cache:
        cache[key] = count if _root(inside).name == name else _used_by_all(module, inside, name, count, cache)
    return cache[key]


def _used_by_all(module: HloModule, inside: dict[str, Instruction], name: str, count: int, cache: _Cache) -> int:
    total = 0
    for user in (instruction for instruction in inside.values() if name in instruction.operands):
        position = user.operands.index(name)
        if user.opcode in _PARTS and position == 0:
            total += _count(user)
        elif user.opcode == "dynamic-update-slice" and position == 0:
            pass
        elif user.opcode == "fusion":
            within = module.computations[user.callee("calls")]
            parameter = _parameter(within, position)
            if parameter:
                results = _numbers_needed(module, inside, user.name, count, cache)
                total += _numbers_needed(module, within, parameter.name, results, cache)
        elif _count(user) == _count(inside[name]) and user.opcode not in _WHOLE:
            total += _numbers_needed(module, inside, user.name, count, cache)
        else:
            return _count(inside[name])
    return total


def _count(instruction: Instruction) -> int:
    return sum(math.prod(shape) for _, shape in arrays(instruction.shape))


def _bytes_written(inside: dict[str, Instruction], shape: str) -> float:
    """Return the bytes that a fusion writes. For an array that it updates in place, this is the updated part."""
    root = _root(inside)
    results = root.operands if root.opcode == "tuple" else (root.name,)
    total = 0.0
    for name, array in zip(results, _SHAPE.findall(shape), strict=False):
        producer = inside[name]
        while producer.opcode == "bitcast":
            producer = inside[producer.operands[0]]
        part = inside[producer.operands[1]].shape if producer.opcode == "dynamic-update-slice" else array
        total += _bytes(part) if _main_bytes(array) else 0.0
    return total


def _root(inside: dict[str, Instruction]) -> Instruction:
    return list(inside.values())[-1]


def _main_bytes(shape: str) -> float:
    """Return the bytes of the arrays of a shape that are in main memory."""
    return sum((_bytes(array) for array in _SHAPE.findall(shape) if "S(" not in array), 0.0)


def _bytes(shape: str) -> float:
    return sum((array_bytes(*array) for array in arrays(shape)), 0.0)
