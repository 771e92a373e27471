"""Detection of mounted buckets. There a rename copies the file, so that atomic writes and leases are not safe."""

from __future__ import annotations

import os
import re
from pathlib import Path

_KINDS = ("blobfuse", "blobfuse2", "gcsfuse", "geesefs", "goofys", "juicefs", "mountpoint-s3", "rclone", "s3fs")
MOUNTS = Path("/proc/mounts")


def file_system(folder: str | os.PathLike[str], mounts: Path = MOUNTS) -> str:
    """Return the type of the file system that contains a folder, such as "ext4" or "fuse.gcsfuse"; "" if it is unknown.

    The folder need not exist. `mounts` is Linux's table of mounts; other systems have none.
    """
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    path = os.path.realpath(folder)
    kinds: dict[str, str] = {}  # mount point -> its type
    for line in lines:
        _, point, kind, *_ = [*line.split(" "), "", "", ""]
        kinds[re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)] = kind
    parents = [path, *map(str, Path(path).parents)]
    return next((kinds[parent] for parent in parents if parent in kinds), "")


def mounted_bucket(folder: str | os.PathLike[str], mounts: Path = MOUNTS) -> str:
    """Return the kind of the mounted bucket that contains a folder, such as "gcsfuse"; "" for a disk."""
    name = file_system(folder, mounts).removeprefix("fuse.")
    return name if name in _KINDS else ""


def describe_mounted_bucket(folder: str | os.PathLike[str], mounts: Path = MOUNTS) -> str:
    """Return a warning for a folder on a mounted bucket; "" for any other."""
    kind = mounted_bucket(folder, mounts)
    return kind and (
        f"{os.fspath(folder)} is on a bucket that is mounted by {kind}: renames copy there, and several jobs may "
        "overwrite each other's files; give the address gs://... or s3://... instead, or a disk (docs/buckets.md)"
    )
