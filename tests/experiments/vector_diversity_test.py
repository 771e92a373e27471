"""Which report of diversity is that of a checkpoint and of judged texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxret.data.records import Judgement, Passage, Query
from jaxret.experiments.vector_diversity import JudgedTexts, is_diversity_of
from jaxret.storage.atomic import write_json

TEXTS = JudgedTexts({"q": Query("q", "river")}, [Passage("p", "stone", "title")], [Judgement("q", "p", 1)])
CHECKPOINT = {"step": 3, "digest": "ab"}


def test_a_report_is_of_one_checkpoint_and_of_its_texts(tmp_path: Path) -> None:
    """Its path has the name of the data alone; other data of this name, and other checkpoints, have the same path."""
    path = tmp_path / "data.test.diversity.json"
    assert not is_diversity_of(path, CHECKPOINT, TEXTS)
    write_json(path, {"checkpoint": CHECKPOINT, "data": TEXTS.digest()})
    assert is_diversity_of(path, dict(CHECKPOINT), TEXTS)
    unjudged = {**TEXTS.queries, "other": Query("other", "light")}
    assert is_diversity_of(path, CHECKPOINT, replace(TEXTS, queries=unjudged)), "queries without a pair change nothing"
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
    write_json(path, {"checkpoint": CHECKPOINT})  # of an earlier release
    assert not is_diversity_of(path, CHECKPOINT, TEXTS)
