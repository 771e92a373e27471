"""On SIGTERM, training finishes the current step and saves a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jaxret.parallel.sigterm import sigterm_handler


@contextmanager
def stop_on_sigterm() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM sets, so that the current step can be saved. A second signal ends the process."""
    stop = threading.Event()

    def handle(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    with sigterm_handler(handle):
        yield stop
