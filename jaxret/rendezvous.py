"""The processes of a job meet at one address before JAX starts: who does not come is named, in every process.

JAX waits for all of them too, but when one does not come it ends each process with a dump that names nobody.
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
_ANSWER = 5.0  # seconds for an answer; what listens there may be another program, which never gives one
_NAMED = 10  # how many of those that are missing are named


class RendezvousError(RuntimeError):
    """The processes of a job did not all find each other; the text says which, or why."""


def meet(address: str, count: int, own: int, timeout: float) -> None:
    """Returns in each of `count` processes, numbered from 0, when all have come; this is process `own`.

    address: "host:port" of process 0. timeout: seconds. Raises RendezvousError in every process that is there: with the
    numbers of those that are not, or if two have the same number or disagree about `count`.
    """
    host, _, port = address.rpartition(":")
    if own == 0:
        told = asyncio.run(_gather(address, count, timeout))
    else:
        told = asyncio.run(_join(host.strip("[]"), int(port), f"process {own} of {count}\n", timeout))
    if told != _ALL_HERE:
        raise RendezvousError(told)


async def _gather(address: str, count: int, timeout: float) -> str:
    """As process 0: how it ended, which all others that are here are told too."""
    here: dict[asyncio.StreamWriter, int] = {}
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # It has left, or its line is endless, or this ends while it is silent: who is missing is counted below.
        with suppress(OSError, ValueError, asyncio.CancelledError):
            writer.write(_GREETING)
            if said := re.fullmatch(rb"process (\d+) of (\d+)\n", await reader.readline()):
                here[writer] = int(said[1])
                trouble = _misfit(here, int(said[1]), int(said[2]), count)
                if not ended.done() and (trouble or len(here) == count - 1):
                    ended.set_result(trouble or _ALL_HERE)
                await reader.read()  # it says no more; this ends when it leaves
        here.pop(writer, None)
        writer.close()

    server = await asyncio.start_server(welcome, sock=_listen(int(address.rpartition(":")[2])), backlog=max(100, count))
    try:
        told = await asyncio.wait_for(ended, timeout)
    except TimeoutError:
        told = _missing(set(range(1, count)) - set(here.values()), count, address, timeout)
    server.close()  # before anybody goes on: JAX listens at this port next
    for writer in list(here):
        with suppress(OSError):  # it left just now
            writer.write(f"{told}\n".encode())
            writer.close()
            await writer.wait_closed()
    return told


async def _join(host: str, port: int, introduction: str, timeout: float) -> str:
    """As another process: what process 0 tells."""
    clock = asyncio.get_running_loop().time
    end = clock() + timeout
    while True:
        writer = None
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _ANSWER)
            if await asyncio.wait_for(reader.readexactly(len(_GREETING)), _ANSWER) != _GREETING:
                raise ConnectionError("another program listens there")
            writer.write(introduction.encode())
            if told := await asyncio.wait_for(reader.readline(), timeout + _ANSWER):
                return told.decode().rstrip("\n")
            raise ConnectionError("it came and went")
        except (OSError, EOFError) as error:  # not yet, or an earlier job that is about to end
            if clock() > end:
                return f"no process 0 at {host}:{port} within {timeout:g} s ({_why(error)})"
        finally:
            if writer:
                writer.close()
        await asyncio.sleep(0.2)


def _listen(port: int) -> socket.socket:
    """At every address of this host, as JAX does."""
    try:
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise
            return socket.create_server(("", port))  # a host without IPv6
    except OSError as error:
        raise RendezvousError(f"process 0 cannot listen at port {port} of this host: {_why(error)}") from error


def _misfit(here: dict[asyncio.StreamWriter, int], who: int, believed: int, count: int) -> str:
    """What is wrong with a process that says it is `who` of `believed`; "" if nothing is."""
    if believed != count:
        return f"process {who} was told that there are {believed} processes, and process 0 that there are {count}"
    hosts = [writer.get_extra_info("peername")[0] for writer, number in here.items() if number == who]
    if len(hosts) > 1 or not 0 < who < count:
        return f"process {who} came twice, from {' and '.join(hosts)}: every process needs a number of its own"
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
