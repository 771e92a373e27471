"""Answers in JSON."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from starlette.responses import JSONResponse

from jaxret.serving.answers import json_answer, json_by_parts

VALUES: list[Any] = [
    {"data": [{"embedding": [1.5, -2e-30], "é\u2028": None}], "empty": [], "no": {}, "yes": True},
    [[[[1.0], [2]], []], "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")],
    3,
]


@pytest.mark.parametrize("value", VALUES)
def test_parts_of_an_answer_form_the_whole(value: Any) -> None:
    assert json_by_parts(value).encode() == JSONResponse(value).body


@pytest.mark.parametrize(("numbers", "main"), [(10, True), (10**6, False)])
def test_a_large_answer_is_made_in_another_thread(numbers: int, main: bool) -> None:
    threads = []

    def content() -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return VALUES

    response = asyncio.run(json_answer(content, numbers))
    assert threads == [main]
    assert response.body == JSONResponse(VALUES).body
    assert response.headers["content-type"] == "application/json"
