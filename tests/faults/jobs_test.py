"""Jobs that are stopped, started twice, or continued elsewhere or with other settings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.index.shard_set import open_shards
from jaxret.training.loop import train
from tests.fault_table import Trials
from tests.faults.conftest import Tiny
from tests.faults.kills_test import leftovers, trained, vectors
from tests.faults.scripts import Script, refusal, run, start, why
from tests.pipeline import contents, free_address, write_data


@pytest.fixture(scope="module")
def alone(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train twelve steps without interruption."""
    workdir = tmp_path_factory.mktemp("jobs") / "alone"
    done = run("train.py", *tiny.training(workdir, train__steps=12))
    assert done.returncode == 0, done.output
    return workdir


def wait_for(path: Path, process: Script) -> None:
    """Wait until the file exists."""
    while not path.exists():
        assert process.poll(0.001) is None, process.output


def encode(tiny: Tiny, name: str, corpus: Path | None = None, *flags: str, **faults: Any) -> Script:
    source = f"--corpus={corpus or tiny.data}"
    return start("encode.py", f"--workdir={tiny.run}", source, f"--name={name}", *flags, **faults)


def first_shard(tiny: Tiny, name: str) -> Path:
    return tiny.run / "embeddings" / name / "shard-00000-of-00023.json"


@pytest.mark.faults(4)
def test_signals_during_training(tiny: Tiny, alone: Path, tmp_path: Path, trials: Trials) -> None:
    """After one SIGTERM, the step is finished and saved. After two, the job ends at once. After Ctrl-C, it prints one
    line. Each time, the same command continues."""
    expected = trained(alone)
    for number, (signals, status) in enumerate(
        {(signal.SIGTERM,): 143, (signal.SIGTERM, signal.SIGTERM): -15, (signal.SIGINT,): 130}.items()
    ):
        workdir = tmp_path / str(number)
        flags = tiny.training(workdir, train__steps=12)
        began = tmp_path / "slow"
        slow: dict[str, Any] = {"delay": ["rename", 20, 60, str(began)]} if len(signals) == 2 else {}
        process = start("train.py", *flags, **slow)
        wait_for(began if slow else workdir / "checkpoints" / "1", process)
        for each in signals:
            process.send(each)
            time.sleep(0.5)
        sent = time.monotonic()
        process.wait(30)
        trials.count(process.returncode == status, f"{signals}: {process.output}")
        if len(signals) == 2:
            trials.count(time.monotonic() - sent < 5, "the second was not obeyed at once")
        if status == 130:
            last = process.stderr.strip().splitlines()[-1]
            trials.count(last == "interrupted" and "Traceback" not in process.stderr, process.output)
        done = run("train.py", *flags)
        trials.count(done.returncode == 0 and trained(workdir) == expected, f"{signals}: {done.output}")


@pytest.mark.faults(4)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -15), (signal.SIGINT, 130)])
def test_signals_during_encoding(number: int, status: int, tiny: Tiny, trials: Trials) -> None:
    name = f"stopped{number}"
    process = encode(tiny, name, delay=["fsync", 40, 5])  # Ctrl-C waits for a file that is being written
    wait_for(first_shard(tiny, name), process)
    process.send(number)
    process.wait(30)
    trials.count(process.returncode == status and "Traceback" not in process.stderr, process.output)
    again = encode(tiny, name)
    again.wait()
    same = vectors(tiny.run / "embeddings" / name) == vectors(tiny.run / "embeddings" / "data")
    trials.count(again.returncode == 0 and same, again.output)


