"""Answers as JSON, the large ones without holding up other requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

_LARGE = 2**15  # numbers from which an answer is made in a thread
_DEPTH = 3  # of the lists and objects whose values are encoded one by one: json.dumps lets no other thread run


async def json_answer(content: Callable[[], Any], numbers: int) -> Response:
    """Return what `content` returns as JSON. numbers: in the answer, about."""
    if numbers < _LARGE:
        return JSONResponse(content())
    return await run_in_threadpool(
        lambda: Response(json_by_parts(content()).encode("utf-8"), media_type="application/json")
    )


def json_by_parts(value: Any, depth: int = _DEPTH) -> str:
    """Return the text that JSONResponse makes of a value, encoded value by value."""
    if depth and isinstance(value, list):
        return f"[{','.join(json_by_parts(item, depth - 1) for item in value)}]"
    if depth and isinstance(value, dict):
        return f"{{{','.join(f'{_encoded(key)}:{json_by_parts(item, depth - 1)}' for key, item in value.items())}}}"
    return _encoded(value)


def _encoded(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
