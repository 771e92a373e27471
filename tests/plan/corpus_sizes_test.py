"""The needs of corpora, by arithmetic."""

from __future__ import annotations

import pytest

from jaxret.parallel.chips import parse_topology
from jaxret.plan.corpus_sizes import config_families, corpus_size_table
from tests.pipeline import REPOSITORY


def test_every_family_has_its_vectors() -> None:
    numbers_of = {name: numbers for name, *numbers in config_families(REPOSITORY / "configs")}
    assert numbers_of["base"] == [1, 768, 1]
    assert numbers_of["mvr"] == [8, 768, 1]
    assert numbers_of["colbert:late"] == [80, 128, 32]


def test_bytes_and_seconds_of_a_row() -> None:
    """1,024 queries on 8,841,823 vectors of 768 numbers, over 8 GPUs."""
    rows = [line.split(" | ") for line in corpus_size_table(REPOSITORY / "configs", parse_topology("h100:8"))]
    (row,) = [row for row in rows if row[0].startswith("| base ") and row[1] == "8,841,823"]
    numbers = 8_841_823 * 768
    assert row[2:4] == [f"{numbers * 4 / 2**30:.1f} GiB", f"{numbers * 2 / 2**30:.1f} GiB"]
    memory, time = row[5].split(", ")
    assert float(memory.removesuffix(" GiB")) == pytest.approx(numbers * 2 / 8 / 2**30, rel=0.05)
    assert int(time.removesuffix(" ms")) == pytest.approx(2 * 1024 * numbers / 8 / 989.4e12 * 1e3, abs=0.6)
    (large,) = [row for row in rows if row[0].startswith("| mvr ") and row[1] == "100,000,000"]
    assert "streamed" in large[4]
    (late,) = [row for row in rows if row[0].startswith("| colbert:late ") and row[1] == "1,000,000"]
    cell, time = late[5].split(", ")
    assert cell == "blocks"
    assert float(time.removesuffix(" s")) == pytest.approx(2 * 1024 * 32 * 80 * 128 * 1e6 / 989.4e12, abs=0.06)
