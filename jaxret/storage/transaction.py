"""Atomic creation of whole folders."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxret.storage.atomic import storage_errors


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` that becomes `path` if the block succeeds.

    After an error, Ctrl-C or SIGTERM it is removed and `path` is unchanged; only SIGKILL leaves it, as `.NAME.*.tmp`.

    Raises FileExistsError if `path` exists and is no empty folder, StorageError if it cannot be written.
    """
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise FileExistsError(f"{path} is there already; give a folder that is not")
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with _sigterm_raises(), storage_errors(path):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            os.replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise SystemExit within the block, so that unfinished files are removed."""

    def handle(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    try:
        before = signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not in the main thread: the handler is left as it is
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
