"""Questions one after the other: the model and the vectors are opened once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from jaxret.cli.app import describe_error
from jaxret.data.records import Query
from jaxret.experiments.searches.answer_question import describe_passages, show_answer
from jaxret.index.shards import ShardError
from jaxret.parallel.events import emit
from jaxret.runs.mismatch import ContractError
from jaxret.search.searcher import Searcher

_PROMPT = "question> "
# Tokens. Questions of up to this length compile nothing, longer ones compile a program for each padded length.
_WARM_LENGTH = 32


def interact(searcher: Searcher, k: int) -> None:
    """Answer questions from standard input, one per line, until an empty line or the end. A terminal shows a prompt
    with a history, and Ctrl-C discards a line without ending the session. An error in a question is printed on stderr,
    and the next question is read."""
    warm_up(searcher, k)
    if searcher.vectors.index:
        print(f"approximate: {searcher.vectors.index.describe(k)}")
    print(f"{describe_passages(searcher)}; an empty line or Ctrl-D ends", flush=True)
    for question in questions():
        try:
            show_answer(searcher, question, k, progress=False)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        except Exception as error:
            # If the output is closed, or the error is unexpected, the session ends.
            if isinstance(error, BrokenPipeError) or not describe_error(error):
                raise
            print(f"error: {describe_error(error)}", file=sys.stderr)
            emit("error", message=describe_error(error), status=0)
        sys.stdout.flush()


def questions() -> Iterator[str]:
    """Yield the lines of standard input up to an empty one. Bytes that are not UTF-8 become lone surrogates, which the
    check of a question reports."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # some builds of Python lack it; then there is no history
            import readline  # noqa: F401
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    while True:
        try:
            line = input(_PROMPT) if terminal else sys.stdin.readline().rstrip("\r\n")
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if not line.strip():
            return
        yield line


def warm_up(searcher: Searcher, k: int) -> None:
    """Compile what questions of up to _WARM_LENGTH tokens need, read the vectors once, and find the places of all
    texts."""
    lengths = range(1, min(searcher.run.tokenizer.query_length, _WARM_LENGTH))
    first = searcher.warm_up([Query("", "? " * length) for length in lengths], k)
    # A missing text is reported with each answer.
    with contextlib.suppress(FileNotFoundError, ContractError, ShardError):
        searcher.texts.read(set(first))
