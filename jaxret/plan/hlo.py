"""Parses the HLO text of a compiled program: its collectives and matrix products, and how often they run."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\dm\d\w*)?)\[([\d,]*)\]")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPENING = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    name: str
    shape: str  # shape of the result, in XLA's notation
    opcode: str
    operands: tuple[str, ...]  # names of the operands
    text: str  # text from the opcode on

    def callee(self, key: str) -> str:
        """Return the name of the computation that an attribute names, such as "body" or "to_apply"; "" without this
        attribute."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.text)
        return match[1] if match else ""


@dataclass
class HloModule:
    """A parsed program."""

    computations: dict[str, dict[str, Instruction]]  # computation -> name -> instruction
    entry: str
    times: Counter[str] = field(default_factory=Counter)  # computation -> number of its runs in a run of the program

    def instructions(self) -> Iterator[tuple[int, str, Instruction]]:
        """Yield (number of runs, computation, instruction) for all instructions."""
        for name, computation in self.computations.items():
            for instruction in computation.values():
                yield self.times[name], name, instruction


def parse_hlo(text: str) -> HloModule:
    """Parse the text of an HLO module.

    Raises ValueError for a text without an entry, and for a loop of unknown length with collectives or products.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for raw in text.splitlines():
        line = _COMMENT.sub("", raw)
        opening = _OPENING.match(line)
        if opening and " = " not in line.split("(", 1)[0]:
            current = computations[opening[2]] = {}
            entry = opening[2] if opening[1] else entry
        elif current is not None and (match := _LINE.match(line)):
            current[match[1]] = _instruction(match[1], match[2])
    if not entry:
        raise ValueError("this is not an HLO module: it has no ENTRY")
    module = HloModule(computations, entry)
    _count_runs(module, entry, 1)
    return module


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, body = text[:end], text[end:].lstrip()
    opcode, _, _ = body.partition("(")
    close = _closing(body, len(opcode))
    operands = tuple(re.findall(r"%?([\w.\-]+)(?=,|$)", body[len(opcode) + 1 : close].replace(" ", ",")))
    return Instruction(name, shape, opcode, operands, body)


def _closing(text: str, start: int) -> int:
    """Return the position of the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise ValueError(f"a parenthesis is not closed: {text[:80]}")


def _count_runs(module: HloModule, name: str, times: int) -> None:
    """Add `times` runs of a computation, and the runs of computations that it calls, to `module.times`."""
    module.times[name] += times
    for instruction in module.computations[name].values():
        if instruction.opcode == "while":
            body, length = instruction.callee("body"), trip_count(module, name, instruction)
            earlier_times = module.times.copy()
            _count_runs(module, body, times * (1 if length is None else length))
            if length is None and any(_matters(module, name) for name in module.times - earlier_times):
                raise ValueError(f"the HLO does not say how often the loop {instruction.name} runs")
        elif instruction.opcode == "conditional":  # all branches count, which gives an upper bound
            for branch in branches(instruction):
                _count_runs(module, branch, times)
        elif instruction.opcode not in COLLECTIVES and "reduce" not in instruction.opcode:
            for callee in re.findall(r"\b(?:calls|to_apply|\w+_computation)=%?([\w.\-]+)", instruction.text):
                if callee in module.computations:
                    _count_runs(module, callee, times)


def _matters(module: HloModule, name: str) -> bool:
    """Return whether a computation has collectives or products."""
    computation = module.computations[name]
    return any(
        instruction.opcode.removesuffix("-start") in COLLECTIVES or _flops(computation, instruction)
        for instruction in computation.values()
    )


def branches(conditional: Instruction) -> list[str]:
    """Return the names of the branches of a conditional."""
    if match := re.search(r"branch_computations=\{([^}]*)\}", conditional.text):
        return re.findall(r"[\w.\-]+", match[1])
    return [conditional.callee("true_computation"), conditional.callee("false_computation")]


def trip_count(module: HloModule, caller: str, loop: Instruction) -> int | None:
    """Return the number of iterations of a loop: XLA's annotation, or the constant limit of its counter minus its
    start.

    Return None if the HLO has neither.
    """
    if annotation := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
        return int(annotation[1])
    condition = module.computations[loop.callee("condition")]
    constants = {name: value for name, entry in condition.items() if (value := _constant(entry)) is not None}
    comparisons = (entry for entry in condition.values() if entry.opcode == "compare" and "direction=LT" in entry.text)
    compare = next(comparisons, None)
    bound = constants.get(compare.operands[1]) if compare else None
    counter = condition.get(compare.operands[0]) if compare else None
    index = re.search(r"index=(\d+)", counter.text) if counter and counter.opcode == "get-tuple-element" else None
    if bound is None or index is None:
        return None
    return bound - _start(module.computations[caller], loop.operands[0], int(index[1]))


