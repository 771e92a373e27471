"""Peak memory of the commands for two small corpora, measured as in bench/memory.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.memory import VERBS, drawn, peaks

SMALL, LARGE, SHARD_ROWS = 2_000, 20_000, 250  # passages; both corpora have more shards than `encode` holds
# MiB, without mapped files, by which a command's memory may grow for 18,000 more passages. Vectors of 64 numbers (4.4
# MiB), which a search holds twice, and ids (0.2 MiB) are small; a list of all records would take tens of MiB.
MORE = {"encode": 40, "search": 40, "mine": 40, "rerank": 40, "serve": 40}


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_hardly_grows_with_the_corpus(tmp_path: Path) -> None:
    own = {
        size: {verb: peak.own for verb, peak in peaks(tmp_path / str(size), drawn(size), SHARD_ROWS)}
        for size in (SMALL, LARGE)
    }
    grown = {verb: own[LARGE][verb] - own[SMALL][verb] for verb in VERBS}
    assert all(own[SMALL][verb] > 100 for verb in VERBS), own
    assert {verb: more for verb, more in grown.items() if more > MORE[verb]} == {}, own
