"""Connects the processes of a job at one address before JAX starts. Every process then knows which ones are missing.

JAX itself also waits for all processes, but its error does not name a missing process.
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
_ANSWER = 5.0  # seconds to wait for an answer, because another program may listen at the port
_NAMED = 10  # missing processes that an error lists


class RendezvousError(RuntimeError):
    """The processes of a job did not all connect. The message names the missing processes or the cause."""


def wait_for_processes(address: str, num_processes: int, process_id: int, timeout: float) -> None:
    """Wait until all processes of a job have called this function.

    Args:
        address: "host:port" of process 0.
        num_processes: number of processes of the job.
        process_id: number of this process, from 0.
        timeout: seconds to wait.

    Raises:
        RendezvousError: processes are missing, have the same number, or have different `num_processes`. It is raised in
          every process that connected.
    """
    host, _, port = address.rpartition(":")
    if process_id == 0:
        outcome = asyncio.run(_gather(address, num_processes, timeout))
    else:
        outcome = asyncio.run(_join(host.strip("[]"), int(port), f"process {process_id} of {num_processes}\n", timeout))
    if outcome != _ALL_HERE:
        raise RendezvousError(outcome)


async def _gather(address: str, count: int, timeout: float) -> str:
    """Wait for the other processes in process 0. Return the outcome, and send it to all processes that connected."""
    process_ids: dict[asyncio.StreamWriter, int] = {}
    end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Ignored: the process left, its line is too long, or the wait ended. Missing processes are counted below.
        with suppress(OSError, ValueError, asyncio.CancelledError):
            writer.write(_GREETING)
            if introduction := re.fullmatch(rb"process (\d+) of (\d+)\n", await reader.readline()):
                process_ids[writer] = int(introduction[1])
                trouble = _misfit(process_ids, int(introduction[1]), int(introduction[2]), count)
                if not end.done() and (trouble or len(process_ids) == count - 1):
                    end.set_result(trouble or _ALL_HERE)
                await reader.read()  # returns when the connection ends, because nothing more is sent
        process_ids.pop(writer, None)
        writer.close()

    server = await asyncio.start_server(welcome, sock=_listen(int(address.rpartition(":")[2])), backlog=max(100, count))
    try:
        outcome = await asyncio.wait_for(end, timeout)
    except TimeoutError:
        outcome = _missing(set(range(1, count)) - set(process_ids.values()), count, address, timeout)
    server.close()  # before any process continues, because JAX listens at this port next
    for writer in list(process_ids):
        with suppress(OSError):  # the process has left
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
            raise ConnectionError("the connection was closed")
        except (OSError, EOFError) as error:  # process 0 has not started, or an earlier job still uses the port
            if clock() > end:
                return f"no process 0 at {host}:{port} within {timeout:g} s ({_cause(error)})"
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
        raise RendezvousError(f"process 0 cannot listen at port {port} of this host: {_cause(error)}") from error


def _misfit(process_ids: dict[asyncio.StreamWriter, int], number: int, total: int, count: int) -> str:
    """Return an error message for a process that introduces itself as `number` of `total`; "" if it is valid.

    Args:
        process_ids: connection -> number of the process.
        number: number of the process.
        total: number of processes that it was started with.
        count: number of processes that process 0 was started with.
    """
    if total != count:
        return f"process {number} was started for a job of {total} processes, and process 0 for a job of {count}"
    hosts = [writer.get_extra_info("peername")[0] for writer, id in process_ids.items() if id == number]
    if len(hosts) > 1 or not 0 < number < count:
        return f"process {number} connected twice, from {' and '.join(hosts)}: every process needs a different number"
    return ""


def _missing(numbers: Collection[int], count: int, address: str, timeout: float) -> str:
    first = [str(number) for number in sorted(numbers)[:_NAMED]]
    remainder = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    noun = "process" if len(numbers) == 1 else "processes"
    return f"{noun} {', '.join(first)}{remainder} of {count} did not come to {address} within {timeout:g} s"


def _cause(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return str(error.strerror)
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)  # asyncio's own text repeats the address
    return "another program listens there" if isinstance(error, EOFError) else str(error) or "no answer"
