"""The best documents in one block of vectors, in float32: FAISS on a GPU or on the CPU, or XLA on any JAX device.

A backend need not be exact about ties or about the last bits: it says how high a document that it left out may have
scored, and `search.py` proves from that, in float64, that nothing was missed. A new one is a class and a line in the
tables at the end of this file.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxret.retrieval.proof import Found, keep_best

FAISS_GPU_MAX_K = 2048  # the limit of FAISS's selection kernels
FEW_QUERIES = 4  # up to so many BLAS is faster on a CPU: FAISS gives each query to one thread


class Padded(NamedTuple):
    """Lists of vectors [N,V,D] float32, padded; mask [N,V] says which exist. Lists after the first `real` are empty."""

    vectors: np.ndarray
    mask: np.ndarray
    real: int


Searcher = Callable[[Any, int], Found]  # queries [Q,D], or Padded where the block is Padded; and k


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
    """FAISS's brute force on the CPU."""

    faiss: Any
    description: str
    name: str = "faiss-cpu"
    lists: ClassVar[bool] = False
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

        def top(queries: np.ndarray, k: int) -> Found:
            wanted = min(k * shape[1], len(rows))  # k x V vectors hold at least k documents
            if len(queries) <= FEW_QUERIES:
                scores, found, _ = best_columns(queries @ rows.T, wanted)
                return from_rows(scores, found, shape, k)
            scores, found = self.faiss.knn(queries, rows, wanted, metric=self.faiss.METRIC_INNER_PRODUCT)
            return from_rows(scores, found, shape, k)

        return top


@dataclass(frozen=True)
class FaissGpu:
    """FAISS's brute force on the first GPU. No machine of the test suite has one: the self-check is its guard."""

    faiss: Any
    resources: Any
    description: str
    name: str = "faiss-gpu"
    lists: ClassVar[bool] = False
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
        description = f"FAISS {faiss.__version__} on GPU 0 of {_faiss_gpus(faiss)} ({reason})"
        return cls(faiss, faiss.StandardGpuResources(), description)

    def load(self, block: np.ndarray | Padded) -> Searcher:
        assert isinstance(block, np.ndarray)
        shape = block.shape[:2]
        index = self.faiss.GpuIndexFlatIP(self.resources, block.shape[-1])  # float32 storage is its default
        index.add(block.reshape(-1, block.shape[-1]))

        def top(queries: np.ndarray, k: int) -> Found:
            # Where the limit bites, the bound says so and the caller asks again with smaller blocks.
            wanted = min(k * shape[1], shape[0] * shape[1], FAISS_GPU_MAX_K)
            scores, found = index.search(queries, wanted)
            return from_rows(scores, found, shape, k)

        return top


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
    """One matrix product and one selection, compiled by XLA for JAX's default device: the backend of TPUs, and of lists
    of vectors."""

    description: str
    name: str = "xla"
    lists: ClassVar[bool] = True
    max_rows: int | None = None
    remedy: ClassVar[str] = ""

    @staticmethod
    def available() -> str | None:
        return None

    @classmethod
    def open(cls, reason: str) -> Xla:
        return cls(f"XLA (jax {jax.__version__}) on {jax.local_devices()[0].device_kind} ({reason})")

    def load(self, block: np.ndarray | Padded) -> Searcher:
        if isinstance(block, Padded):
            return self._load_lists(block)
        n_documents = len(block)
        size = few_sizes(n_documents)
        on_device = jnp.asarray(
            block if size == n_documents else np.pad(block, ((0, size - n_documents), (0, 0), (0, 0)))
        )

        def top(queries: np.ndarray, k: int) -> Found:
            count = len(queries)
            queries = np.pad(queries, ((0, power_of_two(count) - count), (0, 0)))
            found = _xla_top(queries, on_device, n_documents, min(k, n_documents))
            scores, documents = (np.asarray(x)[:count] for x in found)
            cut = scores[:, -1] if k < n_documents else np.full(count, -np.inf, np.float32)
            return Found(scores, documents.astype(np.int64), cut)

        return top

    def _load_lists(self, block: Padded) -> Searcher:
        vectors, mask = jnp.asarray(block.vectors), jnp.asarray(block.mask)
        size = len(block.vectors)

        def top(queries: Padded, k: int) -> Found:
            q, exists, count = queries
            k = min(k, block.real)
            found = _xla_top_lists(q, exists, vectors, mask, min(power_of_two(k), size))
            scores, place = (np.asarray(x)[:count] for x in found)
            bound = scores[:, k - 1] if k < block.real else np.full(count, -np.inf, np.float32)
            # Padded documents score -inf and come last: no product of vectors that passed `upper_norms` overflows.
            assert (place[:, :k] < block.real).all()
            return Found(scores[:, :k], place[:, :k].astype(np.int64), bound)

        return top


