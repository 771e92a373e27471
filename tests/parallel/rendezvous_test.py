"""The processes of a job connect, or each of them names the missing ones: real processes, both streams, exit
statuses."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterable

import pytest

from jaxret.parallel.rendezvous import RendezvousError, wait_for_processes
from tests.pipeline import REPOSITORY, environment, free_address

PROGRAM = """
import sys
from jaxret.cli.app import report_errors
from jaxret.parallel.rendezvous import wait_for_processes
print("ready", flush=True)
with report_errors():
    wait_for_processes(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    print("met")
"""


def begin(address: str, count: int, own: int, timeout: float = 30) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, address, str(count), str(own), str(timeout)],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(processes: Iterable[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Return (status, output, errors) of each process."""
    outputs = [process.communicate(timeout=60) for process in processes]
    return [
        (process.returncode, output.removeprefix("ready\n"), errors)
        for process, (output, errors) in zip(processes, outputs, strict=True)
    ]


def connected(address: str) -> socket.socket:
    """Return a connection to an address, as soon as a process listens on it."""
    host, _, port = address.partition(":")
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            time.sleep(0.01)  # between two attempts; the test has a time limit


def test_all_processes_connect_in_any_order() -> None:
    """Other programs also connect: one sends nothing, one sends other data, one disconnects."""
    address = free_address()
    first = begin(address, 4, 2)
    others = [begin(address, 4, own) for own in (0, 3)]
    silent, talking, leaving = (connected(address) for _ in range(3))
    talking.sendall(b"PRI * HTTP/2.0\r\n\r\n" + b"x" * 200_000)
    leaving.close()
    assert ends([first, *others, begin(address, 4, 1)]) == [(0, "met\n", "")] * 4
    silent.close()
    talking.close()


def test_every_process_names_the_missing_one() -> None:
    """A process that connected but disconnected too early is missing, too."""
    address = free_address()
    first = begin(address, 5, 1)
    assert first.stdout
    first.stdout.readline()  # so that the 3 seconds of process 0 do not include a slow start
    here = [first, begin(address, 5, 0, 3)]
    left = connected(address)
    left.sendall(b"process 2 of 5\n")
    left.close()
    line = f"error: processes 2, 3, 4 of 5 did not come to {address} within 3 s\n"
    assert ends(here) == [(1, "", line)] * 2


def test_many_missing_processes_are_counted() -> None:
    address = free_address()
    with pytest.raises(RendezvousError, match=rf"processes 1, 2, .*, 10 .*53 .*64 .*{address}"):
        wait_for_processes(address, 64, 0, 0.1)
    with pytest.raises(RendezvousError, match=r"^process 1 of 2 did not come"):
        wait_for_processes(address, 2, 0, 0.1)


def test_an_unreachable_process_0() -> None:
    with pytest.raises(RendezvousError, match=r"no process 0 at 127.0.0.1:\d+ within 0.1 s \(Connection refused\)"):
        wait_for_processes(free_address(), 2, 1, 0.1)
    with pytest.raises(RendezvousError, match=r"no process 0 at nobody.invalid:1 within 0.1 s \(\w+"):
        wait_for_processes("nobody.invalid:1", 2, 1, 0.1)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            ((3, 0), (3, 1), (3, 1)),
            "process 1 connected twice, from 127.0.0.1 and 127.0.0.1: every process needs a different number",
        ),
        (((3, 0), (4, 1)), "process 1 was started for a job of 4 processes, and process 0 for a job of 3"),
    ],
)
def test_invalid_process_ids(numbers: tuple[tuple[int, int], ...], message: str) -> None:
    address = free_address()
    for status, output, errors in ends([begin(address, count, own) for count, own in numbers]):
        assert (status, output, errors.count("\n")) == (1, "", 1)
        assert message in errors.replace("::ffff:", "")


def test_a_port_in_use_by_an_earlier_job() -> None:
    """Process 0 reports that the port is in use. The others wait until the listening process is process 0: after a
    restart, it may still be the earlier job."""
    with socket.create_server(("127.0.0.1", 0)) as earlier:
        address = f"127.0.0.1:{earlier.getsockname()[1]}"
        with pytest.raises(RendezvousError, match=r"process 0 .*\d+ .*Address"):
            wait_for_processes(address, 2, 0, 1.0)
        waiting = begin(address, 2, 1)
        visitor, _ = earlier.accept()
        visitor.sendall(b"something else\n")
        visitor.close()
    assert ends([waiting, begin(address, 2, 0)]) == [(0, "met\n", "")] * 2
