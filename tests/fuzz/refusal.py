"""The message of an expected error."""

from __future__ import annotations

from collections.abc import Callable


def refusal(call: Callable[[], object], *errors: type[Exception]) -> str | None:
    """Return the message of an expected error of a call; None if there is none. Any other error is raised."""
    try:
        call()
    except errors as error:
        return str(error)
    return None
