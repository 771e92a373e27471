"""python -m jaxret VERB: what is more than one call into the library."""

from __future__ import annotations

import argparse

from jaxret.tools.cli import user_errors


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxret")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    demo = verbs.add_parser("demo", help="train, encode, search and evaluate on the documentation of this Python")
    demo.add_argument("--workdir", default="runs/demo", help="where everything is saved (default: %(default)s)")
    arguments = parser.parse_args()
    with user_errors():
        from jaxret.tools.demo import demo as run_demo

        run_demo(arguments.workdir)


if __name__ == "__main__":
    main()
