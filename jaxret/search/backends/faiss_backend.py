"""Backends that search a block of vectors with FAISS, on the CPU or on all GPUs of the machine."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from jaxret.search.backends.int8 import CANDIDATE_FACTOR, MOST_CANDIDATES, Quantized
from jaxret.search.backends.late_interaction import PaddedLists
from jaxret.search.backends.precision import FLOAT32, LONGEST_INT8, Precision
from jaxret.search.proof import BlockHits, BlockSearch, best_columns

FAISS_GPU_MAX_K = 2048  # the limit of FAISS's selection kernels
FEW_QUERIES = 4  # for at most this many queries BLAS is faster on a CPU: FAISS gives each query to one thread


def from_rows(scores: np.ndarray, rows: np.ndarray, shape: tuple[int, int], k: int) -> BlockHits:
    """Return the k best passages of a block from its best vectors.

    If the vectors belong to fewer than k passages, passages with score -inf are added; the bound covers them.

    Args:
        scores: scores of the best vectors [Q,r], descending.
        rows: indices of these vectors in the block [Q,r].
        shape: (N passages, V) of the block.
        k: passages to return.
    """
    n_passages, n_vectors = shape
    cut = scores[:, -1] if rows.shape[1] < n_passages * n_vectors else np.full(len(scores), -np.inf, np.float32)
    if n_vectors == 1:
        return BlockHits(scores, rows, cut)
    best = np.full((len(scores), n_passages), -np.inf, np.float32)
    np.maximum.at(best, (np.arange(len(scores))[:, None], rows // n_vectors), scores)
    top, passages, left_out = best_columns(best, k)
    return BlockHits(top, passages, np.maximum(cut, left_out))


@dataclass(frozen=True)
class FaissCpu:
    """FAISS's brute-force search on the CPU."""

    faiss: Any
    description: str
    # Whether a block is searched many times. From the first single query on, the block is kept in int8, too, which
    # takes a quarter more memory (`int8.py`).
    many: bool = False
    # What opens the backend that may be faster, given a reason (`faster_backend.py`).
    rival: Callable[[str], Any] | None = None
    name: str = "faiss-cpu"
    multi_vector: ClassVar[bool] = False
    precision: ClassVar[Precision] = FLOAT32
    precisions: ClassVar[bool] = False
    max_rows: int | None = None
    remedy: ClassVar[str] = "pip install -r requirements.txt"

    @staticmethod
    def available() -> str | None:
        """Return the reason why this backend cannot be used on this machine; None if it can."""
        return _import_faiss()[1]

    @classmethod
    def open(cls, reason: str) -> FaissCpu:
        """Return the backend. `reason` says why it was chosen, for its description."""
        faiss, _ = _import_faiss()
        return cls(faiss, f"FAISS {faiss.__version__} on the CPU ({reason})")

    def load(self, block: np.ndarray | PaddedLists) -> BlockSearch:
        assert isinstance(block, np.ndarray)
        # FAISS uses BLAS from this many queries on. With its default of 128,000, a small batch takes 4 times as long.
        self.faiss.cvar.distance_compute_blas_threshold = 20
        shape = block.shape[:2]
        rows = block.reshape(-1, block.shape[-1])
        quantize = cache(partial(Quantized, self.faiss, rows))
        int8_allowed = self.many and rows.shape[1] <= LONGEST_INT8

        def top(queries: np.ndarray, k: int) -> BlockHits:
            count = min(k * shape[1], len(rows))  # k x V vectors hold at least k passages
            if int8_allowed and len(queries) == 1 and count <= MOST_CANDIDATES // CANDIDATE_FACTOR:
                scores, vector_rows, left_out = quantize().best(queries, count)
                best = from_rows(scores, vector_rows, shape, k)
                return best._replace(bound=np.maximum(best.bound, left_out))
            if len(queries) <= FEW_QUERIES:
                scores, vector_rows, _ = best_columns(queries @ rows.T, count)
                return from_rows(scores, vector_rows, shape, k)
            scores, vector_rows = self.faiss.knn(queries, rows, count, metric=self.faiss.METRIC_INNER_PRODUCT)
            return from_rows(scores, vector_rows, shape, k)

        return top


