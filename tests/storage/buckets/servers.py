"""Servers of buckets on loopback, for tests. No other machine is contacted."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.pipeline import REPOSITORY, command, environment, free_address
from tests.storage.buckets.fake_gcs import FakeGcs

# Without these, clients look for credentials at addresses of the cloud.
LOOPBACK = {
    "GCE_METADATA_HOST": "127.0.0.1:9",
    "GCE_METADATA_ROOT": "127.0.0.1:9",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}

# One request at a time: moto compares and writes in two steps, so that with threads, two jobs could create one object.
MOTO = """
import sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app))
"""


Server = tuple[FakeGcs, dict[str, str]]  # the server, and the environment of its clients


@contextmanager
def gcs_server() -> Iterator[Server]:
    """Serve a fake GCS with the bucket gs://bucket; yield it, and the environment of its clients."""
    server = FakeGcs()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server, {**os.environ, **LOOPBACK, "TENSORSTORE_GCS_HTTP_URL": server.url}
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def s3_server(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """Serve S3's API with the bucket s3://bucket; yield the environment of its clients.

    kind: "moto", "weed" (SeaweedFS, which keeps files in `folder`) or "rclone". The test is skipped if
    JAXRET_BUCKETS_BIN, the folder of these programs, is not set.
    """
    programs = os.environ.get("JAXRET_BUCKETS_BIN")
    if not programs:
        pytest.skip("JAXRET_BUCKETS_BIN is not set (requirements-buckets.txt)")
    port = _free_port()
    (folder / "bucket").mkdir(parents=True)
    arguments = {
        "moto": ["python", "-c", MOTO, str(port)],
        "rclone": ["rclone", "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "key,secret", str(folder)],
        "weed": [
            *("weed", "mini", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", f"-s3.port={port}"),
            *(f"-{part}.port={_free_port()}" for part in ("master", "volume", "filer")),
            *("-bucket=bucket", "-webdav=false", "-admin.ui=false"),
        ],
    }[kind]
    address = f"http://127.0.0.1:{port}"
    environment = {**os.environ, **LOOPBACK, "AWS_ENDPOINT_URL": address}
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(
            [f"{programs}/{arguments[0]}", *arguments[1:]], stdout=log, stderr=log, cwd=folder, env=environment
        )
    try:
        _wait_for(server, port, folder / "log")
        if kind == "moto":
            urlopen(Request(f"{address}/bucket", method="PUT"))
        yield environment
    finally:
        server.kill()
        server.wait()


def start(script: str, clients: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    """Start a script with the environment of a server's clients."""
    return subprocess.Popen(
        command(script, *arguments),
        cwd=REPOSITORY,
        env=clients | environment() | {name: value for name, value in clients.items() if os.environ.get(name) != value},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(job: subprocess.Popen[str]) -> str:
    """Return the output of a script from `start`, which must succeed."""
    output = job.communicate(timeout=480)[0]
    assert job.returncode == 0, output
    return output


def _free_port() -> int:
    return int(free_address().rpartition(":")[2])


def _wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until the server listens, and until SeaweedFS has its bucket."""
    for _ in range(600):
        assert server.poll() is None, log.read_text(errors="replace")[-2000:]
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise AssertionError(log.read_text(errors="replace")[-2000:])
