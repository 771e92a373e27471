"""A run with tokens.packing has the losses of a run without it, resumes to the byte, and records its packing."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxret.models.encoders.architectures import make_encoder
from jaxret.models.encoders.architectures.bert import BertConfig
from jaxret.models.encoders.pretrained import save_pretrained
from jaxret.parallel.mesh import make_mesh
from jaxret.training import prepare
from jaxret.training.loop import TrainResult, train
from jaxret.types import Tokens
from tests.pipeline import tiny_config, write_data, write_encoder
from tests.training.loop_test import STEPS, final_state, interrupt, lines

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    return folder


@pytest.fixture(autouse=True)
def _two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "make_mesh", lambda fsdp=1, tensor=1: make_mesh(fsdp, jax.devices()[:2]))


def config_of(root: Path, **overrides: Any) -> ConfigDict:
    return tiny_config(root / "encoder", root / "data", train__batch_size=16, **overrides)


def run(root: Path, name: str, **overrides: Any) -> tuple[Path, ConfigDict, TrainResult]:
    config = config_of(root, **overrides)
    return root / name, config, train(config, root / name, progress=False)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_packed_run_equals_a_padded_one(accumulate: int, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The losses are equal with dropout and chunks, if padded texts are as long as packed rows; also with several
    batches per step."""
    options = {"data__dev": "", "train__accumulate": accumulate}
    padded, _, _ = run(root, f"padded-{accumulate}", **options)
    whole = root / f"whole-{accumulate}"
    train(config_of(root, tokens__packing=True, train__chunk_size=8, **options), whole)
    assert "packed for each of 4 devices and chunks, rows x tokens: queries in " in capsys.readouterr().out
    expected, packed_lines = ([line for line in lines(folder) if "loss" in line] for folder in (padded, whole))
    assert len(expected) == len(packed_lines) == STEPS
    for one, other in zip(expected, packed_lines):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)
        assert 1 < other["padding"] != one["padding"] > 1
    assert abs(packed_lines[0]["loss"] - packed_lines[1]["loss"]) > 1e-3, "control: another step has another loss"


def test_stopped_and_resumed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, config, result = run(root, "uninterrupted", tokens__packing=True, data__dev="")
    assert result.programs <= 4
    with monkeypatch.context() as patch:
        interrupt(patch, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(config, root / "stopped", progress=False).step == 2
    assert train(config, root / "stopped", progress=False).resumed_from == 2
    assert final_state(root / "stopped", config) == final_state(whole, config)
    assert lines(root / "stopped") == lines(whole)


SOURCES = {"nq-qed": "nq-qed/train.json", "medquad": "medquad"}


@pytest.mark.parametrize("name", SOURCES)
def test_an_epoch_of_real_texts(
    name: str, data_dir: Path, minilm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 queries at a time on one device. The BERT is so small that the number of computed tokens does not matter."""
    monkeypatch.setattr(prepare, "make_mesh", lambda fsdp=1, tensor=1: make_mesh(fsdp, jax.devices()[:1]))
    shapes = BertConfig(30522, 16, num_layers=1, num_heads=2, intermediate_size=16, max_positions=256)
    tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
    (tmp_path / "encoder").mkdir()
    save_pretrained(tmp_path / "encoder", shapes, make_encoder(shapes).init(jax.random.key(0), tokens)["params"])
    for file in minilm_dir.glob("*token*.json"):
        shutil.copy(file, tmp_path / "encoder")
    config = tiny_config(
        tmp_path / "encoder",
        data_dir / SOURCES[name],
        data__dev="",
        data__negatives=0,
        data__on_error="skip",
        tokens__query_length=256,
        tokens__passage_length=256,
        tokens__length_multiple=32,
        tokens__packing=True,
        train__batch_size=128,
        train__steps=-1,
        train__epochs=1.0,
        train__checkpoint_every=1000,
    )
    result = train(config, tmp_path / "run", progress=False)
    ratios = [line["padding"] for line in lines(tmp_path / "run")]
    ratio = f"{np.mean(ratios):.3f} tokens computed per real token"
    print(f"{name}: {ratio} in {result.step} steps, {result.programs} programs")
    assert len(ratios) == result.step > 40
    assert np.mean(ratios) <= 1.08
    assert result.programs <= 4
