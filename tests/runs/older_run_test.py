"""A run that an older jaxret wrote goes on working: it is opened, encoded with, searched and resumed.

tests/older_run holds what that version wrote: a run that was stopped after step 5 of 8, with the vectors of step 4; and
in expected/ what it wrote when it went on itself, as it was and (without_dropout) with dropout off from there on. The
encoder that the run began with is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.contract import ContractError, flatten
from jaxret.data.formats import read_queries, read_run
from jaxret.retrieval.encode import encode_corpus
from jaxret.retrieval.retrieve import retrieve
from jaxret.runs.run import open_run
from jaxret.runs.upgrade import nested
from jaxret.runs.workdir import Workdir
from jaxret.storage import read_json, write_json
from tests.pipeline import CLOCKS, REPOSITORY, command, environment

OLDER = REPOSITORY / "tests" / "older_run"


@pytest.fixture
def workdir(tmp_path: Path) -> Workdir:
    shutil.copytree(OLDER / "run", tmp_path / "run")
    return Workdir(tmp_path / "run")


def numbers(path: Path) -> dict[tuple[int, str], float]:
    """(step, name) -> value, without what a clock says."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["step"], k): v for line in lines for k, v in line.items() if k not in ("step", *CLOCKS)}


# What its command said that is not as in configs/base.py, under today's names. Everything else is today's default.
GIVEN: dict[str, Any] = {
    "data.dev": "tests/older_run/data",
    "data.train": "tests/older_run/data",
    "encode.shard_rows": 60,
    "encode.tokens_per_batch": 384,
    "encoder.checkpoint": "gone/encoder",
    "encoder.tied": True,
    "head.layers.chosen": (1, 3),
    "head.name": "layers",
    "loss.local_weight": 1.0,
    "loss.temperature": 4.0,
    "optimizer.learning_rate": 0.001,
    "pooling": "self_contrastive",
    "tokens.length_multiple": 24,
    "tokens.passage_length": 24,
    "tokens.query_length": 12,
    "train.batch_size": 8,
    "train.checkpoint_every": 2,
    "train.chunk_size": 4,
    "train.log_every": 1,
    "train.steps": 8,
    "validation.batch_size": 8,
    "validation.pool_size": 40,
}


DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def flags() -> list[str]:
    """The command line that began the run."""
    return [f"--config.{key}={value}" for key, value in GIVEN.items()]


def train_on_one_device(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As many as the run began with: sums are in the same order."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    return subprocess.run(
        command("train.py", *arguments),
        cwd=REPOSITORY,
        env=environment() | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_it_is_opened_with_what_it_has(workdir: Workdir) -> None:
    run = open_run(workdir)
    assert run.checkpoint["step"] == 4
    assert run.checkpoint == read_json(workdir.embeddings("data") / "manifest.json")["fingerprint"]["checkpoint"]
    shards = read_json(workdir.embeddings("data") / "manifest.json")["fingerprint"]["contract"]
    assert run.understands(shards)
    run.require_same_vectors(shards, "manifest.json", "")
    with pytest.raises(ContractError, match=r"pooling: 'none' in manifest\.json, 'self_contrastive' in the model in"):
        run.require_same_vectors({**shards, "pooling": "none"}, "manifest.json", "")
    assert not workdir.seal.exists(), "who only reads writes nothing"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("contract.json", {"query_length": 13}, "query_length: 13 in .*contract.json, 12 in the files"),
        ("config.json", {"tokens.query_length": 13}, "query_length: 12 in .*contract.json, 13 in the files"),
        ("encoder/tokenizer.json", None, "has no tokenizer"),
        ("contract.json", None, r"contract\.json is missing"),
    ],
)
def test_what_it_has_is_checked(name: str, change: dict[str, Any] | None, message: str, workdir: Workdir) -> None:
    if change is None:
        (workdir / name).unlink()
    else:
        write_json(workdir / name, nested(flatten(read_json(workdir / name)) | change))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_run(workdir)


@pytest.mark.exhaustive
def test_it_is_resumed_and_ends_as_it_would_have(workdir: Workdir) -> None:
    """In a process of its own; with 8 steps of which 5 were made, and an encoder that is gone. Without dropout, whose
    masks were drawn otherwise then."""
    encoder = read_json(workdir.encoder / "config.json")
    write_json(workdir.encoder / "config.json", encoder | dict.fromkeys(DROPOUT, 0.0))
    arguments = ["--config=configs/base.py", f"--workdir={workdir}", *flags()]
    done = train_on_one_device(*arguments)
    assert done.returncode == 0, done.stderr
    found, expected = numbers(workdir.metrics), numbers(OLDER / "expected" / "without_dropout.jsonl")
    assert expected.keys() <= found.keys()  # more is written down now
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert workdir.seal.exists(), "from here on it is sealed"
    assert read_json(workdir.contract)["version"] == 2
    assert open_run(workdir, "last").checkpoint["step"] == 8
    run = open_run(workdir)
    assert run.checkpoint["step"] == 6, "the best by the measures of before and after"
    folder = encode_corpus(run, OLDER / "data", "again", progress=False).folder
    ranked = read_run(OLDER / "expected" / "without_dropout.trec")
    queries = [query for query in read_queries(OLDER / "data") if query.id in ranked]
    for query, ranking in retrieve(run, queries, folder, 20, progress=False).rankings.items():
        np.testing.assert_allclose([s for _, s in ranking], [s for _, s in ranked[query]], rtol=1e-4)


@pytest.mark.exhaustive
def test_it_is_not_resumed_with_another_seed(workdir: Workdir) -> None:
    arguments = ["--config=configs/base.py", f"--workdir={workdir}", *flags()]
    again = train_on_one_device(*arguments, "--config.seed.data=1")
    assert "seed.data: 12345 in" in again.stderr


@pytest.mark.exhaustive
def test_it_is_resumed_with_dropout(workdir: Workdir) -> None:
    """The same batches and rates, but other masks than it would have had: what is measured is what it was, what is
    learned is near."""
    done = train_on_one_device("--config=configs/base.py", f"--workdir={workdir}", *flags())
    assert done.returncode == 0, done.stderr
    found, expected = numbers(workdir.metrics), numbers(OLDER / "expected" / "metrics.jsonl")
    assert expected.keys() <= found.keys()  # more is written down now
    for (step, name), value in expected.items():
        if step <= 5 or name == "learning_rate":
            assert found[step, name] == pytest.approx(value, rel=1e-4), (step, name)
        elif name == "validation/nll":
            assert found[step, name] == pytest.approx(value, rel=0.05), step
    assert found[6, "loss"] != pytest.approx(expected[6, "loss"], rel=1e-3), "control: other masks"
