"""Processes that were forked: they lack the threads of JAX, and of FAISS, so that a computation would never end."""

from __future__ import annotations

import os

_process: int | None = None  # the first process that used devices


def require_unforked() -> None:
    """Raise RuntimeError in a process that was forked after its parent had used devices."""
    global _process
    if _process is None:
        _process = os.getpid()
    if _process != os.getpid():
        raise RuntimeError(
            f"this process was forked from process {_process}, which had opened a model, and lacks the threads that "
            'compute: start processes by "spawn" (multiprocessing.get_context("spawn")), or fork before a model is '
            "opened, and open it in each process"
        )