def _start(computation: dict[str, Instruction], operand: str, index: int) -> int:
    """Return the value of a loop's counter before the loop, or 0, as in `scan`, if it is not a visible constant."""
    state = computation.get(operand)
    if state is None or state.opcode != "tuple" or index >= len(state.operands):
        return 0
    first = computation.get(state.operands[index])
    while first is not None and first.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
        first = computation.get(first.operands[0])
    return (_constant(first) if first else None) or 0


def _constant(instruction: Instruction) -> int | None:
    match = re.match(r"constant\((-?\d+)\)", instruction.text)
    return int(match[1]) if match else None


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the types and shapes of arrays: "(f32[2,3]{1,0}, pred[])" -> [("f32", (2, 3)), ("pred", ())]."""
    return [(kind, tuple(int(n) for n in sizes.split(",") if n)) for kind, sizes in _ARRAY.findall(shape)]


def array_bytes(kind: str, shape: tuple[int, ...]) -> float:
    """Return the bytes of an array, without padding. Raises ValueError for an unknown type."""
    width = _BYTES.get(kind)
    if width is None:
        bits = re.match(r"[a-z]+(\d+)", kind)
        if not bits:
            raise ValueError(f"{kind} is not a known type of XLA")
        width = int(bits[1]) / 8
    return float(width * math.prod(shape))


@dataclass(frozen=True)
class Collective:
    """A collective operation of a program."""

    kind: str  # one of COLLECTIVES
    dtypes: tuple[str, ...]
    times: int  # number of its runs in a run of the program
    bytes: float  # bytes of its results on one device, for one of its runs
    sent: float  # lower bound of the bytes that a device sends, for one of its runs
    group: int  # number of devices that exchange data
    name: str  # name of the operation in JAX
    overlapped: bool  # whether products are scheduled while it moves its bytes


def collectives(module: HloModule, devices: int) -> list[Collective]:
    """Return every collective of a program.

    An asynchronous all-gather occurs in each computation that it overlaps with. Occurrences with the same channel,
    shape and name count once, with the number of runs of the instruction that starts it.
    """
    by_key: dict[tuple[str, ...], Collective] = {}
    overlaps: set[tuple[str, ...]] = set()  # keys of collectives during which products run
    for times, computation, instruction in module.instructions():
        kind = instruction.opcode.removesuffix("-start")
        if kind not in COLLECTIVES or not times:
            continue
        shape = instruction.shape
        results = arrays(shape)
        if instruction.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
            results = results[len(results) // 2 :] if kind == "all-gather" else results[1:2]  # (operands, results)
        total = sum((array_bytes(*array) for array in results), 0.0)
        group = _group(instruction.text, devices)
        name = _attribute(r'op_name="([^"]*)"', instruction.text)
        dtypes = tuple(sorted({kind for kind, _ in results}))
        collective = Collective(kind, dtypes, times, total, _bytes_sent(kind, total, group), group, name, False)
        key: tuple[str, ...] = (instruction.name,)
        if kind == "all-gather":
            chain = _attribute(r'chain_id="(\d+)"', instruction.text)
            key = (_attribute(r"channel_id=(\d+)", instruction.text), str(results), name, chain)
        if group > 1 and (key not in by_key or times < by_key[key].times):
            by_key[key] = collective
        if _overlaps_products(module, computation, instruction):
            overlaps.add(key)
    return [replace(collective, overlapped=key in overlaps) for key, collective in by_key.items()]


def _overlaps_products(module: HloModule, name: str, collective: Instruction) -> bool:
    """Return whether products run while a collective moves its bytes: in the same fusion, as on TPUs, or between the
    collective's start and end in the schedule."""
    computation = list(module.computations[name].values())
    if not collective.opcode.endswith("-start"):
        candidates = computation if "async_collective_fusion" in name else []
    else:
        start = computation.index(collective)
        ends = [i for i, user in enumerate(computation) if collective.name in user.operands and i > start]
        candidates = computation[start + 1 : min(ends, default=start)]
    return any(_has_product(module, name, instruction) for instruction in candidates)


def _has_product(module: HloModule, name: str, instruction: Instruction) -> bool:
    """Return whether an instruction is a product, or calls one."""
    if _flops(module.computations[name], instruction):
        return True
    callees = [instruction.callee("calls"), instruction.callee("body"), *branches(instruction)]
    return any(
        _has_product(module, callee, inner)
        for callee in callees
        if callee in module.computations
        for inner in module.computations[callee].values()
    )


