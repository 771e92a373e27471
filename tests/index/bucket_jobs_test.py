"""A run in a bucket equals the run on a disk: trained, resumed, encoded by jobs that die, searched. With real
processes, and a fake GCS on loopback."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline import command, contents, train_arguments, untrained_run, write_data, write_encoder
from tests.storage.buckets.fake_gcs import FakeGcs
from tests.storage.buckets.servers import Server, finish, gcs_server, s3_server, start

RUN = "gs://bucket/runs/tiny"


@pytest.fixture(scope="module")
def gcs() -> Iterator[Server]:
    with gcs_server() as server:
        yield server


def fetch(gcs: Server, folder: Path) -> Path:
    """Copy the run from the bucket to a folder."""
    finish(start("-m", gcs[1], "jaxret", "copy", RUN, str(folder)))
    return folder


def read_since(server: FakeGcs, before: int, suffix: str) -> list[str]:
    """Return the objects that were read since a request, of the run's files with a suffix."""
    manifest = json.loads(server.objects["bucket", "runs/tiny/files.json"][1])["files"]
    keys = {f"runs/tiny/{key}" for name, (_, _, *parts) in manifest.items() if name.endswith(suffix) for key in parts}
    assert keys
    return [name for method, name in server.requests[before:] if method == "GET" and name in keys]


LISTED = (
    "import sys; from jaxret.storage.buckets.bucket import Bucket; "
    "print(*Bucket(sys.argv[1]).list('groups'), sep='\\n')"
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["moto", "weed"])
def test_four_jobs_with_two_killed_write_the_bytes_of_one_on_s3(kind: str, tmp_path: Path) -> None:
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data", train=150)
    local, run = tmp_path / "local" / "tiny", "s3://bucket/runs/tiny"
    with s3_server(kind, tmp_path / "server") as server:
        finish(start("train.py", server, *train_arguments(encoder, data, local, train__steps=0, data__dev="")))
        finish(start("-m", server, "jaxret", "copy", str(local), run))
        encode = ("encode.py", server, f"--corpus={data}", "--shard_rows=8", "--lease=3")
        finish(start(*encode, f"--workdir={local}"))
        jobs = [start(*encode, f"--workdir={run}") for _ in range(4)]
        for dying in jobs[:2]:
            before = finish(start("-c", server, LISTED, run))
            while finish(start("-c", server, LISTED, run)) == before:
                assert any(job.poll() is None for job in jobs)
            dying.send_signal(signal.SIGKILL)
            dying.communicate()
        for job in jobs[2:]:
            finish(job)
        finish(start("-m", server, "jaxret", "copy", run, str(tmp_path / "back")))
        ours, theirs = (folder / "embeddings" / "data" for folder in (local, tmp_path / "back"))
        names = {path.name for path in ours.iterdir() if path.is_file() and not path.name.startswith(".")}
        assert len(names) > 60
        assert {path.name for path in theirs.iterdir()} == names
        for name in names - {"corpus.json"}:  # corpus.json records the time of the run's own copy of the corpus
            assert (theirs / name).read_bytes() == (ours / name).read_bytes(), name
        assert finish(start("-c", server, LISTED, run)).strip() == ""


