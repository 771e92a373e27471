"""Meeting of a job's processes at one address before JAX starts; missing processes are named, in every process.

JAX itself also waits for all processes, but its error for a missing one does not name it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
from collections.abc import Collection
from contextlib import suppress

_GREETING = b"jaxret\n"
_ALL_HERE = "all here"
_ANSWER = 5.0  # seconds to wait for an answer: another program may listen at the port and never answer
_NAMED = 10  # upper bound of the number of missing processes that an error lists


class RendezvousError(RuntimeError):
    """The processes of a job did not all meet; the message names the missing ones or the cause."""


def wait_for_processes(address: str, num_processes: int, process_id: int, timeout: float) -> None:
    """Wait until all processes of a job have called this.

    Args:
        address: "host:port" of process 0.
        num_processes: processes of the job.
        process_id: number of this process, from 0.
        timeout: seconds to wait.

    Raises:
        RendezvousError: processes are missing, two have the same number, or they disagree about `num_processes`. Raised
            in every process that came.
    """
    host, _, port = address.rpartition(":")
    if process_id == 0:
        outcome = asyncio.run(_gather(address, num_processes, timeout))
    else:
        outcome = asyncio.run(_join(host.strip("[]"), int(port), f"process {process_id} of {num_processes}\n", timeout))
    if outcome != _ALL_HERE:
        raise RendezvousError(outcome)


async def _gather(address: str, count: int, timeout: float) -> str:
    """Wait for the others in process 0, and return the outcome, which is also sent to all that came."""
    here: dict[asyncio.StreamWriter, int] = {}
    end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Suppressed: it left, its line is too long, or the wait ended first. Missing processes are counted below.
        with suppress(OSError, ValueError, asyncio.CancelledError):
            writer.write(_GREETING)
            if introduction := re.fullmatch(rb"process (\d+) of (\d+)\n", await reader.readline()):
                here[writer] = int(introduction[1])
                trouble = _misfit(here, int(introduction[1]), int(introduction[2]), count)
                if not end.done() and (trouble or len(here) == count - 1):
                    end.set_result(trouble or _ALL_HERE)
                await reader.read()  # nothing more is sent; returns when the connection ends
        here.pop(writer, None)
        writer.close()

    server = await asyncio.start_server(welcome, sock=_listen(int(address.rpartition(":")[2])), backlog=max(100, count))
    try:
        outcome = await asyncio.wait_for(end, timeout)
    except TimeoutError:
        outcome = _missing(set(range(1, count)) - set(here.values()), count, address, timeout)
    server.close()  # before any process continues: JAX listens at this port next
    for writer in list(here):
        with suppress(OSError):  # the process has just left
            writer.write(f"{outcome}\n".encode())
            writer.close()
            await writer.wait_closed()
    return outcome


async def _join(host: str, port: int, introduction: str, timeout: float) -> str:
    """Connect to process 0 and return the outcome that it sends."""
    clock = asyncio.get_running_loop().time
    end = clock() + timeout
    while True:
        writer = None
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _ANSWER)
            if await asyncio.wait_for(reader.readexactly(len(_GREETING)), _ANSWER) != _GREETING:
                raise ConnectionError("another program listens there")
            writer.write(introduction.encode())
            if answer := await asyncio.wait_for(reader.readline(), timeout + _ANSWER):
                return answer.decode().rstrip("\n")
            raise ConnectionError("it came and went")
        except (OSError, EOFError) as error:  # process 0 has not started, or an earlier job still has the port
            if clock() > end:
                return f"no process 0 at {host}:{port} within {timeout:g} s ({_why(error)})"
        finally:
            if writer:
                writer.close()
        await asyncio.sleep(0.2)


def _listen(port: int) -> socket.socket:
    """Return a socket that listens at every address of this host, as JAX does."""
    try:
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise
            return socket.create_server(("", port))  # a host without IPv6
    except OSError as error:
        raise RendezvousError(f"process 0 cannot listen at port {port} of this host: {_why(error)}") from error


def _misfit(here: dict[asyncio.StreamWriter, int], number: int, total: int, count: int) -> str:
    """Return an error message for a process that introduces itself as `number` of `total`; "" if valid."""
    if total != count:
        return f"process {number} was told that there are {total} processes, and process 0 that there are {count}"
    hosts = [writer.get_extra_info("peername")[0] for writer, other in here.items() if other == number]
    if len(hosts) > 1 or not 0 < number < count:
        return f"process {number} came twice, from {' and '.join(hosts)}: every process needs a number of its own"
    return ""


def _missing(absent: Collection[int], count: int, address: str, timeout: float) -> str:
    first = [str(number) for number in sorted(absent)[:_NAMED]]
    more = f" and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
    noun = "process" if len(absent) == 1 else "processes"
    return f"{noun} {', '.join(first)}{more} of {count} did not come to {address} within {timeout:g} s"


def _why(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return str(error.strerror)
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)  # asyncio's own text repeats the address
    return "another program listens there" if isinstance(error, EOFError) else str(error) or "no answer"
