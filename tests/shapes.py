"""The decorator that checks annotated shapes and types of arrays while tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import beartype


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype, but not for functions inside functions: they are made anew at every call of the outer one, and
    preparing the checks took a tenth of the suite's time."""
    return function if "<locals>" in function.__qualname__ else beartype(function)
