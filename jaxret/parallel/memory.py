"""Settings of this process's memory allocator."""

from __future__ import annotations

import ctypes
import platform

import jax

# mallopt's parameters (glibc's malloc.h) -> values.
_OPTIONS = {
    -3: 2**31 - 1,  # M_MMAP_THRESHOLD: blocks of at least this size get their own mapping; the value is the largest int
    -1: -1,  # M_TRIM_THRESHOLD: free bytes at the end of the heap from which they are returned to the system; -1: never
}


def keep_freed_memory() -> bool:
    """Keep freed memory for later allocations instead of returning it to the system. Call it before JAX has devices.

    By default, glibc returns freed blocks of more than 32 MiB at once. A program of XLA on a CPU allocates hundreds of
    MiB at every run, so the system would have to clear as many pages for every step. Blocks above 2 GiB are still
    returned. Programs on a CPU then run in the calling thread, because heaps of other threads hold no large blocks.

    Returns False, without changes, if the C library is not glibc, or refuses the options.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    if not all([library.mallopt(parameter, value) for parameter, value in _OPTIONS.items()]):
        return False
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return True
