"""The best documents in one block of vectors: FAISS on GPUs or on the CPU, or XLA on all of JAX's devices.

A backend need not be exact about ties or about the last bits: it says how high a document that it left out may have
scored, and `search.py` proves from that, in float64, that nothing was missed. A new one is a class and a line in the
tables at the end of this file.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from jaxret.retrieval.devices import Layout, hold, lay_out, local_mesh, platform_of
from jaxret.retrieval.lists import Padded, hold_lists
from jaxret.retrieval.precision import FLOAT32, LONGEST_INT8, Precision, find_precision
from jaxret.retrieval.proof import Found, keep_best
from jaxret.retrieval.quantized import MOST, OVER, Quantized

FAISS_GPU_MAX_K = 2048  # the limit of FAISS's selection kernels
SCORES_BYTES = 2 * 2**30  # of a device that are left for scores, beside documents
FEW_QUERIES = 4  # up to so many BLAS is faster on a CPU: FAISS gives each query to one thread


Searcher = Callable[[Any, int], Found]  # queries [Q,D], or Ragged where the block is Padded; and k


@runtime_checkable
class Backend(Protocol):
    """Where inner products are computed."""

    @property
    def name(self) -> str: ...
    @property
    def lists(self) -> bool:
        """Whether it can also search lists of vectors (Padded)."""
        ...

    @property
    def precision(self) -> Precision:
        """In which numbers it computes; below float32 its scores are upper bounds (`precision.py`)."""
        ...

    @property
    def max_rows(self) -> int | None:
        """How many vectors it can return for one query and block at most; None: no limit."""
        ...

    @property
    def description(self) -> str:
        """One line to print: library, version, device, and why it was chosen."""
        ...

    def load(self, block: np.ndarray | Padded) -> Searcher:
        """Puts documents [N,V,D] float32 on the device; the result finds the best min(k, N) for queries."""
        ...


def from_rows(scores: np.ndarray, rows: np.ndarray, shape: tuple[int, int], k: int) -> Found:
    """The k best documents from the best vectors [Q,r] (descending) of a block of `shape` = (N documents, V).

    Where the r vectors belong to fewer than k documents, others fill up with score -inf: the bound covers them.
    """
    n_documents, n_vectors = shape
    cut = scores[:, -1] if rows.shape[1] < n_documents * n_vectors else np.full(len(scores), -np.inf, np.float32)
    if n_vectors == 1:
        return Found(scores, rows, cut)
    best = np.full((len(scores), n_documents), -np.inf, np.float32)
    np.maximum.at(best, (np.arange(len(scores))[:, None], rows // n_vectors), scores)
    found, documents, left_out = best_columns(best, k)
    return Found(found, documents, np.maximum(cut, left_out))


@dataclass(frozen=True)
class FaissCpu:
    """FAISS's brute force on the CPU. many: what is loaded is searched many times, so that from the first question that
    comes alone it is kept in int8 too, a quarter more (`quantized.py`)."""

    faiss: Any
    description: str
    many: bool = False
    name: str = "faiss-cpu"
    lists: ClassVar[bool] = False
    precision: ClassVar[Precision] = FLOAT32
    precisions: ClassVar[bool] = False
    max_rows: int | None = None
    remedy: ClassVar[str] = "pip install -r requirements.txt"

    @staticmethod
    def available() -> str | None:
        return _import_faiss()[1]

    @classmethod
    def open(cls, reason: str) -> FaissCpu:
        faiss, _ = _import_faiss()
        return cls(faiss, f"FAISS {faiss.__version__} on the CPU ({reason})")

    def load(self, block: np.ndarray | Padded) -> Searcher:
        assert isinstance(block, np.ndarray)
        # Below this many queries FAISS leaves BLAS; its own default of 128,000 is 4 times slower on a small batch.
        self.faiss.cvar.distance_compute_blas_threshold = 20
        shape = block.shape[:2]
        rows = block.reshape(-1, block.shape[-1])
        quantized = cache(partial(Quantized, self.faiss, rows))
        alone = self.many and rows.shape[1] <= LONGEST_INT8

        def top(queries: np.ndarray, k: int) -> Found:
            wanted = min(k * shape[1], len(rows))  # k x V vectors hold at least k documents
            if alone and len(queries) == 1 and wanted <= MOST // OVER:
                scores, found, left_out = quantized().best(queries, wanted)
                best = from_rows(scores, found, shape, k)
                return best._replace(bound=np.maximum(best.bound, left_out))
            if len(queries) <= FEW_QUERIES:
                scores, found, _ = best_columns(queries @ rows.T, wanted)
                return from_rows(scores, found, shape, k)
            scores, found = self.faiss.knn(queries, rows, wanted, metric=self.faiss.METRIC_INNER_PRODUCT)
            return from_rows(scores, found, shape, k)

        return top


@dataclass(frozen=True)
class FaissGpu:
    """FAISS's brute force on all GPUs of the machine, each with its part of the documents. resources: of each GPU. No
    machine of the test suite has one: the self-check is its guard."""

    faiss: Any
    resources: tuple[Any, ...]
    description: str
    name: str = "faiss-gpu"
    lists: ClassVar[bool] = False
    precision: ClassVar[Precision] = FLOAT32
    precisions: ClassVar[bool] = False
    max_rows: int | None = FAISS_GPU_MAX_K
    remedy: ClassVar[str] = (
        "in a fresh environment pip install -r requirements-gpu.txt (it has faiss-gpu for faiss-cpu)"
    )

    @staticmethod
    def available() -> str | None:
        faiss, problem = _import_faiss()
        return problem or (None if _faiss_gpus(faiss) else f"FAISS {faiss.__version__} sees no GPU")

    @classmethod
    def open(cls, reason: str) -> FaissGpu:
        faiss, _ = _import_faiss()
        count = _faiss_gpus(faiss)
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        resources = tuple(faiss.StandardGpuResources() for _ in range(count))
        return cls(faiss, resources, f"FAISS {faiss.__version__} on {gpus} ({reason})")

    def load(self, block: np.ndarray | Padded) -> Searcher:
        assert isinstance(block, np.ndarray)
        bounds = [len(block) * gpu // len(self.resources) for gpu in range(len(self.resources) + 1)]
        parts = [
            (start, self._on(gpu, block[start:stop]))
            for gpu, (start, stop) in enumerate(pairwise(bounds))
            if start < stop
        ]

        def top(queries: np.ndarray, k: int) -> Found:
            with ThreadPoolExecutor(len(parts)) as gpus:  # FAISS gives the interpreter lock back
                found = list(gpus.map(lambda part: part[1](queries, k), parts))
            return _merged(found, [start for start, _ in parts], k)

        return top

    def _on(self, gpu: int, documents: np.ndarray) -> Searcher:
        """Documents on one GPU."""
        shape = documents.shape[:2]
        config = self.faiss.GpuIndexFlatConfig()  # float32 storage is its default
        config.device = gpu
        index = self.faiss.GpuIndexFlatIP(self.resources[gpu], documents.shape[-1], config)
        index.add(documents.reshape(-1, documents.shape[-1]))

        def top(queries: np.ndarray, k: int) -> Found:
            # Where the limit bites, the bound says so and the caller asks again with smaller blocks.
            wanted = min(k * shape[1], shape[0] * shape[1], FAISS_GPU_MAX_K)
            scores, found = index.search(queries, wanted)
            return from_rows(scores, found, shape, k)

        return top


def _merged(found: list[Found], firsts: list[int], k: int) -> Found:
    """The k best of what was found in several parts of a block, which begin at rows `firsts` of it."""
    if len(found) == 1:
        return found[0]
    scores = np.concatenate([part.scores for part in found], axis=1)
    documents = np.concatenate([part.documents + first for part, first in zip(found, firsts, strict=True)], axis=1)
    top, columns, left_out = best_columns(scores, k)
    bound = np.max([*(part.bound for part in found), left_out], axis=0)
    return Found(top, np.take_along_axis(documents, columns, axis=1), bound)


def best_columns(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The `count` highest scores of each row of [Q,n], descending, their columns, and the highest left out [Q]."""
    columns, left_out = keep_best(scores, count)
    found = np.take_along_axis(scores, columns, axis=1)
    order = np.argsort(-found, axis=1)
    return np.take_along_axis(found, order, axis=1), np.take_along_axis(columns, order, axis=1), left_out


