"""SIGTERM finishes and saves the step under way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_sigterm() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM sets, so that the step under way can be saved. A second signal ends the process."""
    stop = threading.Event()

    def handle(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    try:
        before = signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not in the main thread: the owner of the process decides
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
