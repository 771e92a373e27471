"""Rates of known chips, and topologies for plans, such as v5e:4x4 or h100:8.

Sources: Google Cloud's pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x (Ironwood)"
(cloud.google.com/tpu/docs), NVIDIA's data sheets "A100 Tensor Core GPU" (SXM), "L4 Tensor Core GPU", "L40S GPU", "H100
Tensor Core GPU" (SXM), "H200 Tensor Core GPU" (SXM) and "HGX B200" (for one GPU), AMD's data sheet "Instinct MI300X
Accelerator". Rates are without sparsity.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

GIB = 2**30
# Precision of the operands of a product; "exact" is Precision.HIGHEST.
PRODUCT_PRECISIONS = ("int8", "bfloat16", "float32", "float32 exact")

# Part of a GPU's memory that JAX allocates, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.
GPU_FRACTION = 0.75


@dataclass(frozen=True)
class Chip:
    """Rates and memory of a chip."""

    name: str  # name in topologies, such as "v5e"
    platform: str  # "tpu", "cuda" or "rocm"
    memory: int  # bytes that a program may use
    bandwidth: float  # memory bandwidth in bytes/s
    link: float  # bytes/s to other chips, over all links together
    rates: dict[str, float]  # peak FLOP/s by precision (`PRODUCT_PRECISIONS`)
    devices: int = 1  # devices of one chip in JAX; the numbers above are for one device
    host: int = 8  # largest number of chips of a host
    has_compiler: bool = True  # whether its compiler works without the chip; if not, plans compile nothing

    @property
    def is_gpu(self) -> bool:
        return self.platform in ("cuda", "rocm")


def _tpu(name: str, memory: float, teraflops: float, bandwidth: float, link_gigabits: float, int8: float = 2.0) -> Chip:
    """Return a TPU, whose exact float32 products take six bfloat16 passes.

    Args:
        name: name of the chip.
        memory: memory in GiB that libtpu's compiler reports, a little less than the hardware has.
        teraflops: peak rate of bfloat16.
        bandwidth: memory bandwidth in GB/s.
        link_gigabits: rate to other chips in Gbit/s.
        int8: rate of int8 products relative to bfloat16.
    """
    flops = teraflops * 1e12
    rates = {"int8": int8 * flops, "bfloat16": flops, "float32": flops, "float32 exact": flops / 6}
    return Chip(name, "tpu", int(memory * GIB), bandwidth * 1e9, link_gigabits * 1e9 / 8, rates)


def _gpu(name: str, memory: float, bandwidth: float, link: float, teraflops: tuple[float, float, float, float]) -> Chip:
    """Return a GPU for which plans compile nothing.

    Args:
        name: name of the chip.
        memory: memory in GB (10^9 bytes) on the data sheet.
        bandwidth: memory bandwidth in GB/s.
        link: rate to other GPUs of the machine in GB/s, in one direction.
        teraflops: peak rates of int8, bfloat16, TF32 and float32.
    """
    rates = dict(zip(PRODUCT_PRECISIONS, (rate * 1e12 for rate in teraflops), strict=True))
    platform = "rocm" if name.startswith("mi") else "cuda"
    usable = int(memory * 1e9 * GPU_FRACTION)
    return Chip(name, platform, usable, bandwidth * 1e9, link * 1e9, rates, has_compiler=False)


def _hopper(name: str, memory: int, bandwidth: float) -> Chip:
    """Return a Hopper GPU with `memory` bytes and a memory bandwidth in GB/s.

    Float32 is TF32; exact float32 does not use tensor cores. NVLink has 900 GB/s, for both directions together, within
    a machine of eight GPUs.
    """
    rates = {"int8": 1978.9e12, "bfloat16": 989.4e12, "float32": 494.7e12, "float32 exact": 66.9e12}
    return Chip(name, "cuda", int(memory * GPU_FRACTION), bandwidth * 1e9, 450e9, rates)


CHIPS = {
    chip.name: chip
    for chip in (
        replace(_tpu("v4", 30.75, 275.0, 1228.0, 2400.0, int8=1.0), host=4),
        _tpu("v5e", 15.75, 197.0, 819.0, 1600.0),
        replace(_tpu("v5p", 95.74, 459.0, 2765.0, 4800.0), host=4),
        _tpu("v6e", 31.25, 918.0, 1640.0, 3200.0),
        # A chip has two dies, and each is a device with half of 192 GiB, 2,307 teraflops, 7,380 GB/s, and links of
        # 1,200 GB/s in both directions together. No rate of int8 is published.
        replace(_tpu("v7", 96.0, 1153.5, 3690.0, 2400.0, int8=1.0), devices=2, host=4, has_compiler=False),
        _gpu("a100", 80.0, 2039.0, 300.0, (624.0, 312.0, 156.0, 19.5)),
        _gpu("a100-40gb", 40.0, 1555.0, 300.0, (624.0, 312.0, 156.0, 19.5)),
        _gpu("l4", 24.0, 300.0, 32.0, (242.5, 121.0, 60.0, 30.3)),  # only PCIe, like the L40S
        _gpu("l40s", 48.0, 864.0, 32.0, (733.0, 362.05, 183.0, 91.6)),
        _hopper("h100", 84_942_979_072, 3350.0),
        _hopper("h200", 150_109_880_320, 4800.0),
        _gpu("b200", 180.0, 8000.0, 900.0, (4500.0, 2250.0, 1100.0, 80.0)),
        # Seven links of 128 GB/s, for both directions together.
        _gpu("mi300x", 192.0, 5300.0, 448.0, (2614.9, 1307.4, 653.7, 163.4)),
    )
}


# JAX's name of a device kind -> chip. H100s of another kind (PCIe, NVL) have other rates.
DEVICE_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA B200": "b200",
    "AMD Instinct MI300X": "mi300x",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
}


def find_chip(kind: str) -> Chip | None:
    """Return the chip of a Device.device_kind, or None if its rates are unknown."""
    return CHIPS[DEVICE_KINDS[kind]] if kind in DEVICE_KINDS else None


# Description of a GPU for compilation without a GPU: stream_executor.GpuTargetConfigProto as text. The properties are
# those of CUDA and NVIDIA's "Hopper Tuning Guide" for compute capability 9.0.
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
    """Connected chips of one kind."""

    chip: Chip
    grid: tuple[int, ...]  # such as (4, 4) chips, or (8,) GPUs

    @property
    def devices(self) -> int:
        return math.prod(self.grid) * self.chip.devices

    @property
    def hosts(self) -> int:
        """The number of hosts, each with a process. If there are several TPU hosts, each has four chips."""
        chips = math.prod(self.grid)
        if chips <= self.chip.host:
            return 1
        return -(-chips // (8 if self.chip.is_gpu else 4))

    @property
    def of_host(self) -> Topology:
        """Return the topology of one host."""
        if self.hosts == 1:
            return self
        return replace(self, grid=(8,) if self.chip.is_gpu else (2, 2, 1)[: len(self.grid)])

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.grid))}"

    def description(self) -> dict[str, Any]:
        """Return the arguments of jax.experimental.topologies.get_topology_desc for this topology."""
        if self.chip.platform == "cuda":
            hosts, devices_per_host = -(-self.devices // 8), min(self.devices, 8)
            return {
                "platform": "cuda",
                "topology_name": self.chip.name,
                "topology": f"1x{hosts}x{devices_per_host}",
                "target_config": HOPPER.format(
                    memory=round(self.chip.memory / GPU_FRACTION), bandwidth=int(self.chip.bandwidth)
                ),
            }
        options: dict[str, Any] = {"platform": "tpu", "topology_name": str(self)}
        if self.devices == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        if self.chip.name == "v4":
            options["chip_config_name"] = "megacore"  # without megacore, the two cores of a chip are two devices
        return options


# Names of chips that makers and clouds use -> our names.
ALIASES = {"mi300": "mi300x", "a100-80gb": "a100", "tpu7x": "v7", "v5litepod": "v5e"}


def parse_topology(text: str) -> Topology:
    """Return the Topology of a text such as "v5e:4x4". Raises ValueError for unknown chips and impossible grids."""
    name, _, grid = text.lower().partition(":")
    name = ALIASES.get(name, name)
    if name not in CHIPS:
        raise ValueError(f"--topology={text}: {name!r} is not a known chip; the chips are {', '.join(CHIPS)}")
    chip = CHIPS[name]
    axes = {"v4": 3, "v5p": 3, "v7": 3, "v5e": 2, "v6e": 2}.get(name, 1)
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", grid) or grid.count("x") + 1 != axes:
        example = {1: "8", 2: "4x4", 3: "2x2x1"}[axes]
        raise ValueError(f"--topology={text}: {name} needs {axes} number(s) after the colon, as in {name}:{example}")
    topology = Topology(chip, tuple(map(int, grid.split("x"))))
    if chip.is_gpu and topology.devices > 8 and topology.devices % 8:
        raise ValueError(f"--topology={text}: more than 8 GPUs must be machines of 8 GPUs each")
    return topology
