"""Marks of the fault tests, and a run into which faults are injected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from tests.faults.scripts import run
from tests.pipeline import (
    tiny_config,
    train_arguments,
    write_cross_encoder,
    write_data,
    write_encoder,
    write_generator,
)
from tests.training.pretraining.pretrain_test import SMALL as PRETRAINING

SMALL = {"train__steps": 4, "train__checkpoint_every": 1, "validation__pool_size": 16, "encode__shard_rows": 5}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.exhaustive)


@dataclass(frozen=True)
class Tiny:
    """An encoder, a data set, and a run that has been trained and has encoded it; the scripts made all of them."""

    root: Path
    encoder: Path
    data: Path
    run: Path

    @cached_property
    def cross_encoder(self) -> Path:
        return write_cross_encoder(self.root / "cross")

    @cached_property
    def generator(self) -> Path:
        return write_generator(self.root / "generator")

    def config(self, **overrides: Any) -> ConfigDict:
        """Return a config with four steps, each saved, and shards of five passages."""
        return tiny_config(self.encoder, self.data, **SMALL | overrides)

    def training(self, workdir: Path, **overrides: Any) -> list[str]:
        """Return the flags of train.py for `config`."""
        return train_arguments(self.encoder, self.data, workdir, **SMALL | overrides)

    def pretraining(self, workdir: Path) -> list[str]:
        """Return the flags of `jaxret pretrain` for two steps from scratch, each saved."""
        keys = PRETRAINING | {"data.train": str(self.data), "train.steps": 2, "train.checkpoint_every": 1}
        settings = [f"--config.{key}={value}" for key, value in keys.items() if key != "task"]
        return ["--config=pretraining/mlm", f"--workdir={workdir}", *settings]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")
    setup = Tiny(root, write_encoder(root / "encoder"), write_data(root / "data"), root / "run")
    trained = run("train.py", *setup.training(setup.run))
    assert trained.returncode == 0, trained.output
    encoded = run("encode.py", f"--workdir={setup.run}", f"--corpus={setup.data}")
    assert encoded.returncode == 0, encoded.output
    return setup
