"""Objects of a bucket, and working copies of its folders. TensorStore reads its endpoint once per process, so each test
runs a script in a new process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from jaxret.storage.atomic import sha256_json
from jaxret.storage.buckets.bucket import BucketObject
from jaxret.storage.buckets.bucket_folder import BucketFolder
from tests.pipeline import REPOSITORY
from tests.storage.buckets.servers import Server, gcs_server, s3_server

NO_BYTES = sha256(b"").hexdigest().encode()


@pytest.fixture
def gcs() -> Iterator[Server]:
    with gcs_server() as server:
        yield server


def start_script(text: str, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", text, *arguments],
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(job: subprocess.Popen[str]) -> str:
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 0, errors
    return output


def run_script(text: str, environment: dict[str, str], *arguments: str) -> str:
    return finish(start_script(text, environment, *arguments))


def test_conditions_decide_who_writes(gcs: Server) -> None:
    script = """
from jaxret.storage.buckets.bucket import Bucket
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
from jaxret.storage.buckets.bucket import Bucket, BucketError
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
import shutil, sys
from jaxret.storage.buckets.bucket_folder import ChangedFolderError
from jaxret.storage.buckets.working_copy import WorkingCopy
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
(one.path / "a/b").mkdir(parents=True)
(one.path / "a/b/c").write_text("c")
one.path.joinpath("config.json").write_text("two")
one.publish()
two.refresh()
assert (two.path / "a/b/c").exists()
shutil.rmtree(one.path / "a")
one.publish()
two.refresh()
assert not (two.path / "a").exists()
three = WorkingCopy("gs://bucket/run")
assert {path.name: path.read_text() for path in three.path.iterdir()} == {"config.json": "two", "other.json": "2"}
for copy in (one, two, three):
    copy.remove()
"""
    run_script(script, gcs[1])
    assert len(gcs[0].objects) == 3, "the manifest and two files, but nothing from the refused job"


RACE = """
import json, sys, time
from jaxret.storage.buckets.bucket import Bucket, BucketError, salted_json
address, number, keys, sums = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
bucket = Bucket(address)
for attempt in range(100):  # a server that has just begun may have no bucket yet
    try:
        bucket.put(f"here/{number}", b"")
        break
    except BucketError:
        time.sleep(0.2)
while len(bucket.list("here")) < 2:
    time.sleep(0.01)
won = []
for key in range(keys):
    body = salted_json({"number": number})
    if bucket.create(f"key/{key}", body):
        won.append(key)
        assert bucket.get(f"key/{key}").body == body
bucket.create("sum", salted_json({"sum": 0}))
for _ in range(sums):
    while True:
        current = bucket.get("sum")
        total = json.loads(current.body)["sum"]
        if bucket.replace("sum", salted_json({"sum": total + 1}), current.version):
            break
print(json.dumps(won))
"""


def race(environment: dict[str, str], address: str, keys: int = 200, sums: int = 50) -> None:
    """Two processes create the same keys, then add to one sum; each key has one creator, and no addition is lost."""
    jobs = [start_script(RACE, environment, address, str(number), str(keys), str(sums)) for number in range(2)]
    won = [json.loads(finish(job)) for job in jobs]
    assert sorted(won[0] + won[1]) == list(range(keys))
    total = run_script(
        "import sys; from jaxret.storage.buckets.bucket import Bucket; "
        "print(Bucket(sys.argv[1]).get('sum').body.decode())",
        environment,
        address,
    )
    assert json.loads(total)["sum"] == 2 * sums


@pytest.mark.slow
def test_one_of_two_creators_of_an_object_wins(gcs: Server) -> None:
    race(gcs[1], "gs://bucket/race")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moto", "weed"])
def test_one_of_two_creators_of_an_object_wins_on_s3(kind: str, tmp_path: Path) -> None:
    with s3_server(kind, tmp_path) as environment:
        race(environment, "s3://bucket/race")
        run_script(WRITER, environment, "s3://bucket/run", "new")
        assert run_script(READER, environment, "s3://bucket/run") == "new\n"


def test_a_server_that_ignores_conditions_is_refused(tmp_path: Path) -> None:
    with s3_server("rclone", tmp_path) as environment:
        script = "from jaxret.storage.buckets.bucket import Bucket; Bucket('s3://bucket/x').probe()"
        job = start_script(script, environment)
        _, errors = job.communicate(timeout=60)
        assert job.returncode == 1
        assert "s3://bucket/x: the server accepts the creation of an object that exists" in errors


def test_a_lost_response_is_no_conflict(gcs: Server) -> None:
    lost: set[str] = set()

    def lose(name: str) -> bool:  # loses the first answer to each write
        return name not in lost and not lost.add(name)  # type: ignore[func-returns-value]

    gcs[0].lost = lose
    script = """
