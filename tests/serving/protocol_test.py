"""Time limits of a connection."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from jaxret.serving.server import _Protocol

SIZE = 2**25  # larger than the buffers of both sockets


class Recorded(_Protocol):
    """The protocol with a short time limit, and an event at the end of a connection."""

    sent_seconds = 0.3
    ended: asyncio.Event

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended.set()


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % SIZE)]})
    await send({"type": "http.response.body", "body": b"x" * SIZE})


@pytest.mark.parametrize("head", ["", "Connection: close\r\n"])
@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_does_not_read_is_disconnected(head: str, reads: bool) -> None:
    """Control: if the client reads the answer, its connection is kept for the next request."""

    async def run() -> tuple[bool, int]:
        loop = asyncio.get_running_loop()
        config = uvicorn.Config(answer, http=Recorded, lifespan="off", log_config=None)
        config.load()
        Recorded.ended = asyncio.Event()
        server = await loop.create_server(lambda: Recorded(config, ServerState(), {}), "127.0.0.1", 0)
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, server.sockets[0].getsockname())
            await loop.sock_sendall(client, f"GET / HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
            size = 0
            while reads and size < SIZE:
                size += len(await loop.sock_recv(client, 2**20))
            try:
                await asyncio.wait_for(Recorded.ended.wait(), 1.5 if reads else 10)
            except TimeoutError:
                return False, size
            finally:
                server.close()
            return True, size

    ended, size = asyncio.run(run())
    assert ended == (not reads or bool(head))
    assert size >= SIZE * reads
