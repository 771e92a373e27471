"""Atomic creation of whole folders."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxret.parallel.sigterm import sigterm_handler
from jaxret.storage.atomic import storage_errors, sync, sync_tree
from jaxret.storage.unfinished import locked_folder, sweep, temporary_path


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to `path`; it is flushed to disk and renamed to `path` if the block succeeds.

    After an error, Ctrl-C or SIGTERM the folder is removed, and `path` is unchanged. After SIGKILL, a folder
    `.NAME.*.tmp` remains until the next call.

    Raises FileExistsError if `path` exists and is not an empty folder, even if another job made it during the block,
    and StorageError if it cannot be written.
    """
    path = path.absolute()
    with storage_errors(path):
        sweep(path)
    require_absent(path)
    temporary = temporary_path(path)
    # With SystemExit, SIGTERM removes the unfinished files.
    with sigterm_handler(_exit), storage_errors(path):
        try:
            temporary.mkdir(parents=True)
            with locked_folder(temporary):
                yield temporary
                sync_tree(temporary)
                _publish(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def require_absent(path: Path) -> None:
    """Raise FileExistsError if `path` exists and is not an empty folder."""
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise FileExistsError(f"{path} exists already; give a new folder")


def _publish(temporary: Path, path: Path) -> None:
    try:
        os.replace(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise FileExistsError(f"{path} was made by another job meanwhile; give another folder, or use it") from error
    sync(path.parent)


def _exit(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)
