"""The bookkeeping of bench/evidence/language_model.py: its data, its runs' keys, its rows. Nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.evidence import language_model as experiment
from jaxret.configs.base import get_config
from jaxret.data.formats import Corpus, JudgementSource


def test_claims_name_runs_and_runs_set_existing_keys() -> None:
    assert {name for claim in experiment.CLAIMS for name in (claim.baseline, claim.treated)} == set(experiment.RUNS)
    for keys in experiment.RUNS.values():
        get_config().lock().update_from_flattened_dict({**experiment.COMMON, **keys})


def test_questions_that_are_measured_are_about_passages_that_no_training_question_is_about(
    data_dir: Path, tmp_path: Path
) -> None:
    experiment.make_data(data_dir / experiment.SOURCE, tmp_path / "data")
    passages = {name: {p.id for p in Corpus.open(str(tmp_path / "data" / name)).read()} for name in ("train", "test")}
    assert len(passages["test"]) == experiment.PASSAGES
    assert not passages["train"] & passages["test"]
    for name, least in (("train", 480), ("test", experiment.QUESTIONS)):
        judgements = list(JudgementSource.open(tmp_path / "data" / name, name).read())
        assert len(judgements) >= least
        assert {one.passage_id for one in judgements} <= passages[name]


def test_rows_have_the_seeds_that_both_runs_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "CLAIMS", experiment.CLAIMS[:1])
    folder = tmp_path / "data" / "test" / "qrels"
    folder.mkdir(parents=True)
    lines = [f"q{number}\tp{number // 2}\t1" for number in range(12)]
    (folder / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
    claim = experiment.CLAIMS[0]
    for name, seed, value in ((claim.baseline, 1, 0.2), (claim.treated, 1, 0.5), (claim.baseline, 2, 0.3)):
        path = experiment.result_path(tmp_path, name, seed)
        path.parent.mkdir(exist_ok=True)
        ids = np.array(sorted(line.split("\t")[0] for line in lines))
        arrays: dict[str, Any] = {one: np.full(12, value) for one in experiment.MEASURES}
        np.savez(path, ids=ids, processor_seconds=1.0, **arrays)
    results = experiment.collect(tmp_path)
    (row,) = results["rows"]
    assert row["seeds"] == [1]
    assert row["difference"] == pytest.approx(0.3)
    assert row["passages"] == 6
    assert results["runs"][f"{claim.baseline}.2"]["nDCG@10"] == 0.3
