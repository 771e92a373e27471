"""The flag --json of every verb: events of a command as JSON lines on standard output, for programs.

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

_output: list[io.FileIO] = []  # the file for events, if they are written
_lock = threading.Lock()
_rewrites: list[Callable[[str], str]] = []  # the function that changes the texts of events, if there is one


def start_events() -> None:
    """Let this process write events to standard output, and all other output to standard error.

    The file descriptor is redirected instead of `sys.stdout`, because C++ libraries and child processes print text that
    is not JSON, too.
    """
    if _output:
        return
    sys.stdout.flush()
    _output.append(io.FileIO(os.dup(1), "w"))
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # keeps the order with lines on standard error


def show_texts_by(function: Callable[[str], str]) -> None:
    """Let a function change all texts of later events, such as paths on this host to addresses."""
    _rewrites[:] = [function]


def emit(event: str, **fields: Any) -> None:
    """Write {"event": event, ...} as one line, in process 0 after `start_events`. Does nothing in other cases.

    Paths become strings, arrays become lists, and NaN and infinity become null. Raises BrokenPipeError if the reader of
    standard output has ended.
    """
    if _output and is_first_process():
        line = memoryview(json.dumps(_json_value({"event": event, **fields}), allow_nan=False).encode() + b"\n")
        with _lock:
            while line:  # a pipe may accept only a part
                line = line[_output[0].write(line) or 0 :]


@contextmanager
def without_events() -> Iterator[None]:
    """Emit no events in this block. It is used while a model is imported: this is no training, and the folder may be
    renamed."""
    output = _output[:]
    _output.clear()
    try:
        yield
    finally:
        _output[:] = output


def _json_value(value: Any) -> Any:
    """Return a Python, NumPy or JAX value as a value for JSON."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return _rewrites[0](value) if _rewrites else value
    if isinstance(value, Mapping):
        return {_json_value(str(key)): _json_value(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_json_value(entry) for entry in value]
    if hasattr(value, "tolist"):
        return _json_value(value.tolist())
    return _json_value(os.fspath(value) if isinstance(value, os.PathLike) else str(value))
