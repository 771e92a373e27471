"""What the scripts share: flags, quiet libraries, and errors in one sentence instead of a traceback."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from absl import app, flags


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


def run_script(main: Callable[[], None]) -> None:
    """Parses the flags and calls `main`; an unknown config key is an error like any other."""

    def parse(arguments: list[str]) -> list[str]:
        with user_errors():
            try:
                rest = flags.FLAGS(arguments)
            except (AttributeError, KeyError) as error:  # how ml_collections says that a key is unknown
                raise ValueError(f"--config: no such key: {error}") from error
            except flags.Error as error:
                raise ValueError(f"{error} (--help lists the flags)") from error
            if len(rest) > 1:
                raise ValueError(f"what is {' '.join(rest[1:])!r}? every argument is a flag: --name=value")
        return rest

    def call(_: list[str]) -> None:
        logging.getLogger("jax").setLevel(logging.WARNING)  # it reports every accelerator that it does not find
        with user_errors():
            main()

    app.run(call, flags_parser=parse)
