"""Select the backend that finds the best passages of a block of vectors: FAISS or XLA.

Ties and last bits of a backend's scores may be wrong. It returns an upper bound of the score of every passage that it
left out. With this bound, `proof.py` proves in float64 that no result is missing. A new backend is a class and a line
in BACKENDS.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxret.search.backends.faiss_backend import FaissCpu, FaissGpu
from jaxret.search.backends.late_interaction import PaddedLists
from jaxret.search.backends.precision import FLOAT32, Precision, find_precision
from jaxret.search.backends.xla_backend import Xla
from jaxret.search.proof import BlockSearch


@runtime_checkable
class Backend(Protocol):
    """A library that computes inner products on some devices."""

    @property
    def name(self) -> str: ...
    @property
    def multi_vector(self) -> bool:
        """Return whether the backend can also search lists of vectors (PaddedLists)."""
        ...

    @property
    def precision(self) -> Precision:
        """Return the precision of the backend; below float32 its scores are upper bounds (`precision.py`)."""
        ...

    @property
    def max_rows(self) -> int | None:
        """Return the largest number of vectors that it can return for one query and block; None: no limit."""
        ...

    @property
    def description(self) -> str:
        """Return a line with library, version, device, and the reason for the choice."""
        ...

    def load(self, block: np.ndarray | PaddedLists) -> BlockSearch:
        """Put passages [N,V,D] float32 on the device, and return a function that searches them."""
        ...


# All backends, and the backends that `auto` tries in this order, depending on the platform of JAX.
BACKENDS: dict[str, Any] = {"faiss-gpu": FaissGpu, "faiss-cpu": FaissCpu, "xla": Xla}
AUTO_ON_CPU = ("faiss-gpu", "faiss-cpu", "xla")
AUTO_ON_ACCELERATOR = ("faiss-gpu", "xla", "faiss-cpu")


def select_backend(name: str = "auto", multi_vector: bool = False, precision: str = "float32") -> Backend:
    """Choose the backend of a search; its `description` has the reason. Call `self_check` on it before use.

    Args:
        name: the name of the backend; "auto" takes the first of AUTO_ON_... that is available and fits the others. On
            a CPU, a large search then measures whether XLA is faster (`faster_backend.py`).
        multi_vector: whether the corpus has lists of vectors.
        precision: the precision in which candidates are found.

    Raises ValueError if the named backend is not available (the message says what to install) or does not fit.
    """
    numbers = find_precision(precision)
    if name == "auto":
        reasons: list[tuple[str, str]] = []
        for choice in AUTO_ON_CPU if jax.default_backend() == "cpu" else AUTO_ON_ACCELERATOR:
            kind = BACKENDS[choice]
            problem = _lacks(kind, multi_vector, numbers) or kind.available()
            if problem is None:
                problems = "".join(f", not {backend}: {reason}" for backend, reason in reasons)
                backend = _open(kind, f"auto: JAX runs on {jax.default_backend()}{problems}", numbers, multi_vector)
                return replace(backend, rival=Xla.open) if isinstance(backend, FaissCpu) else backend
            reasons.append((choice, problem))
        raise ValueError("no search backend fits: " + "; ".join(f"{choice}: {reason}" for choice, reason in reasons))
    if name == "scipy":
        raise ValueError(
            f"search backend 'scipy' is for sparse vectors; these are dense: use auto, {', '.join(BACKENDS)}"
        )
    if name not in BACKENDS:
        raise ValueError(f"unknown search backend {name!r}; it must be one of auto, {', '.join(BACKENDS)}")
    kind = BACKENDS[name]
    if problem := _lacks(kind, multi_vector, numbers):
        able = ", ".join(key for key, other_kind in BACKENDS.items() if not _lacks(other_kind, multi_vector, numbers))
        noun = "corpus" if multi_vector else "precision"
        raise ValueError(f"search backend {name!r} {problem.removeprefix('it ')}; this {noun} needs {able}, or auto")
    problem = kind.available()
    if problem is not None:
        raise ValueError(f"search backend {name} is not available: {problem}; {kind.remedy}, or use xla")
    return _open(kind, "as requested", numbers, multi_vector)


def _lacks(kind: Any, multi_vector: bool, precision: Precision) -> str | None:
    """Return the reason why a backend does not fit the corpus or the precision; None if it fits."""
    if multi_vector and not kind.multi_vector:
        return "it cannot search lists of vectors"
    if precision != FLOAT32 and not kind.precisions:
        return f"it computes in float32, not in {precision.name}"
    return None


def _open(kind: Any, reason: str, precision: Precision, multi_vector: bool) -> Backend:
    backend: Backend = kind.open(reason, precision, multi_vector) if kind.precisions else kind.open(reason)
    return backend


def with_many_searches(backend: Backend) -> Backend:
    """Return the backend with settings for blocks that are loaded once and searched many times. It has no rival,
    because the loaded blocks belong to it."""
    return replace(backend, many=True, rival=None) if isinstance(backend, FaissCpu) else backend