def _import_faiss() -> tuple[Any, str | None]:
    """The module, or None and why not: FAISS's GPU build raises on import where CUDA's libraries are missing."""
    logging.getLogger("faiss.loader").setLevel(logging.WARNING)  # it reports every build that it does not find
    try:
        return importlib.import_module("faiss"), None
    except (ImportError, OSError) as error:
        return None, f"FAISS cannot be imported ({error})"


def _faiss_gpus(faiss: Any) -> int:
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


@dataclass(frozen=True)
class Xla:
    """One program, compiled by XLA, over all devices that JAX has on this machine (on one CPU, one for each cell:
    `host.py`): the backend of TPUs, and of lists of vectors (on the first device). precision: of candidates."""

    description: str
    name: str = "xla"
    precision: Precision = FLOAT32
    lists: ClassVar[bool] = True
    precisions: ClassVar[bool] = True
    max_rows: int | None = None
    remedy: ClassVar[str] = ""

    @staticmethod
    def available() -> str | None:
        return None

    @classmethod
    def open(cls, reason: str, precision: Precision = FLOAT32, lists: bool = False) -> Xla:
        """lists: for lists of vectors."""
        devices = jax.local_devices()[: 1 if lists else None]
        where = f"{len(devices)} x {devices[0].device_kind}" if len(devices) > 1 else devices[0].device_kind
        if precision != FLOAT32:
            where += f", candidates in {precision.name}"
        return cls(f"XLA (jax {jax.__version__}) on {where} ({reason})", precision=precision)

    @cached_property
    def mesh(self) -> Mesh:
        return local_mesh()

    def load(self, block: np.ndarray | Padded) -> Searcher:
        if isinstance(block, Padded):
            return hold_lists(block, self.precision)
        layout = lay_out(len(block), block.shape[1:], self.precision, self.mesh.size, platform_of(self.mesh))
        step = layout.chunk(block.shape[2]) * layout.cells
        return self.hold((block[start : start + step] for start in range(0, len(block), step)), layout)

    def hold(self, chunks: Iterable[np.ndarray], layout: Layout) -> Searcher:
        """As `load`, of documents that come a chunk at a time (`devices.py`)."""
        return hold(chunks, layout, self.precision, self.mesh)

    @property
    def free(self) -> int | None:
        """Bytes that are left for documents on all devices; None: they are the host's."""
        stats = [device.memory_stats() for device in self.mesh.devices.flat]
        if not all(stats):
            return None
        left = min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
        return max(0, left - SCORES_BYTES) * len(stats)


