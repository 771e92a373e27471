"""jaxret: dense passage retrieval with JAX, from text to an exact top-k. docs/python.md shows its use.

The names of `__all__`, and JAX with them, are imported at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxret.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxret.api import EncodeOptions, Hit, Index, Passage, Retriever, SearchOptions

__all__ = ["EncodeOptions", "Hit", "Index", "Passage", "Retriever", "SearchOptions"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("jaxret.api"), name)
    raise AttributeError(f"module 'jaxret' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
