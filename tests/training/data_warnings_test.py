"""Warnings about training data: equal rows of tokens, dev queries that are trained on, truncated texts; and the files
of warnings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxret.data.tokens.batches import TrainingSet
from jaxret.data.tokens.known_positives import KnownPositives
from jaxret.data.tokens.tokenizer import Truncation
from jaxret.runs.run_warnings import RunWarning, keep_warnings, read_warnings
from jaxret.runs.workdir import Workdir
from jaxret.training import data_warnings as module
from jaxret.training.data_warnings import data_warnings, row_hashes
from jaxret.types import Ragged


def examples(queries: list[list[int]], passages: list[list[int]]) -> TrainingSet:
    """Return a set in which every query has the first passage as its positive."""
    return TrainingSet(
        queries=Ragged.from_lists(queries),
        passages=Ragged.from_lists(passages),
        positives=np.zeros(len(queries), np.int32),
        known_positives=KnownPositives.from_lists([[0]] * len(queries)),
        negatives=Ragged.from_lists([[]] * len(queries)),
        query_ids=[f"q{number}" for number in range(len(queries))],
        pad_id=0,
        marker_ids=(2, 3),
        digest="",
    )


def test_equal_rows_have_equal_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any size of blocks; the order of tokens counts, and so do zeros at the end."""
    rows = Ragged.from_lists([[1, 2, 3], [3, 2, 1], [1, 2, 3], [], [0], [0, 0], [1, 2], []])
    hashes = row_hashes(rows)
    assert len(set(hashes.tolist())) == 6
    assert hashes[0] == hashes[2]
    assert hashes[3] == hashes[7]
    monkeypatch.setattr(module, "_BLOCK_ROWS", 3)
    np.testing.assert_array_equal(row_hashes(rows), hashes)


def test_copies_and_leaks() -> None:
    train = examples([[2, 5, 3], [2, 6, 3]], [[7], [8], [7], [7]])
    sound = examples([[2, 5, 6, 3]], [[7]])
    kinds = [(one.kind, one.text.partition(";")[0]) for one in data_warnings(train, sound)]
    assert kinds == [("duplicates", "train: 2 of 4 passages have the tokens of another one")]
    leaking = examples([[2, 9, 3], [2, 6, 3], [2, 6, 3]], [[7]])
    leak = [one.text for one in data_warnings(examples([[2, 6, 3]], [[7]]), leaking)]
    assert leak == [
        "dev: 1 of 2 queries are also trained on, such as 'q1': validation overstates the quality of the model"
    ]
    assert list(data_warnings(None, leaking)) == []


def test_only_cut_texts_are_a_warning() -> None:
    whole, cut = Truncation("queries", 32, texts=4, tokens=40), Truncation("passages", 64, 4, 1, 300, 20)
    train = replace(examples([[2, 6, 3]], [[7]]), truncations=(whole, cut))
    assert list(data_warnings(train, None)) == [RunWarning("truncation", f"train: {cut}")]


def test_each_job_keeps_its_warnings(tmp_path: Path) -> None:
    run = Workdir(tmp_path)
    assert read_warnings(run) == {}
    first, second = RunWarning("leak", "one"), RunWarning("collapse", "two")
    keep_warnings(run, "train", [first])
    keep_warnings(run, "encode scifact", [second, first])
    keep_warnings(run, "encode scifact", [second])
    keep_warnings(run, "search scifact.test", [])
    assert read_warnings(run) == {"train": [first], "encode scifact": [second], "search scifact.test": []}
    (tmp_path / "warnings" / "train.json").write_text("{}")
    with pytest.raises(ValueError, match=r"train\.json holds .*warnings"):
        read_warnings(run)
