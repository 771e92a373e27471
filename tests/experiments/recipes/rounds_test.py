"""Rounds of a recipe: negatives are mined again, training continues, and a teacher may be an earlier stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.formats import Corpus, TrainingSource
from jaxret.data.records import Example, Passage
from jaxret.experiments.recipes.check_recipe import EvaluationSetup, check_recipe
from jaxret.experiments.recipes.run_recipe import run_recipe
from jaxret.experiments.recipes.stages import Stage, read_stages
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.runs.run import open_run
from jaxret.storage.atomic import read_json, read_with_digest
from tests.pipeline import write_data, write_encoder

CONFIG = "from jaxret.configs.base import get_config\n\n\ndef stages():\n    return {stages}\n"
BM25: dict[str, Any] = {"pools": ["bm25"], "depth": 20, "keep": 4}
ANCE = {"name": "ance", "rounds": 3, "mine": {**BM25, "seed": 7}, "config": {"train.start_from": "warm"}}


def stages_of(folder: Path, stages: list[dict[str, Any]], **keys: Any) -> list[Stage]:
    (folder / "c.py").write_text(CONFIG.format(stages=stages))
    return read_stages(str(folder / "c.py"), {key.replace("__", "."): value for key, value in keys.items()})


def test_a_stage_becomes_its_rounds(tmp_path: Path) -> None:
    """The first round mines as configured; later ones mine with the round before, and sample anew. The next stage may
    name any round."""
    after = {"name": "b", "mine": {"pools": ["ance-3"], "concat": ["ance-2"]}}
    warm, *rounds, last = stages_of(tmp_path, [{"name": "warm"}, ANCE, after], train__steps=5, train__start_from="")
    assert (warm.name, last.name) == ("warm", "b")
    assert [stage.name for stage in rounds] == ["ance-1", "ance-2", "ance-3"]
    assert [stage.pools for stage in rounds] == [("bm25",), ("ance-1",), ("ance-2",)]
    assert [stage.config.train.start_from for stage in rounds] == ["", "ance-1", "ance-2"], (
        "every round but the first continues another"
    )
    assert [(s.config.train.round, s.config.train.rounds, s.config.train.steps) for s in rounds] == [
        (1, 3, 5),
        (2, 3, 5),
        (3, 3, 5),
    ]
    assert {stage.config.validation.best for stage in rounds} == {"last"}
    assert [stage.mining.seed for stage in rounds if stage.mining] == [7, 8, 9]
    assert {(stage.mining.depth, stage.mining.keep) for stage in rounds if stage.mining} == {(20, 4)}
    assert (last.config.train.round, last.config.train.rounds) == (1, 1)


def test_the_recipe_of_ance() -> None:
    warm_up, *rounds = read_stages("recipes/ance_msmarco", {})
    assert [stage.name for stage in rounds] == [f"ance-{number}" for number in range(1, 11)]
    assert [rounds[0].pools, rounds[0].config.train.start_from] == [("warm_up",), "warm_up"]
    assert {stage.config.optimizer.learning_rate for stage in rounds} == {1e-6}
    assert (warm_up.config.optimizer.learning_rate, warm_up.config.train.batch_size) == (2e-4, 32)
    assert {stage.config.tokens.passage_length for stage in (warm_up, *rounds)} == {512}, "all runs have one contract"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 1}, r"1: rounds .*1; .*2"),
        ({"rounds": "3"}, "stage 1: rounds is '3'"),
        ({"mine": None}, r"1 .*rounds, .*mine"),
        ({"name": ""}, r"stage 1 .*rounds"),
        ({"mine": {"pools": ["bm25"], "seed": "x"}}, "stage 1: mine: "),
        ({"config": {"validation.best": "metric"}}, r"validation.best .*'metric', .*stage 'ance-1'"),
        ({"mine": {"pools": ["ance-2"]}}, r"'ance-2' .*neither bm25"),
        ({"base": "cross_encoder"}, r"'ance-1' .*bm25 .*searches; .*\[\]"),
        (
            {"config": {"train.start_from": "ance-2"}},
            r"train.start_from .*stage 'ance-1' .*'ance-2'",
        ),
        (
            {"config": {"train.teacher": "ance-2", "loss.in_batch_kl.weight": 1.0}},
            r"train.teacher .*'ance-1' .*'ance-2', .*earlier",
        ),
    ],
)
def test_invalid_rounds_are_errors(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        stages_of(tmp_path, [{**ANCE, "config": {}, **changes}])


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., list[Stage]]:
    """Return a function that reads stages with a tiny encoder and tiny data."""
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    keys = {
        "encoder.checkpoint": str(encoder),
        "encoder.tied": True,
        "encoder.recompute": "none",
        "tokens.query_length": 12,
        "tokens.passage_length": 24,
        "tokens.length_multiple": 24,
        "data.train": str(data),
        "train.batch_size": 8,
        "encode.tokens_per_batch": 384,
    }
    return lambda *stages, **more: stages_of(tmp_path, list(stages), **keys, **more)


def evaluation(folder: Path) -> EvaluationSetup:
    data = str(folder / "data")
    return EvaluationSetup(Corpus.open(data), EvaluationSource.open(data, data), 10, ("RR@10",))


TAUGHT = {"loss.in_batch_kl.weight": 1.0, "loss.in_batch_kl.temperature": 2.0}
LATE = {"head.name": "colbert", "head.colbert.late": True}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train.teacher": "nowhere"}, "stage 'b': nowhere"),
        ({"train.teacher": "cross"}, r"'b': train.teacher .*'cross', .*reranker"),
        ({"train.teacher": "a", "tokens.query_prompt": "ask: "}, "(?s)stage 'b': .*prompt.*same tokens"),
    ],
)
def test_an_unusable_teacher_is_an_error_before_the_first_step(
    config: dict[str, Any], message: str, tiny: Callable[..., list[Stage]], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    cross = {"name": "cross", "mine": BM25, "config": {"task": "reranking"}}
    stages = tiny({"name": "a", "config": LATE}, cross, {"name": "b", "config": {**TAUGHT, **config}})
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check_recipe(stages, tmp_path / "run", evaluation(tmp_path))
    assert not (tmp_path / "run").exists()


def negatives(examples: list[Example]) -> dict[str, set[str]]:
    return {example.query.id: {passage.id for passage in example.negatives} for example in examples}


def best_passages(run: Path, data: Path, queries: dict[str, str], depth: int) -> dict[str, set[str]]:
    """Return the passages that a run's best checkpoint ranks first, computed from the vectors."""
    corpus = [json.loads(line) for line in (data / "corpus.jsonl").read_text().splitlines()]
    opened = open_run(run)
    embedder, tokenizer = opened.embedder(), opened.tokenizer
    passages = tokenizer.passages([Passage(p["_id"], p["text"], p.get("title", "")) for p in corpus])
    q = embedder(tokenizer.queries(list(queries.values())), "query").flat
    d = embedder(passages, "passage").flat
    order = np.argsort(-(np.asarray(q) @ np.asarray(d).T), axis=1)[:, :depth]
    return {query: {corpus[row]["_id"] for row in rows} for query, rows in zip(queries, order, strict=True)}