from jaxret.storage.buckets.bucket import Bucket, salted_json
bucket = Bucket("gs://bucket/folder")
for number in range(12):
    assert bucket.create(f"{number}", salted_json({})), number
    current = bucket.get(f"{number}")
    assert bucket.replace(f"{number}", salted_json({}), current.version), number
"""
    run_script(script, gcs[1])
    assert len(lost) == 12


WRITER = """
import sys
from jaxret.storage.buckets.working_copy import local_path, publish_all
folder = local_path(sys.argv[1])
folder.mkdir(exist_ok=True)
for number in range(10):
    (folder / f"{number}.txt").write_text(f"{sys.argv[2]} {number}")
publish_all()
"""
READER = """
import sys
from jaxret.storage.buckets.working_copy import local_path
folder = local_path(sys.argv[1])
texts = [(folder / f"{number}.txt").read_text().split() for number in range(10)]
assert [number for _, number in texts] == list("0123456789"), texts
print(*{state for state, _ in texts})
"""


@pytest.mark.daily("first")
@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(999, id="first"), 5, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_writer_that_is_killed_at_any_request_leaves_the_old_state_or_the_new(gcs: Server, every: int) -> None:
    server, environment = gcs
    run_script(WRITER, environment, "gs://bucket/run", "0")
    first = len(server.requests)
    run_script(WRITER, environment, "gs://bucket/run", "1")
    requests, states = len(server.requests) - first, set()
    for number in range(1, requests + 1, every):
        before = run_script(READER, environment, "gs://bucket/run").strip()
        job = start_script(WRITER, environment, "gs://bucket/run", f"{number + 1}")
        last = len(server.requests) + number

        def kill(count: int, job: subprocess.Popen[str] = job, last: int = last) -> None:
            if count == last:
                os.kill(job.pid, signal.SIGKILL)
                job.wait()

        server.before = kill
        job.communicate(timeout=60)
        server.before = lambda count: None
        killed = job.returncode == -signal.SIGKILL  # requests are sent in parallel, so their number varies slightly
        after = run_script(READER, environment, "gs://bucket/run").strip()
        assert after in ([before] if killed else []) + [f"{number + 1}"]
        states.add((killed, after == before))
        run_script(WRITER, environment, "gs://bucket/run", f"again{number}")
        assert run_script(READER, environment, "gs://bucket/run").strip() == f"again{number}"
    assert (True, True) in states


@pytest.mark.slow
def test_the_processes_of_a_host_fetch_a_file_once_and_compare_its_digest(gcs: Server, tmp_path: Path) -> None:
    server, environment = gcs
    environment["XDG_CACHE_HOME"] = str(tmp_path / "writer")
    script = """
import sys
from pathlib import Path
from jaxret.storage.buckets.working_copy import local_path, publish_all
folder = local_path("gs://bucket/run")
folder.mkdir()
(folder / "large.bin").write_bytes(bytes(range(256)) * (40 << 12))  # 40 MiB, two objects
publish_all()
"""
    run_script(script, environment)
    assert sum("data/" in name for _, name in server.objects) == 2
    environment["XDG_CACHE_HOME"] = str(tmp_path / "readers")
    fetch = """
