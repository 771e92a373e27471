"""jaxret VERB ... (or python -m jaxret VERB ...) trains dense retrievers, encodes corpora, and searches them exactly.

jaxret VERB -h lists the flags of a verb; jaxret --version prints the version. A verb that resumes continues when the
same command runs again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from jaxret.cli.app import HELP, report_errors, requests_events, run_command
from jaxret.cli.verbs import VERBS
from jaxret.configs.synonyms import suggest_name
from jaxret.parallel.events import start_events
from jaxret.version import __version__


def main(*words: str) -> None:
    """Run the verb of the command line. `words` are put in front of the arguments: the verb, in a script for one
    verb."""
    arguments = [*words, *sys.argv[1:]]
    with report_errors():
        if arguments == ["--version"]:
            print(f"jaxret {__version__}")
            return
        if requests_events(arguments):
            start_events()
        group = f"{arguments[0]} " if arguments and arguments[0] not in HELP else ""
        if any(verb.startswith(group) for verb in VERBS) and HELP.intersection(arguments[bool(group) :][:1]):
            print(overview(group))
            return
        verb, options = split_verb(arguments)
        module = importlib.import_module(f"jaxret.cli.{verb.replace(' ', '_')}")
    run_command(module, options)


def overview(group: str = "") -> str:
    """Return the help of the verbs that begin with `group`, a line each."""
    lines = [f"  {verb:<13} {summary}" for verb, summary in VERBS.items() if verb.startswith(group)]
    return "\n".join([(__doc__ or "").strip(), "", *lines])


def split_verb(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the verb that a command line begins with, and the other arguments. Raises ValueError without a verb."""
    for count in (2, 1):
        if (verb := " ".join(arguments[:count])) in VERBS:
            return verb, list(arguments[count:])
    if not arguments:
        raise ValueError(f"a verb is missing: jaxret VERB, one of {', '.join(VERBS)} (-h explains them)")
    group = [verb for verb in VERBS if verb.startswith(f"{arguments[0]} ")]
    name = " ".join(arguments[: 2 if group else 1])
    choices = f": it is {' or '.join(group)}" if group else ""
    hint = suggest_name(name, group or VERBS) or choices
    raise ValueError(f"{name!r} is not a verb{hint} (jaxret -h lists them)")


if __name__ == "__main__":
    main()
