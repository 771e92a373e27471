"""kill -9 of any process at any time: the same command continues, and the result is that without kills."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.index.encoded_corpus import open_encoded
from tests.fault_table import Trials
from tests.faults.conftest import Tiny
from tests.faults.scripts import Script, start
from tests.pipeline import CLOCKS, WORDS, contents, free_address

KILLS, CHAINS = 50, 5  # kills, and chains of kills: each chain is a test, so that chains can run in parallel
STEPS = 8  # a run saves and validates at each of these steps
# (folder, **faults) -> the processes of a job; the faults are injected into the first.
Begin = Callable[..., list[Script]]


def leftovers(folder: Path) -> list[str]:
    """Return files that only a running job may have in a folder."""
    names = (path.name for path in folder.rglob("*"))
    return [
        name
        for name in names
        if name.endswith(".tmp")
        or "orbax-checkpoint-tmp" in name
        or name.startswith((".lock", ".lease", ".unfinished"))
    ]


def vectors(folder: Path) -> dict[str, bytes]:
    """Return all results of encoding. The index of the texts is written at their first use."""
    return {name: content for name, content in contents(folder).items() if not name.startswith("passages.")}


def trained(workdir: Path) -> dict[str, object]:
    """Return all results of training that must not depend on kills: digests of every leaf in every checkpoint, metrics
    of checkpoints if the run has validation, and metrics of every step. `leftovers` reports unfinished saves."""
    state: dict[str, object] = {}
    for folder in sorted((workdir / "checkpoints").glob("[0-9]*")):
        metadata, metrics = json.loads((folder / "_CHECKPOINT_METADATA").read_text()), folder / "metrics" / "metrics"
        state[folder.name] = metadata["custom_metadata"]["digests"], metrics.read_text() if metrics.exists() else None
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    state["metrics"] = [{k: v for k, v in line.items() if k not in CLOCKS} for line in lines]
    for name in ("config.json", "contract.json", "data.json"):
        state[name] = json.loads((workdir / name).read_text())
    state["config.json"].pop("mesh")  # type: ignore[attr-defined]  # every start of two processes has another address
    return state


def test_a_leftover_save_is_reported(tmp_path: Path) -> None:
    """The results of a run without validation are read beside it."""
    save = tmp_path / "checkpoints" / "3"
    for folder in (save, tmp_path / "checkpoints" / ".unfinished" / "4"):
        folder.mkdir(parents=True)
    (save / "_CHECKPOINT_METADATA").write_text('{"custom_metadata": {"digests": {"x": "1"}}}')
    (tmp_path / "metrics.jsonl").write_text("")
    for name in ("config.json", "contract.json", "data.json"):
        (tmp_path / name).write_text('{"mesh": {}}')
    assert trained(tmp_path)["3"] == ({"x": "1"}, None)
    assert leftovers(tmp_path) == [".unfinished"]


@dataclass
class Alone:
    """The measurements of a job without kills."""

    result: Any
    first: float  # seconds until the folder existed
    last: float  # seconds until the job ended
    calls: int  # system calls that make something durable or visible


def undisturbed(begin: Begin, file: Path, folder: Path, result: Callable[[Path], Any]) -> Alone:
    """Run the processes of a job to their end; system calls are counted in the first."""
    processes, first = begin(folder, count=str(file)), 0.0
    while any(process.poll(0.002) is None for process in processes):
        if not first and folder.exists():
            first = time.monotonic() - processes[0].started
    last = time.monotonic() - processes[0].started
    assert not any(process.returncode for process in processes), "\n".join(process.output for process in processes)
    return Alone(result(folder), first, last, int(file.read_text()))


def chain(begin: Begin, folder: Path, kills: int, random: np.random.Generator, alone: Alone) -> tuple[int, str]:
    """Start a job again and again, and kill it each time, until it ends by itself or was killed `kills` times; then
    start it once more without a kill. Return the number of kills, and the output if the job did not continue after
    them.

    Half of the kills are at a random time, half at a system call, on average after a third of the job, so that chains
    are long. If there are several processes, one of them is killed, and the others soon afterwards, as a launcher would
    do.
    """
    for killed in range(kills):
        victim = 0
        if random.random() < 0.5:
            number = int(random.integers(1, max(2, alone.calls // 2)))
            processes = begin(folder, kill_at=number if random.random() < 0.5 else -number)
            processes[0].wait()
        else:
            processes = begin(folder)
            victim = int(random.integers(len(processes)))
            span = alone.last - alone.first
            processes[victim].poll(random.uniform(max(0.0, alone.first - 0.1 * span), alone.first + 0.6 * span))
            processes[victim].kill()
            processes[victim].wait()
        if processes[victim].returncode == -signal.SIGKILL:
            for process in processes:
                process.poll(random.uniform(0, 0.3))
                process.kill()
        statuses = [process.wait() for process in processes]
        if not any(statuses):
            return killed, ""
        if -signal.SIGKILL not in statuses:
            return killed, "\n".join(process.output for process in processes)
    processes = begin(folder)
    statuses = [process.wait() for process in processes]
    return kills, "\n".join(process.output for process in processes) if any(statuses) else ""


def all_chains(begin: Begin, root: Path, seed: int, alone: Alone, look: Callable[[Path], Any], trials: Trials) -> None:
    """Run chains of kills until there were enough kills."""
    random, killed = np.random.default_rng(seed), 0
    while killed < KILLS // CHAINS:
        folder = root / f"killed{seed}.{killed}"
        done, message = chain(begin, folder, KILLS // CHAINS - killed, random, alone)
        killed += done
        if message:
            trials.survived += done - 1
            trials.count(False, f"{folder.name}: {message}")
            continue
        state = look(folder)
        wrong = [key for key in state.keys() | alone.result.keys() if state.get(key) != alone.result.get(key)]
        for _ in range(done):
            trials.count(not wrong and not leftovers(folder), f"{folder.name}: {wrong} {leftovers(folder)}")


def encoding(tiny: Tiny) -> Begin:
    def begin(folder: Path, *more: str, **faults: Any) -> list[Script]:
        store = tiny.root / "stores" / folder.name  # a new store, so that kills also hit its writing
        flags = [f"--workdir={tiny.run}", f"--corpus={tiny.data}", f"--name={folder.name}", f"--store={store}"]
        return [start("encode.py", *flags, *more, **faults)]

    return begin


def appending(tiny: Tiny) -> Begin:
    more = tiny.root / "more.jsonl"
    texts = [f"{word} river {number}" for number, word in enumerate(WORDS * 2)]
    if not more.exists():  # shards record the time at which it was written
        more.write_text("".join(json.dumps({"_id": f"m{n}", "text": text}) + "\n" for n, text in enumerate(texts)))

    def begin(folder: Path, **faults: Any) -> list[Script]:
        if not folder.exists():
            shutil.copytree(tiny.run / "embeddings" / "data", folder)
        store = tiny.root / "stores" / folder.name
        flags = [f"--workdir={tiny.run}", f"--corpus={more}", f"--name={folder.name}", f"--store={store}"]
        return [start("encode.py", *flags, "--append", **faults)]

    return begin


def training(tiny: Tiny) -> Begin:
    def begin(folder: Path, **faults: Any) -> list[Script]:
        return [start("train.py", *tiny.training(folder, train__steps=STEPS), **faults)]

    return begin


def together(tiny: Tiny) -> Begin:
    def begin(folder: Path, **faults: Any) -> list[Script]:
        mesh = {"mesh__coordinator": free_address(), "mesh__num_processes": 2}
        each = [tiny.training(folder, train__steps=STEPS, **mesh, mesh__process_id=rank) for rank in range(2)]
        return [start("train.py", *flags, **(faults if rank == 0 else {})) for rank, flags in enumerate(each)]

    return begin


@pytest.fixture(scope="session")
def encoded_alone(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    file = tmp_path_factory.mktemp("encoding") / "count"
    return undisturbed(encoding(tiny), file, tiny.run / "embeddings" / "alone", vectors)


@pytest.fixture(scope="session")
def appended_alone(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    file = tmp_path_factory.mktemp("appending") / "count"
    return undisturbed(appending(tiny), file, tiny.run / "embeddings" / "appended", vectors)


@pytest.fixture(scope="session")
def trained_alone(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    root = tmp_path_factory.mktemp("training")
    return undisturbed(training(tiny), root / "count", root / "alone", trained)


@pytest.fixture(scope="session")
def trained_together(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    root = tmp_path_factory.mktemp("together")
    return undisturbed(together(tiny), root / "count", root / "alone", trained)


@pytest.mark.faults(1)
@pytest.mark.parametrize("seed", range(CHAINS))
def test_killed_while_encoding(seed: int, tiny: Tiny, encoded_alone: Alone, trials: Trials) -> None:
    assert len(encoded_alone.result) > 60
    all_chains(encoding(tiny), tiny.run / "embeddings", seed, encoded_alone, vectors, trials)


@pytest.mark.faults(26)
@pytest.mark.parametrize("seed", range(2))
def test_killed_jobs_that_share_a_folder(seed: int, tiny: Tiny, encoded_alone: Alone, trials: Trials) -> None:
    """Three jobs, which are killed one after the other, or stopped for longer than their leases; each killed one is
    replaced. The result is that of a single job."""
    random = np.random.default_rng(seed)
    for turn in range(3):
        folder = tiny.run / "embeddings" / f"shared-{seed}-{turn}"

        def begin(folder: Path = folder) -> Script:
            return encoding(tiny)(folder, "--lease=1", delay=["fsync", int(random.integers(20, 60)), 1.5])[0]

        jobs, killed = [begin() for _ in range(3)], 0
        while killed < 4 and any(job.poll() is None for job in jobs):
            time.sleep(random.uniform(0.2, 1.0))
            place = int(random.integers(3))
            if random.random() < 0.3:
                jobs[place].send(signal.SIGSTOP)
                time.sleep(1.5)
                jobs[place].send(signal.SIGCONT)
            else:
                jobs[place].kill()
                jobs[place].wait()
                killed += 1
                jobs[place] = begin()
        clean = [job.wait() for job in jobs] == [0] * 3
        message = "\n".join(job.output for job in jobs)
        trials.count(clean and vectors(folder) == encoded_alone.result and not leftovers(folder), message)


@pytest.mark.faults(1)
def test_killed_while_appending(tiny: Tiny, appended_alone: Alone, trials: Trials) -> None:
    assert {"parts.json", "manifest.json"} <= appended_alone.result.keys()
    all_chains(appending(tiny), tiny.run / "embeddings", CHAINS, appended_alone, vectors, trials)


@pytest.mark.faults(1)
def test_killed_while_deleting(tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """The command is killed at every call that makes a change durable or visible: all of the passages are gone, or
    none."""
    (tmp_path / "ids.txt").write_text("p1\np2\n")
    for number in range(1, 9):
        for kill_at in (number, -number):
            folder = tiny.run / "embeddings" / f"deleting{kill_at}"
            shutil.copytree(tiny.run / "embeddings" / "data", folder)
            flags = [f"--workdir={tiny.run}", f"--name={folder.name}", f"--delete={tmp_path / 'ids.txt'}"]
            before = open_encoded(folder).total_rows
            killed = start("encode.py", *flags, kill_at=kill_at).wait()
            gone = before - open_encoded(folder).total_rows
            again = start("encode.py", *flags)
            again.wait()
            left = open_encoded(folder).total_rows
            trials.count(gone in (0, 2) and left == before - 2 and not leftovers(folder), f"{kill_at}: {again.output}")
        if killed != -signal.SIGKILL:
            return
    trials.count(False, "it never ended by itself")


@pytest.mark.faults(2)
@pytest.mark.parametrize("seed", range(CHAINS))
def test_killed_while_training(seed: int, tiny: Tiny, trained_alone: Alone, tmp_path: Path, trials: Trials) -> None:
    all_chains(training(tiny), tmp_path, seed, trained_alone, trained, trials)


@pytest.mark.faults(3)
@pytest.mark.parametrize("seed", range(CHAINS))
def test_killed_with_two_processes(
    seed: int, tiny: Tiny, trained_together: Alone, tmp_path: Path, trials: Trials
) -> None:
    all_chains(together(tiny), tmp_path, seed, trained_together, trained, trials)
