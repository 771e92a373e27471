"""The process of a server: its socket, its start and its end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxret.parallel.events import emit
from jaxret.search.search_options import SearchOptions
from jaxret.serving.counters import Counters, LogHandler, log_event
from jaxret.serving.device import DeviceThread
from jaxret.serving.gateway import Gateway, is_loopback
from jaxret.serving.page import page_endpoint
from jaxret.serving.routes import Routes
from jaxret.serving.serve_options import ServeOptions
from jaxret.serving.served import open_served

TOKEN = "JAXRET_TOKEN"
# In every `_SENT_SECONDS`, a client must read `_SENT_BYTES` of its answer, or all that is left of it.
_SENT_SECONDS = 10.0
_SENT_BYTES = 2**20
_BACKLOG = 2048  # connections that may wait to be accepted; uvicorn has the same number
_BATCHES = 4  # batches in a round of the device, whose items are sorted by length


def serve(
    workdirs: Sequence[str], encoded_name: str, checkpoint: str, options: ServeOptions, search: SearchOptions
) -> None:
    """Serve runs until SIGTERM or Ctrl-C. Requests that are running at that time are answered.

    Args:
        workdirs: folders of runs, FOLDER or NAME=FOLDER.
        encoded_name: name of the encoded corpus; "": the only one of each run.
        checkpoint: "best", "last" or a step.
        options: address and limits.
        search: options of searches.

    Raises ValueError for an address that is in use, or for an address other than loopback without a token, and the
    errors of `open_served`.
    """
    token = os.environ.get(TOKEN, "").strip()
    with bound_socket(options.host, options.port) as listener:
        require_token(options.host, token)
        models = open_served(workdirs, encoded_name, checkpoint, options, search)
        names = [model.name for model in models]
        device = DeviceThread(_BATCHES * options.batch, options.queue)
        counters = Counters(device)
        try:
            routes = Routes(models, device, options, counters)
            del models  # only the routes hold the models: when a corpus is opened again, the old one's memory is free
            endpoints = routes.endpoints() | {("GET", "/"): page_endpoint()}
            gateway = Gateway(endpoints, options, counters, token, bool(os.environ.get("JAXRET_DEBUG")))
            listener.listen(_BACKLOG)  # a client that reads the printed address can connect at once
            address = _address(listener)

            def announce() -> None:
                print(f"{', '.join(names)} at {address} (compiling; /health says when it is ready)", flush=True)
                emit("serving", address=address, models=names)

            _run(_Server(_config(gateway, options), announce), routes, listener)
        finally:
            device.end()
        print("stopped", flush=True)
        emit("stopped", address=address)


def require_token(host: str, token: str) -> None:
    """Raise ValueError if other machines reach the address and there is no token."""
    if token:
        if not (token.isascii() and token.isprintable() and " " not in token):
            raise ValueError(f"{TOKEN} must consist of printable ASCII characters without spaces")
        return
    if not is_loopback(host):
        raise ValueError(
            f"--host={host} can be reached from other machines: set the variable {TOKEN} to a secret that they must "
            "send, or remove --host"
        )


@contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that is bound to an address. Raises ValueError if the address is unknown or in use."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        raise ValueError(f"--host={host}: there is no such address") from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(f"--port={port} of {host} is in use; choose another, or 0 for a free one") from None
            raise ValueError(f"--host={host} --port={port}: {error.strerror or error}") from None
        yield listener


class _Protocol(H11Protocol):
    """uvicorn's protocol with time limits for the head of a request, and for a whole request with its answer. A
    connection that takes longer ends. uvicorn itself limits only the time between two requests."""

    head_seconds, whole_seconds, sent_seconds = 10.0, 80.0, _SENT_SECONDS
    _timer: asyncio.TimerHandle | None = None
    _unsent = 0  # bytes of a complete answer that the client had not read when the time limit began

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._allow(self.head_seconds)

    def data_received(self, data: bytes) -> None:
        if self._timer is None or self._unsent:
            self._allow(self.head_seconds)
        super().data_received(data)

    def handle_events(self) -> None:
        cycle_before = self.cycle
        super().handle_events()
        if self.cycle is not cycle_before:
            self._allow(self.whole_seconds)

    def on_response_complete(self) -> None:
        self._allow_sending()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._allow(None)
        super().connection_lost(exc)

    def _allow_sending(self) -> None:
        """Wait until the client reads the transport's buffer, which the event loop would otherwise keep forever."""
        unsent_before, left = self._unsent, self.transport.get_write_buffer_size()
        if unsent_before and left > max(0, unsent_before - _SENT_BYTES):
            self.transport.abort()
            return
        self._allow(None)
        if left:
            self._unsent, self._timer = left, self.loop.call_later(self.sent_seconds, self._allow_sending)

    def _allow(self, seconds: float | None) -> None:
        self._unsent = 0
        if self._timer:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class _Server(uvicorn.Server):
    """uvicorn's server. After SIGINT or SIGTERM, the process ends with status 0.

    `announce` is called when the signal handlers are set, before requests are answered.
    """

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        def obey(number: int, frame: FrameType | None) -> None:
            log_event("stop", signal=signal.Signals(number).name)
            self.handle_exit(number, frame)

        old_handlers = {number: signal.signal(number, obey) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._announce()
            yield
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)


def _config(gateway: Gateway, options: ServeOptions) -> uvicorn.Config:
    for name in ("uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [LogHandler()], False
        logger.setLevel(logging.WARNING)
    whole_seconds = options.body_seconds + options.answer_seconds + _SENT_SECONDS
    protocol = type(
        "_TimedProtocol", (_Protocol,), {"head_seconds": options.body_seconds, "whole_seconds": whole_seconds}
    )
    return uvicorn.Config(
        gateway,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=int(max(1, options.stop_seconds)),
        limit_concurrency=None,
    )


def _run(server: _Server, routes: Routes, listener: socket.socket) -> None:
    """Listen, compile at the same time, and end after a signal. Raises the errors of compiling."""
    failures: list[BaseException] = []

    def warm_up() -> None:
        try:
            routes.warm_up()
        except BaseException as error:
            failures.append(error)
            server.should_exit = True

    thread = threading.Thread(target=warm_up, name="warm-up", daemon=True)
    thread.start()
    try:
        server.run(sockets=[listener])
    finally:
        routes.stop()
    if failures:
        raise failures[0]


def _address(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
