"""Two artefacts that do not belong together are refused, with both values."""

from __future__ import annotations

import pytest

from jaxret.runs.mismatch import ContractError, flatten, require_equal


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": (4, 6)}) == {"a.b": 1, "a.c.d": None, "e": [4, 6]}


def test_equal_mappings_pass_and_tuples_are_lists() -> None:
    require_equal({"head": {"layers": (4, 6)}}, {"head": {"layers": [4, 6]}}, "A", "B", "")


def test_every_difference_has_both_values_and_the_remedy() -> None:
    left = {"head": {"name": "layers", "layers": (4, 6)}, "lengths": 32, "only": "left"}
    right = {"head": {"name": "layers", "layers": (5, 6)}, "lengths": 64}
    with pytest.raises(ContractError) as caught:
        require_equal(left, right, "the checkpoint", "the shards", "Encode again.")
    assert str(caught.value).splitlines() == [
        "the shards does not match the checkpoint:",
        "  head.layers: [4, 6] in the checkpoint, [5, 6] in the shards",
        "  lengths: 32 in the checkpoint, 64 in the shards",
        "  only: 'left' in the checkpoint, '(absent)' in the shards",
        "Encode again.",
    ]


@pytest.mark.parametrize(("left", "right"), [({"a": None}, {}), ({}, {"a": None}), ({"a": 1}, {"a": "1"})])
def test_absent_and_none_differ_and_types_count(left: dict, right: dict) -> None:
    with pytest.raises(ContractError, match="a: "):
        require_equal(left, right, "A", "B", "")
