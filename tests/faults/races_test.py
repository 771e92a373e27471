"""Two jobs that make one folder with the same command, the second some time after the first: one makes it, the other is
refused in a sentence or makes the same, and the folder is whole."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Tiny, Trials
from tests.faults.kills_test import leftovers
from tests.faults.names_test import commands, verb_words
from tests.faults.scripts import Script, refusal, run, start
from tests.training.pretraining.run_test import SMALL

FRACTIONS = (0.0, 0.3, 0.5, 0.7, 0.9)  # of the time that one job needs alone
Begin = Callable[[], Script]


def race(begin: Callable[[Path], Script], check: Callable[[Path], Script], root: Path, trials: Trials) -> None:
    alone = begin(root / "alone")
    assert alone.wait() == 0, alone.output
    needs = _seconds(alone)
    for number, fraction in enumerate(FRACTIONS):
        folder = root / f"raced{number}"
        first = begin(folder)
        first.poll(fraction * needs)
        second = begin(folder)
        statuses = [first.wait(), second.wait()]
        clean = 0 in statuses and all(one.returncode == 0 or refusal(one) for one in (first, second))
        checked = check(folder)
        left = leftovers(folder.parent)
        said = f"{statuses} after {fraction}: {first.output}\n{second.output}\n{checked.output}\n{left}"
        trials.count(clean and checked.returncode == 0 and not left, said, detected=1 in statuses)


def _seconds(script: Script) -> float:
    return max(script.cpu, 0.5)


@pytest.mark.faults(29)
def test_pretraining(tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    def begin(folder: Path) -> Script:
        keys = SMALL | {"data.train": str(tiny.data), "train.steps": 2, "train.checkpoint_every": 1}
        keys.pop("task")
        flags = [f"--config.{key}={value}" for key, value in keys.items()]
        return start("jaxret/__main__.py", "pretrain", "--config=pretraining/mlm", f"--workdir={folder}", *flags)

    def check(folder: Path) -> Script:
        again = begin(folder)
        assert again.wait() == 0, again.output
        return run("jaxret/__main__.py", "verify", str(folder))

    race(begin, check, tmp_path, trials)


@pytest.mark.faults(29)
def test_training(tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    race(
        lambda folder: start("train.py", *tiny.training(folder, train__steps=2)),
        lambda folder: run("jaxret/__main__.py", "verify", str(folder)),
        tmp_path,
        trials,
    )


@pytest.mark.faults(29)
@pytest.mark.parametrize("verb", ["bm25", "export", "data convert", "data build"])
def test_folders(verb: str, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    if verb == "data build":
        pytest.importorskip("tensorflow_datasets", reason="needs tensorflow-datasets")

    def begin(folder: Path) -> Script:
        folder.mkdir(parents=True, exist_ok=True)
        if verb == "data build":
            return start("jaxret/__main__.py", "data", "build", str(tiny.data), str(folder / "built"))
        arguments = commands(tiny, folder, tiny.data)[verb]
        arguments = [f"--workdir={tiny.run}" if word == f"--workdir={folder / 'run'}" else word for word in arguments]
        return start("jaxret/__main__.py", *verb_words(verb), *arguments)

    def check(folder: Path) -> Script:
        if verb == "bm25":  # the same command again is no error
            again = begin(folder)
            again.wait()
            return again
        places = {"export": "exported", "data convert": "dpr", "data build": "built"}
        if verb == "export":
            words = ["open", str(folder / "exported"), f"--workdir={folder / 'opened'}"]
        else:
            words = ["data", "check", str(folder / places[verb])]
        return run("jaxret/__main__.py", *words)

    race(begin, check, tmp_path, trials)


@pytest.mark.faults(29)
@pytest.mark.parametrize("verb", ["mine", "export", "data convert"])
def test_what_a_killed_command_left_goes_with_the_next(verb: str, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """The leftovers are made an hour old; younger ones might still be written."""

    def begin(**faults: Any) -> Script:
        arguments = commands(tiny, tmp_path, tiny.data)[verb]
        instead = {
            f"--workdir={tmp_path / 'run'}": f"--workdir={tiny.run}",
            f"--pool={tmp_path / 'run'}": "--pool=bm25",
        }
        arguments = [instead.get(word, word) for word in arguments]
        arguments += [f"--corpus={tiny.data}"] if verb == "mine" else []
        process = start("jaxret/__main__.py", *verb_words(verb), *arguments, **faults)
        process.wait()
        return process

    for number in range(1, 20):  # until it was killed after it had begun to write
        killed = begin(kill_at=number)
        if left := leftovers(tmp_path):
            break
    trials.count(killed.returncode == -signal.SIGKILL and bool(left), f"nothing was left: {killed.output}")
    for path in tmp_path.rglob("*.tmp"):
        os.utime(path, (time.time() - 3600,) * 2)
    again = begin()
    trials.count(again.returncode == 0 and not leftovers(tmp_path), f"{again.output}\n{leftovers(tmp_path)}")
