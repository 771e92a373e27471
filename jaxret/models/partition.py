"""Parts of a tree of parameters, by their paths: those that are trained, and those that are frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxret.models.lora import BASE
from jaxret.types import Tree


def frozen_pattern(config: ConfigDict) -> str:
    """Return the pattern of the paths of parameters that a config does not train; "": it trains all."""
    return "|".join(filter(None, (config.optimizer.frozen, BASE if config.lora.rank else "")))


def divide_parameters(tree: Tree, pattern: str, prefix: str = "") -> tuple[Tree, Tree]:
    """Return the parts of nested dicts whose paths do not match a pattern, and those that do. The empty pattern matches
    nothing. prefix: of all paths, with its slash."""
    if not pattern:
        return tree, {}
    others: dict[str, Any] = {}
    matches: dict[str, Any] = {}
    for name, part in tree.items():
        if isinstance(part, Mapping):
            for result, piece in zip(
                (others, matches), divide_parameters(part, pattern, f"{prefix}{name}/"), strict=True
            ):
                if piece:
                    result[name] = piece
        else:
            (matches if re.search(pattern, prefix + name) else others)[name] = part
    return others, matches


def join_parameters(first: Tree, second: Tree) -> Tree:
    """Return nested dicts with the leaves of both."""
    if not second:
        return first
    both = dict(first)
    for name, part in second.items():
        both[name] = join_parameters(both[name], part) if name in both else part
    return both
