"""The processes of one job train in a bucket: each writes its parts of a checkpoint, and the first completes it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxret.storage.checkpoint import Checkpoints
from tests.pipeline import ONE_DEVICE, free_address, train_arguments, write_data, write_encoder
from tests.storage.buckets.fake_gcs import FakeGcs
from tests.storage.buckets.servers import Server, finish, gcs_server, start

RUN = "gs://bucket/runs/pod"


@pytest.fixture(scope="module")
def gcs() -> Iterator[Server]:
    with gcs_server() as server:
        yield server


def digests(folder: Path) -> dict[str, Any]:
    """The digests of the arrays of each checkpoint."""
    paths = folder.glob("checkpoints/*/_CHECKPOINT_METADATA")
    return {path.parent.name: json.loads(path.read_text())["custom_metadata"]["digests"] for path in paths}


def names(server: FakeGcs) -> list[str]:
    """The names of the files of the run in the bucket."""
    _, manifest = server.objects.get(("bucket", "runs/pod/files.json"), (0, b"{}"))
    return list(json.loads(manifest).get("files", {}))


OPEN = """
import sys
from pathlib import Path
from jaxret.parallel.processes import initialize_distributed
from jaxret.runs.run import open_run
from jaxret.storage.checkpoint import tree_digest
from jaxret.training.loop import train
from tests.pipeline import tiny_config
workdir, encoder, data, address, number = sys.argv[1:]
initialize_distributed(address, 2, int(number))
keys = {"train__steps": 9, "train__checkpoint_every": 2, "mesh__fsdp": 2}
train(tiny_config(Path(encoder), Path(data), **keys), workdir, progress=False)
print("digest", tree_digest(open_run(workdir, "last").params))
"""


@pytest.mark.slow
def test_two_processes_train_in_a_bucket_as_on_a_disk(gcs: Server, tmp_path: Path) -> None:
    server, clients = gcs[0], gcs[1] | ONE_DEVICE
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")

    def arguments(workdir: str | Path, steps: int, address: str, number: int) -> list[str]:
        keys = {"train__steps": steps, "train__checkpoint_every": 2, "mesh__fsdp": 2}
        job = {"mesh__coordinator": address, "mesh__num_processes": 2, "mesh__process_id": number}
        flags = train_arguments(encoder, data, tmp_path, **keys, **job)
        return [f"--workdir={workdir}" if flag.startswith("--workdir=") else flag for flag in flags]

    local = tmp_path / "local" / "pod"
    address = free_address()
    jobs = [start("train.py", clients, *arguments(local, 8, address, number)) for number in range(2)]
    for job in jobs:
        finish(job)

    address = free_address()
    jobs = [start("train.py", clients, *arguments(RUN, 8, address, number)) for number in range(2)]
    deadline = time.monotonic() + 240
    while not any(name.startswith("checkpoints/") for name in names(server)):
        assert time.monotonic() < deadline
        assert jobs[0].poll() is None, jobs[0].communicate()[0]
        time.sleep(0.01)
    jobs[1].send_signal(signal.SIGKILL)
    for job in jobs:
        job.kill()
        job.communicate()
    first = {name.split("/")[1] for name in names(server) if name.startswith("checkpoints/")}
    assert "8" not in first, "the job was killed before the end"

    address = free_address()
    jobs = [start("train.py", clients, *arguments(RUN, 8, address, number)) for number in range(2)]
    outputs = [finish(job) for job in jobs]
    assert "8 of 8 steps done" in outputs[0]
    assert not any("not published" in output for output in outputs)
    assert {f"checkpoints/8/arrays-{number}.bin" for number in range(2)} < set(names(server))
    kept = {name.split("/")[1] for name in names(server) if name.startswith("checkpoints/")}
    assert kept == {path.name for path in (local / "checkpoints").iterdir()}, (
        "older ones are deleted in the bucket, too"
    )
    finish(
        start(
            "-m",
            clients,
            "jaxret",
            "export",
            f"--workdir={RUN}",
            "--to=orbax",
            "--checkpoint=last",
            f"--out={tmp_path}/orbax",
        )
    )
    with Checkpoints(tmp_path / "orbax", writing=False) as checkpoints:
        checkpoints.check(8)
    back = tmp_path / "back"
    finish(start("-m", clients, "jaxret", "copy", RUN, str(back)))
    assert digests(back) == digests(local)
    for folder in (RUN, str(back)):  # the copy on a disk is read like any other run
        assert "nothing is damaged" in finish(start("-m", clients, "jaxret", "verify", folder))

    address, script = free_address(), ("-c", clients, OPEN, RUN, str(encoder), str(data))
    jobs = [start(*script, address, str(number)) for number in range(2)]
    opened = [finish(job).splitlines()[-1] for job in jobs]
    assert opened[0] == opened[1], "both processes read the checkpoint that they wrote together"
    assert opened[0].startswith("digest ")
