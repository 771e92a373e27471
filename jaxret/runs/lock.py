"""One job writes to a folder at a time. Who only reads needs no lock."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxret.distributed import from_first_process, wait_for_all
from jaxret.lockfile import LOCK, LockedError, LockFile
from jaxret.storage import naming, sweep


@contextlib.contextmanager
def hold(folder: Path, job: str) -> Iterator[None]:
    """Holds `<folder>/.lock` for the block, and sweeps away what killed writers left in the folder.

    The lock of a process of this host that is gone is taken over, with a line on stderr; that of another host never
    is. The processes of one jax.distributed job are one owner: process 0 holds the lock, so all of them must come here,
    in the same order, and those that succeed leave together. Raises LockedError (in every process) if another job holds
    it, and StorageError if the folder cannot be written.
    """
    folder = Path(folder)
    lock, problem, made = None, None, not folder.exists()
    if jax.process_index() == 0:
        try:
            with naming(folder):
                folder.mkdir(parents=True, exist_ok=True)
            lock = LockFile(folder / LOCK, job)
            sweep(folder)
        except (LockedError, OSError) as error:
            problem = error
    told = from_first_process(str(problem or ""))
    if told:
        raise problem or LockedError(told)
    try:
        yield
        wait_for_all()  # another process may still write
    finally:
        if lock:
            lock.release()
            if made:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # nothing was written: a job that failed at once leaves nothing behind
