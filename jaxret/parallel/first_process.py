"""Which process of a job prints and writes its metrics."""

from __future__ import annotations

import sys
from typing import Any


def is_first_process() -> bool:
    """Return whether this is the only process of a job, or process 0; without importing JAX."""
    jax: Any = sys.modules.get("jax")
    return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0
