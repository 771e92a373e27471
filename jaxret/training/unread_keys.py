"""Detect keys of a config that have no effect, because the task does not read them or another key turns them off."""

from __future__ import annotations

import re
from typing import Any

from ml_collections import ConfigDict

from jaxret.configs.base import get_config
from jaxret.runs.mismatch import flatten

# Task -> pattern of keys that it does not read -> their reader. Groups of other heads are not listed, because a config
# changes its head by one key; encoder.tied is not listed for a reranker, which has one encoder.
UNREAD: dict[str, dict[str, str]] = {
    "retrieval": {r"pretraining\..*": "jaxret pretrain"},
    "reranking": {
        r"pretraining\..*": "jaxret pretrain",
        r"head\..*|pooling|normalize|train\.teacher|data\.pseudo_queries": "a retriever",
        r"loss\.(local_.*|annealing_.*|in_batch_.*|matryoshka\..*|sparsity\..*)": "a retriever",
        r"validation\.(corpus|pool_size|batch_size)|tokens\.(packing|prompt_in_mean)|mesh\.tensor": "a retriever",
        r"encode\.(?!tokens_per_batch$).*": "the encoding of a corpus",
    },
    "pretraining": {
        r"(head|loss|lora|validation|encode)\..*|pooling|normalize|encoder\.tied|seed\.negatives": "jaxret train",
        r"data\.(?!(train|store|on_error)$).*|tokens\.(?!length_multiple$).*": "jaxret train",
        r"train\.(start_from|rounds?|teacher)|mesh\.tensor": "jaxret train",
    },
}

# Key -> (value that turns it off, pattern of keys that then have no effect). This is not an error: a user may change
# only one key of a config, and a sweep may contain this value among others.
SWITCHES: dict[str, tuple[Any, str]] = {
    "lora.rank": (0, r"lora\.(alpha|rslora|dropout|targets|layers|base_dtype)"),
    **{f"loss.{name}.weight": (0, rf"loss\.{name}\.(?!weight$).*") for name in ("kl", "in_batch_kl", "binary")},
    "loss.false_negatives.masked": (False, r"loss\.false_negatives\.margin"),
    "loss.annealing_rate": (0, r"loss\.annealing_floor"),
    "loss.sparsity.query": (0, r"loss\.sparsity\.query_norm"),
    "loss.sparsity.passage": (0, r"loss\.sparsity\.passage_norm"),
    "optimizer.head_learning_rate": (0, r"optimizer\.head_parameters"),
    "optimizer.clip_norm": (0, r"optimizer\.reference_processes"),
    "validation.then": ("", r"validation\.then_from"),
    "train.trackers": ([], r"train\.tracker_project"),
}
# Pattern of keys of pre-training -> the only methods that read them.
_METHODS: dict[str, tuple[str, ...]] = {
    r"pretraining\.(head_layers|skip_from|late_mlm)": ("condenser", "cocondenser"),
    r"pretraining\.contrast_weight": ("cocondenser",),
    r"pretraining\.decoder_(rate|masks)": ("retromae",),
}


def describe_idle(config: ConfigDict) -> list[str]:
    """Return a sentence for each key that turns off other keys whose values differ from configs/base.py."""
    defaults, values = flatten(get_config().to_dict()), flatten(config.to_dict())
    off_switches = [(key, off, pattern) for key, (off, pattern) in SWITCHES.items() if values[key] == off]
    method = config.pretraining.method
    off_switches += [
        ("pretraining.method", method, keys) for keys, readers in _METHODS.items() if method not in readers
    ]
    sentences = []
    for switch, value, pattern in off_switches:
        if idle := [key for key in values if re.fullmatch(pattern, key) and values[key] != defaults.get(key)]:
            verb = "have" if len(idle) > 1 else "has"
            sentences.append(f"{', '.join(idle)} {verb} no effect: {switch} is {_shown(value)}")
    return sentences


def find_reader(task: str, key: str) -> str:
    """Return the reader of a key that a task does not read; "" for a key that it reads."""
    return next((reader for pattern, reader in UNREAD.get(task, {}).items() if re.fullmatch(pattern, key)), "")


def check_unread(config: ConfigDict) -> None:
    """Raise ValueError if the task does not read keys that differ from configs/base.py. The error names all of them."""
    defaults = flatten(get_config().to_dict())
    problems = [
        f"{key} is {_shown(value)}, which {reader} reads and task {config.task!r} does not: "
        f"set it to {_shown(defaults[key])}"
        for key, value in flatten(config.to_dict()).items()
        if key in defaults and value != defaults[key] and (reader := find_reader(config.task, key))
    ]
    if problems:
        raise ValueError("; ".join(problems))


def _shown(value: Any) -> str:
    """Return a value as a config file has it. (`flatten` has turned tuples into lists.)"""
    return repr(tuple(value) if isinstance(value, list) else value)
