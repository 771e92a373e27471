"""Division of a tree of parameters by their paths, into trained and frozen parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxret.models.lora import BASE
from jaxret.types import Tree


def frozen_pattern(config: ConfigDict) -> str:
    """Return the pattern that matches the paths of frozen parameters of a config; "": all parameters are trained."""
    return "|".join(filter(None, (config.optimizer.frozen, BASE if config.lora.rank else "")))


def divide_parameters(tree: Tree, pattern: str, prefix: str = "") -> tuple[Tree, Tree]:
    """Return nested dicts of the leaves whose paths do not match a pattern, and of the leaves whose paths do. The empty
    pattern matches nothing. Paths begin with `prefix`, which ends with a slash."""
    if not pattern:
        return tree, {}
    remainder: dict[str, Any] = {}
    matches: dict[str, Any] = {}
    for name, part in tree.items():
        if isinstance(part, Mapping):
            for result, piece in zip(
                (remainder, matches), divide_parameters(part, pattern, f"{prefix}{name}/"), strict=True
            ):
                if piece:
                    result[name] = piece
        else:
            (matches if re.search(pattern, prefix + name) else remainder)[name] = part
    return remainder, matches


def join_parameters(first: Tree, second: Tree) -> Tree:
    """Return nested dicts with the leaves of two trees."""
    if not second:
        return first
    tree = dict(first)
    for name, part in second.items():
        tree[name] = join_parameters(tree[name], part) if name in tree else part
    return tree
