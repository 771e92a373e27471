"""The best documents in one block of vectors, in float32: FAISS on a GPU or on the CPU, or XLA on any JAX device.

A backend need not be exact about ties or about the last bits: it says how high a document that it left out may have
scored, and `search.py` proves from that, in float64, that nothing was missed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

UNIT = 2.0**-24  # unit roundoff of float32
TINY = 2.0**-126  # smallest normal float32; a device may flush smaller results to zero
BLOCK_ROWS = 65_536  # vectors multiplied at a time: smaller blocks leave BLAS idle, larger ones only cost memory
QUERY_ROWS = 1024  # queries multiplied at a time: 1024 x 65,536 scores are 256 MiB
FAISS_GPU_MAX_K = 2048  # the limit of FAISS's selection kernels
NAMES = ("auto", "faiss-gpu", "faiss-cpu", "xla")


class Found(NamedTuple):
    """The best documents of a block for each query; no document twice."""

    scores: np.ndarray  # [Q,k] float32, descending
    documents: np.ndarray  # [Q,k] int64, within the block
    bound: np.ndarray  # [Q] float32: no document left out scores higher; -inf where none was left out


Searcher = Callable[[np.ndarray, int], Found]


@runtime_checkable
class Backend(Protocol):
    """Where inner products are computed."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str:
        """One line to print: library, version, device, and why it was chosen."""
        ...

    @property
    def max_rows(self) -> int | None:
        """How many vectors it can return for one query and block at most; None: no limit."""
        ...

    def load(self, vectors: np.ndarray) -> Searcher:
        """Puts vectors [N,V,D] float32 on the device; the result finds the best min(k, N) for queries [Q,D]."""
        ...


def rounding_error(dimension: int, query_norms: np.ndarray, largest_norm: float) -> np.ndarray:
    """How far a float32 dot product may be from the exact one, for each query, float64 [Q].

    |fl(q.d) - q.d| <= gamma_D sum|q_i d_i| <= gamma_D |q||d|, with gamma_D = D u / (1 - D u), whatever the order of
    the sum and with or without fused multiply-add (Higham, Accuracy and Stability of Numerical Algorithms, 3.1-3.5).
    Doubled, for D up to 2^22 and for TPUs, which build a float32 product from six bfloat16 ones. The second term is
    underflow: each of the inputs, products and sums may be flushed to zero.
    """
    norms = query_norms.astype(np.float64)
    return 2 * dimension * UNIT * norms * largest_norm + dimension * TINY * (2 + norms + largest_norm)


def upper_norms(vectors: np.ndarray) -> np.ndarray:
    """Upper bounds of the L2 norms of float32 vectors [N,D], float64 [N]. NaN or infinite where a vector has a NaN,
    an infinity, or is so long (about 9e18) that products could overflow."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        squares = np.einsum("nd,nd->n", vectors, vectors).astype(np.float64)
    squares[squares >= np.finfo(np.float32).max / 4] = np.inf
    dimension = vectors.shape[1]
    return np.sqrt(squares * (1 + 2 * dimension * UNIT) + dimension * TINY)


def keep_best(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns [Q,min(k,n)] of the k highest scores [Q,n], in no order, and the highest score left out [Q]."""
    n = scores.shape[1]
    if k >= n:
        return np.broadcast_to(np.arange(n), scores.shape), np.full(len(scores), -np.inf, np.float32)
    order = np.argpartition(scores, (n - k - 1, n - k), axis=1)  # the best left out ends up at column n - k - 1
    return order[:, n - k :], np.take_along_axis(scores, order[:, n - k - 1 : n - k], axis=1)[:, 0]


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
    documents, left_out = keep_best(best, k)
    found = np.take_along_axis(best, documents, axis=1)
    order = np.argsort(-found, axis=1)
    return Found(
        np.take_along_axis(found, order, axis=1),
        np.take_along_axis(documents, order, axis=1),
        np.maximum(cut, left_out),
    )


@dataclass(frozen=True)
class FaissCpu:
    """FAISS's brute force on the CPU."""

    faiss: Any
    description: str
    name: str = "faiss-cpu"
    max_rows: int | None = None

    def load(self, vectors: np.ndarray) -> Searcher:
        # Below this many queries FAISS leaves BLAS; its own default of 128,000 is 4 times slower on a small batch.
        self.faiss.cvar.distance_compute_blas_threshold = 20
        shape = vectors.shape[:2]
        rows = vectors.reshape(-1, vectors.shape[-1])

        def top(queries: np.ndarray, k: int) -> Found:
            wanted = min(k * shape[1], len(rows))  # k x V vectors hold at least k documents
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
    max_rows: int | None = FAISS_GPU_MAX_K

    def load(self, vectors: np.ndarray) -> Searcher:
        shape = vectors.shape[:2]
        index = self.faiss.GpuIndexFlatIP(self.resources, vectors.shape[-1])  # float32 storage is its default
        index.add(vectors.reshape(-1, vectors.shape[-1]))

        def top(queries: np.ndarray, k: int) -> Found:
            # Where the limit bites, the bound says so and the caller asks again with smaller blocks.
            wanted = min(k * shape[1], shape[0] * shape[1], FAISS_GPU_MAX_K)
            scores, found = index.search(queries, wanted)
            return from_rows(scores, found, shape, k)

        return top


