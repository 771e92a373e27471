"""Configs that an older jaxret wrote, as this one spells them: three tables, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxret.contract import flatten
from jaxret.models.heads import HEADS

# Key -> what the code did while there was no such key. What families say of their own keys comes in beside it.
ABSENT: dict[str, Any] = {
    "data.dev_negatives_run": "",
    "data.store": "",
    "data.teacher_run": "",
    "encode.shard_mb": 64,  # there was no limit; a folder that has shards keeps their size
    "encoder.attention": "plain",
    "encoder.attention_dropout": -1.0,
    "encoder.recompute": "none",
    "loss.binary.positive_weight": 1.0,
    "loss.binary.weight": 0.0,
    "loss.kl.scaled": False,
    "loss.kl.teacher_temperature": 1.0,
    "loss.kl.temperature": 1.0,
    "loss.kl.weight": 0.0,
    "loss.margin_mse.weight": 0.0,
    "mesh.initialization_timeout": 300,
    "mesh.reduce_dtype": "float32",  # with bfloat16, as the partitioner liked
    "mesh.platform": "",
    "optimizer.ema": 0.0,
    "task": "retrieval",
    # There was no pre-training: nothing reads these.
    "pretraining.method": "mlm",
    "pretraining.length": 256,
    "pretraining.shortest": 8,
    "pretraining.mask_rate": 0.15,
    "pretraining.head_layers": 2,
    "pretraining.skip_from": 6,
    "pretraining.late_mlm": True,
    "pretraining.contrast_weight": 1.0,
    "pretraining.decoder_rate": 0.5,
    "pretraining.decoder_masks": 256,
    "pretraining.seed": 12345,
    "pretraining.scratch.tokenizer": "",
    "pretraining.scratch.vocabulary": 30522,
    "pretraining.scratch.lowercase": True,
    "pretraining.scratch.hidden_size": 768,
    "pretraining.scratch.layers": 12,
    "pretraining.scratch.heads": 12,
    "pretraining.scratch.intermediate_size": 3072,
    "pretraining.scratch.positions": 512,
    "tokens.packing": False,
    "tokens.passage_prompt": "",
    "tokens.query_prompt": "",
    "tokens.title_separator": "[SEP]",
    "optimizer.head_parameters": r"^(\w+_)?head/(?!vocabulary)",
    "train.accumulate": 1,
    "train.skip_nonfinite": 0,
    "validation.corpus": "",
    "validation.then": "",
    "validation.then_from": 32.0,
    **{f"head.{name}.{key}": value for name, head in HEADS.items() for key, value in head.ABSENT.items()},
}
# Old key -> where its value is now; several where families shared it.
RENAMED: dict[str, tuple[str, ...]] = {}
for _name, _head in HEADS.items():
    for _key, _old in _head.RENAMED.items():
        RENAMED[_old] = (*RENAMED.get(_old, ()), f"head.{_name}.{_key}")

# Old key -> where its value is now, under another name.
MEANT: dict[str, tuple[str, dict[Any, Any]]] = {
    "encoder.remat": ("encoder.recompute", {False: "none", True: "layer"}),
}


def upgrade(config: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config (nested, from JSON) with today's keys. One that is up to date comes back as it is."""
    flat: dict[str, Any] = {}
    for key, value in flatten(config).items():
        if key in MEANT:
            new, values = MEANT[key]
            flat[new] = values[value]
            continue
        for name in RENAMED.get(key, (key,)):
            flat[name] = value
    return nested(ABSENT | flat)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, name = key.split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = value
    return tree
