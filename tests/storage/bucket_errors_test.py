"""Buckets that may not be written, servers that do not answer, and objects that are damaged or gone: real processes, a
fake of GCS on loopback."""

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

from tests.pipeline import REPOSITORY, contents, train_arguments, untrained_run, write_data, write_encoder
from tests.storage.buckets import LOOPBACK, Server, finish, gcs_server, start


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
    damaged = jaxret(gcs[1], "verify", run)
    assert damaged.returncode == 1
    assert f"bad: {run}/config.json: its object data/" in damaged.stdout
    assert f"bad: {run}/contract.json is damaged in the bucket" in damaged.stdout
    assert f"error: {run}: 2 of" in damaged.stderr
    refused = jaxret(gcs[1], "search", f"--workdir={run}", "--query=x")
    assert refused.returncode == 1
    assert "config.json: its object data/" in refused.stderr or "contract.json is damaged" in refused.stderr
    unused = jaxret(gcs[1], "verify", run, "--delete_unused")
    assert "objects belong" not in unused.stdout, "all objects belong to files"
    assert ": 0 copied" in jaxret(gcs[1], "copy", str(tmp_path / "run"), run).stdout
    assert ": 2 copied" in jaxret(gcs[1], "copy", str(tmp_path / "run"), run, "--verify").stdout
    assert "nothing is damaged" in jaxret(gcs[1], "verify", run).stdout
    before = dict(gcs[0].objects)
    gcs[0].objects["bucket", f"runs/tiny/data/{'1' * 16}-{'2' * 64}"] = 1, b"of a killed job"
    assert "1 objects belong to no file" in jaxret(gcs[1], "verify", run).stdout
    assert "1 objects belonged to no file, and are deleted" in jaxret(gcs[1], "verify", run, "--delete_unused").stdout
    assert gcs[0].objects == before
    assert "has no objects" in jaxret(gcs[1], "verify", str(tmp_path / "run"), "--delete_unused").stderr
    assert jaxret(gcs[1], "copy", run, str(tmp_path / "back")).returncode == 0
    ours, theirs = contents(tmp_path / "run"), contents(tmp_path / "back")
    assert {name: text for name, text in ours.items() if name in theirs} == theirs


@pytest.mark.slow
def test_an_encoder_may_be_in_a_bucket(gcs: Server, tmp_path: Path) -> None:
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    for path in encoder.iterdir():  # as other programs write it
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
        (["copy", "ftp://host/run", "copy"], "ftp://host/run: ftp:// is not read or written, but gs:// and s3:// are"),
        (["copy", "run", "S3://bucket/run"], "write s3:// in place of S3://"),
        (["compare", "run", "--prometheus=gs://bucket/x.prom"], "give a file on this host's disk"),
    ],
)
def test_addresses_of_other_kinds_are_named(arguments: list[str], message: str) -> None:
    refused = jaxret(dict(os.environ), *arguments)
    assert refused.returncode == 1
    assert message in refused.stderr
