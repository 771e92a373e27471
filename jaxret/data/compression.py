"""Plain, gzip and Zstandard files, distinguished by their first bytes."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GZIP, ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
SUFFIXES = ("", ".gz", ".zst")  # endings of file names, in the order in which files are looked for


class DamagedFileError(ValueError):
    """A compressed file that ends too soon, or a file that is not compressed although its name says so."""


def zstandard_module() -> Any:
    """Return Python's Zstandard module (from 3.14), or its backport. Raises ValueError with the pip command if neither
    is installed."""
    for name in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise ValueError("a .zst file needs a package: pip install 'jaxret[data]'")


def detect_compression(path: Path) -> str:
    """Return "", ".gz" or ".zst". A file with such a name but other first bytes is damaged, not plain."""
    with open(path, "rb") as file:
        begin = file.read(4)
    if begin.startswith(GZIP):
        return ".gz"
    if begin == ZSTANDARD:
        return ".zst"
    return path.suffix if path.suffix in SUFFIXES else ""


def read_blocks(path: Path, size: int) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, up to `size` at a time. Raises DamagedFileError if its compression is
    damaged."""
    kind = detect_compression(path)
    opener: Any = gzip.open if kind == ".gz" else zstandard_module().open if kind == ".zst" else open
    errors = (EOFError, gzip.BadGzipFile, zlib.error, *([zstandard_module().ZstdError] if kind == ".zst" else []))
    with opener(path, "rb") as file:
        try:
            while block := file.read1(size):
                yield block
        except errors as error:
            raise DamagedFileError(str(error)) from error


def open_compressed_text(raw: Any, suffix: str) -> io.TextIOWrapper:
    """Open a writer of UTF-8 text into `raw`, compressed as `suffix` says. Equal texts give equal bytes."""
    file: Any
    if suffix == ".zst":
        file = zstandard_module().ZstdFile(raw, "wb")
    else:
        file = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0)
    return io.TextIOWrapper(file, encoding="utf-8", newline="\n")
