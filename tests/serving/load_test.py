"""Limits for many requests at the same time: their bodies in memory, and their threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxret.index.metadata_filters import Filter
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.serving import filter_searchers
from jaxret.serving.counters import Counters
from jaxret.serving.device import DeviceThread
from jaxret.serving.filter_searchers import FilterSearchers
from jaxret.serving.gateway import Gateway
from jaxret.serving.refusal import Body, RefusalError
from jaxret.serving.routes import Routes
from jaxret.serving.serve_options import ServeOptions
from jaxret.serving.served import ServedRetriever
from tests.serving.fakes import make_request, make_searcher, make_served, request_scope


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    thread = DeviceThread(batch=4, queue_limit=10)
    yield thread
    thread.end()


def test_a_request_beyond_the_limit_is_not_read(device: DeviceThread) -> None:
    """Controls: requests before and after it, and requests without a body, are answered."""

    async def run() -> list[int]:
        may_go, began = asyncio.Event(), asyncio.Event()

        async def endpoint(request: Request, body: Body) -> Response:
            began.set()
            await may_go.wait()
            return JSONResponse({})

        async def free(request: Request, body: Body) -> Response:
            return JSONResponse({})

        gateway = Gateway({("POST", "/x"): endpoint, ("GET", "/x"): free}, ServeOptions(requests=1), Counters(device))

        async def ask(method: str, readable: bool = True) -> int:
            statuses: list[int] = []
            parts = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

            async def receive() -> Any:
                assert readable
                for part in parts:
                    return part
                return await asyncio.Event().wait()

            async def send(message: Mapping[str, Any]) -> None:
                statuses.extend([message["status"]] if "status" in message else [])

            await gateway(request_scope(method), receive, send)  # type: ignore[arg-type]
            return statuses[0]

        first = asyncio.ensure_future(ask("POST"))
        await began.wait()
        second, third = await ask("POST", readable=False), await ask("GET")
        may_go.set()
        return [second, third, await first, await ask("POST")]

    assert asyncio.run(run()) == [429, 200, 200, 200]


def test_the_filters_that_were_used_last_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four filters stay open, each with its own vectors."""
    opened = []

    def open_filter(rows: np.ndarray) -> Searcher:
        opened.append(int(rows[0]))
        return make_searcher(number=opened[-1])

    monkeypatch.setattr(
        filter_searchers, "matching_rows", lambda encoded_corpus, filters: np.array([int(filters[0][-1])])
    )
    searchers = FilterSearchers(make_searcher(filters=(), encoded_corpus=None, among=open_filter))
    vars(searchers).update(fields={"number": []})

    def use(number: int) -> None:
        assert vars(searchers.open({"number": str(number)})) == {"number": number}

    for number in (1, 2, 3, 4, 1, 5):
        use(number)
    assert opened == [1, 2, 3, 4, 5]
    for number in (5, 1, 4, 3):
        use(number)
    assert opened == [1, 2, 3, 4, 5], "the last four stayed open"
    use(2)
    assert opened == [1, 2, 3, 4, 5, 2], "control: this one was closed"


def test_values_of_a_filter_are_written_as_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus has {"stock": true, "year": 2023}, and its index of metadata the texts "true" and "2023"."""
    texts: list[str] = []

    def find_rows(encoded_corpus: Any, filters: Sequence[Filter]) -> np.ndarray:
        texts.extend(map(str, filters))
        return np.array([0])

    monkeypatch.setattr(filter_searchers, "matching_rows", find_rows)
    searchers = FilterSearchers(make_searcher(filters=(), encoded_corpus=None, among=lambda rows: make_searcher()))
    searchers.fields = {"stock": [], "year": [], "price": []}
    searchers.open({"stock": True, "year": [2023, "2024"], "price": {"gte": 1.5, "lt": 12345678901234567890}})
    assert texts == ["price<12345678901234567890", "price>=1.5", "stock:true", "year:2023", "year:2024"]
    for value in (None, [[1]], [], {}, {"from": 1}, {"gte": None}, {"gte": 1, "lt": [2]}, [2023, {"gt": 1}]):
        with pytest.raises(RefusalError, match="number, true or false"):
            searchers.open({"year": value})


def test_a_filter_is_opened_in_the_thread_of_filters_alone(device: DeviceThread) -> None:
    """Of twelve filters at the same time, four are open while the device is busy. Closed ones were opened again in the
    device's thread, and all requests waited."""
    opened: list[tuple[str, str]] = []
    used: list[Any] = []
    may_go = threading.Event()

    def open_filter(filters: Mapping[str, str]) -> str:
        opened.append((threading.current_thread().name.rpartition("_")[0], filters["number"]))
        return filters["number"]

    def search(items: list[Any], k: int, searcher: Any, texts: bool) -> list[Any]:
        may_go.wait(60)
        used.append(searcher)
        return [SimpleNamespace(hits=[], backend="", rounds=0, scored_pairs=0, batch=1)] * len(items)

    served = make_served(search=search, filters=SimpleNamespace(open=open_filter))
    routes = Routes([served], device, ServeOptions(), Counters(device))
    routes.warm_up()
    endpoint = routes.endpoints()["POST", "/search"]

    async def run() -> list[Any]:
        bodies = [Body({"queries": ["x"], "filter": {"number": str(number)}}) for number in range(12)]
        searches = [asyncio.ensure_future(endpoint(make_request(), body)) for body in bodies]
        await asyncio.sleep(0.3)
        assert len(opened) == 4
        searches[3].cancel()  # the next search gets its turn
        may_go.set()
        answers = await asyncio.gather(*searches, return_exceptions=True)
        return [getattr(answer, "status_code", answer) for answer in answers]

    try:
        statuses = asyncio.run(run())
    finally:
        routes.stop()
    assert isinstance(statuses.pop(3), asyncio.CancelledError)
    assert statuses == [200] * 11
    assert opened == [("opener", str(number)) for number in range(12)]
    assert set(used) >= {str(number) for number in range(12) if number != 3}


@pytest.mark.exhaustive
def test_opening_filters_does_not_block_other_requests(
    runs: Path, device: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They block neither the threads of all requests, nor searches without a filter."""
    served = ServedRetriever(str(runs / "dual"), "", "best", ServeOptions(), SearchOptions())
    may_go = threading.Event()
    monkeypatch.setattr(served.filters, "open", lambda filters: may_go.wait(60))
    monkeypatch.setattr(served, "warm_up", lambda *_: 0)
    routes = Routes([served], device, ServeOptions(), Counters(device))
    routes.warm_up()
    search = routes.endpoints()["POST", "/search"]

    async def run() -> tuple[int, int]:
        body = {"queries": ["x"], "filter": {"colour": "red"}}
        searches = [asyncio.ensure_future(search(make_request(), Body(body))) for _ in range(60)]
        await asyncio.sleep(0.2)
        try:
            number = await asyncio.wait_for(run_in_threadpool(lambda: 7), 10)
            answer = await asyncio.wait_for(search(make_request(), Body({"queries": ["x"]})), 30)
            return number, answer.status_code
        finally:
            for one in searches:
                one.cancel()
            may_go.set()

    try:
        assert asyncio.run(run()) == (7, 200)
    finally:
        routes.stop()
