"""The lengths of texts that a plan assumes."""

from __future__ import annotations

import pytest

from jaxret.plan.workload import parse_lengths


def test_lengths() -> None:
    assert parse_lengths([]) == ()
    assert parse_lengths(["10", "80.5"]) == (10, 80.5)


@pytest.mark.parametrize(
    "values", [["a", "80"], ["10"], ["10", "-80"], ["0", "80"], ["nan", "80"], ["1e9", ""], ["1", "2", "3"]]
)
def test_invalid_lengths(values: list[str]) -> None:
    with pytest.raises(ValueError, match=rf"--lengths={','.join(values)}: .*numbers .*0, .*10,80"):
        parse_lengths(values)
