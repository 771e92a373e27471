"""Whether this is the process of a job that prints and writes metrics."""

from __future__ import annotations

import sys
from typing import Any


def is_first_process() -> bool:
    """Return whether this is process 0 or the only process of a job. Does not import JAX."""
    jax: Any = sys.modules.get("jax")
    return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0
