"""Two jobs that write one folder with the same command, at different delays: one writes it, the other is refused in a
sentence or writes the same, and the folder is complete."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxret.index.encoded_corpus import open_encoded
from tests.fault_table import Trials
from tests.faults.conftest import Tiny
from tests.faults.kills_test import leftovers
from tests.faults.names_test import commands, verb_words
from tests.faults.scripts import Script, refusal, run, start
from tests.pipeline import REPOSITORY, command, environment

FRACTIONS = (0.0, 0.3, 0.5, 0.7, 0.9)  # when the second job begins, as fractions of the time of one job
Begin = Callable[[], Script]


def race(
    begin: Callable[[Path], Script],
    check: Callable[[Path], Script],
    root: Path,
    trials: Trials,
    fractions: Sequence[float] = FRACTIONS,
) -> None:
    alone = begin(root / "alone")
    assert alone.wait() == 0, alone.output
    needs = _seconds(alone)
    for number, fraction in enumerate(fractions):
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
        return start("jaxret/__main__.py", "pretrain", *tiny.pretraining(folder))

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
        if verb == "bm25":  # repeating this command is not an error
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
@pytest.mark.parametrize("verb", ["beir", "sweep", "recipe", "generate"])
def test_a_repeated_command_repeats_no_work(verb: str, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    def begin(folder: Path) -> Script:
        folder.mkdir(parents=True, exist_ok=True)
        if verb == "beir":
            _copy(tiny.run, folder / "run")
            _copy(tiny.data, folder / "sets" / "one")
        return start("jaxret/__main__.py", verb, *commands(tiny, folder, tiny.data)[verb])

    def check(folder: Path) -> Script:
        again = begin(folder)
        assert again.wait() == 0, again.output
        runs = {"beir": "run", "sweep": "sweep/temperature=1/run", "recipe": "recipe/stage1"}
        return run("jaxret/__main__.py", "verify", str(folder / runs[verb])) if verb in runs else again

    race(begin, check, tmp_path, trials, (0.0, 0.5, 0.9))


@pytest.mark.faults(29)
@pytest.mark.parametrize("apart", [0, 3])
def test_opening(apart: int, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """These are new processes, because the verb compares with PyTorch, whose threads do not survive a fork."""
    words = command("-m", "jaxret", "open", str(tiny.encoder), f"--workdir={tmp_path / 'opened'}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    jobs = []
    for seconds in (apart, 0):
        jobs.append(subprocess.Popen(words, cwd=REPOSITORY, env=environment(), text=True, **pipes))  # type: ignore[call-overload]
        time.sleep(seconds)
    errors = [job.communicate(timeout=300)[1] for job in jobs]
    refused = [error for job, error in zip(jobs, errors, strict=True) if job.returncode]
    clean = len(refused) == 1 and "was made by another job meanwhile" in refused[0] and "Traceback" not in refused[0]
    checked = run("jaxret/__main__.py", "verify", str(tmp_path / "opened"))
    left = leftovers(tmp_path)
    trials.count(clean and checked.returncode == 0 and not left, f"{errors}\n{checked.output}\n{left}", detected=True)


@pytest.mark.faults(29)
@pytest.mark.parametrize("verb", ["append", "delete", "index"])
def test_two_jobs_that_change_a_corpus(verb: str, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """If two jobs append or delete the same ids, the second is refused, because the ids exist already or no longer."""
    more = tmp_path / "more.jsonl"
    more.write_text("".join(f'{{"_id": "more{i}", "text": "river market {i}"}}\n' for i in range(12)))

    def begin(folder: Path) -> Script:
        _copy(tiny.run, folder / "run")
        arguments = [word for word in commands(tiny, folder, tiny.data)[verb] if not word.startswith("--corpus")]
        arguments += [f"--corpus={more}"] if verb == "append" else []
        return start("jaxret/__main__.py", *verb_words(verb), *arguments)

    def check(folder: Path) -> Script:
        assert _passages(folder / "run") - _passages(tiny.run) == {"append": 12, "delete": -1, "index": 0}[verb]
        return run("jaxret/__main__.py", "verify", str(folder / "run"))

    race(begin, check, tmp_path, trials, (0.0, 0.5, 0.9))


@pytest.mark.faults(29)
@pytest.mark.parametrize("verbs", ["delete", "append", "append and delete"])
def test_jobs_that_change_different_passages(verbs: str, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """A successful change is not lost by the change of another job."""
    for number in range(10):
        workdir, jobs = tmp_path / f"run{number}", {}
        shutil.copytree(tiny.run, workdir)
        for i in range(4):
            key, file = f"p{i}", tmp_path / f"p{i}"
            file.write_text(f"{key}\n")
            flags = [f"--delete={file}"]
            if verbs == "append" or (verbs == "append and delete" and i % 2):
                key, file = f"more{i}", tmp_path / f"more{i}.jsonl"
                file.write_text(f'{{"_id": "{key}", "text": "river market {i}"}}\n')
                flags = ["--append", f"--corpus={file}"]
            jobs[key] = start("jaxret/__main__.py", "encode", f"--workdir={workdir}", "--name=data", *flags)
        done = {key for key, job in jobs.items() if job.wait() == 0}
        clean = all("is in use" in refusal(job) for key, job in jobs.items() if key not in done)
        ids = {one for _, block in open_encoded(workdir / "embeddings" / "data").id_blocks() for one in block}
        lost = {key for key in done if (key in ids) != key.startswith("more")}
        said = f"done {done}, lost {lost}: {[job.output for job in jobs.values()]}"
        trials.count(clean and bool(done) and not lost, said, detected=len(done) < len(jobs))


def _passages(run_folder: Path) -> int:
    ids = [one for _, ids in open_encoded(run_folder / "embeddings" / "data").id_blocks() for one in ids]
    assert len(ids) == len(set(ids))
    return len(ids)


def _copy(source: Path, folder: Path) -> None:
    """Copy a folder, unless the other job has copied it already."""
    if not folder.exists():
        shutil.copytree(source, folder)


@pytest.mark.faults(29)
@pytest.mark.parametrize("verb", ["mine", "export", "data convert"])
def test_leftovers_of_a_killed_command_are_removed_by_the_next(
    verb: str, tiny: Tiny, tmp_path: Path, trials: Trials
) -> None:
    """The test makes the leftovers an hour old, because younger ones might still be written."""

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

    for number in range(1, 20):  # later kills, until one comes after the job has begun to write
        killed = begin(kill_at=number)
        if left := leftovers(tmp_path):
            break
    trials.count(killed.returncode == -signal.SIGKILL and bool(left), f"nothing was left: {killed.output}")
    for path in tmp_path.rglob("*.tmp"):
        os.utime(path, (time.time() - 3600,) * 2)
    again = begin()
    trials.count(again.returncode == 0 and not leftovers(tmp_path), f"{again.output}\n{leftovers(tmp_path)}")