import hashlib
from jaxret.storage.buckets.working_copy import local_path
print(hashlib.sha256((local_path("gs://bucket/run") / "large.bin").read_bytes()).hexdigest())
"""
    first = len(server.requests)
    jobs = [start_script(fetch, environment) for _ in range(3)]
    assert len(set(map(finish, jobs))) == 1
    reads = [name for method, name in server.requests[first:] if method == "GET" and "data/" in name]
    assert len(reads) == 2, "each object is read once for three processes"
    key = next(key for key in server.objects if "data/" in key[1])
    generation, data = server.objects[key]
    server.objects[key] = generation, b"!" + data[1:]
    environment["XDG_CACHE_HOME"] = str(tmp_path / "later")
    job = start_script(fetch, environment)
    assert "gs://bucket/run/large.bin is damaged in the bucket or on the way" in job.communicate(timeout=60)[1]


@pytest.mark.parametrize(
    ("name", "body", "problem"),
    [
        ("files.json", b"[1]", "is damaged, or another program's"),
        ("files.json", b"\xff", "is damaged, or another program's"),
        ("files.json", b'{"files": {"a": 1}, "sha256": "0"}', "is damaged, or another program's"),
        ("files.json", b'{"files": {"a": ["%s", 0]}, "sha256": "0"}' % NO_BYTES, "is damaged, or another program's"),
        ("a/../../evil.txt", b"x", "is not that of a file in a folder"),
    ],
)
def test_object_names_cannot_leave_the_working_copy(name: str, body: bytes, problem: str, gcs: Server) -> None:
    gcs[0].objects["bucket", f"run/{name}"] = 1, body
    job = start_script(
        "from jaxret.storage.buckets.working_copy import local_path; local_path('gs://bucket/run')", gcs[1]
    )
    assert problem in job.communicate(timeout=60)[1]


@pytest.mark.parametrize("name", ["../mine.txt", "a/../../mine.txt", "ABSOLUTE"])
def test_no_manifest_names_a_file_outside_of_the_destination(name: str, gcs: Server, tmp_path: Path) -> None:
    own_file = tmp_path / "mine.txt"
    own_file.write_text("mine")
    script = """
import sys
from pathlib import Path
from jaxret.storage.buckets.bucket import BucketError
from jaxret.storage.buckets.bucket_folder import MANIFEST, BucketFolder, _body
from jaxret.storage.buckets.copy_folder import copy_folder
folder, (own_file, destination, name) = BucketFolder("gs://bucket/run"), sys.argv[1:]
folder.bucket.create(MANIFEST, _body(folder.upload({name: Path(f"{own_file}.evil")})))
try:
    copy_folder("gs://bucket/run", destination)
except BucketError as error:
    assert "is not that of a file in a folder" in str(error), error
else:
    raise AssertionError("copied")
"""
    Path(f"{own_file}.evil").write_text("evil")
    run_script(script, gcs[1], str(own_file), str(tmp_path / "copy"), str(own_file) if name == "ABSOLUTE" else name)
    assert own_file.read_text() == "mine"
    assert not (tmp_path / "copy").exists()


def test_objects_of_other_programs_are_read_and_not_written(gcs: Server) -> None:
    gcs[0].objects["bucket", "data/corpus.jsonl"] = 1, b"text"
    gcs[0].objects["bucket", "data/empty"] = 2, b""
    script = """
from jaxret.storage.buckets.bucket import BucketError
from jaxret.storage.buckets.working_copy import local_path, publish_all, shown_path
assert local_path("gs://bucket/data/corpus.jsonl").read_text() == "text"
folder = local_path("gs://bucket/data")
assert (folder / "empty").read_bytes() == b""
assert shown_path(folder / "corpus.jsonl") == "gs://bucket/data/corpus.jsonl"
publish_all()
folder = local_path("gs://bucket/data")
(folder / "new").write_text("x")
try:
    publish_all()
except BucketError as error:
    print(error)
"""
    assert "only reads them" in run_script(script, gcs[1])
    result = """
