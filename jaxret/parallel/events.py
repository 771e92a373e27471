"""Events of a command as JSON lines on standard output, for programs: the flag --json of every verb.

docs/events.md lists the events and their fields.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxret.parallel.first_process import is_first_process

_output: list[io.FileIO] = []  # where events are written: none, or one file
_lock = threading.Lock()
_rewrites: list[Callable[[str], str]] = []  # changes the texts of events: none, or one function


def start_events() -> None:
    """Let this process write events to standard output, and everything else that it prints there to standard error.

    The descriptor is redirected, not `sys.stdout`: what libraries in C++ and child processes print is in neither
    case JSON.
    """
    if _output:
        return
    sys.stdout.flush()
    _output.append(io.FileIO(os.dup(1), "w"))
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in order with the lines on standard error


def show_texts_by(function: Callable[[str], str]) -> None:
    """Let a function change all texts of the events that follow, such as paths on this host to addresses."""
    _rewrites[:] = [function]


def emit(event: str, **fields: Any) -> None:
    """Write {"event": event, ...} as one line, in process 0 after `start_events`; do nothing otherwise.

    Paths become strings, arrays lists, and numbers that are not finite null. Raises BrokenPipeError if nobody reads.
    """
    if _output and is_first_process():
        line = memoryview(json.dumps(_json_value({"event": event, **fields}), allow_nan=False).encode() + b"\n")
        with _lock:
            while line:  # a write to a pipe may end early
                line = line[_output[0].write(line) or 0 :]


@contextmanager
def without_events() -> Iterator[None]:
    """Emit nothing inside, where a model becomes a run: no training, in a folder that may be renamed."""
    output = _output[:]
    _output.clear()
    try:
        yield
    finally:
        _output[:] = output


def _json_value(value: Any) -> Any:
    """Return a value of JSON for a Python, NumPy or JAX value."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return _rewrites[0](value) if _rewrites else value
    if isinstance(value, Mapping):
        return {_json_value(str(key)): _json_value(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_json_value(one) for one in value]
    if hasattr(value, "tolist"):
        return _json_value(value.tolist())
    return _json_value(os.fspath(value) if isinstance(value, os.PathLike) else str(value))
