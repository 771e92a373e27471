"""The decorator that checks annotated shapes and types of arrays during tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import beartype


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply beartype, except to functions inside functions: these are created at every call of the outer one, and
    preparing their checks took a tenth of the suite's time."""
    return function if "<locals>" in function.__qualname__ else beartype(function)
