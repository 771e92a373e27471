"""Which paths are addresses of folders and files in buckets; it imports nothing, so that the command line may ask."""

from __future__ import annotations

import os
import re


def is_bucket_address(path: str | os.PathLike[str]) -> bool:
    """Return whether a path begins with gs:// or s3://. A Path of one counts: it has one slash of the two."""
    return bool(re.match(r"(gs|s3):/", os.fspath(path)))
