"""Start the scripts by a zygote, and read their output and exit status."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.pipeline import ONE_DEVICE, REPOSITORY, environment


@functools.cache
def _zygote(preload: str = "") -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own = {"OPENBLAS_NUM_THREADS": "1", **ONE_DEVICE}  # a process with threads must not fork
    own |= {"LD_PRELOAD": preload} if preload else {}
    subprocess.Popen(
        [sys.executable, Path(__file__).with_name("zygote.py"), str(theirs.fileno())],
        cwd=REPOSITORY,
        env=environment() | own,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    return ours


class Output:
    """Output of a process. It is read through a pipe, because a file would count against the limit on file sizes."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        fcntl.fcntl(self._reading, fcntl.F_SETPIPE_SZ, 1 << 20)  # the pipe is read only at the end
        os.set_blocking(self._reading, False)
        self._read = b""

    def text(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while block := os.read(self._reading, 1 << 20):
                self._read += block
        return self._read.decode(errors="replace")

    def __del__(self) -> None:
        os.close(self._reading)


@dataclass
class Script:
    """A script that runs or has run; `returncode` is as in subprocess: negative for the signal that ended it."""

    pid: int
    started: float
    _status: int  # a pipe
    _stdout: Output
    _stderr: Output
    returncode: int | None = None
    cpu: float = 0.0  # seconds of processor time

    def poll(self, patience: float = 0) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], patience)[0]:
            self.returncode = os.waitstatus_to_exitcode(_number(self._status))
            self.cpu = _number(self._status) / 1000
            os.close(self._status)
        return self.returncode

    def wait(self, patience: float = 300) -> int:
        """Wait for the script and return its exit status; after `patience` seconds, kill it and raise an error."""
        if self.poll(patience) is None:
            self.kill()
            self.poll(10)
            raise TimeoutError(f"still there after {patience} seconds:\n{self.stdout}\n{self.stderr}")
        assert self.returncode is not None
        return self.returncode

    def send(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the process may have ended since `poll`
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    @property
    def stdout(self) -> str:
        return self._stdout.text()

    @property
    def stderr(self) -> str:
        return self._stderr.text()

    @property
    def output(self) -> str:
        """Return the exit status and all output."""
        return f"exit {self.returncode}\n{self.stdout}\n{self.stderr}"


def _number(pipe: int) -> int:
    return int.from_bytes(os.read(pipe, 4), "little")


def start(script: str, *arguments: str, env: dict[str, str] | None = None, preload: str = "", **faults: Any) -> Script:
    """Start one of the scripts in the folder of the repository, on one device. preload: library for LD_PRELOAD."""
    stdout, stderr = Output(), Output()
    reading, writing = os.pipe()
    request = {"script": script, "arguments": arguments, "environment": env or {}, "faults": faults}
    descriptors = [stdout.writing, stderr.writing, writing]
    socket.send_fds(_zygote(preload), [json.dumps(request).encode()], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return Script(_number(reading), time.monotonic(), reading, stdout, stderr)


def run(script: str, *arguments: str, env: dict[str, str] | None = None, **faults: Any) -> Script:
    """Run one of the scripts to its end."""
    process = start(script, *arguments, env=env, **faults)
    process.wait()
    return process


def why(act: Callable[[], object]) -> str:
    """Return the message of a refusal; "" if there was none."""
    try:
        act()
    except (ValueError, OSError, ArithmeticError) as error:
        return str(error)
    return ""


def refusal(process: Script) -> str:
    """Return the error sentence of a script; "" if there is none, or a traceback."""
    before, _, message = f"\n{process.stderr}".rpartition("\nerror: ")
    clean = process.returncode == 1 and "\nerror: " not in before and "Traceback" not in before + message
    return message.strip() if clean else ""
