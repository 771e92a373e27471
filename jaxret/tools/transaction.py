"""A folder that is there whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxret.storage import naming


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path`, empty, that becomes `path` if the block ends well. By an error, Ctrl-C or SIGTERM it is
    removed, and `path` is as it was; only a kill that cannot be caught leaves it, as `.NAME.*.tmp`.

    Raises FileExistsError if `path` is there (an empty folder may be), StorageError if it cannot be written.
    """
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise FileExistsError(f"{path} is there already; give a folder that is not")
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with _sigterm_raises(), naming(path):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            os.replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends the process as an exception does, so that what it was about to make is removed."""

    def handle(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    try:
        before = signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not in the main thread: the owner of the process decides
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
