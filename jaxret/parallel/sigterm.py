"""A handler of SIGTERM for a block."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_handler(handle: Callable[..., None]) -> Iterator[None]:
    """Let SIGTERM call `handle` during the block. Outside of the main thread, nothing is changed: there, signals belong
    to the program that calls this."""
    try:
        old_handler = signal.signal(signal.SIGTERM, handle)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)
