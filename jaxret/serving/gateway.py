"""Check every request: host, token, size, time, and whether the client is connected. Write the log and the counts."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from jaxret.serving.counters import Counters, log_event
from jaxret.serving.device import QueueFullError
from jaxret.serving.refusal import Body, RefusalError
from jaxret.serving.serve_options import ServeOptions

Endpoint = Callable[[Request, Body], Awaitable[Response]]
OPEN = ("/", "/health")  # paths that need no token: they return nothing about the run
# A body that is too large is read for these bytes and seconds, so that its sender reads the answer.
_DRAINED_BYTES, _DRAINED_SECONDS = 64 * 2**20, 2.0
_CLIENT_GONE = 499  # status in the log only, because the client has disconnected
_ERROR_TYPES = {413: "validation", 422: "validation", 429: "overloaded", 424: "backend", 503: "unhealthy"}
_HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Gateway:
    """The ASGI application. It has an endpoint for each (method, path). A path that ends with / includes all paths
    below it."""

    def __init__(
        self,
        endpoints: Mapping[tuple[str, str], Endpoint],
        options: ServeOptions,
        counters: Counters,
        token: str = "",
        debug: bool = False,
    ) -> None:
        """Keep the endpoints.

        Args:
            token: token that a request must have; "": only requests of this machine are answered, without a token.
            debug: write tracebacks to the log.
        """
        self._endpoints, self._options, self._counters = endpoints, options, counters
        self._token, self._debug = token.encode(), debug
        self._paths = {path for _, path in endpoints}
        self._folders = [path for path in self._paths if path.endswith("/") and path != "/"]
        self._request_count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        start, path = time.perf_counter(), str(scope["path"])
        request = Request(scope, receive)
        request.state.number = number = uuid.uuid4().hex[:16]
        status, size = _CLIENT_GONE, 0
        self._request_count += 1
        try:
            if response := await self._answer(request, path, number):
                response.headers.update({**_HEADERS, "x-request-id": number})
                status, size = response.status_code, len(response.body)
                await response(scope, receive, send)
        finally:
            self._request_count -= 1
            self._note(request, path, status, size, time.perf_counter() - start, number)

    def _note(self, request: Request, path: str, status: int, size: int, seconds: float, number: str) -> None:
        route = self._route(path) or "other"
        self._counters.requests.labels(route, str(status)).inc()
        self._counters.seconds.labels(route).observe(seconds)
        values = {"request": number, "client": request.client.host if request.client else ""}
        values |= {"method": request.method, "path": path[:200]}
        log_event("request", **values, status=status, bytes=size, milliseconds=round(seconds * 1000, 2))

    async def _answer(self, request: Request, path: str, number: str) -> Response | None:
        """Return the answer to a request, which may be an error, or None if the client has disconnected."""
        try:
            self._admit(request, path)
            endpoint = self._endpoint(request.method, path)
            if request.method == "POST" and self._request_count > self._options.requests:
                message = f"more than {self._options.requests} requests at a time; try again in a moment"
                raise RefusalError(429, message, "overloaded")
            body = Body(await self._json(request)) if request.method == "POST" else Body({})
            return await self._unless_gone(request, endpoint(request, body))
        except RefusalError as error:
            return refusal_response(path, error)
        except QueueFullError as error:
            return refusal_response(path, RefusalError(429, str(error), "overloaded"))
        except ClientDisconnect:
            return None
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            debug_fields = {"traceback": traceback.format_exc()} if self._debug else {}
            log_event("error", request=number, path=path[:200], message=message[:2000], **debug_fields)
            return refusal_response(path, RefusalError(500, f"internal error; the log has it as request {number}"))

    def _admit(self, request: Request, path: str) -> None:
        """Raise `RefusalError` for a request without the token, or, on a server without one, for another host."""
        if self._token:
            scheme, _, word = request.headers.get("authorization", "").partition(" ")
            token = word.strip().encode() if scheme.lower() == "bearer" else b""
            if path not in OPEN and not hmac.compare_digest(token, self._token):
                raise RefusalError(401, "this server needs its token: Authorization: Bearer TOKEN", "unauthorized")
            return
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if not is_loopback(name):  # the name of a web page's host may resolve to this machine
            raise RefusalError(403, "without a token this server answers only localhost", "forbidden")

    def _endpoint(self, method: str, path: str) -> Endpoint:
        method = "GET" if method == "HEAD" else method
        route = self._route(path)
        if (method, route) in self._endpoints:
            return self._endpoints[method, route]
        if route:
            headers = {"allow": ", ".join(method for method, path in self._endpoints if path == route)}
            raise RefusalError(405, f"{path} has no method {method:.10}", "method_not_allowed", headers)
        raise RefusalError(404, "there is no such path", "not_found")

    def _route(self, path: str) -> str:
        """Return the path of the endpoints that a path belongs to; "" if there are none."""
        if path in self._paths:
            return path
        return next((folder for folder in self._folders if path.startswith(folder)), "")

    async def _json(self, request: Request) -> Any:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page may send other types to this server without permission
            raise RefusalError(415, "send JSON, with Content-Type: application/json", "unsupported_media_type")
        data = await self._body(request)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            place = f": {error}" if isinstance(error, json.JSONDecodeError) else ""
            raise RefusalError(400, f"the body is not JSON{place}") from None

    async def _body(self, request: Request) -> bytes:
        """Read a body within the limits of size and time."""
        limit, size = self._options.most_bytes, 0
        parts: list[bytes] = []
        length = request.headers.get("content-length", "0")
        too_large = length.isdecimal() and int(length) > limit
        try:
            async with asyncio.timeout(_DRAINED_SECONDS if too_large else self._options.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > limit and not too_large:
                        too_large, parts = True, []
                    if too_large and size > _DRAINED_BYTES:
                        break
                    if not too_large:
                        parts.append(part)
        except TimeoutError:
            if not too_large:
                seconds = self._options.body_seconds
                raise RefusalError(408, f"the request did not arrive in {seconds:g} s", "timeout") from None
        if too_large:
            raise RefusalError(413, f"the body has more than {limit} bytes, --most_bytes of the server", "too_large")
        return b"".join(parts)

    async def _unless_gone(self, request: Request, answer: Awaitable[Response]) -> Response | None:
        """Await an answer. If the client disconnects first, cancel it and return None."""
        answer_task = asyncio.ensure_future(answer)
        disconnect_task = asyncio.ensure_future(_wait_for_disconnect(request.receive))
        try:
            async with asyncio.timeout(self._options.answer_seconds):
                await asyncio.wait({answer_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
            if answer_task.done():
                return answer_task.result()
            return None
        except TimeoutError:
            seconds = self._options.answer_seconds
            raise RefusalError(504, f"the answer took longer than {seconds:g} s", "timeout") from None
        finally:
            answer_task.cancel()
            disconnect_task.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


def is_loopback(host: str) -> bool:
    """Return whether a name or an address (IPv6 with or without brackets) is a loopback address of this machine."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refusal_response(path: str, error: RefusalError) -> Response:
    """Return an error in the form of the interface of a path."""
    # A message may quote a request, and its JSON may have half of a surrogate pair.
    message = str(error).encode("utf-8", "backslashreplace").decode()
    if path in ("/embed", "/embed_all", "/embed_sparse", "/rerank"):
        kind = _ERROR_TYPES.get(error.status, "backend" if error.status >= 500 else "validation")
        content: dict[str, Any] = {"error": message, "message": message, "code": error.status, "error_type": kind}
    else:
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        content = {"error": {"message": message, "type": kind, "param": None, "code": error.code}}
    headers = error.headers | ({"connection": "close"} if error.status in (408, 413) else {})
    if error.status in (429, 503):
        headers["retry-after"] = "1"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(content, error.status, headers)