from jaxret.storage.buckets.working_copy import local_path, publish_all
local_path("gs://bucket/results/table.html").write_text("table")
publish_all()
"""
    run_script(result, gcs[1])
    assert gcs[0].objects["bucket", "results/table.html"][1] == b"table", "a result is an ordinary object"


def test_a_copy_continues_and_comes_back_the_same(gcs: Server, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    texts = {"config.json": "{}", "sub/a b.txt": "text", "sub/empty": "", "ümlaut\n.txt": "x"}
    for name, text in texts.items():
        (source / name).write_text(text)
    (source / ".lock").write_text("of this host")

    def copy(one: str | Path, other: str | Path) -> str:
        words = [sys.executable, "-m", "jaxret", "copy", str(one), str(other)]
        environment = {**gcs[1], "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
        return done.stdout or done.stderr

    assert "4 files, 0.0 MB in gs://bucket/copy: 4 copied" in copy(source, "gs://bucket/copy")
    (source / "sub" / "new.txt").write_text("new")
    assert ": 1 copied" in copy(source, "gs://bucket/copy")
    assert ": 5 copied" in copy("gs://bucket/copy", "gs://bucket/second")
    assert ": 5 copied" in copy("gs://bucket/second", tmp_path / "back")
    back = {path.relative_to(tmp_path / "back").as_posix(): path for path in (tmp_path / "back").rglob("*")}
    assert {name: path.read_text() for name, path in back.items() if path.is_file()} == {**texts, "sub/new.txt": "new"}
    gcs[0].objects["bucket", "plain/corpus.jsonl"] = 1, b"text"
    assert "holds objects that jaxret has not written, such as corpus.jsonl" in copy(source, "gs://bucket/plain")
    assert "1 copied" in copy("gs://bucket/plain", tmp_path / "plain")
    # The objects of a job that was killed before its first manifest.
    for key in (f".probe-{'0' * 16}", f"data/{'1' * 16}-{'2' * 64}"):
        gcs[0].objects["bucket", f"killed/{key}"] = 1, b"text"
    assert ": 5 copied" in copy(source, "gs://bucket/killed")
    (source / ".lock.json").write_text("{}")
    assert "a job writes there" in copy(source, "gs://bucket/third")


def test_few_parts_of_a_large_file_are_read_ahead(gcs: Server) -> None:
    """A part has 32 MiB, and eight files are read at the same time."""
    script = """
from jaxret.storage.buckets.bucket import Bucket
from jaxret.storage.buckets.bucket_folder import BucketFolder, StoredFile
bucket = Bucket("gs://bucket/run")
keys = tuple(f"data/{number}" for number in range(20))
for key in keys:
    bucket.put(key, b"x")
parts = BucketFolder(bucket)._parts("file", StoredFile("", 20, keys))
bucket.get("marker")
next(parts), next(parts)
bucket.get("marker")
"""
    run_script(script, gcs[1])
    names = [name for _, name in gcs[0].requests]
    first, last = [place for place, name in enumerate(names) if name.endswith("marker")]
    assert 2 <= last - first - 1 <= 4


KILLED_COPY = """
import os, sys
from jaxret.storage.buckets import copy_folder
copy_folder._PUBLISHED_AFTER = 0.0
def show(size):
    global files
    files += 1
    if files == 150:
        os.kill(os.getpid(), 9)