def _attribute(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _group(text: str, devices: int) -> int:
    """Return the number of devices in a group: {{0,1},{2,3}}, [2,2]<=[4], or mesh['a'=2,'b'=2] {'a'}. Without groups,
    it is `devices`."""
    if groups := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([\w.]+)'=(\d+)", groups[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([\w.]+)'", groups[2]))
    if groups := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", text):
        return int(groups[2])
    if groups := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return groups[1].count(",") + 1
    return 2 if "source_target_pairs={{" in text else devices


def _bytes_sent(kind: str, result: float, group: int) -> float:
    """Return a lower bound of the bytes that a device sends, for a result of `result` bytes."""
    remote_share = (group - 1) / group
    shares = {"all-reduce": 2 * remote_share, "reduce-scatter": group - 1, "collective-permute": 1}
    return result * shares.get(kind, remote_share)


def hlo_product_flops(module: HloModule) -> int:
    """Return the FLOPs of all matrix products that one device computes."""
    products = (entry for entry in module.instructions() if entry[0])
    return sum(times * _flops(module.computations[name], product) for times, name, product in products)


def _flops(computation: dict[str, Instruction], instruction: Instruction) -> int:
    """Return the FLOPs of one run of an instruction, or 0 if it is neither a product nor a kernel."""
    if instruction.opcode == "dot":
        return _product(computation, instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    if instruction.opcode != "custom-call":
        return 0
    if "__cublas$" in _target(instruction):
        return _product(computation, instruction, r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
    return _kernel(instruction)


def _target(call: Instruction) -> str:
    return _attribute(r'custom_call_target="([^"]*)"', call.text)


def cost_in_name(call: Instruction, unit: str) -> int:
    """Return the flops or bytes in a Triton kernel's name ("group_maxima_flops_12_bytes_34"), or 0 for other calls."""
    is_triton = "gpu.triton" in _target(call)
    return int(_attribute(rf'op_name="[^"]*_{unit}_(\d+)', call.text) or 0) if is_triton else 0


def _kernel(call: Instruction) -> int:
    """Return the FLOPs of a kernel: the cost estimate of Pallas, or the products of cuDNN's attention.

    The backward pass of attention counts as the four products of plain attention.
    """
    if triton := cost_in_name(call, "flops"):
        return triton
    if "__cudnn$fmha" not in _target(call):
        return int(_attribute(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', call.text) or 0)
    scores = _attribute(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]', call.text)
    (_, result), *_ = arrays(call.shape)
    products = 4 if "Backward" in _target(call) else 2
    return products * 2 * math.prod(int(n) for n in re.findall(r"\d+", scores)) * result[-1]


def _product(computation: dict[str, Instruction], product: Instruction, axes_pattern: str) -> int:
    """Return the FLOPs of a dot or of a call of cuBLAS. `axes_pattern` matches the summed axes of the left operand."""
    (_, result), *_ = arrays(product.shape)
    (_, left), *_ = arrays(computation[product.operands[0]].shape)
    axes = re.findall(r"\d+", _attribute(axes_pattern, product.text))
    return 2 * math.prod(result) * math.prod(left[int(axis)] for axis in axes)


def _convolution(computation: dict[str, Instruction], product: Instruction) -> int:
    """Return the FLOPs of a convolution, which is a TPU's form of a product."""
    (_, result), *_ = arrays(product.shape)
    left, right = (arrays(computation[name].shape)[0][1] for name in product.operands[:2])
    inputs, kernel, outputs = re.split("_|->", _attribute(r"dim_labels=(\S+?)(?:,|$)", product.text))
    taps = 1.0
    window = _attribute(r"window=\{([^}]*)\}", product.text)
    settings = defaultdict(lambda: "", dict(part.split("=") for part in window.split()))
    for axis in range(len(settings["size"].split("x")) if settings["size"] else 0):
        taps *= _taps(settings, axis, left[inputs.index(str(axis))], result[outputs.index(str(axis))])
    return round(2 * math.prod(result) * right[kernel.index("i")] * taps)


def _taps(settings: dict[str, str], axis: int, length: int, outputs: int) -> float:
    """Return the mean number of elements of a convolution's window that have an input on one axis, for each output."""

    def setting(name: str, default: str) -> str:
        return settings[name].split("x")[axis] if settings[name] else default

    low = int(setting("pad", "0_0").split("_")[0])
    stride, spread = int(setting("stride", "1")), int(setting("rhs_dilate", "1"))
    holes = int(setting("lhs_dilate", "1"))
    positions = (o * stride + k * spread - low for o in range(outputs) for k in range(int(setting("size", "1"))))
    return sum(p >= 0 and p % holes == 0 and p // holes < length for p in positions) / outputs