def power_of_two(count: int) -> int:
    """The next one: few sizes, so few programs are compiled."""
    return 1 << (count - 1).bit_length()


def few_sizes(count: int) -> int:
    """The next size in steps of a sixteenth of a power of two: blocks from which rows were left out are all of other
    sizes, and each size is a program."""
    step = max(1, power_of_two(count) // 16)
    return -(-count // step) * step


@partial(jax.jit, static_argnums=3)
def _xla_top(queries: jax.Array, vectors: jax.Array, real: jax.Array | int, k: int) -> tuple[jax.Array, jax.Array]:
    """The k best of the first `real` documents; the others are padding."""
    product = jnp.einsum("qd,nvd->qnv", queries, vectors, precision=jax.lax.Precision.HIGHEST)
    scores = jnp.max(product, axis=-1)  # [Q,N]
    scores = jnp.where(jnp.arange(scores.shape[1]) < real, scores, -jnp.inf)
    group = 16  # selecting groups by their maximum first: XLA sorts all of a long row on a GPU
    n_queries, n = scores.shape
    if 2 * k * group > n:
        top, documents = jax.lax.top_k(scores, k)
        return top, documents
    scores = jnp.pad(scores, ((0, 0), (0, -n % group)), constant_values=-jnp.inf)
    groups = scores.reshape(n_queries, -1, group)
    _, chosen = jax.lax.top_k(groups.max(axis=-1), k)  # the k best scores lie in the k best groups
    inside = jnp.take_along_axis(groups, chosen[..., None], axis=1).reshape(n_queries, -1)  # [Q,k*group]
    top, place = jax.lax.top_k(inside, k)
    documents = jnp.take_along_axis(chosen, place // group, axis=1) * group + place % group
    return top, documents


@partial(jax.jit, static_argnums=4)
def _xla_top_lists(
    queries: jax.Array, exists: jax.Array, vectors: jax.Array, mask: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    products = jnp.einsum("qud,nvd->qunv", queries, vectors, precision=jax.lax.Precision.HIGHEST)
    best = jnp.max(jnp.where(mask, products, -jnp.inf), axis=-1)  # [Q,U,N]
    scores = jnp.sum(jnp.where(exists[..., None], best, 0.0), axis=1)
    top, places = jax.lax.top_k(scores, k)
    return top, places


# What there is, and what `auto` tries, in this order, by what JAX runs on.

BACKENDS: dict[str, Any] = {"faiss-gpu": FaissGpu, "faiss-cpu": FaissCpu, "xla": Xla}
AUTO_ON_CPU = ("faiss-gpu", "faiss-cpu", "xla")
AUTO_ON_ACCELERATOR = ("faiss-gpu", "xla", "faiss-cpu")


def select_backend(name: str = "auto", lists: bool = False) -> Backend:
    """Chooses where to search; `.description` says what was chosen and why. Call `self_check` on it before use.

    lists: the corpus holds lists of vectors. auto: the first of AUTO_ON_... that can do that and is available. Raises
    ValueError if a named backend is not available, with what to install, or has no lists.
    """
    if name == "auto":
        passed: list[tuple[str, str]] = []
        for choice in AUTO_ON_CPU if jax.default_backend() == "cpu" else AUTO_ON_ACCELERATOR:
            kind = BACKENDS[choice]
            problem = "it has no lists of vectors" if lists and not kind.lists else kind.available()
            if problem is None:
                why = "".join(f", not {other}: {reason}" for other, reason in passed)
                return kind.open(f"auto: JAX runs on {jax.default_backend()}{why}")
            passed.append((choice, problem))
        raise RuntimeError("no search backend is available")
    if name not in BACKENDS:
        raise ValueError(f"unknown search backend {name!r}; it must be one of auto, {', '.join(BACKENDS)}")
    kind = BACKENDS[name]
    if lists and not kind.lists:
        able = ", ".join(other for other, one in BACKENDS.items() if one.lists)
        raise ValueError(f"search backend {name!r} has no lists of vectors; this corpus needs {able}, or auto")
    problem = kind.available()
    if problem is not None:
        raise ValueError(f"search backend {name} is not available: {problem}; {kind.remedy}, or take xla")
    return kind.open("as asked")
