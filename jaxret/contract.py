"""Two records that must agree, compared key by key: those that do not stop with both values shown, because the
alternative is vectors that look right and retrieve nonsense. What is in a run's contract is in runs/contract.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ContractError(ValueError):
    """Two artefacts that should belong together do not."""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = list(value) if isinstance(value, tuple) else value
    return flat


def require_equal(
    expected: Mapping[str, Any], found: Mapping[str, Any], expected_name: str, found_name: str, remedy: str
) -> None:
    """Raises ContractError listing every key on which two (nested, JSON-like) mappings differ, with both values.

    `expected_name` and `found_name` say where each side comes from; `remedy` says what to do about it.
    """
    left, right = flatten(expected), flatten(found)
    missing = "(absent)"
    differences = [
        f"  {key}: {left.get(key, missing)!r} in {expected_name}, {right.get(key, missing)!r} in {found_name}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key, missing) != right.get(key, missing)
    ]
    if differences:
        raise ContractError(f"{found_name} does not match {expected_name}:\n" + "\n".join(differences) + f"\n{remedy}")
