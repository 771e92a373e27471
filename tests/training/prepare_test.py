"""Errors of a new run before any text is tokenized, which may take hours: missing data, and weights of another
model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import write_json
from jaxret.training.loop import train
from jaxret.training.prepare import log_changes
from jaxret.training.task import TrainingJob
from tests.pipeline import tiny_config, write_data, write_encoder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepare")
    write_data(folder / "data")
    write_encoder(folder / "encoder")
    return folder


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"data.dev": "nowhere"}, id="data.dev"),
        pytest.param({"validation.corpus": "nowhere"}, id="validation.corpus"),
        pytest.param({"encoder.sha256": "abc"}, id="encoder.sha256"),
        pytest.param({"train.start_from": "nowhere"}, id="train.start_from"),
        pytest.param({"lora.adapters": "nowhere", "lora.rank": 2}, id="lora.adapters"),
    ],
)
def test_what_is_missing_is_an_error_before_tokenizing(keys: dict[str, Any], root: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    config = tiny_config(root / "encoder", root / "data", data__store=str(store), train__steps=1)
    config.update_from_flattened_dict(keys)
    with pytest.raises((OSError, ValueError), match=next(iter(keys.values()))):
        train(config, tmp_path / "run", progress=False)
    assert not store.exists()


def test_a_run_of_another_model_is_an_error_before_tokenizing(root: Path, tmp_path: Path) -> None:
    store, other = tmp_path / "store", tmp_path / "other"
    short = tiny_config(root / "encoder", root / "data", data__dev="", train__steps=0, tokens__query_length=7)
    train(short, other, progress=False)
    config = tiny_config(root / "encoder", root / "data", data__store=str(store), train__start_from=str(other))
    with pytest.raises(ValueError, match=re.escape(f"{other}/contract.json")):
        train(config, tmp_path / "run", progress=False)
    assert not store.exists()


@pytest.mark.parametrize(
    ("earlier", "logged"),
    [
        ({"validation": {"corpus": "1", "judgements": "2"}}, []),
        ({"validation": {"corpus": "1", "judgements": "3"}}, ["the judgements of data.dev, set", "validation has"]),
        ({"validation": {"corpus": "3", "judgements": "2"}}, ["the passages of validation.corpus", "validation has"]),
        ({}, []),  # a run that began before jaxret wrote this entry
    ],
)
def test_changed_contents_of_validation_are_logged(earlier: dict[str, Any], logged: list[str], tmp_path: Path) -> None:
    config = tiny_config("encoder", "set", validation__corpus="wiki")
    lines: list[str] = []
    job: TrainingJob[Any, Any, Any] = object.__new__(TrainingJob)  # a job with only the fields that the function reads
    vars(job).update(config=config, workdir=Workdir(tmp_path), log=lines.append, changes={})
    write_json(job.workdir.data, earlier)
    log_changes(job, {"validation": {"corpus": "1", "judgements": "2"}})
    assert len(lines) == len(logged)
    assert all(line.startswith(start) for line, start in zip(lines, logged, strict=True))
