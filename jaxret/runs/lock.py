"""The lock of a folder to which only one job at a time may write. Reading needs no lock."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxret.parallel.processes import from_first_process, wait_for_all
from jaxret.storage.atomic import storage_errors
from jaxret.storage.buckets.mounted_bucket import describe_mounted_bucket
from jaxret.storage.buckets.working_copy import copy_of, folder_files
from jaxret.storage.file_state import file_state
from jaxret.storage.lockfile import FolderLock, LockedError
from jaxret.storage.unfinished import remove_leftovers

_PAUSE = 0.2  # seconds between two attempts to take a lock that another job holds


@contextlib.contextmanager
def hold_folder(folder: Path, job: str, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock of a folder for the block, and remove temporary files that killed writers left in the folder.

    The processes of one jax.distributed job share the lock. Process 0 takes it, so all must call this function, in the
    same order, and they leave the block together.

    Args:
        folder: the folder, which is created if it does not exist.
        job: description of the job, for the error message in another job.
        patience: seconds to wait for another job that holds the lock, counted from its last change of a file in the
            folder.

    Raises:
        LockedError: another job holds the lock (raised in every process).
        StorageError: the folder cannot be written.
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
            lock = _take(folder, job, patience)
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
                    folder.rmdir()  # succeeds only if it is empty, so that a job that failed at once leaves no folder


def _take(folder: Path, job: str, patience: float) -> FolderLock:
    """Return the lock of a folder. Wait for another job that holds it, like `hold_folder`."""
    states, since = None, time.monotonic()
    while True:
        try:
            return FolderLock(folder, job)
        except LockedError as error:
            if not patience:
                raise
            if states is None:
                print(f"waiting: {error}", file=sys.stderr)
            if (current := [file_state(path) for _, path in folder_files(folder)]) != states:
                states, since = current, time.monotonic()
            elif time.monotonic() - since > patience:
                raise
        time.sleep(_PAUSE)