files = 0
copy_folder.copy_folder(*sys.argv[1:], show=show)
"""


@pytest.mark.parametrize("source", ["disk", "bucket"])
def test_a_killed_copy_does_not_send_again_what_was_published(source: str, gcs: Server, tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / "run" / "files" / str(number)).mkdir(parents=True)
        (tmp_path / "run" / "files" / str(number) / "x").write_text(str(number))
    (tmp_path / "run" / "contract.json").write_text("{}")
    (tmp_path / "run" / "a.json").write_text("{}")
    words = [sys.executable, "-m", "jaxret", "copy"]
    environment = {**gcs[1], "PYTHONPATH": str(REPOSITORY)}

    def copy(one: str, other: str) -> str:
        return subprocess.run([*words, one, other], env=environment, capture_output=True, text=True, timeout=120).stdout

    address = str(tmp_path / "run")
    if source == "bucket":
        assert ": 202 copied" in copy(address, "gs://bucket/source")
        address = "gs://bucket/source"
    gcs[0].delay = 0.02
    killed = start_script(KILLED_COPY, gcs[1], address, "gs://bucket/copy")
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    published = json.loads(gcs[0].objects["bucket", "copy/files.json"][1])["files"]
    assert len(published) == 128
    assert "contract.json" not in published
    assert gcs[0].most_at_once > 4
    gcs[0].delay = 0.0
    assert ": 74 copied" in copy(address, "gs://bucket/copy")


def test_many_groups_are_listed_by_one_request(gcs: Server, tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from jaxret.storage.buckets.bucket_folder import BucketFolder
folder = BucketFolder("gs://bucket/run")
path = Path(sys.argv[1])
path.write_text("x")
for number in range(40):
    assert folder.add_group(f"corpus/{number:02}", folder.upload({f"corpus/{number:02}": path}))
assert len(folder.files()) == 40
folder.bucket.put("first", b"")
assert len(folder.files()) == 40
folder.bucket.put("second", b"")
assert folder.add_group("corpus/40", folder.upload({"corpus/40": path}))
folder.remove_groups(["corpus/00"])
assert sorted(folder.files()) == [f"corpus/{number:02}" for number in range(1, 41)]
"""
    run_script(script, gcs[1], str(tmp_path / "file"))
    names = [name for _, name in gcs[0].requests]
    look = names[names.index("run/first") + 1 : names.index("run/second")]
    assert len(look) == 2, "it reads the list and the manifest"


def test_a_refresh_does_not_search_all_keys_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listing(list[str]):
        def __contains__(self, key: object) -> bool:
            raise AssertionError("a search through the whole list")

    folder, keys = BucketFolder("gs://bucket/run"), [f"groups/corpus/{number}.json" for number in range(4)]
    body = json.dumps({"files": {}, "sha256": sha256_json({})}).encode()
    monkeypatch.setattr(folder.bucket, "list", lambda prefix: Listing(keys))
    monkeypatch.setattr(folder.bucket, "get_several", lambda keys: [BucketObject(body, b"1") for _ in keys])
    assert len(folder.groups("corpus")) == 4
    del keys[0]
    assert folder.groups("corpus").keys() == {f"corpus/{number}" for number in range(1, 4)}


def test_an_address_in_a_folder_that_jaxret_wrote_is_a_path_in_its_copy(gcs: Server) -> None:
    script = """
import json
from pathlib import Path
from jaxret.storage.buckets.working_copy import copy_of, local_path, publish_all, shown_path
run = local_path("gs://bucket/runs/one")
(run / "embeddings/x").mkdir(parents=True)
(run / "embeddings/x/ids").write_text("1")
publish_all()
inner = local_path("gs://bucket/runs/one/embeddings/x")
assert (inner / "ids").read_text() == "1"
assert copy_of(inner) is copy_of("gs://bucket/runs/one") is copy_of(Path("gs://bucket/runs/one/embeddings"))
assert copy_of("gs://bucket/runs/one-more") is None
assert shown_path(Path("gs://bucket/runs/one")) == "gs://bucket/runs/one"
(inner / "ids").write_text("12")
publish_all()
assert (local_path("gs://bucket/runs/one") / "embeddings/x/ids").read_text() == "12"
"""
    run_script(script, gcs[1])
    assert {name.rpartition("/")[0] for _, name in gcs[0].objects} == {"runs/one", "runs/one/data"}


@pytest.mark.slow
def test_a_reader_takes_the_new_files_where_another_job_replaces_those_that_it_fetches(
    gcs: Server, tmp_path: Path
) -> None:
    server, environment = gcs
    run_script(WRITER, environment, "gs://bucket/run", "old")
    reads = 0

    def replace(_: int) -> None:
        """Before the third read of data, let another job write; the server's lock is held by this request."""
        nonlocal reads
        method, name = server.requests[-1]
        reads += method == "GET" and "/data/" in name
        if reads == 3:
            reads += 1
            server.lock.release()
            run_script(WRITER, environment, "gs://bucket/run", "new")
            server.lock.acquire()

    server.before = replace
    assert run_script(READER, {**environment, "XDG_CACHE_HOME": str(tmp_path)}, "gs://bucket/run") == "new\n"
    assert reads >= 4


