"""SIGTERM finishes and saves the step under way."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class StopRequest:
    """Whether SIGTERM has come."""

    requested: bool = False


@contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """Yield a request that SIGTERM sets, so that the step under way can be saved. A second signal ends the process."""
    stop = StopRequest()

    def handle(*_: object) -> None:
        stop.requested = True
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
