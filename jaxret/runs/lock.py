"""One job writes to a folder at a time; reading needs no lock."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxret.parallel.processes import from_first_process, wait_for_all
from jaxret.storage.atomic import storage_errors
from jaxret.storage.lockfile import FolderLock, LockedError
from jaxret.storage.mounted_bucket import describe_mounted_bucket
from jaxret.storage.unfinished import remove_leftovers
from jaxret.storage.working_copy import copy_of


@contextlib.contextmanager
def hold_folder(folder: Path, job: str) -> Iterator[None]:
    """Hold the lock of a folder for the block, and remove temporary files that killed writers left there.

    The processes of one jax.distributed job hold the lock together: process 0 takes it, so all of them must call this,
    in the same order, and they leave the block together. Raises LockedError (in every process) if another job holds
    the lock, and StorageError if the folder cannot be written.
    """
    folder = Path(folder)
    lock, problem, is_new = None, None, not folder.exists()
    if jax.process_index() == 0:
        if warning := describe_mounted_bucket(folder):
            print(warning, file=sys.stderr)
        try:
            with storage_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
            if copy := copy_of(folder):
                copy.require_writable()
            lock = FolderLock(folder, job)
            remove_leftovers(folder)
        except (LockedError, OSError) as error:
            problem = error
    message = from_first_process(str(problem or ""))
    if message:
        raise problem or LockedError(message)
    try:
        yield
        wait_for_all()  # another process may still write
    finally:
        if lock:
            lock.release()
            if is_new:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # nothing was written: a job that failed at once leaves nothing behind