@dataclass(frozen=True)
class FaissGpu:
    """FAISS's brute-force search on all GPUs of the machine, each with a part of the passages.

    No machine of the test suite has a GPU, so errors are found by the self-check only.
    """

    faiss: Any
    resources: tuple[Any, ...]  # FAISS's object for each GPU
    description: str
    name: str = "faiss-gpu"
    multi_vector: ClassVar[bool] = False
    precision: ClassVar[Precision] = FLOAT32
    precisions: ClassVar[bool] = False
    max_rows: int | None = FAISS_GPU_MAX_K
    remedy: ClassVar[str] = (
        "in a fresh environment pip install -r requirements-gpu.txt (it has faiss-gpu instead of faiss-cpu)"
    )

    @staticmethod
    def available() -> str | None:
        """Return the reason why this backend cannot be used on this machine; None if it can."""
        faiss, problem = _import_faiss()
        return problem or (None if _faiss_gpus(faiss) else f"FAISS {faiss.__version__} sees no GPU")

    @classmethod
    def open(cls, reason: str) -> FaissGpu:
        """Return the backend for all GPUs that FAISS sees. `reason` says why it was chosen, for its description."""
        faiss, _ = _import_faiss()
        count = _faiss_gpus(faiss)
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        resources = tuple(faiss.StandardGpuResources() for _ in range(count))
        return cls(faiss, resources, f"FAISS {faiss.__version__} on {gpus} ({reason})")

    def load(self, block: np.ndarray | PaddedLists) -> BlockSearch:
        assert isinstance(block, np.ndarray)
        bounds = [len(block) * gpu // len(self.resources) for gpu in range(len(self.resources) + 1)]
        parts = [
            (start, self._load_on(gpu, block[start:stop]))
            for gpu, (start, stop) in enumerate(pairwise(bounds))
            if start < stop
        ]

        def top(queries: np.ndarray, k: int) -> BlockHits:
            with ThreadPoolExecutor(len(parts)) as gpus:  # FAISS releases the interpreter lock
                hits = list(gpus.map(lambda part: part[1](queries, k), parts))
            return _merge_parts(hits, [start for start, _ in parts], k)

        return top

    def _load_on(self, gpu: int, passages: np.ndarray) -> BlockSearch:
        shape = passages.shape[:2]
        config = self.faiss.GpuIndexFlatConfig()  # stores vectors in float32 by default
        config.device = gpu
        index = self.faiss.GpuIndexFlatIP(self.resources[gpu], passages.shape[-1], config)
        index.add(passages.reshape(-1, passages.shape[-1]))

        def top(queries: np.ndarray, k: int) -> BlockHits:
            # If the limit cuts off needed vectors, the bound is high, and the caller searches again in smaller blocks.
            count = min(k * shape[1], shape[0] * shape[1], FAISS_GPU_MAX_K)
            scores, vector_rows = index.search(queries, count)
            return from_rows(scores, vector_rows, shape, k)

        return top


def _merge_parts(hits: list[BlockHits], firsts: list[int], k: int) -> BlockHits:
    """Return the k best of the hits in the parts of a block; `firsts` are the first rows of the parts."""
    if len(hits) == 1:
        return hits[0]
    scores = np.concatenate([hit.scores for hit in hits], axis=1)
    passages = np.concatenate([hit.rows + first for hit, first in zip(hits, firsts, strict=True)], axis=1)
    top, columns, left_out = best_columns(scores, k)
    bound = np.max([*(hit.bound for hit in hits), left_out], axis=0)
    return BlockHits(top, np.take_along_axis(passages, columns, axis=1), bound)


def _import_faiss() -> tuple[Any, str | None]:
    """Return (module, None), or (None, reason) if it cannot be imported, such as a GPU build without CUDA's
    libraries."""
    logging.getLogger("faiss.loader").setLevel(logging.WARNING)  # INFO reports every build that is not installed
    try:
        return importlib.import_module("faiss"), None
    except (ImportError, OSError) as error:
        return None, f"FAISS cannot be imported ({error})"


def _faiss_gpus(faiss: Any) -> int:
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0
