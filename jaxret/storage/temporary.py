"""A temporary folder that is removed with the Python object that made it."""

from __future__ import annotations

import os
import shutil
import weakref
from pathlib import Path
from tempfile import mkdtemp


class TemporaryFolder:
    """A folder that is removed with this object, or when the process ends. A forked child does not remove it."""

    def __init__(self) -> None:
        self.path = Path(mkdtemp(prefix="jaxret-"))
        self.remove = weakref.finalize(self, _remove_own, self.path, os.getpid())


def _remove_own(folder: Path, process: int) -> None:
    """Remove a folder if this process made it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
