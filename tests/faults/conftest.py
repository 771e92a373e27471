"""The table of what was injected and what became of it, and what the injections are made into."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
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
from tests.training.pretraining.run_test import SMALL as PRETRAINING

INJECTIONS = {
    1: "kill -9 while encoding",
    2: "kill -9 while saving checkpoints",
    3: "kill -9 of one or both of two processes that train",
    4: "SIGTERM once and twice, Ctrl-C",
    5: "bit flips in every file of a run",
    6: "truncated and lengthened files",
    7: "deleted, swapped, duplicated shards",
    8: "duplicate ids",
    9: "NaN and infinity in vectors",
    10: "NaN loss, NaN weights",
    11: "bad encodings, bad JSON",
    12: "empty and blank texts",
    13: "a passage of 1M tokens, a line of 100 MB",
    14: "disk full",
    15: "EIO, EDQUOT, file size limit",
    16: "two jobs on one folder",
    17: "resumed with other things",
    18: "resumed on another number of devices",
    19: "malicious input",
    20: "0, 1, B-1, B, B+1 rows; k > n",
    21: "ties, over shard sizes and backends",
    22: "read-only, vanishing folder, clock back",
    23: "several processes: one killed, no coordinator",
    24: "corrupt compilation cache",
    25: "kill -9 in every step of a recipe",
    26: "several jobs on one folder, killed and stopped",
    27: "folders of any name, long paths",
    28: "power cut while training",
    29: "two jobs that make one folder",
    30: "power cut, EIO in every verb that writes",
}


# The table


@dataclass
class Trials:
    """Outcomes of trials: an error that names the fault, or the result without it. Anything else is a loss."""

    detected: int = 0
    survived: int = 0
    lost: list[str] = field(default_factory=list)

    def count(self, outcome: bool, what: str, detected: bool = False) -> None:
        """One trial: `outcome` says whether it went as it must; `detected`: by being refused."""
        if not outcome:
            self.lost.append(what)
        elif detected:
            self.detected += 1
        else:
            self.survived += 1


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> Iterator[Trials]:
    """Counts the trials of a test; those that are lost fail it."""
    counts = Trials()
    yield counts
    request.node.user_properties.append(("faults", (counts.detected, counts.survived, len(counts.lost))))
    if counts.lost:
        pytest.fail("\n".join(counts.lost), pytrace=False)


_ROWS: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
_WITHOUT: dict[int, set[str]] = defaultdict(set)  # number -> why a part was left out


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.exhaustive)
            item.user_properties += [("injection", mark.args[0]) for mark in item.iter_markers("faults")]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Runs where the reports come together, also if workers made them."""
    properties: dict[str, Any] = dict(report.user_properties)
    number = properties.get("injection")
    if number is None:
        return
    _ROWS[number]
    if report.skipped and isinstance(report.longrepr, tuple):
        _WITHOUT[number].add(report.longrepr[2].removeprefix("Skipped: "))
    if report.when == "teardown" and "faults" in properties:
        for place, value in enumerate(properties["faults"]):
            _ROWS[number][place] += value
    if report.when == "call" and report.failed:  # it ended before its trials did
        _ROWS[number][2] += 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _ROWS:
        return
    terminalreporter.section("faults")
    width = max(map(len, INJECTIONS.values()))
    terminalreporter.write_line(f" #  {'injection':{width}}  trials  detected  survived  lost")
    for number, (detected, survived, lost) in sorted(_ROWS.items()):
        row = f"{detected + survived + lost:6d}  {detected:8d}  {survived:8d}  {lost:4d}"
        without = f"   not tried: {'; '.join(sorted(_WITHOUT[number]))}" if number in _WITHOUT else ""
        terminalreporter.write_line(f"{number:2d}  {INJECTIONS[number]:{width}}  {row}{without}")


# What the injections are made into


SMALL = {"train__steps": 4, "train__checkpoint_every": 1, "validation__pool_size": 16, "encode__shard_rows": 5}


@dataclass(frozen=True)
class Tiny:
    """An encoder, a data set, and a run that is trained and has encoded it, all made by the scripts."""

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
        """Four steps, each saved, and shards of five passages."""
        return tiny_config(self.encoder, self.data, **SMALL | overrides)

    def training(self, workdir: Path, **overrides: Any) -> list[str]:
        """The flags of train.py for `config`."""
        return train_arguments(self.encoder, self.data, workdir, **SMALL | overrides)

    def pretraining(self, workdir: Path) -> list[str]:
        """The flags of `jaxret pretrain` for two steps, each saved, from nothing."""
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
