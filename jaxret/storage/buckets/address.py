"""Recognition of addresses in buckets. This module imports nothing, so that the command line can use it."""

from __future__ import annotations

import os
import re


def is_bucket_address(path: str | os.PathLike[str]) -> bool:
    """Return whether a path begins with gs:// or s3://, or with one slash, which a Path keeps of the two."""
    return bool(re.match(r"(gs|s3):/", os.fspath(path)))
