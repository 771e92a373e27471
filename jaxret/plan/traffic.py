"""Bytes that a compiled program reads from a device's main memory and writes there, as its HLO has them.

What XLA keeps in the memory on a TPU's chip (memory space 1) counts nothing. A GPU's caches are in no program: there,
what one kernel writes and the next reads counts twice, also where it never leaves the cache.
"""

from __future__ import annotations

import math
import re

from jaxret.plan.hlo import COLLECTIVES, Instruction, Module, arrays, branches, said_by_name, size, trips

# Names for what is there, and control flow, whose computations are counted themselves.
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
_PARTS = ("dynamic-slice", "slice", "gather")  # that read of their first operand what they give
_WHOLE = ("convolution", "dot", "custom-call", "sort", "reduce", "scatter")  # that need all of every operand
_Known = dict[tuple[int, str, int], int]
_SHAPE = re.compile(r"\b[a-z]+[0-9]*(?:e\dm\d\w*)?\[[\d,]*\](?:\{[^}]*\})?")


def traffic(module: Module) -> float | None:
    """Of one device, in a run of the program; of a conditional, that of its dearest branch. None if it is unknown,
    because how often a loop runs is not written in the HLO."""
    found = _run(module, module.entry)
    return None if math.isinf(found) else found


def _run(module: Module, name: str) -> float:
    """Of one run of a computation: what each instruction moves that is no part of a fusion. Infinite if unknown."""
    total = 0.0
    for found in module.computations[name].values():
        total += _moved(module, name, found)
        if found.opcode == "while":
            length = trips(module, name, found)
            if length is None:
                return math.inf
            total += (length + 1) * _run(module, found.called("condition"))
            total += length * _run(module, found.called("body")) if length else 0.0
        elif found.opcode == "call":
            total += _run(module, found.called("to_apply"))
        elif found.opcode == "conditional":
            total += max(_run(module, branch) for branch in branches(found))
    return total


def _moved(module: Module, name: str, found: Instruction) -> float:
    kind = found.opcode
    if kind in _FREE or kind.endswith("-done") or kind.removesuffix("-start") in COLLECTIVES:
        return 0.0
    if kind == "copy-start":  # (to, from, a handle)
        return sum((_main(shape) for shape in _SHAPE.findall(found.shape)[:2]), 0.0)
    computation = module.computations[name]
    operands = [computation[operand].shape if operand in computation else "" for operand in found.operands]
    if inside := module.computations.get(found.called("calls")):  # a fusion, or what goes on beside others
        known: _Known = {}
        read = sum((_read(module, inside, number, shape, known) for number, shape in enumerate(operands)), 0.0)
        return read + _written(inside, found.shape if kind == "fusion" else _root(inside).shape)
    if said := said_by_name(found, "bytes"):
        return float(said)
    if kind in _PARTS:
        return _main(found.shape) + (_bytes(found.shape) if _main(operands[0]) else 0.0)
    if kind == "dynamic-update-slice":
        return _main(operands[1]) + (_bytes(operands[1]) if _main(found.shape) else 0.0)
    result = _SHAPE.findall(found.shape)[0] if "__cublas$" in found.rest else found.shape  # and not its workspace
    return sum(map(_main, operands), _main(result))


def _read(module: Module, inside: dict[str, Instruction], number: int, shape: str, known: _Known) -> float:
    """Of an operand of a fusion, in main memory: all of it, or what is used."""
    parameter = _parameter(inside, number)
    if parameter is None or not _main(shape):
        return 0.0
    used = _used(module, inside, parameter.name, _count(_root(inside)), known)
    return _bytes(shape) * min(1.0, used / max(1, _count(parameter)))


def _parameter(inside: dict[str, Instruction], number: int) -> Instruction | None:
    return next((i for i in inside.values() if i.rest.startswith(f"parameter({number})")), None)


def _used(module: Module, inside: dict[str, Instruction], name: str, wanted: int, known: _Known) -> int:
    """How many numbers of an array are needed for so many of those that a fusion gives. known: what was found before,
    because every way from an array to the result leads over others, and there are more ways than can be gone."""
    asked = (id(inside), name, wanted)
    if asked not in known:
        known[asked] = wanted if _root(inside).name == name else _used_by_all(module, inside, name, wanted, known)
    return known[asked]


def _used_by_all(module: Module, inside: dict[str, Instruction], name: str, wanted: int, known: _Known) -> int:
    total = 0
    for user in (i for i in inside.values() if name in i.operands):
        place = user.operands.index(name)
        if user.opcode in _PARTS and place == 0:
            total += _count(user)
        elif user.opcode == "dynamic-update-slice" and place == 0:
            pass
        elif user.opcode == "fusion":
            within = module.computations[user.called("calls")]
            parameter = _parameter(within, place)
            if parameter:
                given = _used(module, inside, user.name, wanted, known)
                total += _used(module, within, parameter.name, given, known)
        elif _count(user) == _count(inside[name]) and user.opcode not in _WHOLE:
            total += _used(module, inside, user.name, wanted, known)
        else:
            return _count(inside[name])
    return total


def _count(found: Instruction) -> int:
    return sum(math.prod(shape) for _, shape in arrays(found.shape))


def _from(inside: dict[str, Instruction], name: str) -> str:
    while inside[name].opcode == "bitcast":
        name = inside[name].operands[0]
    return name


def _written(inside: dict[str, Instruction], shape: str) -> float:
    """Of what a fusion gives: of an array that it changes in place, the part that is new."""
    root = _root(inside)
    results = root.operands if root.opcode == "tuple" else (root.name,)
    total = 0.0
    for name, one in zip(results, _SHAPE.findall(shape), strict=False):
        made = inside[_from(inside, name)]
        changed = inside[made.operands[1]].shape if made.opcode == "dynamic-update-slice" else one
        total += _bytes(changed) if _main(one) else 0.0
    return total


def _root(inside: dict[str, Instruction]) -> Instruction:
    return list(inside.values())[-1]


def _main(shape: str) -> float:
    """Bytes of the arrays of a shape that are in main memory."""
    return sum((_bytes(one) for one in _SHAPE.findall(shape) if "S(" not in one), 0.0)


def _bytes(shape: str) -> float:
    return sum((size(*array) for array in arrays(shape)), 0.0)
