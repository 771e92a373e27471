"""Objects of a bucket on gs:// or s3://: get, create if absent, replace if unchanged, put, list, delete.

TensorStore is the client, so that checkpoints and all other objects share endpoints, credentials and retries. For S3,
the variables are AWS_ENDPOINT_URL (any server with conditional writes), AWS_REGION and the usual credentials; for GCS,
TENSORSTORE_GCS_HTTP_URL and Google's default credentials.

The answer to a conditional write can be lost: the server has the bytes, and the client's retry gets the answer that the
object exists. So after a refusal the object is read, and equal bytes count as written. Therefore small bodies need a
random part (`salted_json`). It also prevents a repeated S3 version, which is an MD5.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from jaxret.storage.atomic import StorageError

if TYPE_CHECKING:
    import tensorstore

SCHEMES = {"gs": "gcs", "s3": "s3"}  # TensorStore's drivers
ADDRESS = "gs://BUCKET/FOLDER or s3://BUCKET/FOLDER"
# TensorStore's default limits retry an unreachable server for minutes.
_RETRIES = {"max_retries": 5, "initial_delay": "100ms", "max_delay": "2s"}
# By default, TensorStore waits forever for a server that accepts a connection and sends nothing.
_SILENCE = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "20", "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1"}
_FIRST_ANSWER = 25  # seconds to wait for the first answer of a bucket; later ones, such as to uploads, may take longer
_ANSWERED: set[str] = set()  # buckets that have answered this process
_ATTEMPTS, _PAUSE = 8, 0.1  # attempts of a conditional write, and seconds between them
PART = 32 << 20  # bytes that are read or written at a time, because TensorStore holds a request in memory
_SEVERAL = 32  # number of requests at a time
_ABSENT = b"\x02"  # TensorStore's version of an object that does not exist, for every driver
_CAUSES = {
    "NOT_FOUND": "there is no such bucket",
    "PERMISSION_DENIED": "no permission, or wrong credentials",
    "UNAUTHENTICATED": "wrong or missing credentials",
    "UNAVAILABLE": "the server does not answer",
    "DEADLINE_EXCEEDED": "the server does not answer",
    "RESOURCE_EXHAUSTED": "the server has too many requests, or the quota is used up",
    "ABORTED": "the server gave up after several attempts",
}


class BucketError(StorageError):
    """A bucket cannot be read or written; the message has the address and the cause."""


@dataclass(frozen=True)
class BucketObject:
    """The bytes of an object, and its version, which changes when the object is written."""

    body: bytes
    version: bytes


def salted_json(value: Mapping[str, Any]) -> bytes:
    """Return a mapping as JSON with a random "salt", so that a writer recognizes its own bytes."""
    return json.dumps({**value, "salt": secrets.token_hex(8)}, sort_keys=True).encode()


class Bucket:
    """The objects below an address; keys do not contain the address. Opening it sends no request.

    Methods raise BucketError if the server refuses or does not answer. A bucket that does not exist looks empty;
    `probe` detects it.

    Args:
        address: gs://BUCKET/FOLDER or s3://BUCKET/FOLDER.

    Raises:
        ValueError: the address is of another kind.
    """

    def __init__(self, address: str) -> None:
        match = re.fullmatch(r"(gs|s3)://?([^/]+)(?:/(.*))?", address, re.DOTALL)
        if not match:
            raise ValueError(f"{address}: not the address of a folder in a bucket, {ADDRESS}")
        self.scheme, self.name, self.folder = match[1], match[2], (match[3] or "").strip("/")
        if any(part in (".", "..") for part in self.folder.split("/")):
            raise ValueError(f"{address}: a folder in a bucket has no part . or ..")
        self.address = "/".join(filter(None, (f"{self.scheme}://{self.name}", self.folder)))

    def __str__(self) -> str:
        return self.address

    @cached_property
    def _store(self) -> tensorstore.KvStore:
        import tensorstore

        driver = {"driver": SCHEMES[self.scheme], "bucket": self.name, "path": f"{self.folder}/" if self.folder else ""}
        if self.scheme == "s3":
            driver["aws_region"] = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
            if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
                driver["endpoint"] = endpoint.rstrip("/")
            if os.environ.get("AWS_ACCESS_KEY_ID"):
                driver["aws_credentials"] = {"type": "environment"}  # the default also asks a server of the cloud
        context = tensorstore.Context({f"{SCHEMES[self.scheme]}_request_retries": _RETRIES})
        for name, value in _SILENCE.items():
            os.environ.setdefault(name, value)
        with _errors(self.address):
            return tensorstore.KvStore.open(driver, context=context).result()

    def _answer(self, future: Any) -> Any:
        """Return the result of a request. Raises ValueError, as TensorStore does, if the bucket
        never answered and does not answer in time."""
        bucket = f"{self.scheme}://{self.name}"
        try:
            result = future.result(timeout=None if bucket in _ANSWERED else _FIRST_ANSWER)
        except TimeoutError:
            raise ValueError(f"UNAVAILABLE: no answer within {_FIRST_ANSWER} seconds") from None
        _ANSWERED.add(bucket)
        return result

    def get(self, key: str) -> BucketObject | None:
        """Return an object, or None if it does not exist."""
        return next(iter(self.get_several([key])))

    def get_several(self, keys: Iterable[str], at_once: int = _SEVERAL) -> Iterator[BucketObject | None]:
        """Yield the objects of some keys in their order; None for a key without an object.

        At most `at_once` objects are in memory in addition to the one that was yielded.
        """
        remaining_keys = iter(list(keys))
        requests = deque((key, self._store.read(key)) for key in islice(remaining_keys, at_once))
        while requests:
            key, request = requests.popleft()
            with _errors(f"{self.address}/{key}"):
                result = self._answer(request)
            requests.extend((key, self._store.read(key)) for key in islice(remaining_keys, 1))
            is_missing = result.state == "missing"
            yield None if is_missing else BucketObject(bytes(result.value), bytes(result.stamp.generation))

    def version(self, key: str) -> bytes | None:
        """Return the version of an object, or None if it does not exist."""
        with _errors(f"{self.address}/{key}"):
            result = self._answer(self._store.read(key, byte_range=slice(0, 0)))
        return None if result.state == "missing" else bytes(result.stamp.generation)

    def parts(self, key: str, version: bytes) -> Iterator[bytes]:
        """Yield the bytes of an object in parts of PART bytes, so that memory does not grow with its size.

        Raises BucketError if the object has another version now.
        """
        start, ended = 0, False
        while not ended:
            with _errors(f"{self.address}/{key}"):
                try:
                    result = self._answer(self._store.read(key, byte_range=slice(start, start + PART)))
                except ValueError as error:
                    if not str(error).startswith("OUT_OF_RANGE"):
                        raise
                    result = self._answer(self._store.read(key, byte_range=slice(start, None)))
                    ended = True
            if bytes(result.stamp.generation) != version:
                raise BucketError(f"{self.address}/{key} was changed while it was read; run the command again")
            ended |= len(result.value) < PART
            start += len(result.value)
            yield bytes(result.value)

    def create(self, key: str, body: bytes) -> bool:
        """Write an object unless it exists. Return whether it now has these bytes."""
        return self._write_if(key, body, _ABSENT)

    def replace(self, key: str, body: bytes, version: bytes) -> bool:
        """Write an object if it still has a given version. Return whether it now has these bytes."""
        return self._write_if(key, body, version)

    def _write_if(self, key: str, body: bytes, version: bytes) -> bool:
        for _ in range(_ATTEMPTS):
            with _errors(f"{self.address}/{key}"):
                if self._answer(self._store.write(key, body, if_equal=version)).generation != b"":
                    return True
            current = self.get(key)
            if current is not None and current.body == body:
                return True
            if (current.version if current else _ABSENT) != version:
                return False
            # Refused, though nothing was changed: S3 answers so during another write, and if the bucket does not exist.
            time.sleep(_PAUSE)
        raise BucketError(f"{self.address}/{key}: the server refuses it; is there a bucket {self.name}?")

    def put(self, key: str, body: bytes) -> None:
        """Write an object unconditionally."""
        with _errors(f"{self.address}/{key}"):
            self._answer(self._store.write(key, body))

    def list(self, folder: str = "") -> list[str]:
        """Return the keys of all objects below a folder, sorted."""
        import tensorstore

        keys = tensorstore.KvStore.KeyRange(f"{folder}/", f"{folder}0") if folder else tensorstore.KvStore.KeyRange()
        with _errors(f"{self.address}/{folder}"):
            return sorted(key.decode() for key in self._answer(self._store.list(keys)))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, several at a time. A missing object is not an error."""
        for batch in _batches(list(keys)):
            futures = [(key, self._store.write(key, None)) for key in batch]
            for key, future in futures:
                with _errors(f"{self.address}/{key}"):
                    self._answer(future)

    def probe(self) -> None:
        """Write, replace and delete a small object.

        Raises BucketError if the bucket does not exist, cannot be written, or ignores the conditions of writes, which
        protect the files of several jobs.
        """
        key = f".probe-{secrets.token_hex(8)}"
        first, second, third = (salted_json({}) for _ in range(3))
        try:
            is_written = self.create(key, first)
        except BucketError as error:
            cause = str(error).removeprefix(f"{self.address}/{key}: ")
            raise BucketError(f"{self.address} cannot be written: {cause}") from error
        if not is_written:
            raise BucketError(f"{self.address}: an object that was just written cannot be read")
        try:
            first_version = self.get(key)
            if (
                first_version is None
                or self.create(key, second)
                or not self.replace(key, second, first_version.version)
            ):
                raise BucketError(self._unconditional("the creation of an object that exists"))
            if self.replace(key, third, first_version.version):
                raise BucketError(self._unconditional("the replacement of an object that changed"))
        finally:
            self.delete([key])

    def _unconditional(self, write: str) -> str:
        return (
            f"{self.address}: the server accepts {write} (it ignores If-None-Match and If-Match), so that jobs would "
            "overwrite each other's files; use a server with conditional writes (docs/buckets.md)"
        )


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(keys), _SEVERAL):
        yield keys[start : start + _SEVERAL]


@contextlib.contextmanager
def _errors(address: str) -> Iterator[None]:
    """Turn TensorStore's errors, which are ValueErrors, into BucketErrors in the block."""
    try:
        yield
    except ValueError as error:
        text = " ".join(str(error).split())
        word = re.match(r"[A-Z_]+", text)
        cause = _CAUSES.get(word[0] if word else "", "the request failed")
        text = re.split(r" \[[\w-]+='", text)[0]  # without TensorStore's annotations, one of which is a page of XML
        text = " ".join(re.sub(r"<[^<>]*>", " ", text).split())  # without the tags of a proxy's page
        raise BucketError(f"{address}: {cause} ({text[:300]})") from error
