"""Compare two records that must agree, key by key.

A difference stops the job with both values, because vectors of different settings look correct but give wrong results.
The content of a run's contract is in runs/contract.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ContractError(ValueError):
    """Two files or folders that are used together do not match."""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping with dotted keys: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = list(value) if isinstance(value, tuple) else value
    return flat


def require_equal(
    expected: Mapping[str, Any], actual: Mapping[str, Any], expected_name: str, actual_name: str, remedy: str
) -> None:
    """Raise ContractError with both values of every key on which two (nested, JSON-like) mappings differ.

    Args:
        expected: the stored record.
        actual: the current record.
        expected_name: name of the stored record, for the error message.
        actual_name: name of the current record, for the error message.
        remedy: advice at the end of the error message.
    """
    left, right = flatten(expected), flatten(actual)
    placeholder = "(absent)"
    differences = [
        f"  {key}: {left.get(key, placeholder)!r} in {expected_name}, {right.get(key, placeholder)!r} in {actual_name}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key, placeholder) != right.get(key, placeholder)
    ]
    if differences:
        raise ContractError(f"{actual_name} does not match {expected_name}:\n" + "\n".join(differences) + f"\n{remedy}")
