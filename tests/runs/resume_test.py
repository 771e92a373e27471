"""Settings that may change when a run is resumed, and their record in the folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from jaxret.models.encoders.weight_files import weights_digest
from jaxret.runs.mismatch import ContractError
from jaxret.runs.resume import record_changes, require_same_run
from jaxret.runs.run import config_json
from jaxret.runs.seal import check_seal
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json, write_json
from tests.pipeline import write_encoder
from tests.tiny import MLR, make_config


@pytest.fixture
def workdir(tmp_path: Path) -> Workdir:
    """A folder with a config; other files of a run are not needed."""
    write_encoder(tmp_path / "encoder")
    write_json(tmp_path / "contract.json", {})
    write_json(tmp_path / "config.json", config_json(make_config(MLR)))
    return Workdir(tmp_path)


def changed(key: str, value: Any) -> ConfigDict:
    return make_config(MLR | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mesh.fsdp", 2),
        ("mesh.process_id", 1),
        ("mesh.platform", "cpu"),
        ("validation.metric", "nll"),
        ("validation.pool_size", 7),
        ("encode.dtype", "float16"),
        ("encode.tokens_per_batch", 7),
        ("encoder.recompute", "layer"),
        ("encoder.attention", "flash"),
        ("data.train", "elsewhere"),
        ("encoder.download", True),
        ("train.log_every", 7),
        ("train.checkpoint_every", 7),
        ("train.chunk_size", 8),
        ("train.skip_nonfinite", 7),
        ("train.steps", 7),
        ("train.epochs", 7.0),
    ],
)
def test_keys_that_may_change(key: str, value: Any, workdir: Workdir) -> None:
    group, name = key.split(".")
    assert require_same_run(workdir, changed(key, value)) == {key: (make_config(MLR)[group][name], value)}
    assert require_same_run(workdir, make_config(MLR)) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed.data", 1),
        ("optimizer.learning_rate", 1.0),
        ("train.batch_size", 8),
        ("train.start_from", "elsewhere"),
        ("train.accumulate", 2),
        ("optimizer.ema", 0.5),
        ("optimizer.decay", "cosine"),
        ("encoder.checkpoint", "elsewhere"),
        ("encoder.dtype", "bfloat16"),
        ("encoder.attention_dropout", 0.0),
        ("mesh.reduce_dtype", "bfloat16"),
        ("tokens.passage_length", 7),
        ("tokens.query_prompt", "query: "),
        ("tokens.passage_prompt", "passage: "),
        ("tokens.title_separator", " "),
        ("tokens.packing", True),  # attention's dropout depends on places in a padded text
        ("pooling", "average"),
        ("loss.temperature", 9.0),
        ("head.name", "mvr"),
    ],
)
def test_keys_that_may_not_change(key: str, value: Any, workdir: Workdir) -> None:
    with pytest.raises(ContractError) as caught:
        require_same_run(workdir, changed(key, value))
    first, *differing, remedy = str(caught.value).splitlines()
    assert first == f"the config given does not match {workdir.config}:"
    assert len(differing) == 1
    assert differing[0].startswith(f"  {key}: ")
    assert differing[0].endswith(f" in {workdir.config}, {value!r} in the config given")
    assert "--workdir" in remedy


def test_a_moved_encoder_is_the_same_encoder(workdir: Workdir) -> None:
    """Another encoder is refused: checkpoints have the run's weights, and exports name their origin."""
    folder = workdir.config.parent
    shutil.copytree(folder / "encoder", folder / "moved")
    write_json(workdir.data, {"start": {"weights": weights_digest(folder / "encoder")}})
    moved = changed("encoder.checkpoint", str(folder / "moved"))
    # Without a checkpoint, the weights are not read yet.
    with pytest.raises(ContractError, match=r"encoder\.checkpoint"):
        require_same_run(workdir, moved)
    (workdir.checkpoints / "3").mkdir(parents=True)
    assert require_same_run(workdir, moved).keys() == {"encoder.checkpoint"}
    moved.encoder.sha256 = "0" * 64
    with pytest.raises(ValueError, match=r"encoder\.sha256 .* 0000"):
        require_same_run(workdir, moved)
    weights = bytearray((folder / "moved" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "moved" / "model.safetensors").write_bytes(weights)
    for other in ("elsewhere", str(folder / "moved")):
        with pytest.raises(ContractError, match=r"encoder\.checkpoint"):
            require_same_run(workdir, changed("encoder.checkpoint", other))


def test_keys_of_other_families_are_ignored(workdir: Workdir) -> None:
    """A key of a new head does not prevent runs of other heads from being resumed."""
    config = read_json(workdir.config)
    config["head"]["mvr"] = {"window": 4}
    write_json(workdir.config, config)
    assert require_same_run(workdir, make_config(MLR)) == {}
    config["head"]["layers_of"] = {"window": 4}
    write_json(workdir.config, config)
    with pytest.raises(ContractError, match=r"head\.layers_of\.window: 4 in .*, '\(absent\)' in the config given"):
        require_same_run(workdir, make_config(MLR))


def test_changes_are_recorded_in_the_history(workdir: Workdir) -> None:
    config = changed("train.log_every", 7)
    changes = require_same_run(workdir, config)
    record_changes(workdir, config, {"version": 2}, {"train": 1}, changes, 5)
    check_seal(workdir)
    assert read_json(workdir.config) == config_json(config)
    assert (read_json(workdir.contract), read_json(workdir.data)) == ({"version": 2}, {"train": 1})
    before = workdir.seal.stat().st_mtime_ns
    record_changes(workdir, config, {"version": 2}, {"train": 1}, require_same_run(workdir, config), 6)
    assert workdir.seal.stat().st_mtime_ns == before, "nothing changed, so nothing is written"
    config = changed("train.steps", 9)
    record_changes(workdir, config, {"version": 2}, {"train": 1}, require_same_run(workdir, config), 7)
    assert [json.loads(line) for line in workdir.history.read_text().splitlines()] == [
        {"step": 5, "changes": {"train.log_every": [10, 7]}},
        {"step": 7, "changes": {"train.log_every": [7, 10], "train.steps": [-1, 9]}},
    ]