def test_files_of_a_failed_fetch_are_not_published(gcs: Server) -> None:
    script = """
from jaxret.storage.buckets.bucket import BucketError
from jaxret.storage.buckets.working_copy import WorkingCopy
reader, writer = WorkingCopy("gs://bucket/run"), WorkingCopy("gs://bucket/run")
writer.path.mkdir()
for number in range(10):
    (writer.path / f"{number}.txt").write_text(f"text {number}")
writer.publish()
writer.folder.bucket.put(writer.folder.files()["7.txt"].parts[0], b"damage")
try:
    reader.refresh()
except BucketError as error:
    assert "7.txt is damaged" in str(error)
assert len(list(reader.path.iterdir())) == 9
assert reader.changes() == ({}, [])
"""
    run_script(script, gcs[1])


def test_a_file_that_is_written_again_with_the_same_bytes_is_not_sent(gcs: Server) -> None:
    script = """
from jaxret.storage.buckets.working_copy import WorkingCopy
copy = WorkingCopy("gs://bucket/run")
copy.path.mkdir()
for text in ("same", "same", "other"):
    (copy.path / "file").write_text(text)
    copy.publish()
    assert copy.changes() == ({}, [])
"""
    run_script(script, gcs[1])
    assert sum("data/" in name for method, name in gcs[0].requests if method == "POST") == 2


def test_bytes_that_a_file_still_has_are_not_deleted(gcs: Server, tmp_path: Path) -> None:
    """Of three files that are committed again, one is unchanged, one is renamed, and one has new contents."""
    script = """
from pathlib import Path
from jaxret.storage.buckets.bucket_folder import BucketFolder
folder, names = BucketFolder("gs://bucket/run"), ("same", "old", "other")
for name in names:
    Path(name).write_text(name)
files = folder.upload({name: Path(name) for name in names})
folder.commit(files, {})
Path("other").write_text("new")
changes = {"same": files["same"], "new": files["old"], "old": None} | folder.upload({"other": Path("other")})
folder.commit(changes, files)
for name, file in folder.files().items():
    folder.check(name, file)
assert sorted(folder.files()) == ["new", "other", "same"]
assert len(folder.bucket.list("data")) == 3
"""
    run_script(f"import os; os.chdir({str(tmp_path)!r})\n{script}", gcs[1])


def test_a_removed_folder_does_not_come_back_with_the_groups_that_a_killed_job_left(gcs: Server) -> None:
    script = """
import shutil
from jaxret.storage.buckets.working_copy import WorkingCopy
copy = WorkingCopy("gs://bucket/run")
(copy.path / "x").mkdir(parents=True)
(copy.path / "x/shard").write_text("vectors")
assert copy.publish_group("x", "x/shard")
files = copy.folder.groups("x")["x/shard"]
copy.folder.commit(files, {})  # and here the job was killed, before it removed the group
shutil.rmtree(copy.path / "x")
copy.publish()
assert copy.folder.files() == {}
"""
    run_script(script, gcs[1])
    assert [name for _, name in gcs[0].objects] == ["run/files.json"]


def test_the_last_job_to_finish_leaves_no_lease_in_the_bucket(gcs: Server) -> None:
    script = """
from jaxret.storage.buckets.bucket_leases import LAST, BucketLeases
from jaxret.storage.buckets.working_copy import WorkingCopy
copies = [WorkingCopy("gs://bucket/run") for _ in range(2)]
jobs = [BucketLeases(copy, copy.path / "x") for copy in copies]
with jobs[1] as second:
    with jobs[0] as first:
        assert first.claim("shard") and not second.claim("shard") and first.claim(LAST)
        first.clear()  # while it holds both
    assert second.claim(LAST), "as a job that looked before the first one was ready"
    second.clear()
"""
    run_script(script, gcs[1])
    assert [name for _, name in gcs[0].objects] == []


