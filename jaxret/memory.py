"""How this process asks the system for memory."""

from __future__ import annotations

import ctypes
import platform

import jax

# mallopt's parameters (glibc's malloc.h) -> values.
_OPTIONS = {
    -3: 2**31 - 1,  # M_MMAP_THRESHOLD: bytes of a block that the system is asked for on its own; an int
    -1: -1,  # M_TRIM_THRESHOLD: free bytes at the end of the heap that are given back; -1: never
}


def keep_freed_memory() -> bool:
    """Keeps what is freed for what is asked for next; to be called before JAX has devices. By default glibc gives
    blocks of more than 32 MiB back at once, and a program of XLA's on a CPU asks for hundreds of MiB whenever it runs:
    for every step the system then hands out, and clears, as many pages again. Blocks above 2 GiB are still given back.

    Programs on a CPU then run in the thread that calls them: other threads have heaps that hold no large block. False
    where the C library is another one, or an old glibc that refuses; there nothing changes.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    if not all([library.mallopt(parameter, value) for parameter, value in _OPTIONS.items()]):
        return False
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return True