@pytest.mark.faults(4)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -15), (signal.SIGINT, 130)])
def test_signals_while_text_is_read(number: int, status: int, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """The job does not first read the rest of the shard, which takes 17 seconds. Finished shards stay."""
    name, folder = f"read{number}", tiny.run / "embeddings" / f"read{number}"
    flags = ["--shard_rows=40", f"--store={tmp_path}"]  # a new store, so that text is read
    process = encode(tiny, name, None, *flags, passages=[81, 0.5])
    wait_for(folder / "shard-00000-of-00003.json", process)
    time.sleep(1)
    process.send(number)
    process.wait(5)
    trials.count(process.returncode == status and "Traceback" not in process.stderr, process.output)
    trials.count((folder / "shard-00000-of-00003.json").exists(), "the first shard is gone")
    again, alone = (encode(tiny, each, None, *flags) for each in (name, f"{name}-alone"))
    ended = again.wait(), alone.wait()
    actual, expected = vectors(folder), vectors(tiny.run / "embeddings" / f"{name}-alone")
    wrong = [key for key in actual.keys() | expected.keys() if actual.get(key) != expected.get(key)]
    trials.count(ended == (0, 0) and not wrong, f"{wrong} {again.output}\n{alone.output}")


def names_owner(message: str, owner: Script) -> bool:
    return all(part in message for part in (socket.gethostname(), str(owner.pid), "since"))


@pytest.mark.faults(16)
def test_two_encoding_jobs(tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """One job encodes into the folder of another, which was stopped or killed: it completes the same corpus, and
    refuses another."""
    folder, expected = tiny.run / "embeddings" / "together", vectors(tiny.run / "embeddings" / "data")
    first = encode(tiny, "together", None, "--lease=2", delay=["fsync", 60, 4])
    wait_for(first_shard(tiny, "together"), first)
    first.send(signal.SIGSTOP)
    other = encode(tiny, "together", write_data(tmp_path / "other", seed=1))
    other.wait()
    trials.count("corpus.sha256" in refusal(other), other.output, detected=True)
    second = encode(tiny, "together")
    trials.count(second.wait() == 0 and "silent for" in second.stderr and vectors(folder) == expected, second.output)
    first.send(signal.SIGCONT)
    clean = first.wait() == 0 and vectors(folder) == expected and not leftovers(folder)
    trials.count(clean, f"what woke up: {first.output}")

    first = encode(tiny, "dead")
    wait_for(first_shard(tiny, "dead"), first)
    first.kill()
    first.wait()
    second = encode(tiny, "dead")
    second.wait()
    trials.count("taken over" in second.stderr and second.returncode == 0, second.output)
    trials.count(vectors(tiny.run / "embeddings" / "dead") == expected, "not what it is alone")


@pytest.mark.faults(16)
def test_two_training_jobs(tiny: Tiny, alone: Path, tmp_path: Path, trials: Trials) -> None:
    workdir = tmp_path / "run"
    flags = tiny.training(workdir, train__steps=12)
    first = start("train.py", *flags)
    wait_for(workdir / "checkpoints" / "1", first)
    first.send(signal.SIGSTOP)
    second = run("train.py", *flags)
    trials.count(names_owner(refusal(second), first), second.output, detected=True)
    first.send(signal.SIGCONT)
    trials.count(first.wait() == 0 and trained(workdir) == trained(alone), first.output)
    trials.count(not leftovers(workdir), str(leftovers(workdir)))

    shutil.rmtree(workdir)
    first = start("train.py", *flags)
    wait_for(workdir / "checkpoints" / "1", first)
    first.kill()
    first.wait()
    second = run("train.py", *flags)
    trials.count("taken over" in second.stderr and trained(workdir) == trained(alone), second.output)


@pytest.mark.faults(16)
def test_jobs_that_start_at_the_same_moment(tiny: Tiny, trials: Trials) -> None:
    for turn in range(2):
        name = f"race{turn}"
        jobs = [encode(tiny, name) for _ in range(3)]
        ended = [job.wait() for job in jobs]
        folder = tiny.run / "embeddings" / name
        same = vectors(folder) == vectors(tiny.run / "embeddings" / "data") and not leftovers(folder)
        trials.count(ended == [0] * 3 and same, "\n".join(job.output for job in jobs))


REFUSED: dict[str, tuple[Any, Any]] = {
    "optimizer.learning_rate": (1e-3, 2e-3),
    "train.batch_size": (8, 16),
    "tokens.query_length": (12, 10),
    "data.negatives": (1, 2),
    "seed.data": (0, 7),
    "seed.dropout": (0, 7),
    "head.name": ("dual_encoder", "mlr"),
    "loss.temperature": (1.0, 0.5),
    "encoder.tied": (True, False),
}
ACCEPTED: dict[str, Any] = {
    "train.steps": 6,
    "train.log_every": 2,
    "train.checkpoint_every": 2,
    "validation.batch_size": 16,
    "encode.shard_rows": 9,
    "encode.tokens_per_batch": 200,
    "mesh.fsdp": 2,
}


@pytest.fixture
def copied(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of a run with four steps."""
    shutil.copytree(tiny.run, tmp_path / "run", ignore=shutil.ignore_patterns("embeddings"))
    return tmp_path / "run"


@pytest.mark.faults(17)
def test_resuming_with_changed_settings(tiny: Tiny, copied: Path, tmp_path: Path, trials: Trials) -> None:
    """A setting that changes results is refused with both values, and the folder does not change; others are
    accepted."""
    before = contents(copied)
    for key, (old, new) in REFUSED.items():
        message = why(lambda: train(tiny.config(**{key.replace(".", "__"): new}), copied, progress=False))  # noqa: B023
        trials.count(key in message and str(old) in message and str(new) in message, f"{key}: {message}", detected=True)
    other = write_data(tmp_path / "data", train=41)
    message = why(lambda: train(tiny.config(data__train=str(other), data__dev=str(other)), copied, progress=False))
    trials.count("data" in message and str(other) in message, f"data: {message}", detected=True)
    trials.count(contents(copied) == before, "a refused job has changed the folder")
    for key, new in ACCEPTED.items():
        workdir = tmp_path / key
        shutil.copytree(copied, workdir)
        message = why(lambda: train(tiny.config(**{key.replace(".", "__"): new}), workdir, progress=False))  # noqa: B023
        trials.count(not message, f"{key}: {message}")


@pytest.mark.faults(17)
def test_resuming_after_the_source_changed(tiny: Tiny, copied: Path, tmp_path: Path, trials: Trials) -> None:
    """The run has a copy of the encoder's files: the originals may change, but the copy must not."""
    flags = tiny.training(copied, train__steps=6)
    shutil.copytree(copied, tmp_path / "expected")
    done = run("train.py", *tiny.training(tmp_path / "expected", train__steps=6))
    assert done.returncode == 0, done.output
    edits = {
        "config.json": ('"hidden_act": "gelu"', '"hidden_act": "relu"'),
        "tokenizer_config.json": ('"cls_token": "[CLS]"', '"cls_token": "[MASK]"'),
        "tokenizer.json": ('"river"', '"rover"'),
    }
    kept = contents(copied)
    for name, (old, new) in edits.items():
        for folder, accepted in ((tiny.encoder, True), (copied / "encoder", False)):
            original = (folder / name).read_text()
            assert old in original, name
            (folder / name).write_text(original.replace(old, new))
            done = run("train.py", *flags)
            (folder / name).write_text(original)
            if accepted:
                same = done.returncode == 0 and trained(copied) == trained(tmp_path / "expected")
                trials.count(same, f"source's {name}: {done.output}")
            else:
                trials.count(name in refusal(done), f"{name}: {done.output}", detected=True)
            for path in copied.rglob("*"):
                if path.is_file() and str(path.relative_to(copied)) not in kept:
                    path.unlink()
            shutil.rmtree(copied / "checkpoints")
            for place, content in kept.items():
                (copied / place).parent.mkdir(parents=True, exist_ok=True)
                (copied / place).write_bytes(content)


def devices(count: int) -> dict[str, str]:
    return {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"}


@pytest.mark.faults(18)
def test_resuming_on_other_devices(tiny: Tiny, alone: Path, tmp_path: Path, trials: Trials) -> None:
    name = "devices"
    process = encode(tiny, name, kill_at=80)
    assert process.wait() == -signal.SIGKILL
    done = encode(tiny, name, env=devices(4))
    trials.count(done.wait() == 0, done.output)
    actual, expected = (open_shards(tiny.run / "embeddings" / each) for each in (name, "data"))
    rows = range(expected.total_rows)
    one, other = (np.concatenate([vectors for _, vectors in shards]) for shards in (actual, expected))
    close = np.allclose(one, other, atol=1e-5)
    trials.count(actual.ids(rows) == expected.ids(rows) and close, "vectors differ")
    workdir = tmp_path / "run"
    first = start("train.py", *tiny.training(workdir, train__steps=12))
    wait_for(workdir / "checkpoints" / "4", first)
    first.kill()
    first.wait()
    done = run("train.py", *tiny.training(workdir, train__steps=12), env=devices(2))
    trials.count(done.returncode == 0, done.output)
    losses, right = (
        [x["loss"] for x in map(json.loads, (w / "metrics.jsonl").read_text().splitlines()) if "loss" in x]
        for w in (workdir, alone)
    )
    trials.count(len(losses) == 12 and np.allclose(losses, right, atol=1e-3), f"{losses} against {right}")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Return a function that copies a folder to a disk which is then read-only."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no right to mount a disk")

    def copy(folder: Path) -> Path:
        shutil.copytree(folder, disk / folder.name)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        return disk / folder.name

    yield copy
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.faults(22)
def test_a_read_only_folder(tiny: Tiny, read_only: Callable[[Path], Path], trials: Trials) -> None:
    """Verbs that only read succeed; the others are refused in one line with the folder."""
    workdir = read_only(tiny.run)
    done = run("search.py", f"--workdir={workdir}", "--query=river stone", "--corpus=data")
    trials.count(done.returncode == 0 and "1." in done.stdout, done.output)
    for script, *flags in (
        ("train.py", *tiny.training(workdir, train__checkpoint_every=2)),
        ("encode.py", f"--workdir={workdir}", f"--corpus={tiny.data}", "--name=new"),
        ("search.py", f"--workdir={workdir}", f"--queries={tiny.data}", "--corpus=data"),
    ):
        done = run(script, *flags)
        message = refusal(done)
        trials.count(
            str(workdir) in message and "read-only" in message.lower(), f"{script}: {done.output}", detected=True
        )


@pytest.mark.faults(22)
def test_the_folder_vanishes(tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """The folder is deleted in the middle of a run: the error is one line, and the job ends soon."""
    workdir = tmp_path / "run"
    process = start("train.py", *tiny.training(workdir, train__steps=400, train__checkpoint_every=2))
    wait_for(workdir / "checkpoints" / "4", process)
    process.send(signal.SIGSTOP)
    shutil.rmtree(workdir, ignore_errors=True)  # the job may rename files until it has stopped
    process.send(signal.SIGCONT)
    process.wait(60)
    trials.count(str(workdir) in refusal(process), process.output, detected=True)
    name = "vanishing"
    process = encode(tiny, name)
    wait_for(first_shard(tiny, name), process)
    process.send(signal.SIGSTOP)
    folder = tiny.run / "embeddings" / name
    shutil.rmtree(folder, ignore_errors=True)
    process.send(signal.SIGCONT)
    process.wait(60)
    trials.count(str(folder) in refusal(process), process.output, detected=True)
    again = encode(tiny, name)
    same = again.wait() == 0 and vectors(folder) == vectors(tiny.run / "embeddings" / "data")
    trials.count(same, f"afterwards: {again.output}")


@pytest.mark.faults(22)
def test_the_clock_is_set_back(tiny: Tiny, alone: Path, tmp_path: Path, trials: Trials) -> None:
    workdir = tmp_path / "run"
    done = run("train.py", *tiny.training(workdir, train__steps=12), clock=-60)
    trials.count(done.returncode == 0 and trained(workdir) == trained(alone), done.output)
    done = encode(tiny, "clock", clock=-60)
    same = done.wait() == 0 and vectors(tiny.run / "embeddings/clock") == vectors(tiny.run / "embeddings/data")
    trials.count(same, done.output)


@pytest.mark.faults(23)
@pytest.mark.parametrize("killed", [0, 1])
def test_one_of_two_processes_is_killed_and_both_continue(
    killed: int, tiny: Tiny, tmp_path: Path, trials: Trials
) -> None:
    """The other process ends, too, and both can continue."""
    workdir = tmp_path / "run"

    def begin(steps: int) -> list[Script]:
        mesh = {"mesh__coordinator": free_address(), "mesh__num_processes": 2}
        options = {"train__steps": steps, "train__checkpoint_every": 2, **mesh}
        return [start("train.py", *tiny.training(workdir, **options, mesh__process_id=rank)) for rank in range(2)]

    both = begin(1000)
    wait_for(workdir / "checkpoints" / "2", both[0])
    both[killed].kill()
    sent = time.monotonic()
    other = both[1 - killed]
    status = other.wait(150)
    trials.count(status != 0 and time.monotonic() - sent < 120, f"the other went on: {other.output}")
    if killed == 1:  # if process 0 is killed, JAX may notice it first, and end with a dump
        said = "error: another process of this job is gone" in other.stderr and "stack trace" not in other.stderr
        # The job waited for a checkpoint that cannot be completed, until JAX ended the job.
        waited = "stopped sending heartbeats" in other.stderr
        trials.count((status == 1 and said) or waited, other.output)
    steps = max(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()) + 4
    again = begin(steps)
    statuses = [process.wait(150) for process in again]
    trials.count(statuses == [0, 0], "\n".join(process.output for process in again))
    trials.count((workdir / "checkpoints" / str(steps)).exists() and not leftovers(workdir), str(leftovers(workdir)))


@pytest.mark.faults(23)
def test_no_coordinator(tiny: Tiny, trials: Trials) -> None:
    address = free_address()
    flags = [f"--workdir={tiny.run}", f"--corpus={tiny.data}", "--name=nobody", "--initialization_timeout=3"]
    done = run("encode.py", *flags, f"--coordinator={address}", "--num_processes=2", "--process_id=1")
    trials.count(address in refusal(done), done.output, detected=True)
    done = run("encode.py", *flags, f"--coordinator={address}", "--num_processes=2", "--process_id=0")
    trials.count(f"process 1 of 2 did not come to {address}" in refusal(done), done.output, detected=True)
    trials.count(not (tiny.run / "embeddings" / "nobody").exists(), "a file was written")


@pytest.mark.faults(24)
def test_compiled_programs(tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """Damaged programs are compiled again."""
    cache = tmp_path / "cache"
    expected = vectors(tiny.run / "embeddings" / "data")
    assert encode(tiny, "cache", cache=str(cache)).wait() == 0
    whole = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    assert sum(path.name.endswith("-cache") for path in whole) > 3
    rotated = [*list(whole)[1:], next(iter(whole))]
    changes: dict[str, Callable[[Path, bytes], bytes]] = {
        "flipped": lambda path, data: (
            data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]
        ),
        "cut": lambda path, data: data[: len(data) // 2],
        "empty": lambda path, data: b"",
        "junk": lambda path, data: b"junk" * 100,
        "exchanged": lambda path, data: whole[rotated[list(whole).index(path)]],
    }
    for what, change in changes.items():
        for path, data in whole.items():
            path.write_bytes(change(path, data))
        name = f"cache-{what}"
        done = encode(tiny, name, cache=str(cache))
        same = done.wait() == 0 and vectors(tiny.run / "embeddings" / name) == expected
        refused = what == "exchanged" and done.returncode in (1, 70)  # JAX does not check which program a file holds
        trials.count(same or refused, f"{what}: {done.output}", detected=refused)
