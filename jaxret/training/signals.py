"""SIGTERM: the step under way is finished and saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Stop:
    requested: bool = False


@contextmanager
def stop_on_sigterm() -> Iterator[Stop]:
    """Lets the step under way finish and be saved when the machine is taken away. A second signal ends at once."""
    stop = Stop()

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
