"""Buckets without the right to write, servers that do not answer, and damaged or missing objects: real processes, and a
fake GCS on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxret.storage.atomic import sha256_json
from jaxret.storage.buckets.bucket_folder import COPYING
from tests.pipeline import (
    REPOSITORY,
    contents,
    free_address,
    train_arguments,
    untrained_run,
    write_data,
    write_encoder,
)
from tests.storage.buckets.servers import LOOPBACK, Server, finish, gcs_server, start


@pytest.fixture
def gcs() -> Iterator[Server]:
    with gcs_server() as server:
        yield server


def jaxret(clients: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxret", *arguments],
        env={**clients, "PYTHONPATH": str(REPOSITORY), "JAXRET_COMPILATION_CACHE": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_a_bucket_without_rights_to_write_is_read_and_refused_before_the_work(gcs: Server, tmp_path: Path) -> None:
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    untrained_run(tmp_path / "run", encoder, data)
    run, workdir = "gs://bucket/runs/tiny", "--workdir=gs://bucket/runs/tiny"
    assert not jaxret(gcs[1], "encode", f"--workdir={tmp_path / 'run'}", f"--corpus={data}").returncode
    assert not jaxret(gcs[1], "copy", str(tmp_path / "run"), run).returncode
    before = dict(gcs[0].objects)
    gcs[0].read_only = True
    exported = jaxret(gcs[1], "export", workdir, "--to=parquet", f"--out={tmp_path / 'parquet'}")
    assert exported.returncode == 0, exported.stderr
    assert "not published" not in exported.stderr
    answer = jaxret(gcs[1], "search", workdir, "--query=what is x")
    assert answer.returncode == 0, answer.stderr
    assert "not published" not in answer.stderr
    assert "nothing is damaged" in jaxret(gcs[1], "verify", run).stdout
    rankings = ("--queries", str(data), "--qrels", str(data))
    training = train_arguments(encoder, data, tmp_path / "x")
    config = [argument for argument in training if not argument.startswith("--workdir")]
    commands = {
        "search": ([workdir, *rankings], "nDCG"),
        "bm25": (["--workdir=gs://bucket/runs/bm25", f"--corpus={data}", *rankings], "nDCG"),
        "index": ([workdir, "--factory=Flat"], "recall"),
        "encode": ([workdir, f"--corpus={data}", "--name=new"], "encoded"),
        "train": ([*config, "--workdir=gs://bucket/runs/new"], "step"),
        "report": ([run, "--out=gs://bucket/reports/report.html"], "report"),
        "open": ([str(encoder), "--workdir=gs://bucket/runs/opened"], "transformers"),
        "copy": ([str(tmp_path / "run"), "gs://bucket/runs/copy"], "copied"),
    }
    for verb, (arguments, work) in commands.items():
        refused = jaxret(gcs[1], verb, *arguments)
        assert refused.returncode == 1, (verb, refused)
        assert "cannot be written: no permission, or wrong credentials" in refused.stderr.splitlines()[-1], (
            verb,
            refused.stderr,
        )
        assert refused.stderr.count("error") == 1, (verb, refused.stderr)
        assert "not published" not in refused.stderr
        assert work not in refused.stdout, (verb, refused.stdout)
    assert gcs[0].objects == before


@pytest.mark.slow
def test_a_server_that_takes_connections_and_sends_nothing_is_an_error_in_half_a_minute() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        clients = {**os.environ, **LOOPBACK, "AWS_ENDPOINT_URL": address, "TENSORSTORE_GCS_HTTP_URL": address}
        start_time = time.monotonic()
        jobs = [start("-m", clients, "jaxret", "verify", f"{scheme}://bucket/run") for scheme in ("gs", "s3")]
        for job in jobs:
            output = job.communicate(timeout=120)[0]
            assert job.returncode == 1
            assert "the server does not answer (UNAVAILABLE: no answer within 25 seconds)" in output
        assert time.monotonic() - start_time < 60


@pytest.mark.slow
def test_damaged_objects_are_named_and_a_copy_repairs_them(gcs: Server, tmp_path: Path) -> None:
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    untrained_run(tmp_path / "run", encoder, data)
    run = "gs://bucket/runs/tiny"
    assert not jaxret(gcs[1], "copy", str(tmp_path / "run"), run).returncode
    files = json.loads(gcs[0].objects["bucket", "runs/tiny/files.json"][1])["files"]
    keys = {name: ("bucket", f"runs/tiny/{parts[0]}") for name, (_, _, *parts) in files.items() if parts}
    del gcs[0].objects[keys["config.json"]]
    generation, body = gcs[0].objects[keys["contract.json"]]
    gcs[0].objects[keys["contract.json"]] = generation, bytes([body[0] ^ 1]) + body[1:]
    generation, body = gcs[0].objects[keys["data.json"]]
    gcs[0].objects[keys["data.json"]] = generation, body[:-1]
    damaged = jaxret(gcs[1], "verify", run)
    assert damaged.returncode == 1
    assert f"bad: {run}/config.json: its object data/" in damaged.stdout
    assert f"bad: {run}/contract.json is damaged in the bucket" in damaged.stdout
    assert f"error: {run}: 3 of" in damaged.stderr
    refused = jaxret(gcs[1], "search", f"--workdir={run}", "--query=x")
    assert refused.returncode == 1
    assert "config.json: its object data/" in refused.stderr or "contract.json is damaged" in refused.stderr
    unused = jaxret(gcs[1], "verify", run, "--delete_unused")
    assert "objects belong" not in unused.stdout, "all objects belong to files"
    assert ": 0 copied" in jaxret(gcs[1], "copy", str(tmp_path / "run"), run).stdout
    assert ": 3 copied" in jaxret(gcs[1], "copy", str(tmp_path / "run"), run, "--verify").stdout
    assert "nothing is damaged" in jaxret(gcs[1], "verify", run).stdout
    before = dict(gcs[0].objects)
    gcs[0].objects["bucket", f"runs/tiny/data/{'1' * 16}-{'2' * 64}"] = 1, b"of a killed job"
    assert "1 objects belong to no file" in jaxret(gcs[1], "verify", run).stdout
    gcs[0].objects["bucket", "runs/tiny/.copying.json"] = 1, b"{}"
    refused = jaxret(gcs[1], "verify", run, "--delete_unused")
    assert "a job writes to gs://bucket/runs/tiny, or was killed while it did so (.copying.json)" in refused.stderr
    del gcs[0].objects["bucket", "runs/tiny/.copying.json"]
    assert "1 objects belonged to no file, and are deleted" in jaxret(gcs[1], "verify", run, "--delete_unused").stdout
    assert gcs[0].objects == before
    assert "is not in a bucket" in jaxret(gcs[1], "verify", str(tmp_path / "run"), "--delete_unused").stderr
    assert jaxret(gcs[1], "copy", run, str(tmp_path / "back")).returncode == 0
    ours, theirs = contents(tmp_path / "run"), contents(tmp_path / "back")
    assert {name: text for name, text in ours.items() if name in theirs} == theirs


@pytest.mark.parametrize("mark", ["leases/shard", COPYING])
def test_unused_objects_stay_while_a_job_writes(mark: str, gcs: Server) -> None:
    """They may belong to a file that the job has not named yet. If no job writes, they are deleted."""
    folder = "gs://bucket/run"
    unused = f"data/{'1' * 16}-{'2' * 64}"
    files = {"files": {}, "sha256": sha256_json({})}
    for name, body in {"files.json": json.dumps(files).encode(), unused: b"1", mark: b"{}"}.items():
        gcs[0].objects["bucket", f"run/{name}"] = 1, body
    refused = jaxret(gcs[1], "verify", folder, "--delete_unused")
    assert refused.returncode == 1
    assert f"a job writes to {folder}" in refused.stderr
    assert ("bucket", f"run/{unused}") in gcs[0].objects
    del gcs[0].objects["bucket", f"run/{mark}"]
    jaxret(gcs[1], "verify", folder, "--delete_unused")
    assert [name for _, name in gcs[0].objects] == ["run/files.json"]


@pytest.mark.slow
def test_an_encoder_may_be_in_a_bucket(gcs: Server, tmp_path: Path) -> None:
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    for path in encoder.iterdir():  # stored as other programs do: under the names of the files
        gcs[0].objects["bucket", f"models/tiny/{path.name}"] = 1, path.read_bytes()
    finish(start("train.py", gcs[1], *train_arguments(encoder, data, tmp_path / "local")))
    arguments = train_arguments("gs://bucket/models/tiny", data, tmp_path / "run")
    finish(start("train.py", gcs[1], *arguments))
    ours, theirs = (
        [
            json.loads(line)["loss"]
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            if "loss" in line
        ]
        for name in ("run", "local")
    )
    assert ours == theirs
    assert ours


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "GS://bucket/run"], "GS://bucket/run: write gs:// in place of GS://"),
        (["copy", "ftp://host/run", "copy"], "ftp://host/run: ftp:// is not supported: use gs:// or s3://"),
        (["copy", "run", "S3://bucket/run"], "write s3:// in place of S3://"),
        (["compare", "run", "--prometheus=gs://bucket/x.prom"], "give a file on a disk of this host"),
        (["compare", "A=gs://bucket/a,azure://b/x"], "azure://b/x: azure:// is not supported"),
        (["demo", "--workdir", "azure://b/x"], "azure://b/x: azure:// is not supported"),
        (["data", "check", "beir:hdfs://b/x"], "hdfs://b/x: hdfs:// is not supported"),
    ],
)
def test_addresses_of_other_kinds_are_named(arguments: list[str], message: str) -> None:
    refused = jaxret(dict(os.environ), *arguments)
    assert refused.returncode == 1
    assert message in refused.stderr


COPY = """
import sys
from jaxret.storage.buckets import copy_folder
target, other = sys.argv[2], sys.argv[3]
if other:  # begins before this copy has published anything, when it has announced itself
    announce = copy_folder._announce
    def announced(*arguments):
        result = announce(*arguments)
        copy_folder._announce = announce
        try:
            copy_folder.copy_folder(other, target)
        except FileExistsError as error:
            print(error)
        return result
    copy_folder._announce = announced
