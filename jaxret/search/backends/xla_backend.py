"""The backend that searches blocks with a program that XLA compiles for all devices of JAX."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxret.search.backends.accelerators import CellLayout, local_mesh, plan_cells, platform_of, put_on_devices
from jaxret.search.backends.late_interaction import PaddedLists, put_lists_on_device
from jaxret.search.backends.precision import FLOAT32, Precision
from jaxret.search.proof import BlockSearch

SCORES_BYTES = 2 * 2**30  # memory of a device that is reserved for scores


@dataclass(frozen=True)
class Xla:
    """The backend of TPUs, of lists of vectors (on the first device), and of precisions below float32.

    One program searches all devices that JAX has on this machine; on one CPU, a program for each cell (`cpu.py`).
    """

    description: str
    name: str = "xla"
    precision: Precision = FLOAT32
    multi_vector: ClassVar[bool] = True
    precisions: ClassVar[bool] = True
    max_rows: int | None = None
    remedy: ClassVar[str] = ""

    @staticmethod
    def available() -> str | None:
        """Return None: JAX is always installed."""
        return None

    @classmethod
    def open(cls, reason: str, precision: Precision = FLOAT32, multi_vector: bool = False) -> Xla:
        """Return the backend; `multi_vector` is whether it searches lists of vectors."""
        devices = jax.local_devices()[: 1 if multi_vector else None]
        device_names = f"{len(devices)} x {devices[0].device_kind}" if len(devices) > 1 else devices[0].device_kind
        if precision != FLOAT32:
            device_names += f", candidates in {precision.name}"
        return cls(f"XLA (jax {jax.__version__}) on {device_names} ({reason})", precision=precision)

    @cached_property
    def mesh(self) -> Mesh:
        return local_mesh()

    def load(self, block: np.ndarray | PaddedLists) -> BlockSearch:
        if isinstance(block, PaddedLists):
            return put_lists_on_device(block, self.precision)
        layout = plan_cells(len(block), block.shape[1:], self.precision, self.mesh.size, platform_of(self.mesh))
        step = layout.chunk(block.shape[2]) * layout.cells
        return self.hold((block[start : start + step] for start in range(0, len(block), step)), layout)

    def hold(self, chunks: Iterable[np.ndarray], layout: CellLayout) -> BlockSearch:
        """Put chunks of passages on the devices (`accelerators.py`), and return a function that searches them."""
        return put_on_devices(chunks, layout, self.precision, self.mesh)

    @property
    def free(self) -> int | None:
        """Return the free bytes for passages on all devices; None if the devices share the host's memory."""
        stats = [device.memory_stats() for device in self.mesh.devices.flat]
        if not all(stats):
            return None
        left = min(stat["bytes_limit"] - stat["bytes_in_use"] for stat in stats)
        return max(0, left - SCORES_BYTES) * len(stats)