def test_only_groups_that_a_job_has_seen_become_part_of_the_folder(gcs: Server) -> None:
    script = """
from jaxret.storage.buckets.working_copy import WorkingCopy
one, two = WorkingCopy("gs://bucket/run"), WorkingCopy("gs://bucket/run")
for copy, name in ((one, "seen"), (two, "unseen")):
    (copy.path / "x").mkdir(parents=True)
    (copy.path / "x" / name).write_text(name)
    assert copy.publish_group("x", f"x/{name}")
one.publish_folder("x")
assert one.folder._manifest().files.keys() == {"x/seen"}
assert one.folder.files().keys() == {"x/seen", "x/unseen"}
"""
    run_script(script, gcs[1])


def test_a_killed_process_leaves_a_copy_that_the_next_one_removes(gcs: Server, tmp_path: Path) -> None:
    environment = {**gcs[1], "XDG_CACHE_HOME": str(tmp_path)}
    script = """
import time
from jaxret.storage.buckets.working_copy import WorkingCopy
copy = WorkingCopy("gs://bucket/run")
print("open", flush=True)
time.sleep(600)
"""
    jobs = [start_script(script, environment) for _ in range(2)]
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == "open\n"
    copies = set((tmp_path / "jaxret" / "working").iterdir())
    for path in copies:
        os.utime(path, (1, 1))
    jobs[0].kill()
    jobs[0].communicate()
    run_script(
        "from jaxret.storage.buckets.working_copy import WorkingCopy; WorkingCopy('gs://bucket/run').remove()",
        environment,
    )
    (living,) = (tmp_path / "jaxret" / "working").iterdir()
    jobs[1].kill()
    jobs[1].communicate()
    assert living in copies, "the copy of the running process stays"


def test_a_copy_that_cannot_be_published_stays_and_the_others_are_published(gcs: Server, tmp_path: Path) -> None:
    script = """
from jaxret.storage.buckets.working_copy import WorkingCopy, local_path, publish_all
one, two = local_path("gs://bucket/one"), local_path("gs://bucket/two")
for folder in (one, two):
    folder.mkdir()
    (folder / "file").write_text(folder.name)
other = WorkingCopy("gs://bucket/one")
other.path.mkdir()
(other.path / "file").write_text("another job's")
other.publish()
publish_all()
"""
    job = start_script(script, {**gcs[1], "XDG_CACHE_HOME": str(tmp_path)})
    errors = job.communicate(timeout=240)[1]
    assert job.returncode == 1
    assert "gs://bucket/one/file: another job has written it" in errors
    kept = errors.strip().splitlines()[-1]
    assert kept.startswith("gs://bucket/one: 1 file(s) were not published; they are in ")
    assert (Path(kept.rpartition(" ")[2]) / "file").read_text() == "one"
    assert any(body == b"two" for _, body in gcs[0].objects.values())


