"""The examples of a config, and the lines that are printed about them."""

from __future__ import annotations

import json
from pathlib import Path

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.training.examples import load_examples
from tests import tiny
from tests.pipeline import write_encoder


def test_advice_on_missing_negatives_is_for_training_data(tmp_path: Path) -> None:
    """Dev examples without negatives must not lead to data.negatives=0, which would drop those of the training data."""
    tokenizer = TextTokenizer.load(write_encoder(tmp_path / "encoder"), 12, 24)
    row = {"query": "music", "positive": "river"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    path = str(tmp_path / "pairs.jsonl")
    config = tiny.make_config(
        {"data.train": path, "data.dev": path, "data.store": str(tmp_path / "store"), "data.negatives": 1}
    )
    printed: dict[str, list[str]] = {"train": [], "dev": []}
    for which, lines in printed.items():
        assert load_examples(config, which, tokenizer, False, lines.append)
    for which, lines in printed.items():
        (line,) = [line for line in lines if "hard negatives; their slots stay empty" in line]
        assert ("data.negatives=0" in line) == (which == "train")
