"""A server like a user's: a process on a free port, with both of its streams."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.api import Index, Retriever
from jaxret.training.loop import train
from tests.pipeline import REPOSITORY, environment, tiny_config, untrained_run, words, write_data, write_encoder

PASSAGES = 120
ONE_DEVICE = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def write_runs(folder: Path) -> Path:
    """Write the untrained runs "mlr" (three vectors per passage), "dual", "late" (ColBERT) and "cross" (a
    cross-encoder), and a corpus with colours and markup, which the first three have encoded."""
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    generator = np.random.default_rng(0)
    rows = [
        {
            "_id": f"p{n}",
            "title": f"title {n}",
            "text": words(generator, 12),
            "metadata": {"colour": ["red", "blue", "green"][n % 3]},
        }
        for n in range(PASSAGES)
    ]
    rows[7]["title"] = "<u>title</u> <img src=x onerror=alert(1)>"
    rows[7]["text"] = "<img src=x onerror=alert(1)> silver castle bridge"
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    families: dict[str, dict[str, Any]] = {
        "mlr": {"head__name": "mlr", "head__mlr__chosen": (1, 2, 3)},
        "dual": {"head__token": "mean", "normalize": True, "tokens__query_prompt": "castle "},
        "late": {"head__name": "colbert", "head__colbert__late": True, "normalize": True},
    }
    for name, keys in families.items():
        untrained_run(folder / name, folder / "encoder", folder / "data", **keys)
        Index.build(Retriever.open(folder / name), folder / "corpus.jsonl", progress=False)
    config = tiny_config(folder / "encoder", folder / "data", task="reranking", train__steps=0, data__dev="")
    train(config, folder / "cross", progress=False)
    return folder


@dataclass
class Running:
    """A server process. `log` has its log until now, one object per line."""

    process: subprocess.Popen[str]
    port: int
    stderr: Path
    first_line: str

    def ask(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str = ""
    ) -> tuple[int, Any]:
        """Send a request; return the status, and the answer as JSON or text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"content-type": "application/json"} if body is not None else {}
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, data, {**sent, **(headers or {})})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        return response.status, json.loads(text) if "json" in response.headers["content-type"] else text

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stderr.read_text().splitlines()]

    def stop(self) -> tuple[int, str]:
        """Send SIGTERM; return the exit status and the rest of stdout."""
        self.process.send_signal(signal.SIGTERM)
        rest, _ = self.process.communicate(timeout=60)
        return self.process.returncode, rest


def start_server(stderr: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start `jaxret serve` on a free port, with its log in a file, and `variables` in its environment."""
    with open(stderr, "w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxret", "serve", "--port=0", *arguments],
            cwd=REPOSITORY,
            env=environment() | ONE_DEVICE | variables,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


@contextmanager
def running(stderr: Path, *arguments: str, wait: bool = True, **variables: str) -> Iterator[Running]:
    """Run `jaxret serve` on a free port until the block ends.

    Args:
        stderr: file for its log.
        arguments: arguments of the command.
        wait: whether to wait until it is ready, not only until it answers.
        variables: variables of its environment.
    """
    process = start_server(stderr, *arguments, **variables)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " at http://" in line, stderr.read_text()
        server = Running(process, int(line.rpartition(" (")[0].rpartition(":")[2]), stderr, line)
        # A server that has printed its address listens.
        socket.create_connection(("127.0.0.1", server.port), 60).close()
        deadline = time.monotonic() + 240
        status = 0
        while status not in ((200,) if wait else (200, 503)) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
            try:
                status, _ = server.ask("/health")
            except OSError:
                status = 0
        assert status == (200 if wait else 503), stderr.read_text()
        yield server
    finally:
        process.kill()
        process.communicate()


def refused(*arguments: str, **variables: str) -> str:
    """Run `jaxret serve`, which must refuse to start; return its error sentence."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxret", "serve", *arguments],
        cwd=REPOSITORY,
        env=environment() | ONE_DEVICE | variables,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line
