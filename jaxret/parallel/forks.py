"""Processes that were forked: they lack the threads of JAX, and of FAISS, so that a computation would never end."""

from __future__ import annotations

import os

_uses_devices = False
_parent = 0  # the process that used devices before this one was forked from it


def require_unforked() -> None:
    """Raise RuntimeError in a process that was forked after its parent had used devices."""
    global _uses_devices
    _uses_devices = True
    if _parent:
        raise RuntimeError(
            f"this process was forked from process {_parent}, which had opened a model, and lacks the threads that "
            'compute: start processes by "spawn" (multiprocessing.get_context("spawn")), or fork before a model is '
            "opened, and open it in each process"
        )


def _note_fork() -> None:
    global _parent
    if _uses_devices and not _parent:
        _parent = os.getppid()


os.register_at_fork(after_in_child=_note_fork)
