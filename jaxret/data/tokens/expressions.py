"""Check that no regular expression of a foreign tokenizer runs without end: each is tried on a few texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxret.storage.atomic import read_json

# Upper bound of the processor time for all expressions of a tokenizer, in seconds. Published tokenizers need
# milliseconds.
TRIAL_SECONDS = 3
_LENGTH = 2000  # characters of a text; the time of a bad expression grows with their third power or exponentially
_TEXTS = (
    *(character * _LENGTH for character in "a 1!\n"),
    ("The quick brown fox, aged 42, can't jump over 3.14 lazy dogs!\n" * _LENGTH)[:_LENGTH],
)
# Expressions of Llama 3, Qwen 2 and 3, and XLM-RoBERTa. They are not tried, because the process delays every start.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SAFE_EXPRESSIONS = {rf"{_WORDS}\p{{N}}{{1,3}}{_REST}", rf"{_WORDS}\p{{N}}{_REST}", " {2,}"}
# The library of regular expressions cannot be interrupted. Therefore another process, with limited time, tries
# them. It prints the number of each expression before trying it. The loader reports invalid expressions.
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
    """Raise ValueError if a regular expression of a tokenizer.json runs without end on a short text, and RuntimeError
    if the expressions cannot be tried."""
    if not path.exists() or b'"Regex"' not in path.read_bytes():
        return
    rules = read_json(path)
    all_expressions = [*_expressions(rules.get("normalizer")), *_expressions(rules.get("pre_tokenizer"))]
    expressions = [expression for expression in dict.fromkeys(all_expressions) if expression not in _SAFE_EXPRESSIONS]
    if not expressions:
        return
    process = subprocess.run(
        [sys.executable, "-c", _TRIAL],
        input=json.dumps([TRIAL_SECONDS, expressions, _TEXTS]),
        capture_output=True,
        text=True,
        env=os.environ | {"RUST_BACKTRACE": "0"},
    )
    if process.returncode:
        tries = process.stdout.split()
        if not tries:
            raise RuntimeError(f"{path}: its regular expressions could not be tried: {process.stderr.strip()[-300:]}")
        raise ValueError(
            f"{path}: the regular expression {expressions[int(tries[-1])]!r:.100} did not end within "
            f"{TRIAL_SECONDS} s on a text of {_LENGTH:,} characters. Use the model's original file"
        )


def _expressions(rules: Any) -> list[str]:
    """Return the regular expressions at all depths of a JSON value."""
    if isinstance(rules, dict):
        first = [rules["Regex"]] if isinstance(rules.get("Regex"), str) else []
        return first + [expression for value in rules.values() for expression in _expressions(value)]
    return [expression for value in rules for expression in _expressions(value)] if isinstance(rules, list) else []
