"""What the scripts share: an error a user can act on is one sentence, not a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def user_errors() -> Iterator[None]:
    """Prints errors in input, config and files as `error: ...` and exits with 1; JAXRET_DEBUG=1 shows tracebacks."""
    try:
        yield
    except (ValueError, FileNotFoundError, ArithmeticError) as error:
        if os.environ.get("JAXRET_DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
