"""Servers of buckets on loopback, for tests. No address of another machine is contacted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.storage.fake_gcs import FakeGcs

# Clients look for credentials at addresses of the cloud unless they are told not to.
LOOPBACK = {
    "GCE_METADATA_HOST": "127.0.0.1:9",
    "GCE_METADATA_ROOT": "127.0.0.1:9",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}


@contextmanager
def gcs_server() -> Iterator[tuple[FakeGcs, dict[str, str]]]:
    """Serve a fake of GCS with the bucket gs://bucket; yield it, and the environment of its clients."""
    server = FakeGcs()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server, {**os.environ, **LOOPBACK, "TENSORSTORE_GCS_HTTP_URL": server.url}
    finally:
        server.shutdown()
        server.server_close()