@pytest.mark.exhaustive
def test_a_recipe_with_warm_up_rounds_and_a_student(
    tiny: Callable[..., list[Stage]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second round's negatives are ranked high by the first one's checkpoint, and differ from the first round's."""
    ance = {**ANCE, "rounds": 2, "mine": {**BM25, "pools": ["warm"]}}
    student = {"name": "student", "config": {"train.teacher": "ance-2", **TAUGHT}}
    stages = tiny({"name": "warm", "mine": BM25}, ance, student, train__steps=4, optimizer__learning_rate=3e-3)
    run_recipe(stages, tmp_path / "run", evaluation(tmp_path))
    records = {path.stem: read_with_digest(path) for path in (tmp_path / "run" / "done").glob("*.json")}
    steps = ["mine", "train", "encode", "search"]
    names = [f"{name}.{step}" for name in ("warm", "ance-1", "ance-2") for step in steps]
    assert records.keys() == {*names, *(f"student.{step}" for step in steps[1:])}
    first, second = (
        TrainingSource.open(tmp_path / "run" / "mined" / f"ance-{number}.jsonl").read() for number in (1, 2)
    )
    queries = {example.query.id: example.query.text for example in second}
    ranked = best_passages(tmp_path / "run" / "ance-1", tmp_path / "data", queries, BM25["depth"])
    assert all(chosen and chosen <= ranked[query] for query, chosen in negatives(second).items())
    assert not all(chosen <= ranked[query] for query, chosen in negatives(first).items()), (
        "control: those of the first round are not all ranked high"
    )
    assert negatives(first) != negatives(second)
    assert records["ance-2.mine"]["inputs"]["pools"] == {"ance-1": records["ance-1.encode"]["files"]}
    assert records["ance-2.train"]["inputs"]["runs"]["train.start_from"] == records["ance-1.train"]["files"]
    assert records["student.train"]["inputs"]["runs"]["train.teacher"] == records["ance-2.train"]["files"]
    counts = {name: open_run(tmp_path / "run" / name).checkpoint["step"] for name in ("ance-1", "ance-2", "student")}
    assert counts == {"ance-1": 4, "ance-2": 8, "student": 4}
    lineages = {read_json(tmp_path / "run" / name / "lineage.json")["sha256"] for name in counts}
    assert len(lineages) == 3
    assert read_json(tmp_path / "run" / "student" / "data.json")["teacher"]["step"] == 8
    assert "| ance-2 |" in (tmp_path / "run" / "results.md").read_text()
    capsys.readouterr()
    run_recipe(stages, tmp_path / "run", evaluation(tmp_path))
    assert capsys.readouterr().out.count("already done") == len(records)
