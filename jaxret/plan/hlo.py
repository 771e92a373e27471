"""Parse the HLO text of a compiled program: its collectives and matrix products, and how often they run."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\dm\d\w*)?)\[([\d,]*)\]")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPENING = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]  # names
    rest: str  # everything after the opcode

    def called(self, key: str) -> str:
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""


@dataclass
class HloModule:
    """A parsed program."""

    computations: dict[str, dict[str, Instruction]]  # computation -> name -> instruction
    entry: str
    times: Counter[str] = field(default_factory=Counter)  # computation -> how often a run of the program runs it

    def instructions(self) -> Iterator[tuple[int, str, Instruction]]:
        """Yield (how often it runs, computation, instruction)."""
        for name, computation in self.computations.items():
            for instruction in computation.values():
                yield self.times[name], name, instruction


def parse_hlo(text: str) -> HloModule:
    """Parse the text of an HLO module.

    Raises ValueError without an entry, or for a loop with collectives or products whose length is unknown.
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
    _count(module, entry, 1)
    return module


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = _closing(rest, len(opcode))
    operands = tuple(re.findall(r"%?([\w.\-]+)(?=,|$)", rest[len(opcode) + 1 : close].replace(" ", ",")))
    return Instruction(name, shape, opcode, operands, rest)


def _closing(text: str, start: int) -> int:
    """Return the position of the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise ValueError(f"a parenthesis is never closed: {text[:80]}")


def _count(module: HloModule, name: str, times: int) -> None:
    module.times[name] += times
    for instruction in module.computations[name].values():
        if instruction.opcode == "while":
            body, length = instruction.called("body"), trip_count(module, name, instruction)
            before = module.times.copy()
            _count(module, body, times * (1 if length is None else length))
            if length is None and any(_matters(module, name) for name in module.times - before):
                raise ValueError(f"how often the loop {instruction.name} runs is not written in the HLO")
        elif instruction.opcode == "conditional":  # all branches count: an upper bound
            for branch in branches(instruction):
                _count(module, branch, times)
        elif instruction.opcode not in COLLECTIVES and "reduce" not in instruction.opcode:
            for callee in re.findall(r"\b(?:calls|to_apply|\w+_computation)=%?([\w.\-]+)", instruction.rest):
                if callee in module.computations:
                    _count(module, callee, times)


def _matters(module: HloModule, name: str) -> bool:
    """Return whether a computation has collectives or products."""
    computation = module.computations[name]
    return any(
        one.opcode.removesuffix("-start") in COLLECTIVES or _flops(computation, one) for one in computation.values()
    )


def branches(conditional: Instruction) -> list[str]:
    """Return the names of a conditional's branches."""
    match = re.search(r"branch_computations=\{([^}]*)\}", conditional.rest)
    if match:
        return re.findall(r"[\w.\-]+", match[1])
    return [conditional.called("true_computation"), conditional.called("false_computation")]


def trip_count(module: HloModule, caller: str, loop: Instruction) -> int | None:
    """Return how often a loop runs: XLA's annotation, or the constant limit of its counter minus its start.

    None if it has neither.
    """
    annotation = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
    if annotation:
        return int(annotation[1])
    condition = module.computations[loop.called("condition")]
    constants = {name: _constant(one) for name, one in condition.items() if _constant(one) is not None}
    compare = next((one for one in condition.values() if one.opcode == "compare" and "direction=LT" in one.rest), None)
    bound = constants.get(compare.operands[1]) if compare else None
    counter = condition.get(compare.operands[0]) if compare else None
    index = re.search(r"index=(\d+)", counter.rest) if counter and counter.opcode == "get-tuple-element" else None
    if bound is None or index is None:
        return None
    return bound - _start(module.computations[caller], loop.operands[0], int(index[1]))


def _start(computation: dict[str, Instruction], operand: str, index: int) -> int:
    """Return the value of a loop's counter before it; 0 (as in `scan`) if it is not a visible constant."""
    state = computation.get(operand)
    if state is None or state.opcode != "tuple" or index >= len(state.operands):
        return 0
    first = computation.get(state.operands[index])
    while first is not None and first.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
        first = computation.get(first.operands[0])
    return (_constant(first) if first else None) or 0


