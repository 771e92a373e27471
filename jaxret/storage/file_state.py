"""The state of a file, which shows whether an open or mapped file was changed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class FileState(NamedTuple):
    """Size, time of the last change and inode of a file; all 0 where there is none.

    `ctime` is the time of the last change, which no program can set back. A change of name or rights also changes it.
    0: it was not read.
    """

    size: int
    mtime: int  # ns
    inode: int
    ctime: int = 0  # ns

    def difference(self, current: FileState) -> str:
        """Return how the file differs now, as the end of a sentence; "" if it is unchanged."""
        if self == current:
            return ""
        if current == MISSING:
            return "does not exist any more"
        if self.inode != current.inode:
            return "was replaced after it was opened"
        if self.size != current.size:
            return f"has {current.size:,} bytes, and had {self.size:,} when it was opened"
        return "was written to after it was opened"


MISSING = FileState(0, 0, 0)


def file_state(path: Path, changed: bool = False) -> FileState:
    """Return the current state of a file; `changed` is whether to read `ctime`."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return MISSING
    return FileState(stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns if changed else 0)
