"""Select the backend that finds the best passages of a block of vectors: FAISS or XLA.

A backend need not be exact about ties or about the last bits. It returns an upper bound on the score of every passage
that it left out; from that `proof.py` proves in float64 that nothing was missed. A new backend is a class and a line in
BACKENDS.
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
    """A library and devices that compute inner products."""

    @property
    def name(self) -> str: ...
    @property
    def lists(self) -> bool:
        """Return whether it can also search lists of vectors (PaddedLists)."""
        ...

    @property
    def precision(self) -> Precision:
        """Return the precision of its numbers; below float32 its scores are upper bounds (`precision.py`)."""
        ...

    @property
    def max_rows(self) -> int | None:
        """Return how many vectors it can return for one query and block at most; None: no limit."""
        ...

    @property
    def description(self) -> str:
        """Return a line to print: library, version, device, and why it was chosen."""
        ...

    def load(self, block: np.ndarray | PaddedLists) -> BlockSearch:
        """Put passages [N,V,D] float32 on the device; return a search for the best min(k, N) of them."""
        ...


# All backends, and those that `auto` tries, in this order, by the platform of JAX.

BACKENDS: dict[str, Any] = {"faiss-gpu": FaissGpu, "faiss-cpu": FaissCpu, "xla": Xla}
AUTO_ON_CPU = ("faiss-gpu", "faiss-cpu", "xla")
AUTO_ON_ACCELERATOR = ("faiss-gpu", "xla", "faiss-cpu")


def select_backend(name: str = "auto", lists: bool = False, precision: str = "float32") -> Backend:
    """Choose where to search; `.description` names the choice and its reason. Call `self_check` on it before use.

    Args:
        name: of the backend; "auto" takes the first of AUTO_ON_... that is available and can do the rest.
        lists: the corpus holds lists of vectors.
        precision: of the numbers in which candidates are found.

    Raises ValueError if a named backend is not available, with the package to install, or cannot do it.
    """
    numbers = find_precision(precision)
    if name == "auto":
        reasons: list[tuple[str, str]] = []
        for choice in AUTO_ON_CPU if jax.default_backend() == "cpu" else AUTO_ON_ACCELERATOR:
            kind = BACKENDS[choice]
            problem = _lacks(kind, lists, numbers) or kind.available()
            if problem is None:
                why = "".join(f", not {other}: {reason}" for other, reason in reasons)
                return _open(kind, f"auto: JAX runs on {jax.default_backend()}{why}", numbers, lists)
            reasons.append((choice, problem))
        raise ValueError("no search backend does this: " + "; ".join(f"{other}: {reason}" for other, reason in reasons))
    if name == "scipy":
        raise ValueError(
            f"search backend 'scipy' is for sparse vectors; these are dense: take auto, {', '.join(BACKENDS)}"
        )
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
    return _open(kind, "as requested", numbers, lists)


def _lacks(kind: Any, lists: bool, precision: Precision) -> str | None:
    """Return why a backend cannot do what is requested; None if it can."""
    if lists and not kind.lists:
        return "it has no lists of vectors"
    if precision != FLOAT32 and not kind.precisions:
        return f"it computes in float32, not in {precision.name}"
    return None


def _open(kind: Any, reason: str, precision: Precision, lists: bool) -> Backend:
    backend: Backend = kind.open(reason, precision, lists) if kind.precisions else kind.open(reason)
    return backend


def with_many_searches(backend: Backend) -> Backend:
    """Return a backend for blocks that are loaded once and searched many times."""
    return replace(backend, many=True) if isinstance(backend, FaissCpu) else backend
