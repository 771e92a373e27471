"""Every row's training step can be built: the model, with the checks that training makes first, and its abstract step.

`make test` builds the model of every row, and traces a step of every kind: with few layers, a small batch and short
texts. The exhaustive tests lower every distinct step in its full size. Nothing is compiled; `make test-plan` does that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jax
import pytest
from ml_collections import ConfigDict

from bench.plan_tables import program_key
from jaxret.configs import change_config, load_config
from jaxret.experiments.recipes.stages import read_stages
from jaxret.experiments.reproduce.papers import Case, PaperRow, paper_rows
from jaxret.models.pooling import POOLINGS
from jaxret.plan.programs import (
    AbstractProgram,
    encoder_directory,
    longest_batch,
    retriever_of,
    training_program,
)
from jaxret.training.config_check import check_config
from jaxret.training.optimizers import make_optimizer

TRAINED = [row for row in paper_rows().values() if row.runnable and row.config]


@cache
def case_configs(row_id: str) -> dict[str, ConfigDict]:
    """Return the configs of all trainings for a row's models, with the row's keys, by name."""
    return {name: config for case in paper_rows()[row_id].cases() for name, config in trained(case)}


def trained(case: Case) -> Iterator[tuple[str, ConfigDict]]:
    row = case.row
    if row.verb == "recipe":
        begun = {"train.start_from": "run", "data.pseudo_queries": "file"} if row.warm_up else {}
        for stage in read_stages(case.config, {**row.set, **begun}):
            yield f"{row.id}@{case.source.name}:{stage.name}", stage.config
    else:
        yield f"{row.id}@{case.source.name}", change_config(load_config(case.config), dict(row.set), case.config)
    if row.warm_up:
        yield f"{row.id}@{case.source.name}:warm-up", load_config(row.warm_up)


def small(config: ConfigDict) -> ConfigDict:
    """Return a config with the same operations: one layer (two for MLR, both chosen), a small batch, and short
    texts."""
    changes = {
        "encoder.layers": 2 if config.head.name == "mlr" else 1,
        "head.mlr.chosen": (1, 2),
        "head.i3.reconstructor_layers": 1,
        "head.i3.interactor_layers": 1,
        "train.batch_size": 4,
        "train.chunk_size": min(config.train.chunk_size, 2),
        "data.negatives": min(config.data.negatives, 2),
        "tokens.query_length": 16,
        "tokens.passage_length": 32,
    }
    return change_config(config, changes, "a row")


def directory(config: ConfigDict) -> Path:
    return encoder_directory(config.encoder.checkpoint)[0]


def step(config: ConfigDict) -> AbstractProgram:
    shapes = longest_batch(config, retriever_of(config, directory(config)))
    return training_program(config, directory(config), shapes, jax.devices()[:1])


@pytest.mark.parametrize("row", TRAINED, ids=lambda row: row.id)
def test_the_models_of_a_row_are_built(row: PaperRow) -> None:
    """The model has the published shapes of its encoder, so the config cannot name a layer, head or pooling that the
    encoder lacks."""
    for name, config in case_configs(row.id).items():
        config = change_config(config, {"data.train": "train"}, name)
        check_config(config)
        make_optimizer(config.optimizer, 1000)
        if config.task == "retrieval":
            model = retriever_of(config, directory(config))
            assert longest_batch(config, model).documents == config.train.batch_size * (1 + config.data.negatives)


def test_control_a_missing_layer_is_noticed() -> None:
    config = change_config(load_config("recipes/mlr_open_qa:bert"), {"head.mlr.chosen": (12, 13)}, "mlr")
    with pytest.raises(ValueError, match="13"):
        retriever_of(config, directory(config))


@pytest.mark.slow
def test_a_step_of_every_kind_is_traced() -> None:
    """It covers every head on every architecture, and every pooling. `tests/families_test.py` runs all pairs of
    them."""
    traced: set[tuple[str, str]] = set()
    for row in TRAINED:
        for config in case_configs(row.id).values():
            if config.task == "retrieval":
                architecture = json.loads((directory(config) / "config.json").read_text())["model_type"]
                kinds = {(config.head.name, architecture), ("pooling", config.pooling)}
                if not kinds <= traced:
                    traced |= kinds
                    program, arguments, state = step(small(config))
                    assert program.trace(*arguments).jaxpr.eqns, row.id
                    assert 0 < state["parameters"] < state["moments"], row.id
    heads = {"dual_encoder", "mlr", "me_bert", "colbert", "mvr", "aggretriever", "i3"}
    assert {kind for kind, _ in traced} == {*heads, "pooling"}
    assert {name for kind, name in traced if kind == "pooling"} == set(POOLINGS)


LOWERED: set[str] = set()


@pytest.mark.daily("mlr/2/dual-encoder")
@pytest.mark.exhaustive
@pytest.mark.parametrize("row", TRAINED, ids=lambda row: row.id)
def test_every_step_is_lowered(row: PaperRow) -> None:
    """Each step has its full size; equal programs are lowered once."""
    for name, config in case_configs(row.id).items():
        if config.task == "retrieval" and (key := program_key(config)) not in LOWERED:
            LOWERED.add(key)
            program, arguments, _ = step(config)
            assert "func.func public @main" in program.trace(*arguments).lower().as_text(), name