def _constant(instruction: Instruction) -> int | None:
    match = re.match(r"constant\((-?\d+)\)", instruction.rest)
    return int(match[1]) if match else None


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return "(f32[2,3]{1,0}, pred[])" -> [("f32", (2, 3)), ("pred", ())]."""
    return [(kind, tuple(int(n) for n in sizes.split(",") if n)) for kind, sizes in _ARRAY.findall(shape)]


def array_bytes(kind: str, shape: tuple[int, ...]) -> float:
    """Return the bytes of an array, without padding. Raises ValueError for an unknown type."""
    width = _BYTES.get(kind)
    if width is None:
        bits = re.match(r"[a-z]+(\d+)", kind)
        if not bits:
            raise ValueError(f"{kind} is not a type of XLA's that is known here")
        width = int(bits[1]) / 8
    return float(width * math.prod(shape))


@dataclass(frozen=True)
class Collective:
    """A collective operation of a program."""

    kind: str  # of COLLECTIVES
    dtypes: tuple[str, ...]
    times: int  # in a run of the program
    bytes: float  # of its results on one device, one time
    sent: float  # lower bound of the bytes that a device sends, one time
    group: int  # devices that take part
    name: str  # operation of the source
    overlapped: bool  # whether products are scheduled while it moves its bytes


def collectives(module: HloModule, devices: int) -> list[Collective]:
    """Return every collective of a program.

    An asynchronous all-gather is written in each computation that it overlaps with. Of those with one channel, shape
    and name, one counts, as often as the instruction that starts it.
    """
    by_key: dict[tuple[str, ...], Collective] = {}
    beside: set[tuple[str, ...]] = set()  # keys of those that products run beside
    for times, computation, instruction in module.instructions():
        kind = instruction.opcode.removesuffix("-start")
        if kind not in COLLECTIVES or not times:
            continue
        shape = instruction.shape
        results = arrays(shape)
        if instruction.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
            results = results[len(results) // 2 :] if kind == "all-gather" else results[1:2]  # (operands, results)
        total = sum((array_bytes(*array) for array in results), 0.0)
        group = _group(instruction.rest, devices)
        name = _attribute(r'op_name="([^"]*)"', instruction.rest)
        dtypes = tuple(sorted({kind for kind, _ in results}))
        collective = Collective(kind, dtypes, times, total, _sent(kind, total, group), group, name, False)
        key: tuple[str, ...] = (instruction.name,)
        if kind == "all-gather":
            chain = _attribute(r'chain_id="(\d+)"', instruction.rest)
            key = (_attribute(r"channel_id=(\d+)", instruction.rest), str(results), name, chain)
        if group > 1 and (key not in by_key or times < by_key[key].times):
            by_key[key] = collective
        if _has_products_beside(module, computation, instruction):
            beside.add(key)
    return [replace(collective, overlapped=key in beside) for key, collective in by_key.items()]


def _has_products_beside(module: HloModule, name: str, collective: Instruction) -> bool:
    """Return whether products run while a collective moves its bytes: in one fusion with it, as TPUs have them, or
    between its start and its end in the schedule."""
    computation = list(module.computations[name].values())
    if not collective.opcode.endswith("-start"):
        others = computation if "async_collective_fusion" in name else []
    else:
        start = computation.index(collective)
        ends = [i for i, other in enumerate(computation) if collective.name in other.operands and i > start]
        others = computation[start + 1 : min(ends, default=start)]
    return any(_computes(module, name, other) for other in others)


def _computes(module: HloModule, name: str, instruction: Instruction) -> bool:
    """Return whether an instruction, or one that it calls, is a product."""
    if _flops(module.computations[name], instruction):
        return True
    callees = [instruction.called("calls"), instruction.called("body"), *branches(instruction)]
    return any(
        _computes(module, inner, each)
        for inner in callees
        if inner in module.computations
        for each in module.computations[inner].values()
    )


def _attribute(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _group(rest: str, devices: int) -> int:
    """Return the devices in a group: {{0,1},{2,3}}, [2,2]<=[4], or mesh['a'=2,'b'=2] {'a'}; all without one."""
    if groups := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'([\w.]+)'=(\d+)", groups[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([\w.]+)'", groups[2]))
    if groups := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
        return int(groups[2])
    if groups := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return groups[1].count(",") + 1
    return 2 if "source_target_pairs={{" in rest else devices


def _sent(kind: str, result: float, group: int) -> float:
    """Return the bytes that a device sends at least, for a result of that many bytes."""
    others = (group - 1) / group
    return result * {"all-reduce": 2 * others, "reduce-scatter": group - 1, "collective-permute": 1}.get(kind, others)


def hlo_product_flops(module: HloModule) -> int:
    """Return the FLOPs of all matrix products that one device computes."""
    return sum(
        times * _flops(module.computations[name], product) for times, name, product in module.instructions() if times
    )


def _flops(computation: dict[str, Instruction], instruction: Instruction) -> int:
    """Return the FLOPs of one run of an instruction: 0 unless it is a product or a kernel."""
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
    return _attribute(r'custom_call_target="([^"]*)"', call.rest)


def cost_in_name(call: Instruction, unit: str) -> int:
    """Return the flops or bytes in a Triton kernel's name ("group_maxima_flops_12_bytes_34"); 0 without any."""
    is_triton = "gpu.triton" in _target(call)
    return int(_attribute(rf'op_name="[^"]*_{unit}_(\d+)', call.rest) or 0) if is_triton else 0


