"""Limits of a request, without a socket: who may send it, how large it is, and how long it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxret.serving.counters import Counters
from jaxret.serving.device import DeviceThread
from jaxret.serving.gateway import Gateway
from jaxret.serving.refusal import Body, RefusalError
from jaxret.serving.serve_options import ServeOptions

OPTIONS = ServeOptions(most_bytes=100, body_seconds=0.2, answer_seconds=0.2)
PLACES = [("POST", "/search"), *(("GET", path) for path in ("/", "/health", "/metrics", "/v1/models/"))]


class Endpoint:
    """An endpoint that answers after `seconds`, and counts the requests that began and ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began, self.ended = seconds, 0, 0

    async def __call__(self, request: Request, body: Body) -> Response:
        self.began += 1
        await asyncio.sleep(self.seconds)
        self.ended += 1
        return JSONResponse({"answer": 1})


@pytest.fixture(scope="module")
def counters() -> Iterator[Counters]:
    device = DeviceThread(batch=1, queue_limit=1)
    yield Counters(device)
    device.end()


class Client:
    """A gateway with one endpoint, and requests to it."""

    def __init__(self, counters: Counters, token: str = "", seconds: float = 0.0) -> None:
        self.endpoint = Endpoint(seconds)
        self.gateway = Gateway(dict.fromkeys(PLACES, self.endpoint), OPTIONS, counters, token)

    def ask(
        self,
        *parts: bytes,
        path: str = "/search",
        headers: Mapping[str, str] = {},
        ends: bool = True,
        goes: bool = False,
    ) -> int:
        """Return the status; 0 if there is no answer. A request without parts is a GET.

        ends: whether the body ends with its last part. goes: whether the client disconnects after it.
        """
        names = {"host": "localhost:8080", "content-type": "application/json", **headers}
        lines = [(name.encode(), value.encode()) for name, value in names.items()]
        scope = {"type": "http", "method": "POST" if parts else "GET", "path": path, "headers": lines, "client": None}
        messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": part, "more_body": number < len(parts) or not ends}
            for number, part in enumerate(parts, 1)
        ]
        messages += [{"type": "http.disconnect"}] if goes else []
        sent: list[Mapping[str, Any]] = []

        async def receive() -> Any:
            return messages.pop(0) if messages else await asyncio.Event().wait()

        async def send(message: Mapping[str, Any]) -> None:
            sent.append(message)

        async def run() -> None:
            await asyncio.wait_for(self.gateway(scope, receive, send), 20)  # type: ignore[arg-type]
            await asyncio.sleep(self.endpoint.seconds)  # an endpoint that was not cancelled ends during this time

        asyncio.run(run())
        return sent[0]["status"] if sent else 0


@pytest.mark.parametrize("length", [{}, {"content-length": "101"}], ids=["in parts", "with a length"])
def test_a_body_has_at_most_the_allowed_bytes(length: dict[str, str], counters: Counters) -> None:
    client = Client(counters)
    assert client.ask(b"{}" + b" " * 50, b" " * 49, headers=length) == 413
    assert client.endpoint.began == 0
    assert client.ask(b"{}" + b" " * 50, b" " * 48) == 200, "control: a body of 100 bytes is allowed"


def test_a_body_must_arrive_in_time(counters: Counters) -> None:
    client = Client(counters)
    assert client.ask(b"{", ends=False) == 408
    assert client.endpoint.began == 0


def test_an_answer_that_takes_too_long_is_cancelled(counters: Counters) -> None:
    client = Client(counters, seconds=0.4)
    assert client.ask(b"{}") == 504
    assert (client.endpoint.began, client.endpoint.ended) == (1, 0)


def test_the_answer_of_a_client_that_is_gone_is_cancelled(counters: Counters) -> None:
    client = Client(counters, seconds=0.1)
    assert client.ask(b"{}", goes=True) == 0
    assert (client.endpoint.began, client.endpoint.ended) == (1, 0)
    assert client.ask(b"{}") == 200, "control: the client waits"


def test_every_path_but_the_page_and_the_state_needs_the_token(counters: Counters) -> None:
    client = Client(counters, token="sesame")
    assert client.ask(path="/") == client.ask(path="/health") == 200
    for word in ({}, {"authorization": "Bearer sesam"}, {"authorization": "sesame"}, {"authorization": "Bearer"}):
        assert {client.ask(path=path, headers=word) for path in ("/metrics", "/v1/models/mlr", "/nowhere")} == {401}
        assert client.ask(b"{}", headers=word) == 401
    assert client.endpoint.began == 2
    assert client.ask(b"{}", headers={"authorization": "Bearer sesame", "host": "gpu.example"}) == 200


def test_without_a_token_only_this_machine_may_ask(counters: Counters) -> None:
    client = Client(counters)
    assert {
        client.ask(b"{}", headers={"host": host}) for host in ("gpu.example", "gpu.example:8080", "10.0.0.1:80")
    } == {403}
    assert {client.ask(b"{}", headers={"host": host}) for host in ("localhost", "127.0.0.1:80", "[::1]:80")} == {200}


def test_what_a_web_page_may_send_is_refused(counters: Counters) -> None:
    """Pages of other origins can send these types without permission."""
    client = Client(counters)
    types = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "")
    assert {client.ask(b"{}", headers={"content-type": kind}) for kind in types} == {415}
    assert client.ask(b"{}", headers={"content-type": "application/json; charset=utf-8"}) == 200


def test_texts_and_counts_of_a_request_are_limited() -> None:
    def problem(value: object, limit: int = 2, most_characters: int = 3) -> int:
        with pytest.raises(RefusalError) as refusal:
            Body({"x": value}).texts("x", limit, most_characters)
        return refusal.value.status

    assert Body({"x": ["a", "abc"]}).texts("x", 2, 3) == ["a", "abc"]
    assert [problem(["a"] * 3), problem("abcd"), problem(["a", "abcd"])] == [413, 413, 413]
    assert [problem([]), problem(" "), problem(["a", ""]), problem([[1, 2]]), problem(None)] == [
        422,
        422,
        422,
        400,
        422,
    ]
    assert [Body({"k": k}).count("k", 10, 5) for k in (1, 5)] == [1, 5]
    for k in (0, 6, True, 2.0):
        with pytest.raises(RefusalError):
            Body({"k": k}).count("k", 10, 5)
