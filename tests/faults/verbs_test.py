"""Commands that write files and are ended at any file operation: repeating the command gives the undisturbed result.
Two commands at the same time do so, too.

A command ends by a power cut (it is killed, and files that were never flushed are empty), or because one operation
fails. shim.c counts the operations of the whole process.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.fault_table import Trials
from tests.faults.conftest import Tiny
from tests.faults.kills_test import leftovers
from tests.faults.names_test import commands, verb_words
from tests.faults.power_test import EPHEMERAL, operations, shim, shimmed, unflushed  # noqa: F401
from tests.faults.scripts import Script, refusal, start
from tests.pipeline import contents

CHEAP = ("fuse", "copy", "compare", "data convert", "data split", "keywords")  # a trial takes a second
MANY, FEW = 50, 4  # trials; a quarter of them are failures
# Verbs whose results others need, in the order of `commands`.
BEFORE = ("train", "encode", "search", "bm25", "rerank", "export")
VERBS = (
    *("pretrain", "encode", "append", "delete", "index", "search", "bm25", "mine", "fuse", "rerank", "generate"),
    *("beir", "sweep", "recipe", "export", "open", "report", "plot", "probe", "copy"),
    *("data chunk", "data convert", "data split", "data build", "keywords"),
)
RACED = ("mine", "rerank", "compare", "fuse", "report", "copy", "plot", "data chunk", "data split", "keywords")
RACES = 10  # races of a verb that is not cheap


class Stage:
    """A folder that can be reset to its state before a command, always at the same path."""

    def __init__(self, tiny: Tiny, root: Path) -> None:
        self.folder, self._states, self._log = root / "work", root / "states", root / "log"
        self.folder.mkdir()
        shutil.copytree(tiny.data, self.folder / "sets" / "one")
        self.commands = commands(tiny, self.folder, tiny.data)
        (tiny.root / "more.jsonl").write_text('{"_id": "more", "text": "river market"}\n')
        for number, name in enumerate(BEFORE):
            shutil.copytree(self.folder, self._states / str(number))
            done = self.run(name)
            assert done.returncode == 0, done.output
        shutil.copytree(self.folder, self._states / str(len(BEFORE)))

    def reset(self, name: str) -> None:
        """Restore the folder before a command on which others depend, or after all of these."""
        state = BEFORE.index(name) if name in BEFORE else len(BEFORE)
        shutil.rmtree(self.folder)
        shutil.copytree(self._states / str(state), self.folder)

    def start(self, name: str, preload: str = "", **variables: int) -> Script:
        self._log.unlink(missing_ok=True)
        env = shimmed(self.folder, self._log) | {name: str(value) for name, value in variables.items()}
        return start("jaxret/__main__.py", *verb_words(name), *self.commands[name], env=env, preload=preload)

    def run(self, name: str, preload: str = "", **variables: int) -> Script:
        script = self.start(name, preload, **variables)
        script.wait()
        return script

    @property
    def operations(self) -> int:
        return len(operations(self._log))

    def cut_power(self) -> list[str]:
        """Empty the files that were never flushed, and return their names."""
        lost = unflushed(self._log)
        for path in lost:
            path.write_bytes(b"")
        return [path.name for path in lost]

    def wait_an_hour(self) -> None:
        """Make unfinished files an hour old. Even a job that ended may leave one, if its deletion failed."""
        for path in self.folder.rglob("*.tmp"):
            os.utime(path, (time.time() - 3600,) * 2)

    def files(self) -> dict[str, bytes]:
        """Return the files, except TensorStore's data, whose names are random, and files that no command reads; of
        array_record, return the records, whose keys are in any order."""
        names = [n for n in contents(self.folder) if not any(part in n for part in (*EPHEMERAL, "/d/"))]
        return {name: self.content(self.folder / name) for name in names}

    @staticmethod
    def content(path: Path) -> bytes:
        if ".array_record" not in path.name or not path.stat().st_size:
            return path.read_bytes()
        from array_record.python.array_record_module import ArrayRecordReader

        return b"".join(bytes(sorted(record)) for record in ArrayRecordReader(str(path)).read_all())


@pytest.fixture(scope="module")
def stage(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tiny, tmp_path_factory.mktemp("stage"))


@pytest.mark.faults(30)
@pytest.mark.parametrize("name", VERBS)
def test_every_verb_is_ended_at_random_times(name: str, stage: Stage, shim: str, trials: Trials) -> None:  # noqa: F811
    alone = undisturbed(name, stage, shim)
    assert alone.made, "it has written files that are equal each time"
    count, random = stage.operations, np.random.default_rng(len(name))
    for number, place in enumerate(random.integers(1, count + 1, MANY if name in CHEAP else FEW)):
        stage.reset(name)
        fault = "SHIM_FAIL" if number % 4 == 3 else "SHIM_KILL"
        ended = stage.run(name, shim, **{fault: int(place)})
        emptied = stage.cut_power() if ended.returncode == -signal.SIGKILL else []
        stage.wait_an_hour()
        clean = ended.returncode in (0, -signal.SIGKILL) or bool(refusal(ended))
        complete = not alone.differences(stage)
        again = stage.run(name)
        went_on = again.returncode == 0 or (complete and bool(refusal(again)))
        wrong, left = alone.differences(stage), leftovers(stage.folder)
        said = f"{fault} {place} of {count}, emptied {emptied}: {wrong} {left}\n{ended.output}\n{again.output}"
        trials.count(clean and went_on and not wrong and not left, said, detected=ended.returncode == 1)


@pytest.mark.faults(29)
@pytest.mark.parametrize("name", RACED)
def test_two_jobs_of_every_verb_at_once(name: str, stage: Stage, trials: Trials) -> None:
    """The second job begins at a random time during the first: both give the result of one. They take no lock, so a
    refusal would be about the other job's files."""
    alone, random = undisturbed(name, stage), np.random.default_rng(len(name))
    for _ in range(MANY if name in CHEAP else RACES):
        stage.reset(name)
        first = stage.start(name)
        first.poll(random.uniform(0, alone.seconds))
        second = stage.start(name)
        statuses = [first.wait(), second.wait()]
        wrong, left = alone.differences(stage), leftovers(stage.folder)
        wrong += [f"said {one.stdout}" for one in (first, second) if name == "compare" and one.stdout != alone.said]
        said = f"{statuses}: {wrong} {left}\n{first.output}\n{second.output}"
        trials.count(statuses == [0, 0] and not wrong and not left, said)


@dataclass
class Undisturbed:
    """Results of a command without disturbance; files that differ between two runs (clocks) count only by name."""

    files: dict[str, bytes]
    same: set[str]  # files with equal bytes in two runs
    made: set[str]  # names of those that the command writes
    said: str
    seconds: float

    def differences(self, stage: Stage) -> list[str]:
        """Return the names of files that differ from the undisturbed result."""
        now = stage.files()
        same = self.same & now.keys()
        return sorted(self.files.keys() ^ now.keys() | {file for file in same if now[file] != self.files[file]})


def undisturbed(name: str, stage: Stage, preload: str = "") -> Undisturbed:
    alone = []
    for _ in range(2):
        stage.reset(name)
        before = stage.files()
        done = stage.run(name, preload)
        assert done.returncode == 0, done.output
        alone.append(stage.files())
    assert alone[0].keys() == alone[1].keys()
    same = {file for file, content in alone[0].items() if content == alone[1][file]}
    made = {file for file in same if before.get(file) != alone[0][file]}
    return Undisturbed(alone[0], same, made, done.stdout, done.cpu)
