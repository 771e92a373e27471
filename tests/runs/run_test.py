"""Opening a run: parameters.json lists the arrays of its checkpoints, so that the model is not traced for this."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import pytest

from jaxret.models.model import Model, parameter_shapes
from jaxret.runs import run as run_module
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import open_run, stored_shapes, trained_parameters
from jaxret.runs.seal import write_sealed
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json
from jaxret.storage.checkpoint import CheckpointError
from jaxret.types import Params
from tests.pipeline import untrained_run, write_data, write_encoder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    data, encoder = write_data(folder / "data"), write_encoder(folder / "encoder")
    untrained_run(folder / "run", encoder, data)
    untrained_run(folder / "shallow", encoder, data, encoder__layers=1)
    untrained_run(folder / "adapted", encoder, data, lora__rank=2, lora__targets=("query",))
    return folder


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Model]:
    """A list of models whose parameters were traced."""
    models: list[Model] = []

    def traced(model: Model) -> Params:
        models.append(model)
        return parameter_shapes(model)

    monkeypatch.setattr(run_module, "parameter_shapes", traced)
    return models


@pytest.mark.parametrize("name", ["run", "adapted"])
def test_the_recorded_shapes_are_those_that_tracing_gives(name: str, root: Path, traces: list[Model]) -> None:
    run = open_run(root / name)
    assert traces == [], "the shapes come from the file"
    workdir = Workdir(root / name)
    assert stored_shapes(workdir) == run_module.trained_shapes(run.config, run.model)
    params = trained_parameters(run) if name == "adapted" else run.params
    assert stored_shapes(workdir) == jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)


def test_shapes_of_another_version_are_not_used(root: Path, tmp_path: Path, traces: list[Model]) -> None:
    shutil.copytree(root / "run", tmp_path / "run")
    workdir = Workdir(tmp_path / "run")
    write_sealed(workdir, {workdir.parameters: read_json(workdir.parameters) | {"jaxret": "0.1.0"}})
    open_run(workdir.path)
    assert len(traces) == 1


def test_a_run_without_the_file_opens(
    root: Path, tmp_path: Path, traces: list[Model], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(root / "run", tmp_path / "run")
    Workdir(tmp_path / "run").parameters.unlink()
    with pytest.raises(ContractError, match="is missing"):
        open_run(tmp_path / "run")
    Workdir(tmp_path / "run").seal.unlink()
    open_run(tmp_path / "run")
    assert len(traces) == 1
    assert "seal.json was deleted" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "{}", '{"jaxret": "VERSION", "parameters": [1]}'])
def test_a_file_without_shapes_is_an_error(content: str, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "run", tmp_path / "run")
    workdir = Workdir(tmp_path / "run")
    workdir.parameters.write_text(content.replace("VERSION", run_module.__version__))
    workdir.seal.unlink()
    with pytest.raises(ContractError, match="has no shapes"):
        open_run(workdir.path)


def test_the_checkpoint_of_another_model_is_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    shutil.copytree(root / "shallow" / "checkpoints", tmp_path / "run" / "checkpoints")
    with pytest.raises(CheckpointError, match="does not fit the config"):
        open_run(tmp_path / "run")
