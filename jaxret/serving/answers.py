"""Encode answers as JSON. Large answers do not delay other requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

_LARGE = 2**15  # answers with at least this many numbers are encoded in a thread
# Levels of lists and objects whose values are encoded one by one, because json.dumps lets no other thread run.
_DEPTH = 3


async def json_answer(content: Callable[[], Any], numbers: int) -> Response:
    """Return the value of `content()` as JSON. `numbers` is the approximate count of numbers in the answer."""
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
        return f"{{{','.join(f'{_encode_json(key)}:{json_by_parts(item, depth - 1)}' for key, item in value.items())}}}"
    return _encode_json(value)


def _encode_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
