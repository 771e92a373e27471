"""Objects of a bucket, and working copies of folders in it. TensorStore reads its endpoint once a process, so each test
runs a script in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.storage.buckets import gcs_server
from tests.storage.fake_gcs import FakeGcs

Server = tuple[FakeGcs, dict[str, str]]


@pytest.fixture
def gcs() -> Iterator[Server]:
    with gcs_server() as server:
        yield server


def run_script(text: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_conditions_decide_who_writes(gcs: Server) -> None:
    script = """
from jaxret.storage.bucket import Bucket
bucket = Bucket("gs://bucket/folder")
bucket.probe()
assert bucket.list() == []
assert bucket.create("a", b"1") and not bucket.create("a", b"2") and bucket.create("a", b"1")
first = bucket.get("a")
assert bucket.replace("a", b"3", first.version) and not bucket.replace("a", b"4", first.version)
assert bucket.get("a").body == b"3" and bucket.get("b") is None and bucket.list() == ["a"]
"""
    run_script(script, gcs[1])
    assert [name for _, name in gcs[0].objects] == ["folder/a"]


def test_a_missing_bucket_and_a_dead_server_are_one_sentence(gcs: Server) -> None:
    script = """
from jaxret.storage.bucket import Bucket, BucketError
try:
    Bucket("gs://other/folder").probe()
except BucketError as error:
    print(error)
"""
    assert "there is no such bucket" in run_script(script, gcs[1])
    dead = run_script(script, {**gcs[1], "TENSORSTORE_GCS_HTTP_URL": "http://127.0.0.1:9"})
    assert "Could not connect" in dead


def test_a_working_copy_publishes_what_was_changed_and_refuses_what_another_job_has_changed(gcs: Server) -> None:
    script = """
import sys
from jaxret.storage.bucket_folder import ChangedFolderError
from jaxret.storage.working_copy import WorkingCopy
one, two = WorkingCopy("gs://bucket/run"), WorkingCopy("gs://bucket/run")
one.path.mkdir(), two.path.mkdir()
(one.path / "config.json").write_text("1")
(one.path / ".lock").write_text("of this host")
one.publish()
(two.path / "other.json").write_text("2")
two.publish()
two.refresh()
assert (two.path / "config.json").read_text() == "1" and not (two.path / ".lock").exists()
(one.path / "config.json").write_text("one")
(two.path / "config.json").write_text("two")
two.publish()
try:
    one.publish()
    sys.exit("both have written config.json")
except ChangedFolderError as error:
    assert "config.json" in str(error)
three = WorkingCopy("gs://bucket/run")
assert {path.name: path.read_text() for path in three.path.iterdir()} == {"config.json": "two", "other.json": "2"}
for copy in (one, two, three):
    copy.remove()
"""
    run_script(script, gcs[1])
    assert len(gcs[0].objects) == 4, "the manifest, two files, and what the refused job wrote"
