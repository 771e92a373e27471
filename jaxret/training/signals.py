"""On SIGTERM, training finishes the current step and saves a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_sigterm() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM sets, so that the current step can be saved. A second signal ends the process."""
    stop = threading.Event()

    def handle(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    try:
        previous_handler = signal.signal(signal.SIGTERM, handle)
    except ValueError:  # outside of the main thread, signals belong to the program that calls this
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
