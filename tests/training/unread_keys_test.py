"""A key that its task does not read is refused. The table READ is verified by a run of each task that records which
keys are read: in tests/configs/config_test.py (retrieval), tasks/reranking_test.py, pretraining/pretrain_test.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jaxret.configs.base import get_config
from jaxret.runs.mismatch import flatten
from jaxret.training.config_check import check_config
from jaxret.training.loop import train
from jaxret.training.unread_keys import SWITCHES, describe_idle, find_reader
from tests.pipeline import tiny_config, write_data, write_encoder
from tests.tiny import make_config

READ = {
    "retrieval": r"(?!pretraining\.).*",
    "reranking": r"task|(encoder|optimizer|lora|seed)\..*|data\.(?!pseudo_queries).*|train\.(?!teacher).*"
    r"|mesh\.(?!tensor).*|tokens\.(?!packing|prompt_in_mean).*"
    r"|loss\.(temperature|contrastive_weight|(false_negatives|kl|margin_mse|binary)\..*)"
    r"|validation\.(metric|then|then_from|best)|encode\.tokens_per_batch",
    "pretraining": r"task|(encoder(?!\.tied)|optimizer|mesh(?!\.tensor)|pretraining)\..*|tokens\.length_multiple"
    r"|data\.(train|store|on_error)|train\.(?!start_from|round|teacher).*|seed\.(init|data|dropout)",
}
KEYS = flatten(get_config().to_dict())


def other(key: str) -> Any:
    """Return a value that differs from the key's default."""
    value = KEYS[key]
    if isinstance(value, list):
        return ("x",) if key in ("encoder.ignore", "lora.targets", "train.trackers") else (1,)
    if isinstance(value, bool):
        return not value
    return value + ("x" if isinstance(value, str) else 0.5 if isinstance(value, float) else 1)


def refusal(task: str, key: str) -> str:
    """Return the refusal of a config with another value of the key; empty if there is none, or if the error is about
    the value."""
    config = make_config({"task": task, "data.train": "somewhere", "encoder.recompute": "cheap"})
    config.update_from_flattened_dict({key: other(key)})
    try:
        check_config(config)
    except ValueError as error:
        return str(error) if f"task {task!r} does not" in str(error) else ""
    return ""


@pytest.mark.parametrize("task", READ)
def test_a_key_is_read_by_a_task_or_refused(task: str) -> None:
    for key in KEYS.keys() - {"task"}:
        message, default = refusal(task, key), KEYS[key]
        assert bool(message) != bool(re.fullmatch(READ[task], key)), key
        if message:
            shown = [repr(tuple(default) if isinstance(default, list) else default), repr(other(key))]
            assert message.startswith(f"{key} is {shown[1]}, which {find_reader(task, key)} reads and task ")
            assert message.endswith(f": set it to {shown[0]}")


def test_one_message_names_all_of_them() -> None:
    config = make_config({"task": "reranking", "data.train": "somewhere", "normalize": True, "encode.words": 3})
    with pytest.raises(ValueError, match=r"encode.words .*3, .*0; normalize .*True, .*False"):
        check_config(config)


@pytest.mark.parametrize(
    ("changes", "on"),
    [
        ({"lora.alpha": 32.0, "lora.targets": ("q_proj",)}, {"lora.rank": 4}),
        ({"loss.kl.temperature": 0.05}, {"loss.kl.weight": 1.0}),
        ({"loss.in_batch_kl.scaled": True}, {"loss.in_batch_kl.weight": 1.0}),
        ({"loss.binary.positive_weight": 2.0}, {"loss.binary.weight": 1.0}),
        ({"loss.false_negatives.margin": 0.2}, {"loss.false_negatives.masked": True}),
        ({"loss.annealing_floor": 0.5}, {"loss.annealing_rate": 0.1}),
        ({"loss.sparsity.query_norm": "l1"}, {"loss.sparsity.query": 0.1}),
        ({"loss.sparsity.passage_norm": "l1"}, {"loss.sparsity.passage": 0.1}),
        ({"optimizer.head_parameters": "head/"}, {"optimizer.head_learning_rate": 0.1}),
        ({"optimizer.reference_processes": 4, "optimizer.clip_norm": 0.0}, {"optimizer.clip_norm": 1.0}),
        ({"validation.then_from": 3.0}, {"validation.then": "nll"}),
        ({"train.tracker_project": "mine"}, {"train.trackers": ("wandb",)}),
        ({"pretraining.head_layers": 3, "pretraining.skip_from": 5}, {"pretraining.method": "condenser"}),
        ({"pretraining.contrast_weight": 0.5}, {"pretraining.method": "cocondenser"}),
        ({"pretraining.decoder_masks": 8}, {"pretraining.method": "retromae"}),
    ],
)
def test_settings_of_disabled_parts_are_reported(changes: dict[str, Any], on: dict[str, Any]) -> None:
    (switch,) = on
    (sentence,) = describe_idle(make_config(changes))
    idle = ", ".join(sorted(key for key in changes if key != switch))
    assert re.match(rf"{idle} (has|have) no effect: {switch} is ", sentence)
    assert describe_idle(make_config(changes | on)) == []


def test_the_base_config_turns_nothing_off_that_is_set() -> None:
    assert describe_idle(get_config()) == []
    assert SWITCHES.keys() <= KEYS.keys()
    assert all(any(re.fullmatch(pattern, key) for key in KEYS) for _, pattern in SWITCHES.values())


@pytest.mark.slow
def test_a_run_tells_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    train(tiny_config(encoder, data, data__dev="", train__steps=0, lora__alpha=32.0), tmp_path / "run")
    assert "lora.alpha has no effect: lora.rank is 0\n" in capsys.readouterr().out
