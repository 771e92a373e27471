"""Detects forked processes. They lack the threads of JAX and FAISS, so that a computation would never end."""

from __future__ import annotations

import os

_uses_devices = False
_parent = 0  # id of the parent process, if it used devices before the fork


def require_unforked() -> None:
    """Raise RuntimeError in a process that was forked after its parent had used devices."""
    global _uses_devices
    _uses_devices = True
    if _parent:
        raise RuntimeError(
            f"this process was forked from process {_parent}, which had opened a model, and lacks the threads of JAX. "
            'Start processes with "spawn" (multiprocessing.get_context("spawn")), or fork before a model is opened, '
            "and open it in each process"
        )


def _note_fork() -> None:
    global _parent
    if _uses_devices and not _parent:
        _parent = os.getppid()


os.register_at_fork(after_in_child=_note_fork)