@pytest.mark.slow
def test_a_run_in_a_bucket_equals_a_run_on_a_disk(gcs: Server, tmp_path: Path) -> None:
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    local = tmp_path / "local" / "tiny"
    for steps in (3, 6):  # the second call resumes
        trained = []
        for workdir in (str(local), RUN):
            arguments = train_arguments(encoder, data, tmp_path, train__steps=steps)
            arguments = [f"--workdir={workdir}" if "--workdir=" in argument else argument for argument in arguments]
            trained.append(start("train.py", gcs[1], *arguments))
        assert all("6 of 6" in output or steps == 3 for output in map(finish, trained))
    encode = ("encode.py", gcs[1], f"--corpus={data}", "--shard_rows=4", "--lease=3")
    finish(start(*encode, f"--workdir={local}"))
    before = len(gcs[0].requests)
    jobs = [start(*encode, f"--workdir={RUN}") for _ in range(3)]
    deadline = time.monotonic() + 120
    while not any("/groups/embeddings" in name and "-of-" in name for _, name in list(gcs[0].objects)):
        assert time.monotonic() < deadline, jobs[0].poll()
        time.sleep(0.01)
    jobs[0].send_signal(signal.SIGKILL)
    jobs[0].communicate()
    for job in jobs[1:]:
        assert f"{RUN}/embeddings/data" in finish(job)
    assert not read_since(gcs[0], before, ".npy"), "a job reads no vectors of other jobs"
    search = ("search.py", gcs[1], f"--queries={data}", f"--qrels={data}", "--split=dev")
    finish(start(*search, f"--workdir={local}"))
    before, files = len(gcs[0].requests), sum("/data/" in name for _, name in gcs[0].objects)
    assert f"{RUN}/runs/" in finish(start(*search, f"--workdir={RUN}"))
    requests = gcs[0].requests[before:]
    reads = [name for method, name in requests if method == "GET" and "/data/" in name]
    assert len(reads) == len(set(reads)) <= files, "each object is read at most once"
    written = [name for method, name in requests if method == "POST" and "/data/" in name]
    assert len(requests) - len(reads) - len(written) <= 20, (
        "the number of other requests does not grow with the shards: lists, manifest, probe"
    )

    fetched = fetch(gcs, tmp_path / "fetched")
    for part in ("embeddings/data", "runs", "encoder"):
        ours = {path.relative_to(local): path for path in (local / part).rglob("*") if path.is_file()}
        assert {path.relative_to(fetched) for path in (fetched / part).rglob("*") if path.is_file()} == set(ours), part
        for name, path in ours.items():
            if name.name != "corpus.json":  # corpus.json records the time of the run's own copy of the corpus
                assert (fetched / name).read_bytes() == path.read_bytes(), name

    def digests(folder: Path) -> dict[str, object]:
        """Map checkpoints to the digests of their arrays; Orbax's own files have paths and times."""
        paths = folder.glob("checkpoints/*/_CHECKPOINT_METADATA")
        return {path.parent.name: json.loads(path.read_text())["custom_metadata"] for path in paths}

    assert set(digests(fetched)) >= {"6"}
    assert digests(fetched) == digests(local)

    def measures(folder: Path) -> object:
        evaluation = json.loads(next(folder.glob("eval/*.json")).read_text())
        return evaluation["mean"], evaluation["per_query"]

    assert measures(fetched) == measures(local)
    assert not any("/groups/" in name or "/leases/" in name for _, name in gcs[0].objects), (
        "the jobs left no leases or groups"
    )


FROM_PYTHON = """
import os, pickle, sys
import jaxret
retriever = jaxret.Retriever.from_model(sys.argv[1], "gs://bucket/runs/python", token="mean")
os.chdir(sys.argv[2])
vectors = retriever.encode_queries(["river stone"])
again = pickle.loads(pickle.dumps(retriever))
opened = jaxret.Retriever.open("gs://bucket/runs/python")
print(repr(retriever), all((one.encode_queries(["river stone"]) == vectors).all() for one in (again, opened)))
"""


@pytest.mark.slow
def test_a_run_is_made_and_opened_from_python(gcs: Server, tmp_path: Path) -> None:
    """The working directory does not matter."""
    encoder = write_encoder(tmp_path / "encoder")
    output = finish(start("-c", gcs[1], FROM_PYTHON, str(encoder), str(tmp_path)))
    assert output.splitlines()[-1] == "Retriever('gs://bucket/runs/python', step 0) True"


