"""Keys of a config that name a corpus."""

from __future__ import annotations

from pathlib import Path

import pytest
from ml_collections import ConfigDict

from jaxret.configs import load_config
from jaxret.data.formats import Corpus, DataError
from jaxret.experiments.recipes.check_recipe import EvaluationSetup, complete_evaluation
from jaxret.experiments.recipes.evaluation_request import EvaluationRequest
from jaxret.experiments.recipes.stages import referenced_files
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.training.config_sources import validation_corpus
from tests.pipeline import write_data


def config_with(**keys: str) -> ConfigDict:
    config = load_config("base")
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in keys.items()})
    return config


def test_the_validation_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxret.experiments.recipes.stages.model_files", lambda name: [])
    data = write_data(tmp_path / "data", train=2, dev=1)
    corpus = validation_corpus(config_with(validation__corpus=str(data)))
    assert corpus == Corpus.open(data)
    assert referenced_files(config_with(validation__corpus=str(data))) == [data / "corpus.jsonl"]
    for without_file in ("", "train"):
        assert validation_corpus(config_with(validation__corpus=without_file)) is None
        assert referenced_files(config_with(validation__corpus=without_file)) == []
    with pytest.raises(DataError, match=r"nowhere: .*exist"):
        validation_corpus(config_with(validation__corpus=str(tmp_path / "nowhere")))


def test_a_recipe_is_evaluated_on_its_training_folder(tmp_path: Path) -> None:
    data, other = write_data(tmp_path / "data", train=2, dev=1), write_data(tmp_path / "other", train=2, dev=1)
    config = config_with(data__train=str(data))
    setup = complete_evaluation(EvaluationRequest(split="dev"), config)
    assert setup == EvaluationSetup(Corpus.open(data), EvaluationSource.open(data, data, "dev"))
    assert setup.result_name == setup.source.name
    assert complete_evaluation(EvaluationRequest(split="dev", name="mine"), config).result_name == "mine"
    request = EvaluationRequest(str(other), split="dev")
    assert complete_evaluation(request, config).corpus == Corpus.open(other)
    records = tmp_path / "train.jsonl"
    records.write_text('{"query": "river", "positives": ["stone"]}\n')
    with pytest.raises(ValueError, match=r"--corpus .*--config\.data\.train"):
        complete_evaluation(EvaluationRequest(), config_with(data__train=str(records)))
    with pytest.raises(FileNotFoundError, match=r"nowhere .*exist"):
        complete_evaluation(EvaluationRequest(), config_with(data__train=str(tmp_path / "nowhere")))
    (data / "corpus.jsonl").unlink()
    with pytest.raises(DataError, match=r"corpus\.jsonl: .*exist"):
        complete_evaluation(EvaluationRequest(), config)
