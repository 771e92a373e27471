"""An in-memory fake of Google Cloud Storage's JSON API: the part that TensorStore uses, with its preconditions.

`python fake_gcs.py PORT` serves it on loopback.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 1000  # objects per list


class FakeGcs(ThreadingHTTPServer):
    """A server with the objects of all buckets: name -> generation and bytes."""

    request_queue_size = 128
    daemon_threads = True

    def __init__(self, port: int = 0, buckets: tuple[str, ...] = ("bucket",)) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.buckets = buckets
        self.objects: dict[tuple[str, str], tuple[int, bytes]] = {}
        self.generation = 1000
        self.lock = threading.Lock()
        self.requests: list[tuple[str, str]] = []  # method, and name of the object or prefix of the list
        self.lost: Callable[[str], bool] = lambda name: False  # returns whether the answer to a write is lost
        self.read_only = False
        self.delay = 0.0  # seconds before each answer
        self.at_once = self.most_at_once = 0  # requests at the same time
        self.before: Callable[[int], None] = lambda number: None  # called with the number of each request

    def handle_error(self, *_: object) -> None:
        """Ignore errors of killed clients."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # each answer is one packet, which is sent at once: otherwise it takes 40 ms
    disable_nagle_algorithm = True
    server: FakeGcs

    def log_message(self, *_: object) -> None:
        pass

    def _reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _lose(self, *_: object) -> None:
        """Close the connection without an answer."""
        self.close_connection = True

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        parts = url.path.strip("/").split("/")
        bucket = parts[parts.index("b") + 1]
        if bucket not in self.server.buckets:
            return self._reply(404, b'{"error": {"message": "The specified bucket does not exist."}}')
        with self.server.lock:
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.at_once, self.server.most_at_once)
        time.sleep(self.server.delay)
        with self.server.lock:
            self.server.at_once -= 1
            self.server.requests.append((self.command, query.get("name") or unquote(parts[-1])))
            self.server.before(len(self.server.requests))
            if self.server.read_only and self.command != "GET":
                return self._reply(403, b'{"error": {"message": "no rights to write"}}')
            if parts[0] == "upload":
                if self.server.lost(query["name"]):
                    self._reply = self._lose  # type: ignore[method-assign, assignment]
                return self._write(bucket, query["name"], query, body)
            if parts[-1] == "o":
                return self._list(bucket, query)
            name = unquote(parts[-1])
            if self.command == "DELETE":
                return self._delete(bucket, name, query)
            return self._read(bucket, name, query)

    do_GET = do_POST = do_DELETE = _handle  # noqa: N815 (http.server's names)

    def _refused(self, bucket: str, name: str, query: dict[str, str]) -> bool:
        generation, _ = self.server.objects.get((bucket, name), (0, b""))
        return "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != generation

    def _write(self, bucket: str, name: str, query: dict[str, str], body: bytes) -> None:
        if self._refused(bucket, name, query):
            return self._reply(412, b"{}")
        self.server.generation += 1
        self.server.objects[bucket, name] = (self.server.generation, body)
        self._reply(200, json.dumps({"name": name, "generation": str(self.server.generation)}).encode())

    def _delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        if self._refused(bucket, name, query):
            return self._reply(412, b"{}")
        return self._reply(204 if self.server.objects.pop((bucket, name), None) else 404)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        names = sorted(
            name
            for owner, name in self.server.objects
            if owner == bucket
            and name.startswith(query.get("prefix", ""))
            and name >= query.get("startOffset", "")
            and ("endOffset" not in query or name < query["endOffset"])
        )
        start = int(query.get("pageToken", 0))
        items = [
            {"name": name, "generation": str(generation), "size": str(len(data))}
            for name in names[start : start + PAGE]
            for generation, data in [self.server.objects[bucket, name]]
        ]
        more = {"nextPageToken": str(start + PAGE)} if len(names) > start + PAGE else {}
        self._reply(200, json.dumps({"items": items, **more}).encode())

    def _read(self, bucket: str, name: str, query: dict[str, str]) -> None:
        if (bucket, name) not in self.server.objects:
            return self._reply(404)
        generation, data = self.server.objects[bucket, name]
        if query.get("alt") != "media":
            facts = {"name": name, "generation": str(generation), "size": str(len(data))}
            return self._reply(200, json.dumps(facts).encode())
        if int(query.get("ifGenerationNotMatch", -1)) == generation:
            return self._reply(304)
        headers = {"x-goog-generation": str(generation)}
        if span := self.headers.get("Range"):
            first, _, last = span.removeprefix("bytes=").partition("-")
            start = len(data) - int(last) if first == "" else int(first)
            end = len(data) - 1 if first == "" or last == "" else min(int(last), len(data) - 1)
            if start >= len(data):
                return self._reply(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            return self._reply(206, data[start : end + 1], headers)
        self._reply(200, data, headers)


if __name__ == "__main__":
    FakeGcs(int(sys.argv[1])).serve_forever()