CHANGES_FROM_PYTHON = """
import sys
import jaxret
from jaxret.storage.atomic import sha256_file
from jaxret.storage.buckets.bucket_folder import BucketFolder
from jaxret.storage.buckets.working_copy import folder_files
address = "gs://bucket/runs/changed"
retriever = jaxret.Retriever.from_model(sys.argv[1], address, token="mean")

def published(name):
    files = BucketFolder(address).files()
    folder = retriever.run.workdir.embeddings(name)
    paths = {path.relative_to(folder.parents[1]).as_posix(): path for _, path in folder_files(folder)}
    return all(name in files and files[name].sha256 == sha256_file(path)
               for name, path in paths.items() if path.name != "passages.npy")

index = jaxret.Index.build(retriever, ["river stone", "town house"], "texts", progress=False)
done = [published("texts")]
index.append(["a new text"], progress=False)
done.append(published("texts"))
index.delete(["0"])
done.append(published("texts"))
jaxret.Index.build(retriever, "texts", "short", jaxret.EncodeOptions(dimension=4), progress=False)
print([*done, published("short")])
"""


@pytest.mark.slow
def test_changes_from_python_are_published_when_they_are_made(gcs: Server, tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder")
    output = finish(start("-c", gcs[1], CHANGES_FROM_PYTHON, str(encoder)))
    assert output.splitlines()[-1] == str([True] * 4)


WITH_A_DELETED_CHECKPOINT = """
import subprocess, sys
import jaxret
retriever = jaxret.Retriever.open("gs://bucket/runs/trained")
subprocess.run(sys.argv[1:], check=True)
try:
    jaxret.Index.build(retriever, ["river stone"], "texts", progress=False)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
def test_an_encoder_in_a_bucket_sees_that_training_deleted_its_checkpoint(gcs: Server, tmp_path: Path) -> None:
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")

    def train(steps: int) -> list[str]:
        words = train_arguments(encoder, data, tmp_path, train__steps=steps, data__dev="")
        return ["--workdir=gs://bucket/runs/trained" if "--workdir=" in word else word for word in words]

    finish(start("train.py", gcs[1], *train(3)))
    output = finish(start("-c", gcs[1], WITH_A_DELETED_CHECKPOINT, *command("train.py", *train(6))))
    message = "CheckpointError: gs://bucket/runs/trained/checkpoints/3 was deleted"
    assert output.splitlines()[-1].startswith(message), output
    assert not [name for _, name in gcs[0].objects if "trained/embeddings" in name], "nothing is left in the bucket"


@pytest.mark.slow
def test_what_commands_write_may_be_in_a_bucket(gcs: Server, tmp_path: Path) -> None:
    """The folder and the file equal those written to a disk."""
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    untrained_run(tmp_path / "run", encoder, data)
    for out in (str(tmp_path / "st"), "gs://bucket/out/st"):
        export = ("export", f"--workdir={tmp_path / 'run'}", "--to=sentence-transformers", f"--out={out}")
        finish(start("-m", gcs[1], "jaxret", *export))
    finish(start("-m", gcs[1], "jaxret", "copy", "gs://bucket/out/st", str(tmp_path / "st-back")))
    assert contents(tmp_path / "st-back") == contents(tmp_path / "st")
    (tmp_path / "a.trec").write_text("q1 Q0 p1 1 0.5 a\nq1 Q0 p2 2 0.25 a\n")
    (tmp_path / "b.trec").write_text("q1 Q0 p2 1 0.5 b\nq1 Q0 p3 2 0.25 b\n")
    for out in (str(tmp_path / "fused.trec"), "gs://bucket/fused/fused.trec"):
        finish(
            start("-m", gcs[1], "jaxret", "fuse", str(tmp_path / "a.trec"), str(tmp_path / "b.trec"), f"--out={out}")
        )
    finish(start("-m", gcs[1], "jaxret", "copy", "gs://bucket/fused", str(tmp_path / "fused")))
    assert (tmp_path / "fused" / "fused.trec").read_bytes() == (tmp_path / "fused.trec").read_bytes()
