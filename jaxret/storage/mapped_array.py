"""Arrays of .npy files, memory-mapped."""

from __future__ import annotations

import os
import threading

import numpy as np

# numpy parses a header with Python's parser. In Python 3.11, this parser sometimes fails if two threads use it at once
# (SystemError: AST constructor recursion depth mismatch).
_HEADERS = threading.Lock()


def map_array(path: str | os.PathLike[str]) -> np.ndarray:
    """Return the array of a .npy file, memory-mapped and read-only. A wrong size in the header allocates no memory.

    Raises OSError if the file cannot be read, ValueError, TypeError, OverflowError or EOFError if it is damaged.
    """
    with _HEADERS:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return array