# What there is, and what `auto` tries, in this order, by what JAX runs on.

BACKENDS: dict[str, Any] = {"faiss-gpu": FaissGpu, "faiss-cpu": FaissCpu, "xla": Xla}
AUTO_ON_CPU = ("faiss-gpu", "faiss-cpu", "xla")
AUTO_ON_ACCELERATOR = ("faiss-gpu", "xla", "faiss-cpu")


def select_backend(name: str = "auto", lists: bool = False, precision: str = "float32", many: bool = False) -> Backend:
    """Chooses where to search; `.description` says what was chosen and why. Call `self_check` on it before use.

    lists: the corpus holds lists of vectors. precision: in which numbers candidates are found. many: what is loaded is
    searched many times. auto: the first of AUTO_ON_... that can do that and is available. Raises ValueError if a named
    backend is not available, with what to install, or cannot do it.
    """
    numbers = find_precision(precision)
    if name == "auto":
        passed: list[tuple[str, str]] = []
        for choice in AUTO_ON_CPU if jax.default_backend() == "cpu" else AUTO_ON_ACCELERATOR:
            kind = BACKENDS[choice]
            problem = _lacks(kind, lists, numbers) or kind.available()
            if problem is None:
                why = "".join(f", not {other}: {reason}" for other, reason in passed)
                return _open(kind, f"auto: JAX runs on {jax.default_backend()}{why}", numbers, many, lists)
            passed.append((choice, problem))
        raise ValueError("no search backend does this: " + "; ".join(f"{other}: {reason}" for other, reason in passed))
    if name not in BACKENDS:
        raise ValueError(f"unknown search backend {name!r}; it must be one of auto, {', '.join(BACKENDS)}")
    kind = BACKENDS[name]
    if problem := _lacks(kind, lists, numbers):
        able = ", ".join(other for other, one in BACKENDS.items() if not _lacks(one, lists, numbers))
        what = "corpus" if lists else "precision"
        raise ValueError(f"search backend {name!r} {problem.removeprefix('it ')}; this {what} needs {able}, or auto")
    problem = kind.available()
    if problem is not None:
        raise ValueError(f"search backend {name} is not available: {problem}; {kind.remedy}, or take xla")
    return _open(kind, "as asked", numbers, many, lists)


def _lacks(kind: Any, lists: bool, precision: Precision) -> str | None:
    """Why a backend cannot do what is asked."""
    if lists and not kind.lists:
        return "it has no lists of vectors"
    if precision != FLOAT32 and not kind.precisions:
        return f"it computes in float32, not in {precision.name}"
    return None


def _open(kind: Any, reason: str, precision: Precision, many: bool, lists: bool) -> Backend:
    found: Backend = kind.open(reason, precision, lists) if kind.precisions else kind.open(reason)
    return replace(found, many=True) if many and isinstance(found, FaissCpu) else found
