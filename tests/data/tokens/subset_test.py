"""A random subset of the training queries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.formats import TrainingSource
from jaxret.data.tokens.batches import tokenize_examples
from jaxret.data.tokens.subset import choose_ids, take_random_queries
from jaxret.data.tokens.teacher_scores import TeacherScores
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.training.examples import data_record, load_examples
from jaxret.types import Ragged
from tests.pipeline import tiny_config, write_data, write_encoder

IDS = [f"q{i}" for i in range(1000)]


def test_a_larger_subset_contains_a_smaller_one() -> None:
    assert len(choose_ids(IDS, 100, 1)) == 100
    assert choose_ids(IDS, 10, 1) < choose_ids(reversed(IDS), 100, 1)
    assert choose_ids(IDS, 100, 1) != choose_ids(IDS, 100, 2)
    kept = choose_ids(IDS, 100, 1)
    assert kept & set(IDS[:500]) == {key for key in choose_ids(IDS, 200, 1) if key in IDS[:500]} & kept
    halves = [sum(int(key[1:]) < 500 for key in choose_ids(IDS, 200, seed)) for seed in range(50)]
    assert abs(np.mean(halves) - 100) < 5  # the standard deviation of the mean is 0.9


def test_a_subset_larger_than_the_data_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"data\.subset .*1,001, .*1,000 training"):
        choose_ids(IDS, 1001, 0)


def test_all_examples_of_the_queries_are_taken(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(write_encoder(tmp_path / "encoder"), 12, 24)
    data = tokenize_examples(TrainingSource.open(write_data(tmp_path / "data"), "train").read(), tokenizer)
    part = take_random_queries(data, 10, 7)
    chosen = choose_ids(data.query_ids, 10, 7)
    rows = [row for row, key in enumerate(data.query_ids) if key in chosen]
    assert set(part.query_ids) == chosen
    assert len(part) == len(rows) > 10, "some queries have two positives"
    assert len(part.passages) == len(data.passages)
    assert part.teacher is None
    assert part.record["subset_of"] == data.record
    negatives = Ragged(np.arange(len(data.negatives.flat), dtype=np.float32), data.negatives.offsets)
    taught = replace(data, teacher=TeacherScores(np.arange(len(data), dtype=np.float32), negatives))
    scores = take_random_queries(taught, 10, 7).teacher
    assert scores is not None
    assert scores.positives.tolist() == rows != list(range(len(rows)))
    for place, row in enumerate(rows):
        np.testing.assert_array_equal(scores.negatives[place], negatives[row])
        assert part.positives[place] == data.positives[row]
        np.testing.assert_array_equal(part.known_positives[place], data.known_positives[row])
        for name in ("queries", "negatives"):
            np.testing.assert_array_equal(getattr(part, name)[place], getattr(data, name)[row])
    assert (
        len(
            {data.digest, part.digest, take_random_queries(data, 11, 7).digest, take_random_queries(data, 10, 8).digest}
        )
        == 4
    )


def test_training_records_its_subset(tmp_path: Path) -> None:
    data, encoder = write_data(tmp_path / "data"), write_encoder(tmp_path / "encoder")
    tokenizer, said = TextTokenizer.load(encoder, 12, 24), []  # type: ignore[var-annotated]

    def record(**changes: Any) -> tuple[Any, dict[str, Any]]:
        config = tiny_config(encoder, data, data__store=str(tmp_path / "store"), **changes)
        train, dev = (load_examples(config, which, tokenizer, False, said.append) for which in ("train", "dev"))
        assert train is not None
        return train, data_record(train, dev)

    part, written = record(data__subset=10, seed__data=7)
    whole, everything = record()
    assert set(part.query_ids) == choose_ids(whole.query_ids, 10, 7)
    assert any(f"used: the {len(part)} of 10 queries (seed.data 7)" in line for line in said)
    assert written["train"]["examples"] == len(part) < len(whole) == everything["train"]["examples"]
    assert written["train"]["sha256"] != everything["train"]["sha256"]
    assert written["dev"] == everything["dev"]