def _kernel(call: Instruction) -> int:
    """Return the FLOPs of a kernel: of Pallas by its cost estimate, of cuDNN's attention by the shape of its scores.

    The backward pass of attention counts as the four products of plain attention.
    """
    if triton := cost_in_name(call, "flops"):
        return triton
    if "__cudnn$fmha" not in _target(call):
        return int(_attribute(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', call.rest) or 0)
    scores = _attribute(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]', call.rest)
    (_, result), *_ = arrays(call.shape)
    products = 4 if "Backward" in _target(call) else 2
    return products * 2 * math.prod(int(n) for n in re.findall(r"\d+", scores)) * result[-1]


def _product(computation: dict[str, Instruction], product: Instruction, axes_pattern: str) -> int:
    """Return the FLOPs of a dot, or of a call of cuBLAS. axes_pattern: pattern of the left operand's axes."""
    (_, result), *_ = arrays(product.shape)
    (_, left), *_ = arrays(computation[product.operands[0]].shape)
    axes = re.findall(r"\d+", _attribute(axes_pattern, product.rest))
    return 2 * math.prod(result) * math.prod(left[int(axis)] for axis in axes)


def _convolution(computation: dict[str, Instruction], product: Instruction) -> int:
    """Return the FLOPs of a convolution, a TPU's form of a product."""
    (_, result), *_ = arrays(product.shape)
    left, right = (arrays(computation[name].shape)[0][1] for name in product.operands[:2])
    inputs, kernel, outputs = re.split("_|->", _attribute(r"dim_labels=(\S+?)(?:,|$)", product.rest))
    taps = 1.0
    window = _attribute(r"window=\{([^}]*)\}", product.rest)
    settings = defaultdict(lambda: "", dict(part.split("=") for part in window.split()))
    for axis in range(len(settings["size"].split("x")) if settings["size"] else 0):
        taps *= _taps(settings, axis, left[inputs.index(str(axis))], result[outputs.index(str(axis))])
    return round(2 * math.prod(result) * right[kernel.index("i")] * taps)


def _taps(settings: dict[str, str], axis: int, length: int, outputs: int) -> float:
    """Return how many elements of a convolution's window meet an input on one axis, for each output on average."""

    def setting(name: str, default: str) -> str:
        return settings[name].split("x")[axis] if settings[name] else default

    low = int(setting("pad", "0_0").split("_")[0])
    stride, spread = int(setting("stride", "1")), int(setting("rhs_dilate", "1"))
    holes = int(setting("lhs_dilate", "1"))
    positions = (o * stride + k * spread - low for o in range(outputs) for k in range(int(setting("size", "1"))))
    return sum(p >= 0 and p % holes == 0 and p // holes < length for p in positions) / outputs