copy_folder.copy_folder(sys.argv[1], target)
"""


def test_two_sources_are_not_mixed_by_copies_at_once(gcs: Server, tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / name / "checkpoints" / name / "params").write_text(name)
        (tmp_path / name / "contract.json").write_text("{}")
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "metrics.jsonl").write_text(f"{name}\n")
    output = finish(start("-c", gcs[1], COPY, str(tmp_path / "one"), "gs://bucket/run", str(tmp_path / "other")))
    assert "gs://bucket/run has files of another source (metrics.jsonl)" in output
    assert "(a copy to it is running or was interrupted" in output
    files = json.loads(gcs[0].objects["bucket", "run/files.json"][1])["files"]
    assert set(files) == set(contents(tmp_path / "one"))
    assert not any("copying" in name for _, name in gcs[0].objects)
    finish(start("-c", gcs[1], COPY, str(tmp_path / "one"), "gs://bucket/run", str(tmp_path / "one")))
    # A copy with damage is still a copy of the same run.
    keys = {name: ("bucket", f"run/{parts[0]}") for name, (_, _, *parts) in files.items()}
    gcs[0].objects[keys["metrics.jsonl"]] = 1, b"0ne\n"
    del gcs[0].objects[keys["checkpoints/one/params"]]
    assert ": 2 copied" in jaxret(gcs[1], "copy", str(tmp_path / "one"), "gs://bucket/run", "--verify").stdout
    assert "has files of another source" in jaxret(gcs[1], "copy", str(tmp_path / "other"), "gs://bucket/run").stderr
    assert not any("copying" in name for _, name in gcs[0].objects)
    # A damaged log is replaced only by the same file; a log with more lines lets the copy also replace other damage.
    files = json.loads(gcs[0].objects["bucket", "run/files.json"][1])["files"]
    keys = {name: ("bucket", f"run/{parts[0]}") for name, (_, _, *parts) in files.items()}
    log = gcs[0].objects.pop(keys["metrics.jsonl"])
    before = dict(gcs[0].objects)
    refused = jaxret(gcs[1], "copy", str(tmp_path / "other"), "gs://bucket/run", "--verify")
    assert "has files of another source (metrics.jsonl)" in refused.stderr
    assert gcs[0].objects == before, "nothing is published"
    gcs[0].objects[keys["metrics.jsonl"]] = log
    del gcs[0].objects[keys["config.json"]]
    (tmp_path / "one" / "config.json").write_text('{"steps": 9}')
    (tmp_path / "one" / "metrics.jsonl").write_text("one\ntwo\n")
    assert ": 2 copied" in jaxret(gcs[1], "copy", str(tmp_path / "one"), "gs://bucket/run", "--verify").stdout


@pytest.mark.slow
def test_results_records_and_events_have_bucket_addresses(gcs: Server, tmp_path: Path) -> None:
    """Addresses of the bucket are in results, in records and in events; and no object is left over."""
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    run = "gs://bucket/runs/tiny"
    for source, target in ((encoder, "gs://bucket/encoder"), (data, "gs://bucket/data")):
        assert not jaxret(gcs[1], "copy", str(source), target).returncode
    assert not jaxret(gcs[1], "open", "gs://bucket/encoder", f"--workdir={run}").returncode
    assert not jaxret(gcs[1], "encode", f"--workdir={run}", "--corpus=gs://bucket/data").returncode
    searched = ("search", f"--workdir={run}", "--queries=gs://bucket/data", "--qrels=gs://bucket/data", "--json")
    event = json.loads(jaxret(gcs[1], *searched).stdout.splitlines()[-1])
    assert (event["run"], event["results"]) == (f"{run}/runs/data.test.trec", f"{run}/eval/data.test.json")
    corpus, out = "--corpus=gs://bucket/data", "--out=gs://bucket/mined/train.jsonl"
    titled = ("report", run, "--title=gs://no/bucket: a=gs://no/other", f"--out={tmp_path / 'report.html'}")
    assert not jaxret(gcs[1], *titled).returncode
    assert "<title>gs://no/bucket: a=gs://no/other</title>" in (tmp_path / "report.html").read_text()
    mined = jaxret(gcs[1], "mine", "--data=gs://bucket/data", "--pool=bm25", corpus, out)
    assert "its parents: gs://bucket/mined/train.jsonl.parents.json" in mined.stdout, mined
    assert {"mined/train.jsonl", "mined/train.jsonl.parents.json"} <= {name for _, name in gcs[0].objects}
    compared = jaxret(gcs[1], "compare", f"A={run}", f"B={run}")
    assert f"{run}/eval/data.test.json is in two systems" in compared.stderr
    assert "belong" not in jaxret(gcs[1], "verify", run).stdout, "every object belongs to a file"
    assert not jaxret(gcs[1], "copy", run, str(tmp_path / "back")).returncode
    assert json.loads((tmp_path / "back" / "config.json").read_text())["encoder"]["checkpoint"] == "gs://bucket/encoder"
    dataset = json.loads((tmp_path / "back" / "eval" / "data.test.json").read_text())["provenance"]["dataset"]
    assert (dataset["queries"], dataset["qrels"]) == ("gs://bucket/data", "gs://bucket/data")
    for path in (tmp_path / "back").rglob("*.json"):
        assert "/working/" not in path.read_text(), path


@pytest.mark.slow
def test_an_interrupted_export_to_a_bucket_continues(gcs: Server, tmp_path: Path) -> None:
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    untrained_run(tmp_path / "run", encoder, data)
    assert not jaxret(
        gcs[1], "encode", f"--workdir={tmp_path / 'run'}", f"--corpus={data}", "--shard_rows=8"
    ).returncode
    arguments = ("export", f"--workdir={tmp_path / 'run'}", "--to=parquet", "--out=gs://bucket/parquet")
    job = start("-m", gcs[1], "jaxret", *arguments)

    def parts() -> int:
        stored = gcs[0].objects.get(("bucket", "parquet/files.json"))
        return sum(name.endswith(".parquet") for name in json.loads(stored[1])["files"]) if stored else 0

    while parts() < 2:
        assert job.poll() is None, job.communicate()[0]
    job.kill()
    job.communicate()
    before = parts()
    assert not jaxret(gcs[1], *arguments).returncode
    assert parts() > before >= 2
    assert not jaxret(gcs[1], "copy", "gs://bucket/parquet", str(tmp_path / "back")).returncode
    assert not jaxret(gcs[1], *arguments[:-1], f"--out={tmp_path / 'local'}").returncode
    ours, theirs = contents(tmp_path / "back"), contents(tmp_path / "local")
    assert {name: ours[name] for name in ours if name.endswith(".parquet")} == {
        name: theirs[name] for name in theirs if name.endswith(".parquet")
    }


def test_results_with_an_address_as_prefix_are_published(gcs: Server) -> None:
    """For example pictures, whose suffixes are appended to the name. The cache is too small for any file."""
    script = """
