"""Reports of diversity: to which checkpoint and texts one belongs, and where it is written."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxret.data.records import Judgement, Passage, Query
from jaxret.experiments import vector_diversity
from jaxret.experiments.vector_diversity import (
    JudgedPairs,
    JudgedSource,
    JudgedTexts,
    is_diversity_of,
    report_diversity,
)
from jaxret.runs.run import OpenedRun
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json, write_json

TEXTS = JudgedTexts({"q": Query("q", "river")}, [Passage("p", "stone", "title")], [Judgement("q", "p", 1)])
CHECKPOINT = {"step": 3, "digest": "ab"}


def test_a_report_is_of_one_checkpoint_and_of_its_texts(tmp_path: Path) -> None:
    """The path of a report has only the name of the data: other data with this name, and other checkpoints, have the
    same path."""
    path = tmp_path / "data.test.diversity.json"
    assert not is_diversity_of(path, CHECKPOINT, TEXTS)
    write_json(path, {"checkpoint": CHECKPOINT, "dataset": {"sha256": TEXTS.digest()}})
    assert is_diversity_of(path, dict(CHECKPOINT), TEXTS)
    unjudged = {**TEXTS.queries, "other": Query("other", "light")}
    assert is_diversity_of(path, CHECKPOINT, replace(TEXTS, queries=unjudged)), "queries without a pair do not matter"
    assert not is_diversity_of(path, {"step": 2, "digest": "ab"}, TEXTS)
    assert not is_diversity_of(path, {"step": 3, "digest": "cd"}, TEXTS)
    for changed in (
        replace(TEXTS, queries={"q": Query("q", "music")}),
        replace(TEXTS, queries={"q": Query("q", "river", instruction="Find stones.")}),
        replace(TEXTS, passages=[Passage("p", "paper", "title")]),
        replace(TEXTS, passages=[Passage("p", "stone", "other")]),
        replace(TEXTS, pairs=[*TEXTS.pairs, Judgement("q", "p2", 1)]),
    ):
        assert not is_diversity_of(path, CHECKPOINT, changed)
    write_json(path, {"checkpoint": CHECKPOINT})  # written by an earlier release
    assert not is_diversity_of(path, CHECKPOINT, TEXTS)


def test_the_report_of_the_best_checkpoint_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--checkpoint=2` overwrote it, but sweeps and pictures read the report of the best one."""
    vectors = np.eye(2, dtype=np.float32)
    pairs = JudgedPairs(["q"], ["p"], vectors[:1], vectors[None], np.zeros(1, np.int64))
    monkeypatch.setattr(vector_diversity, "judged_pairs", lambda *arguments: pairs)
    monkeypatch.setattr(vector_diversity, "read_judged_texts", lambda *arguments: TEXTS)
    monkeypatch.setattr(vector_diversity, "find_best_checkpoint", lambda *arguments: CHECKPOINT)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    data = JudgedSource.open(tmp_path / "data", "test")
    head = SimpleNamespace(vector_names=lambda: ("one", "two"))
    model, config = SimpleNamespace(module=SimpleNamespace(head=head)), SimpleNamespace(pooling="none")
    for checkpoint in (CHECKPOINT, {"step": 2, "digest": "cd"}):
        run: Any = object.__new__(OpenedRun)
        vars(run).update(workdir=Workdir(tmp_path), config=config, model=model, params={}, checkpoint=checkpoint)
        assert str(tmp_path / "eval") in report_diversity(run, data)
    monkeypatch.setattr(vector_diversity, "read_judged_texts", lambda *arguments: replace(TEXTS, pairs=[]))
    report_diversity(run, data)  # the folder has the same path and other content
    shutil.copytree(tmp_path / "data", tmp_path / "b" / "data")
    monkeypatch.setattr(vector_diversity, "read_judged_texts", lambda *arguments: TEXTS)
    with pytest.raises(ValueError, match=f"that on {tmp_path}/b/data would replace.*--name"):
        report_diversity(run, JudgedSource.open(tmp_path / "b" / "data", "test"))
    report_diversity(run, JudgedSource.open(tmp_path / "b" / "data", "test"), "b")
    written = {path.name: read_json(path)["checkpoint"] for path in (tmp_path / "eval").iterdir()}
    names = ("data.test.step-2", "b.step-2")
    assert written == {"data.test.diversity.json": CHECKPOINT, **{f"{n}.diversity.json": checkpoint for n in names}}
