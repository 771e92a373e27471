"""kill -9 at a request to a bucket: the same command continues, and the bucket gets the same files as without the
kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxret.data.formats import Corpus
from tests.fault_table import Trials
from tests.faults.conftest import Tiny
from tests.faults.kills_test import trained
from tests.storage.buckets.servers import Server, finish, gcs_server, start

NAME = "runs/tiny"
RUN = f"gs://bucket/{NAME}"
KILLS = 10  # kills per command
Objects = dict[tuple[str, str], tuple[int, bytes]]


@pytest.fixture(scope="module")
def gcs() -> Iterator[Server]:
    with gcs_server() as server:
        yield server


@pytest.fixture(scope="module")
def states(gcs: Server, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Objects]:
    """The objects of a run in a bucket: with two checkpoints of its training, trained, and with its encoded corpus."""
    server, clients = gcs
    data = [f"--workdir={RUN}", f"--corpus={tiny.data}", "--shard_rows=8"]
    states: dict[str, Objects] = {}
    for name, *arguments in (
        ("half", "train.py", *training(tiny, 2)),
        ("trained", "train.py", *training(tiny, 4)),
        ("encoded", "encode.py", *data),
    ):
        script, *words = arguments
        finish(start(script, clients, *words))
        states[name] = dict(server.objects)
    return states


def training(tiny: Tiny, steps: int) -> list[str]:
    words = tiny.training(tiny.root, train__steps=steps)
    return [f"--workdir={RUN}", *(word for word in words if not word.startswith("--workdir="))]


def files_in(server: Server) -> dict[str, bytes]:
    """Return the files of the run in the bucket, as listed in its manifest."""
    objects = server[0].objects
    listed = json.loads(objects["bucket", f"{NAME}/files.json"][1])["files"]
    return {
        name: b"".join(objects["bucket", f"{NAME}/{key}"][1] for key in keys) for name, (_, _, *keys) in listed.items()
    }


def outcome(server: Server, folder: Path, part: str) -> object:
    """Return all results of a command that must not depend on kills."""
    files = files_in(server)
    if part == "checkpoints":
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return trained(folder)
    unclocked = ("corpus.json",)  # corpus.json records the time of the run's own copy of the corpus
    return {name: data for name, data in files.items() if name.startswith(part) and not name.endswith(unclocked)}


COMMANDS = {  # name: the state before, what is compared
    "train": ("half", "checkpoints"),
    "encode": ("trained", "embeddings/"),
    "append": ("encoded", "embeddings/"),
    "delete": ("encoded", "embeddings/"),
    "search": ("encoded", "runs/"),
}


@pytest.mark.faults(38)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_killed_at_a_request(
    name: str, gcs: Server, states: dict[str, Objects], tiny: Tiny, tmp_path: Path, trials: Trials
) -> None:
    server, clients = gcs
    before, part = COMMANDS[name]
    (tmp_path / "more.jsonl").write_text(
        "".join(json.dumps({"_id": f"more{number}", "text": f"river stone {number}"}) + "\n" for number in range(9))
    )
    ids = [passage.id for passage in Corpus.open(tiny.data).read()][:3]
    (tmp_path / "ids.txt").write_text("".join(f"{key}\n" for key in ids))
    script, *arguments = {
        "train": ["train.py", *training(tiny, 4)],
        "encode": ["encode.py", f"--workdir={RUN}", f"--corpus={tiny.data}", "--shard_rows=8"],
        "append": ["encode.py", f"--workdir={RUN}", f"--corpus={tmp_path}/more.jsonl", "--name=data", "--append"],
        "delete": ["encode.py", f"--workdir={RUN}", "--name=data", f"--delete={tmp_path}/ids.txt"],
        "search": ["search.py", f"--workdir={RUN}", f"--queries={tiny.data}", f"--qrels={tiny.data}", "--split=dev"],
    }[name]

    server.objects = dict(states[before])
    first = len(server.requests)
    finish(start(script, clients, *arguments))
    requests = len(server.requests) - first
    expected = outcome(gcs, tmp_path / "whole", part)
    for trial, number in enumerate(np.linspace(1, requests, KILLS).round().astype(int)):
        server.objects = dict(states[before])
        jobs: list[subprocess.Popen[str]] = []
        last = len(server.requests) + int(number)

        def kill(count: int, jobs: list[subprocess.Popen[str]] = jobs, last: int = last) -> None:
            if count == last:
                os.kill(jobs[0].pid, signal.SIGKILL)
                jobs[0].wait()

        server.before = kill
        jobs.append(start(script, clients, *arguments))
        jobs[0].communicate(timeout=300)
        server.before = lambda count: None
        again = start(script, clients, *arguments)
        output = again.communicate(timeout=300)[0]
        right = again.returncode == 0 and outcome(gcs, tmp_path / str(trial), part) == expected
        trials.count(right, f"{name} killed at request {number} of {requests}: {again.returncode} {output[-800:]}")
