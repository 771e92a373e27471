"""python -m jaxret data: look at a data set, and write it in another format."""

from __future__ import annotations

import argparse
from typing import Any

LENGTHS = "32,64,128,256,512"


def add_parser(verbs: Any) -> None:
    """The flags of `data check` and `data convert`."""
    found = verbs.add_parser("data", help="look at data sets (check SRC) and convert them (convert SRC DST --to=...)")
    what = found.add_subparsers(dest="what", required=True, metavar="check|convert")
    check = what.add_parser("check", help="what it is, counts, lengths, duplicates, leaks, and every bad record")
    check.add_argument("source", help="folder or file; FORMAT:PATH forces a format")
    check.add_argument("--tokenizer", default="", help="model folder, package:NAME/FOLDER or hub name; without, words")
    check.add_argument("--lengths", default=LENGTHS, help="limits, and what they would cut (default: %(default)s)")
    convert = what.add_parser("convert", help="write it in another format; what that cannot hold is counted")
    convert.add_argument("source", help="folder or file; FORMAT:PATH forces a format")
    convert.add_argument("destination", help="file (plain, .gz, .zst or .parquet) or folder to write")
    convert.add_argument("--to", required=True, help="a folder of beir, msmarco, tevatron or dpr, or a format's name")
    convert.add_argument(
        "--split", default="train", help="which, or what to call a training file (default: %(default)s)"
    )
    convert.add_argument("--role", default="", help="passages, queries, judgements, examples or rankings")
    convert.add_argument("--on_error", default="error", choices=["error", "skip"], help="what to do with bad records")


def run(arguments: argparse.Namespace) -> None:
    if arguments.what == "check":
        check(arguments.source, arguments.tokenizer, arguments.lengths)
        return
    from jaxret.data.formats import Policy
    from jaxret.data.formats.convert import convert

    policy = Policy(arguments.on_error)
    print(convert(arguments.source, arguments.destination, arguments.to, arguments.split, arguments.role, policy))
    if policy.report():
        print(policy.report())


def check(source: str, tokenizer: str, lengths: str) -> None:
    """Prints what there is, and every bad record; with one, the command fails."""
    limits = lengths.split(",")
    if not all(limit.isdecimal() for limit in limits):
        raise ValueError(f"--lengths={lengths}: numbers of tokens are expected, with commas between them")
    from jaxret.models.encoders.pretrained import resolve
    from jaxret.tools.data_check import check_data, load_tokenizer

    reader = load_tokenizer(str(resolve(tokenizer, weights=False))) if tokenizer else None
    found = check_data(source, reader, [int(limit) for limit in limits])
    print("\n".join(found.lines))
    for error in found.policy.errors:
        print(f"bad: {error}")
    if found.policy.errors:
        raise ValueError(f"{source}: {len(found.policy.errors):,} bad records, listed above")
