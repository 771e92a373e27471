"""The files that the steps of a recipe depend on."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxret.configs import load_config
from jaxret.experiments.recipes.stages import referenced_files
from jaxret.runs.mismatch import flatten
from jaxret.runs.run import config_json
from tests.pipeline import write_data

REFERENCED = (
    "data.dev_negatives_run",
    "data.pseudo_queries",
    "data.teacher_run",
    "lora.adapters",
    "train.start_from",
    "train.teacher",
    "validation.corpus",
)
BY_THE_DATA = ("data.dev", "data.negatives_run", "data.train")  # steps take these files as separate inputs
NO_INPUT = (  # values that are not paths, and paths that change no result
    "data.store",
    "encoder.direction",
    "encoder.sha256",
    "lora.base",
    "mesh.coordinator",
    "mesh.platform",
    "optimizer.frozen",
    "pretraining.scratch.tokenizer",  # recipes do not pre-train
    "tokens.passage_prompt",
    "tokens.prompts",
    "tokens.query_prompt",
    "tokens.task",
    "validation.then",
)


def test_every_key_that_may_be_a_path_is_known_here() -> None:
    values = flatten(config_json(load_config("base")))
    assert sorted(key for key, value in values.items() if value == "") == sorted(REFERENCED + BY_THE_DATA + NO_INPUT)


@pytest.mark.parametrize("key", REFERENCED)
def test_the_files_of_a_key_are_referenced(key: str, tmp_path: Path) -> None:
    if key.startswith("data."):
        value = file = tmp_path / "rankings.trec"
    elif key == "lora.adapters":
        value = tmp_path / "adapters"
        file = value / "adapter_model.safetensors"
    elif key == "validation.corpus":
        value = write_data(tmp_path / "data", train=2, dev=1)
        file = value / "corpus.jsonl"
    else:
        value = tmp_path / "run"
        file = value / "checkpoints" / "3" / "_CHECKPOINT_METADATA"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    if key == "lora.adapters":
        (value / "adapter_config.json").touch()
    config = load_config("base")
    config.encoder.checkpoint = ""
    assert file not in referenced_files(config)
    config.update_from_flattened_dict({key: str(value)})
    assert file in referenced_files(config)