@dataclass(frozen=True)
class Xla:
    """One matrix product and one selection, compiled by XLA for JAX's default device: the backend of TPUs."""

    description: str
    name: str = "xla"
    max_rows: int | None = None

    def load(self, vectors: np.ndarray) -> Searcher:
        on_device = jnp.asarray(vectors)
        n_documents = len(vectors)

        def top(queries: np.ndarray, k: int) -> Found:
            count = len(queries)
            padded = 1 << (count - 1).bit_length()  # few sizes, so few programs are compiled
            queries = np.pad(queries, ((0, padded - count), (0, 0)))
            scores, documents = (np.asarray(x)[:count] for x in _xla_top(queries, on_device, min(k, n_documents)))
            cut = scores[:, -1] if k < n_documents else np.full(count, -np.inf, np.float32)
            return Found(scores, documents.astype(np.int64), cut)

        return top


@partial(jax.jit, static_argnums=2)
def _xla_top(queries: jax.Array, vectors: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    product = jnp.einsum("qd,nvd->qnv", queries, vectors, precision=jax.lax.Precision.HIGHEST)
    scores = jnp.max(product, axis=-1)  # [Q,N]
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


def select_backend(name: str = "auto") -> Backend:
    """Chooses where to search; `.description` says what was chosen and why. Call `self_check` on it before use.

    auto: faiss-gpu if FAISS sees a GPU, else xla if JAX runs on an accelerator, else faiss-cpu, else xla.
    Raises ValueError if a named backend is not available, with what to install.
    """
    if name not in NAMES:
        raise ValueError(f"unknown search backend {name!r}; it must be one of {', '.join(NAMES)}")
    faiss, problem = _import_faiss()
    gpus = faiss.get_num_gpus() if faiss is not None and hasattr(faiss, "StandardGpuResources") else 0
    on_accelerator = jax.default_backend() != "cpu"
    chosen, reason = name, "as asked"
    if name == "auto":
        chosen = "faiss-gpu" if gpus else "xla" if on_accelerator or faiss is None else "faiss-cpu"
        seen = problem or f"FAISS sees {gpus} GPUs"
        reason = f"auto: {seen}, JAX runs on {jax.default_backend()}"
    if chosen.startswith("faiss") and faiss is None:
        files = {"faiss-gpu": "requirements-gpu.txt", "faiss-cpu": "requirements.txt"}
        raise ValueError(
            f"search backend {chosen} is not available: {problem}; pip install -r {files[chosen]}, or take xla"
        )
    if chosen == "faiss-gpu" and not gpus:
        raise ValueError(
            f"search backend faiss-gpu is not available: FAISS {faiss.__version__} sees no GPU; in a fresh "
            "environment pip install -r requirements-gpu.txt (it has faiss-gpu for faiss-cpu), or take faiss-cpu or xla"
        )
    if chosen == "faiss-gpu":
        description = f"FAISS {faiss.__version__} on GPU 0 of {gpus} ({reason})"
        return FaissGpu(faiss, faiss.StandardGpuResources(), description)
    if chosen == "faiss-cpu":
        return FaissCpu(faiss, f"FAISS {faiss.__version__} on the CPU ({reason})")
    return Xla(f"XLA (jax {jax.__version__}) on {jax.local_devices()[0].device_kind} ({reason})")


def _import_faiss() -> tuple[Any, str]:
    """The module, or None and why not: FAISS's GPU build raises on import where CUDA's libraries are missing."""
    try:
        return importlib.import_module("faiss"), ""
    except (ImportError, OSError) as error:
        return None, f"FAISS cannot be imported ({error})"


def self_check(backend: Backend) -> None:
    """Searches small random blocks and compares with float64. Raises RuntimeError if anything is off.

    What must hold is what search.py's proof needs: every score within `rounding_error` of the exact one, no document
    twice, and no document left out above the bound. The last-bit values are those that TF32 or bfloat16 would lose.
    """
    random = np.random.default_rng(0)
    # Q, N, V, D, k: few dimensions make the tolerance tight; many are what is searched; k = N wants everything.
    for n_queries, n, n_vectors, dimension, k in ((1, 300, 1, 8, 300), (33, 600, 1, 768, 10), (5, 200, 3, 64, 25)):
        queries = random.standard_normal((n_queries, dimension), dtype=np.float32)
        vectors = random.standard_normal((n, n_vectors, dimension), dtype=np.float32)
        vectors[n // 2 :] = vectors[: n - n // 2]  # every document twice
        vectors[7], queries[0] = 1 + 2.0**-12, 1 + 2.0**-12
        case = f"{n_queries} queries, {n} documents of {n_vectors} x {dimension}, k = {k}"
        found = backend.load(vectors)(queries, k)
        exact = np.einsum("qd,nvd->qnv", queries.astype(np.float64), vectors.astype(np.float64)).max(axis=-1)
        norms = upper_norms(vectors.reshape(-1, dimension))
        error = rounding_error(dimension, upper_norms(queries), norms.max())[:, None]
        wrong = ""
        if found.documents.shape != (n_queries, k) or found.documents.min() < 0 or found.documents.max() >= n:
            wrong = f"returned documents of shape {found.documents.shape} outside 0 to {n - 1}"
        elif any(len(set(row)) != k for row in found.documents.tolist()):
            wrong = "returned a document twice"
        elif (np.diff(found.scores, axis=1) > 0).any():
            wrong = "returned scores that are not descending"
        elif (np.abs(found.scores - np.take_along_axis(exact, found.documents, axis=1)) > error).any():
            wrong = "is less exact than float32: is TF32 or bfloat16 forced (NVIDIA_TF32_OVERRIDE)?"
        else:
            np.put_along_axis(exact, found.documents, -np.inf, axis=1)
            if (exact.max(axis=1) > found.bound.astype(np.float64) + error[:, 0]).any():
                wrong = "left out a document that scores above its bound"
        if wrong:
            raise RuntimeError(f"search backend {backend.description} {wrong} ({case}): choose another backend")
