"""jaxret VERB ... (python -m jaxret VERB ...): from text to a trained retriever, its vectors and an exact search.

jaxret VERB -h lists the flags of a verb.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from jaxret.commands import VERBS
from jaxret.shipped import nearest
from jaxret.tools.cli import HELP, run_command, user_errors


def main(*words: str) -> None:
    """Does what the command line says; `words` come before it, in a script of one verb."""
    arguments = [*words, *sys.argv[1:]]
    with user_errors():
        group = f"{arguments[0]} " if arguments and arguments[0] not in HELP else ""
        if any(verb.startswith(group) for verb in VERBS) and HELP.intersection(arguments[bool(group) :][:1]):
            print(overview(group))
            return
        verb, rest = choose(arguments)
        module = importlib.import_module(f"jaxret.commands.{verb.replace(' ', '_')}")
    run_command(module, rest)


def overview(group: str = "") -> str:
    """What the verbs that begin with `group` do, a line each."""
    lines = [f"  {verb:<13} {does}" for verb, does in VERBS.items() if verb.startswith(group)]
    return "\n".join([(__doc__ or "").strip(), "", *lines])


def choose(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The verb that a command line begins with, and what follows. Raises ValueError if there is none."""
    for count in (2, 1):
        if (verb := " ".join(arguments[:count])) in VERBS:
            return verb, list(arguments[count:])
    if not arguments:
        raise ValueError(f"what is to be done? jaxret VERB, one of {', '.join(VERBS)} (-h says what they do)")
    group = [verb for verb in VERBS if verb.startswith(f"{arguments[0]} ")]
    asked = " ".join(arguments[: 2 if group else 1])
    known = f": it is {' or '.join(group)}" if group else nearest(asked, VERBS)
    raise ValueError(f"{asked!r} is no verb{known} (jaxret -h lists them)")


if __name__ == "__main__":
    main()
