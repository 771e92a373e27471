"""Whether the regular expressions of somebody else's tokenizer end: each is tried before a text is read with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxret.storage.atomic import read_json

SECONDS = 3  # of computing, for all expressions of a tokenizer; those that are in use take milliseconds
_LENGTH = 2000  # characters of a text; the time of a bad expression grows with their third power, or exponentially
_TEXTS = (
    *(character * _LENGTH for character in "a 1!\n"),
    ("The quick brown fox, aged 42, can't jump over 3.14 lazy dogs!\n" * _LENGTH)[:_LENGTH],
)
# Of Llama 3, Qwen 2 and 3, and XLM-RoBERTa: a process more would make every start longer.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SAFE_EXPRESSIONS = {rf"{_WORDS}\p{{N}}{{1,3}}{_REST}", rf"{_WORDS}\p{{N}}{_REST}", " {2,}"}
# The library for expressions cannot be interrupted, so that another process, with limits of its own, has to try them.
# It counts them; the loader reports an invalid expression.
_TRIAL = """
import json, resource, sys
from tokenizers import Regex, pre_tokenizers
seconds, expressions, texts = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
for number, expression in enumerate(expressions):
    print(number, flush=True)
    try:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
    except Exception:
        continue
    for text in texts:
        split.pre_tokenize_str(text)
"""


def check_expressions(path: Path) -> None:
    """Raise ValueError if a regular expression of a tokenizer.json takes time without bound on a short text, and
    RuntimeError if they cannot be tried."""
    if not path.exists() or b'"Regex"' not in path.read_bytes():
        return
    rules = read_json(path)
    every = [*_expressions(rules.get("normalizer")), *_expressions(rules.get("pre_tokenizer"))]
    expressions = [expression for expression in dict.fromkeys(every) if expression not in _SAFE_EXPRESSIONS]
    if not expressions:
        return
    process = subprocess.run(
        [sys.executable, "-c", _TRIAL],
        input=json.dumps([SECONDS, expressions, _TEXTS]),
        capture_output=True,
        text=True,
        env=os.environ | {"RUST_BACKTRACE": "0"},
    )
    if process.returncode:
        tries = process.stdout.split()
        if not tries:
            raise RuntimeError(f"{path}: its regular expressions could not be tried: {process.stderr.strip()[-300:]}")
        raise ValueError(
            f"{path}: the regular expression {expressions[int(tries[-1])]!r:.100} goes back and forth without end in a "
            f"text of {_LENGTH:,} characters ({SECONDS} s are allowed); use the model's original file"
        )


def _expressions(rules: Any) -> list[str]:
    """Return the regular expressions of rules, wherever they are in them."""
    if isinstance(rules, dict):
        own = [rules["Regex"]] if isinstance(rules.get("Regex"), str) else []
        return own + [expression for value in rules.values() for expression in _expressions(value)]
    return [expression for value in rules for expression in _expressions(value)] if isinstance(rules, list) else []