@pytest.mark.slow
def test_messages_have_the_address_and_not_the_path_of_the_copy(gcs: Server) -> None:
    records = {"corpus": '{"_id": "a", "text": "x"}\n{"_id": \n', "queries": '{"_id": "q", "text": "y"}\n'}
    for name, text in records.items():
        gcs[0].objects["bucket", f"broken/{name}.jsonl"] = 1, text.encode()
    gcs[0].objects["bucket", "broken/qrels/test.tsv"] = 1, b"query-id\tcorpus-id\tscore\nq\ta\t1\n"
    job = subprocess.run(
        [sys.executable, "-m", "jaxret", "data", "check", "beir:gs://bucket/broken"],
        env={**gcs[1], "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert job.returncode == 1
    assert "bad: gs://bucket/broken/corpus.jsonl:2" in job.stdout + job.stderr
    assert "/working/" not in job.stdout + job.stderr


COPY = """
import sys
from jaxret.storage.buckets.copy_folder import copy_folder
assert copy_folder(*sys.argv[1:]).new_files == 2
"""


@pytest.mark.slow
def test_a_copy_over_another_run_is_refused(gcs: Server, tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "contract.json").write_text("{}")
        (tmp_path / name / "metrics.jsonl").write_text(f"{name}\n")
    run_script(COPY, gcs[1], str(tmp_path / "one"), "gs://bucket/one")
    (tmp_path / "one" / "metrics.jsonl").write_text("one\ntwo\n")
    script = """
import sys
from jaxret.storage.buckets.copy_folder import copy_folder
for source, destination in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        copy_folder(source, destination)
    except FileExistsError as error:
        assert f"{destination} has files of another source (metrics.jsonl)" in str(error), error
    else:
        raise AssertionError(destination)
"""
    other, one = str(tmp_path / "other"), str(tmp_path / "one")
    run_script(script, gcs[1], other, "gs://bucket/one", "gs://bucket/one", other)
    run_script(COPY.replace("2", "1"), gcs[1], one, "gs://bucket/one")


@pytest.mark.slow
def test_arrays_of_shards_are_fetched_when_they_are_opened(gcs: Server, tmp_path: Path) -> None:
    script = """
from jaxret.storage.buckets.working_copy import local_path, publish_all
folder = local_path("gs://bucket/run") / "embeddings/x"
folder.mkdir(parents=True)
(folder / "manifest.json").write_text("{}")
(folder / "vectors-00000-of-00001.npy").write_bytes(b"vectors")
publish_all()
"""
    run_script(script, gcs[1])
    script = """
import sys
from jaxret.storage.buckets.working_copy import copy_of, fetch_files, local_path, stored_file
folder = local_path(sys.argv[1])
path = folder / "vectors-00000-of-00001.npy"
assert (folder / "manifest.json").exists() and not path.exists()
assert stored_file(path).size == 7 and stored_file(folder / "manifest.json") is None
assert copy_of(folder).changes() == ({}, [])
fetch_files(folder)
assert path.read_bytes() == b"vectors" and stored_file(path) is None
assert copy_of(folder).changes() == ({}, [])
"""
    run_script(script, gcs[1], "gs://bucket/run/embeddings/x")
    for source, destination in (
        ("gs://bucket/run/embeddings/x", str(tmp_path / "x")),
        (str(tmp_path / "x"), "gs://bucket/x"),
    ):
        run_script(
            COPY,
            gcs[1],
            source,
            destination,
        )
    run_script(script, gcs[1], "gs://bucket/x")


def test_arrays_that_were_not_fetched_are_not_removed_after_a_failed_fetch(gcs: Server) -> None:
    script = """
from jaxret.storage.buckets.bucket import BucketError
from jaxret.storage.buckets.working_copy import WorkingCopy
reader, writer = WorkingCopy("gs://bucket/run"), WorkingCopy("gs://bucket/run")
(writer.path / "x").mkdir(parents=True)
for name in ("a.json", "vectors-0-of-1.npy"):
    (writer.path / "x" / name).write_text(name)
writer.publish()
writer.folder.bucket.put(writer.folder.files()["x/a.json"].parts[0], b"damage")
try:
    reader.refresh()
except BucketError as error:
    assert "a.json is damaged" in str(error)
(reader.path / "new").write_text("new")
reader.publish()
assert writer.folder.files().keys() == {"new", "x/a.json", "x/vectors-0-of-1.npy"}
"""
    run_script(script, gcs[1])


def test_objects_of_a_job_that_ends_during_the_verification_stay(gcs: Server, tmp_path: Path) -> None:
    """The job names its objects and releases its lease after the verification has listed the objects."""
    script = """
import sys
from pathlib import Path
from jaxret.experiments.verify import verify_folder
from jaxret.storage.buckets.bucket import Bucket
from jaxret.storage.buckets.bucket_folder import BucketFolder
folder, path = BucketFolder("gs://bucket/run"), Path(sys.argv[1])
path.write_text("x")
folder.commit(folder.upload({"first": path}), {})
files = folder.upload({"second": path})
folder.bucket.put("leases/x/shard.json", b"{}")
list_keys = Bucket.list

def list_after_the_end(bucket, prefix):
    if prefix == "leases":
        folder.commit(files, folder.files())
        folder.bucket.delete(["leases/x/shard.json"])
    return list_keys(bucket, prefix)

Bucket.list = list_after_the_end
list(verify_folder("gs://bucket/run", delete_unused=True))
Bucket.list = list_keys
assert list_keys(folder.bucket, "leases") == []
folder.check("second", folder.files()["second"])
"""
    run_script(script, gcs[1], str(tmp_path / "file"))
