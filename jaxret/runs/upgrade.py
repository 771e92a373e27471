"""Configs that an older jaxret wrote, as this one spells them: two tables, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxret.contract import flatten

# Old key -> where its value is now; several where families shared it, none where nothing reads it any more.
RENAMED: dict[str, tuple[str, ...]] = {
    "head.layers": ("head.layers.chosen",),
    "head.count": ("head.first_tokens.count", "head.viewers.count"),
    "head.first_viewer_id": ("head.viewers.first_id",),
    "head.projection": ("head.all_tokens.projection",),
    "head.late_interaction": ("head.all_tokens.late",),
    **{
        f"head.{key}": (f"head.lexical.{key}",)
        for key in ("lexical_dim", "cls_dim", "pruning", "mlm", "term_weights", "chunk")
    },
    **{
        f"head.{key}": (f"head.implicit.{key}",)
        for key in ("variant", "reconstructor_layers", "interactor_layers", "pseudo_length", "mask_id")
    },
    "loss.parts_weight": ("head.lexical.parts_weight",),
    "loss.reconstruction_weight": ("head.implicit.reconstruction_weight",),
    "loss.reconstruction_decay": ("head.implicit.reconstruction_decay",),
}
# Key -> what the code did while there was no such key.
ABSENT: dict[str, Any] = {
    "head.viewers.deviation": 0.02,
    "mesh.initialization_timeout": 300,
    "optimizer.head_parameters": r"^(\w+_)?head/(?!vocabulary)",
}


def upgrade(config: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config (nested, from JSON) with today's keys. One that is up to date comes back as it is."""
    flat: dict[str, Any] = {}
    for key, value in flatten(config).items():
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
