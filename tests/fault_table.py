"""The table of injected faults and their outcomes, for tests with the mark `faults`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

INJECTIONS = {
    1: "kill -9 while encoding",
    2: "kill -9 while saving checkpoints",
    3: "kill -9 of one or both of two processes that train",
    4: "SIGTERM once and twice, Ctrl-C",
    5: "bit flips in every file of a run",
    6: "truncated and lengthened files",
    7: "deleted, swapped, duplicated shards",
    8: "duplicate ids",
    9: "NaN and infinity in vectors",
    10: "NaN loss, NaN weights",
    11: "bad encodings, bad JSON",
    12: "empty and blank texts",
    13: "a passage of 1M tokens, a line of 100 MB",
    14: "disk full",
    15: "EIO, EDQUOT, file size limit",
    16: "two jobs on one folder",
    17: "resumed with other things",
    18: "resumed on another number of devices",
    19: "malicious input",
    20: "0, 1, B-1, B, B+1 rows; k > n",
    21: "ties, over shard sizes and backends",
    22: "read-only, vanishing folder, clock back",
    23: "several processes: one killed, no coordinator",
    24: "corrupt compilation cache",
    25: "kill -9 in every step of a recipe",
    26: "several jobs on one folder, killed and stopped",
    27: "folders of any name, long paths",
    28: "power cut while training",
    29: "two jobs that make one folder",
    30: "power cut, EIO in every verb that writes",
    31: "long runs: descriptors, threads, memory",
    32: "32 threads on one index: any k, filters, parameters",
    33: "model folders that are hostile",
    34: "corpora and shards that change while they are open",
    35: "forked children, pickles",
    36: "thousands of equal vectors",
    37: "wrong types from Python",
    38: "kill -9 at a request to a bucket",
}


# The table


@dataclass
class Trials:
    """Outcomes of trials: an error that names the fault, or a correct result. All other outcomes are losses."""

    detected: int = 0
    survived: int = 0
    lost: list[str] = field(default_factory=list)

    def count(self, outcome: bool, what: str, detected: bool = False) -> None:
        """Count a trial. outcome: whether it ended as it should; detected: whether it was refused."""
        if not outcome:
            self.lost.append(what)
        elif detected:
            self.detected += 1
        else:
            self.survived += 1


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> Iterator[Trials]:
    """Count the trials of a test; lost ones fail it."""
    counts = Trials()
    yield counts
    request.node.user_properties.append(("faults", (counts.detected, counts.survived, len(counts.lost))))
    if counts.lost:
        pytest.fail("\n".join(counts.lost), pytrace=False)


_ROWS: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
_WITHOUT: dict[int, set[str]] = defaultdict(set)  # number -> reasons why a part was skipped


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("faults"):
            item.user_properties.append(("injection", mark.args[0]))
            if "trials" not in getattr(item, "fixturenames", ()):  # the test is a single trial
                item.user_properties.append(("refused", mark.kwargs.get("refused", False)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the reports; pytest calls this in the main process, also for tests of workers."""
    properties: dict[str, Any] = dict(report.user_properties)
    number = properties.get("injection")
    if number is None:
        return
    _ROWS[number]
    if report.skipped and isinstance(report.longrepr, tuple):
        _WITHOUT[number].add(report.longrepr[2].removeprefix("Skipped: "))
    if report.when == "call" and report.failed:  # the test ended before its trials
        _ROWS[number][2] += 1
    elif report.when == "call" and report.passed and "refused" in properties:
        _ROWS[number][0 if properties["refused"] else 1] += 1
    if report.when == "teardown" and "faults" in properties:
        for place, value in enumerate(properties["faults"]):
            _ROWS[number][place] += value


def pytest_terminal_summary(terminalreporter: Any) -> None:
    # Daily tests run only a few trials of each row.
    if not _ROWS or "not exhaustive" in terminalreporter.config.option.markexpr:
        return
    terminalreporter.section("faults")
    width = max(map(len, INJECTIONS.values()))
    terminalreporter.write_line(f" #  {'injection':{width}}  trials  detected  survived  lost")
    for number, (detected, survived, lost) in sorted(_ROWS.items()):
        row = f"{detected + survived + lost:6d}  {detected:8d}  {survived:8d}  {lost:4d}"
        without = f"   not tried: {'; '.join(sorted(_WITHOUT[number]))}" if number in _WITHOUT else ""
        terminalreporter.write_line(f"{number:2d}  {INJECTIONS[number]:{width}}  {row}{without}")
