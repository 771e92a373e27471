"""The chips that are known, and how many of them a plan is for: v5e:4x4, h100:8.

Sources: Google Cloud's pages "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e" (cloud.google.com/tpu/docs), NVIDIA's data
sheets "H100 Tensor Core GPU" (SXM) and "H200 Tensor Core GPU" (SXM). Rates are without sparsity.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

GIB = 2**30
PRECISIONS = ("int8", "bfloat16", "float32", "float32 exact")  # of a product's operands; exact: Precision.HIGHEST

# A GPU's memory is not JAX's alone: it takes this part of it unless XLA_PYTHON_CLIENT_MEM_FRACTION says another.
GPU_FRACTION = 0.75


@dataclass(frozen=True)
class Chip:
    """memory: bytes that a program may use. bandwidth: of its memory, bytes/s. link: bytes/s that it can send to other
    chips, over all its links. rates: PRECISIONS -> FLOP/s at most."""

    name: str
    platform: str  # tpu or cuda
    memory: int
    bandwidth: float
    link: float
    rates: dict[str, float]


def _tpu(name: str, memory: float, teraflops: float, bandwidth: float, link_gigabits: float, int8: float = 2.0) -> Chip:
    """memory: GiB, as libtpu's compiler says (a little less than is built in). An exact float32 product is six bfloat16
    passes; products of int8 are `int8` times as fast as bfloat16's."""
    flops = teraflops * 1e12
    rates = {"int8": int8 * flops, "bfloat16": flops, "float32": flops, "float32 exact": flops / 6}
    return Chip(name, "tpu", int(memory * GIB), bandwidth * 1e9, link_gigabits * 1e9 / 8, rates)


def _hopper(name: str, memory: int, bandwidth: float) -> Chip:
    """memory: bytes of the device. Float32 is TF32; exact float32 does without tensor cores. NVLink has 900 GB/s both
    ways together, inside one machine of eight."""
    rates = {"int8": 1978.9e12, "bfloat16": 989.4e12, "float32": 494.7e12, "float32 exact": 66.9e12}
    return Chip(name, "cuda", int(memory * GPU_FRACTION), bandwidth * 1e9, 450e9, rates)


CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v4", 30.75, 275.0, 1228.0, 2400.0, int8=1.0),
        _tpu("v5e", 15.75, 197.0, 819.0, 1600.0),
        _tpu("v5p", 95.74, 459.0, 2765.0, 4800.0),
        _tpu("v6e", 31.25, 918.0, 1640.0, 3200.0),
        _hopper("h100", 84_942_979_072, 3350.0),
        _hopper("h200", 150_109_880_320, 4800.0),
    )
}


# What JAX calls a device -> the chip. H100s of another kind (PCIe, NVL) have other rates.
KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
}


def chip_of(kind: str) -> Chip | None:
    """The chip that JAX calls so (Device.device_kind); None if its rates are not known here."""
    return CHIPS[KINDS[kind]] if kind in KINDS else None


# What XLA wants to know of a GPU that is not there (compute capability 9.0; its properties as CUDA and NVIDIA's
# "Hopper Tuning Guide" have them): stream_executor.GpuTargetConfigProto as text.
HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA Hopper"
"""


@dataclass(frozen=True)
class Topology:
    """Some chips, connected: grid (4, 4), or (8,) for GPUs."""

    chip: Chip
    grid: tuple[int, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.grid)

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.grid))}"

    def description(self) -> dict[str, Any]:
        """The arguments of jax.experimental.topologies.get_topology_desc."""
        if self.chip.platform == "cuda":
            hosts, each = -(-self.devices // 8), min(self.devices, 8)
            return {
                "platform": "cuda",
                "topology_name": self.chip.name,
                "topology": f"1x{hosts}x{each}",
                "target_config": HOPPER.format(
                    memory=round(self.chip.memory / GPU_FRACTION), bandwidth=int(self.chip.bandwidth)
                ),
            }
        options: dict[str, Any] = {"platform": "tpu", "topology_name": str(self)}
        if self.devices == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        if self.chip.name == "v4":
            options["chip_config_name"] = "megacore"  # else its two cores are two devices
        return options


def parse_topology(text: str) -> Topology:
    """ "v5e:4x4" -> Topology. Raises ValueError for a chip that is not in the table, and a grid that it cannot have."""
    name, _, grid = text.partition(":")
    if name not in CHIPS:
        raise ValueError(f"--topology={text}: {name!r} is no chip that is known here; there are {', '.join(CHIPS)}")
    chip = CHIPS[name]
    axes = {"v4": 3, "v5p": 3, "v5e": 2, "v6e": 2}.get(name, 1)
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", grid) or grid.count("x") + 1 != axes:
        example = {1: "8", 2: "4x4", 3: "2x2x1"}[axes]
        raise ValueError(f"--topology={text}: after the colon {name} needs {axes} number(s), as in {name}:{example}")
    found = Topology(chip, tuple(map(int, grid.split("x"))))
    if chip.platform == "cuda" and found.devices > 8 and found.devices % 8:
        raise ValueError(f"--topology={text}: above 8 GPUs there must be whole machines of 8")
    return found