from jaxret.storage.buckets.working_copy import local_path, publish_all
for ending in (".svg", ".png"):
    local_path("gs://bucket/plots/training").with_suffix(ending).write_text(ending)
publish_all()
folder = local_path("gs://bucket/many")
folder.mkdir()
for number in range(40):
    (folder / f"{number}.txt").write_text(f"{number}" * 1000)
publish_all()
assert {path.name for path in local_path("gs://bucket/many").iterdir()} == {f"{number}.txt" for number in range(40)}
"""
    finish(start("-c", {**gcs[1], "JAXRET_OBJECTS_GB": "0.000001"}, script))
    assert gcs[0].objects["bucket", "plots/training.svg"][1] == b".svg"
    assert gcs[0].objects["bucket", "plots/training.png"][1] == b".png"


@pytest.mark.slow
def test_a_folder_that_a_console_made_is_no_file(gcs: Server, tmp_path: Path) -> None:
    gcs[0].objects["bucket", "made/"] = 1, b""
    gcs[0].objects["bucket", "made/sub/"] = 2, b""
    gcs[0].objects["bucket", "made/sub/corpus.jsonl"] = 3, b"text"
    assert ": 1 copied" in jaxret(gcs[1], "copy", "gs://bucket/made", str(tmp_path / "made")).stdout
    assert contents(tmp_path / "made") == {"sub/corpus.jsonl": b"text"}
    gcs[0].objects["bucket", "empty/"] = 1, b""
    assert ": 1 copied" in jaxret(gcs[1], "copy", str(tmp_path / "made"), "gs://bucket/empty").stdout
    assert "nothing is damaged" in jaxret(gcs[1], "verify", "gs://bucket/empty").stdout


@pytest.mark.slow
def test_processes_of_one_job_encode_into_a_bucket(gcs: Server, tmp_path: Path) -> None:
    """The processes of a TPU slice each have a working copy, and the shards equal those of one process."""
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    untrained_run(tmp_path / "run", encoder, data)
    assert jaxret(gcs[1], "copy", str(tmp_path / "run"), "gs://bucket/run").returncode == 0
    options = ["encode", f"--corpus={data}", "--shard_rows=8"]
    assert jaxret(gcs[1], *options, f"--workdir={tmp_path}/run").returncode == 0
    job = [f"--coordinator={free_address()}", "--num_processes=2", "--platform=cpu", "--workdir=gs://bucket/run"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxret", *options, *job, f"--process_id={number}"],
            env={**gcs[1], "PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(tmp_path / f"cache{number}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    for process in processes:
        assert process.communicate(timeout=300)[0].endswith("passages are in gs://bucket/run/embeddings/data\n")
        assert process.returncode == 0
    jaxret(gcs[1], "copy", "gs://bucket/run", str(tmp_path / "back"))
    of_one, of_both = (contents(tmp_path / name / "embeddings" / "data") for name in ("run", "back"))
    arrays = {name for name in of_one if name.endswith(".npy")}
    assert len(arrays) == 15
    assert {name: of_both[name] for name in arrays} == {name: of_one[name] for name in arrays}
    assert not any("lease" in name or "groups" in name for _, name in gcs[0].objects)


def test_a_copy_on_a_disk_is_its_users_own(gcs: Server, tmp_path: Path) -> None:
    """If its files are changed, this host's cache still has the bucket's bytes; and a copy needs no room in the
    cache."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "psgs.tsv").write_bytes(b"id\ttext\ttitle\n" + b"1\triver\tstone\n" * 200_000)
    environment = {**gcs[1], "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert jaxret(environment, "copy", str(tmp_path / "data"), "gs://bucket/data").returncode == 0
    assert jaxret(environment, "copy", "gs://bucket/data", str(tmp_path / "copy")).returncode == 0
    file = tmp_path / "copy" / "psgs.tsv"
    assert (file.stat().st_nlink, file.stat().st_mode & 0o777) == (1, 0o644)
    assert time.time() - file.stat().st_mtime < 600
    assert not list((tmp_path / "cache").rglob("objects/*")), "no object is cached"

    script = (
        "import sys; from jaxret.storage.buckets.working_copy import local_path; "
        "print(local_path(sys.argv[1]).stat().st_size)"
    )
    size = finish(start("-c", environment, script, "gs://bucket/data/psgs.tsv")).splitlines()[-1]
    (cached,) = [path for path in (tmp_path / "cache" / "jaxret" / "objects").iterdir() if path.name[0] != "."]
    cached.chmod(0o644)  # another program changes the file in the cache
    with open(cached, "ab") as written:
        written.write(b"mine")
    assert finish(start("-c", environment, script, "gs://bucket/data/psgs.tsv")).splitlines()[-1] == size


RECIPE = """
from jaxret.configs.base import get_config as base


def stages():
    mined = {"pools": ["stage1"], "keep": 3, "depth": 20, "draw": "top"}
    return ({"name": "stage1"}, {"name": "stage2", "mine": mined, "config": {"train.steps": 4}})


def get_config():
    config = base()
    config.encoder.checkpoint, config.encoder.tied, config.encoder.recompute = "ENCODER", True, "none"
    config.tokens.query_length, config.tokens.passage_length, config.tokens.length_multiple = 12, 24, 24
    config.data.negatives, config.train.batch_size, config.train.steps, config.train.log_every = 1, 8, 3, 1
    config.validation.batch_size, config.validation.pool_size = 8, 40
    return config
"""


@pytest.mark.slow
def test_files_of_a_recipe_have_addresses(gcs: Server, tmp_path: Path) -> None:
    """Its stages name the mined data in the bucket, not a deleted copy; so do the labels for Prometheus."""
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    (tmp_path / "rec.py").write_text(RECIPE.replace("ENCODER", str(encoder)))
    words = ["recipe", f"--config={tmp_path}/rec.py", "--workdir=gs://bucket/rec", f"--config.data.train={data}"]
    done = jaxret(gcs[1], *words, f"--prometheus={tmp_path}/p.prom")
    assert done.returncode == 0, done.stderr
    assert 'run="gs://bucket/rec/stage2"' in (tmp_path / "p.prom").read_text()
    jaxret(gcs[1], "copy", "gs://bucket/rec", str(tmp_path / "back"))
    config = json.loads((tmp_path / "back" / "stage2" / "config.json").read_text())
    assert config["data"]["train"] == "gs://bucket/rec/mined/stage2.jsonl"
    named = [path for path in (tmp_path / "back").rglob("*.json*") if "working/.copy" in path.read_text()]
    assert not named
