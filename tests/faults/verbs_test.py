"""Commands that make files, ended at any operation on them: the same command again makes what it makes alone.

It is ended by a power cut (killed, and what was never flushed is empty), or an operation fails once. shim.c counts the
operations of the whole process.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.faults.conftest import Tiny, Trials
from tests.faults.kills_test import leftovers
from tests.faults.names_test import commands, verb_words
from tests.faults.power_test import EPHEMERAL, operations, shim, shimmed, unflushed  # noqa: F401
from tests.faults.scripts import Script, refusal, start
from tests.pipeline import contents

CUTS, FAILURES = 3, 1
BEFORE = ("train", "encode", "search", "bm25", "rerank", "export")  # what others need, in the order of `commands`
VERBS = (
    *("pretrain", "index", "bm25", "mine", "rerank", "generate", "export", "open"),
    *("data chunk", "data convert", "data split", "data build", "keywords"),
)


class Stage:
    """A folder that is brought to the state before a command again and again, always at the same path."""

    def __init__(self, tiny: Tiny, root: Path) -> None:
        self.folder, self._states, self._log = root / "work", root / "states", root / "log"
        self.folder.mkdir()
        shutil.copytree(tiny.data, self.folder / "sets" / "one")
        self.commands = commands(tiny, self.folder, tiny.data)
        for number, name in enumerate(BEFORE):
            shutil.copytree(self.folder, self._states / str(number))
            done = self.run(name)
            assert done.returncode == 0, done.output
        shutil.copytree(self.folder, self._states / str(len(BEFORE)))

    def reset(self, name: str) -> None:
        """Make the folder what it was before a command that needs what others make, or after all that others need."""
        state = BEFORE.index(name) if name in BEFORE else len(BEFORE)
        shutil.rmtree(self.folder)
        shutil.copytree(self._states / str(state), self.folder)

    def run(self, name: str, preload: str = "", **variables: int) -> Script:
        self._log.unlink(missing_ok=True)
        env = shimmed(self.folder, self._log) | {name: str(value) for name, value in variables.items()}
        script = start("jaxret/__main__.py", *verb_words(name), *self.commands[name], env=env, preload=preload)
        script.wait()
        return script

    @property
    def operations(self) -> int:
        return len(operations(self._log))

    def cut_power(self) -> list[str]:
        """Empty what was never flushed, make what is unfinished an hour old, and return the names of the former."""
        lost = unflushed(self._log)
        for path in lost:
            path.write_bytes(b"")
        for path in self.folder.rglob("*.tmp"):
            os.utime(path, (time.time() - 3600,) * 2)
        return [path.name for path in lost]

    def files(self) -> dict[str, bytes]:
        """Without TensorStore's data, whose names are drawn, and what nobody reads; of array_record, the
        records, whose keys are in any order."""
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
def test_ended_anywhere(name: str, stage: Stage, shim: str, trials: Trials) -> None:  # noqa: F811
    """Files that differ between two undisturbed commands (times) count by their names alone."""
    alone = []
    for _ in range(2):
        stage.reset(name)
        before = stage.files()
        done = stage.run(name, shim)
        assert done.returncode == 0, done.output
        alone.append(stage.files())
    assert alone[0].keys() == alone[1].keys()
    same = {file for file, content in alone[0].items() if content == alone[1][file]}
    made = {file for file in same if content_differs(before, alone[0], file)}
    assert made, "it made files that are the same each time"
    count, random = stage.operations, np.random.default_rng(len(name))

    def wrong() -> list[str]:
        now = stage.files()
        return sorted(
            alone[0].keys() ^ now.keys() | {file for file in same & now.keys() if now[file] != alone[0][file]}
        )

    for number, place in enumerate(random.integers(1, count + 1, CUTS + FAILURES)):
        stage.reset(name)
        fault = "SHIM_KILL" if number < CUTS else "SHIM_FAIL"
        ended = stage.run(name, shim, **{fault: int(place)})
        emptied = stage.cut_power() if ended.returncode == -signal.SIGKILL else []
        clean = ended.returncode in (0, -signal.SIGKILL) or bool(refusal(ended))
        complete = not wrong()
        again = stage.run(name)
        went_on = again.returncode == 0 or (complete and bool(refusal(again)))
        left = leftovers(stage.folder)
        said = f"{fault} {place} of {count}, emptied {emptied}: {wrong()} {left}\n{ended.output}\n{again.output}"
        trials.count(clean and went_on and not wrong() and not left, said, detected=ended.returncode == 1)


def content_differs(before: dict[str, bytes], after: dict[str, bytes], file: str) -> bool:
    return before.get(file) != after[file]
