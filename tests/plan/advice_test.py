"""The keys that a plan tries if a step does not fit, in their order."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from jaxret.configs.base import get_config
from jaxret.parallel.chips import GIB, parse_topology
from jaxret.plan.advice import advise, memory_changes, with_changes

ONE, FOUR = parse_topology("v5e:1x1"), parse_topology("v5e:2x2")


def plain() -> ConfigDict:
    """Return a config without any option that saves memory."""
    config = get_config()
    config.encoder.recompute = "none"
    return config


def test_keys_that_change_no_result_are_tried_first() -> None:
    config = plain()
    tried = list(memory_changes(config, FOUR.devices))
    kinds = [sorted(key.rpartition(".")[2] for key in change) for change in tried]
    together = sorted(["recompute", "chunk_size", "fsdp"])
    alone = [["recompute"], ["recompute"], ["chunk_size"], ["fsdp"]]
    assert kinds == [*alone, together, ["dtype"], sorted([*together, "dtype"])]
    for change in tried:
        with_changes(config, change)  # every key exists in the config


def test_keys_that_are_set_or_have_no_effect_are_not_tried() -> None:
    config = get_config()
    config.encoder.dtype = "bfloat16"
    config.train.chunk_size = 4
    keys = {key for change in memory_changes(config, ONE.devices) for key in change}
    assert keys == {"encoder.recompute"}


def test_the_search_ends_with_the_first_fit() -> None:
    needs: list[dict[str, Any]] = []

    def bytes_of(config: ConfigDict) -> int:
        needs.append(config.to_dict())
        if config.train.chunk_size and config.mesh.fsdp == 1:
            return 10 * GIB
        return 20 * GIB

    changes = list(advise(plain(), FOUR, bytes_of))
    assert [tried.fits for tried in changes] == [False] * (len(changes) - 1) + [True]
    assert changes[-1].change == {"train.chunk_size": 16}
    assert len(needs) == len(changes)


def test_an_impossible_change_is_skipped() -> None:
    def bytes_of(config: ConfigDict) -> int:
        if config.mesh.fsdp > 1:
            raise ValueError("size is not divisible by mesh.fsdp")
        return 20 * GIB

    assert not any("mesh.fsdp" in tried.change for tried in advise(plain(), FOUR, bytes_of))
