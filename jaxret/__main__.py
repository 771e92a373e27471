"""python -m jaxret VERB (or jaxret VERB): what is more than one call into the library."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from jaxret.tools import data
from jaxret.tools.cli import keep_compiled, nearest, quiet, run_script, user_errors


class _Parser(argparse.ArgumentParser):
    """Mistakes are errors like any other."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the flags)")


def main() -> None:
    if sys.argv[1:2] == ["plan"]:
        plan(sys.argv[2:])
        return
    with user_errors():
        arguments, rest = parser().parse_known_args()
        if rest:
            near = nearest(rest[0].partition("=")[0], [f"--{name}" for name in vars(arguments)])
            raise ValueError(f"{rest[0]!r} is no flag{near} (--help lists them)")
        quiet()
        keep_compiled()
        run(arguments)


def parser() -> argparse.ArgumentParser:
    found = _Parser(prog="python -m jaxret", description=__doc__, allow_abbrev=False)
    verbs = found.add_subparsers(dest="verb", required=True, metavar="VERB")
    demo = verbs.add_parser("demo", help="train, encode, search and evaluate on the documentation of this Python")
    demo.add_argument("--workdir", default="runs/demo", help="where everything is saved (default: %(default)s)")
    spread = verbs.add_parser("diversity", help="how different a checkpoint's vectors of a passage are; which wins")
    spread.add_argument("--workdir", required=True, help="a trained run with several vectors a passage")
    spread.add_argument("--data", required=True, help="folder with judged queries")
    spread.add_argument("--split", default="test", help="whose queries (default: %(default)s)")
    spread.add_argument("--checkpoint", default="best", help="best, last or a step (default: %(default)s)")
    verbs.add_parser("plan", help="memory, time and storage of a config on chips that are not there: plan --help")
    opened = verbs.add_parser("open", help="a model as it comes, as a run: to encode, search and start training from")
    opened.add_argument("model", help="a Hugging Face or sentence-transformers directory, or a hub name")
    opened.add_argument("--workdir", required=True, help="folder of the run, to be made")
    opened.add_argument(
        "--token", default="", choices=["cls", "mean"], help="of an encoder alone: what its vector is (default: cls)"
    )
    opened.add_argument("--download", action="store_true", help="fetch a hub name that is not in the local cache")
    exported = verbs.add_parser("export", help="a run in the files of other libraries, read back and compared")
    exported.add_argument("--workdir", required=True, help="a trained run")
    exported.add_argument("--to", required=True, choices=["hf", "sentence-transformers"], help="whose files")
    exported.add_argument("--out", required=True, help="folder to be made")
    exported.add_argument("--checkpoint", default="best", help="best, last or a step (default: %(default)s)")
    words = verbs.add_parser("keywords", help="pseudo-queries from the passages' own words")
    words.add_argument("--corpus", required=True, help="folder or file with passages (docs/data.md)")
    words.add_argument("--out", required=True, help="file to write, for data.pseudo_queries")
    words.add_argument("--count", type=int, default=8, help="words for each passage (default: %(default)s)")
    data.add_parser(verbs)
    return found


def plan(arguments: list[str]) -> None:
    """`plan`, `plan encode`, ...: its flags are those of a script with a config."""
    from jaxret.plan import command

    verb = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "train"
    with user_errors():
        if verb not in command.VERBS:
            known = ", ".join(command.VERBS)
            raise ValueError(f"plan {verb}: what is planned is one of {known}{nearest(verb, command.VERBS)}")
    run_script(lambda: command.main(verb), command.__name__, ["plan", *arguments])


def run(arguments: argparse.Namespace) -> None:
    if arguments.verb == "demo":
        from jaxret.demo.demo import demo as run_demo
        from jaxret.memory import keep_freed_memory

        keep_freed_memory()
        run_demo(arguments.workdir)
    elif arguments.verb == "keywords":
        from jaxret.tools.keywords import write_keywords

        found, total = write_keywords(arguments.corpus, arguments.out, arguments.count)
        print(f"{found:,} of {total:,} passages have keywords, written to {arguments.out}")
    elif arguments.verb == "data":
        data.run(arguments)
    elif arguments.verb == "export":
        from jaxret.tools.export import export

        print(export(arguments.workdir, arguments.to, arguments.out, arguments.checkpoint))
    elif arguments.verb == "open":
        from jaxret.tools.open_model import open_model

        print(open_model(arguments.model, arguments.workdir, arguments.token, arguments.download))
    else:
        from jaxret.runs.run import open_run
        from jaxret.tools.diversity import report

        print(report(open_run(arguments.workdir, arguments.checkpoint), arguments.data, arguments.split))


if __name__ == "__main__":
    main()
