"""A corpus encoded by the workers of a Ray cluster with several hosts on loopback, one of which dies while others
join."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.ray_encode import EncodeJob
from jaxret.runs.ray_cluster import EngineOptions, RunOpening
from tests.pipeline import command, contents, environment, run_script, untrained_run, write_data, write_encoder
from tests.runs.ray_hosts import add_host, ray_cluster

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    untrained_run(folder / "run", write_encoder(folder / "encoder"), write_data(folder / "data", train=150))
    return folder


@pytest.fixture
def cluster() -> Iterator[Any]:
    with ray_cluster() as hosts:
        yield hosts


def shards(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if name != "corpus.json" and not name.startswith(".")}


def test_bytes_do_not_depend_on_hosts_that_die_or_join(root: Path, cluster: Any, tmp_path: Path) -> None:
    options = ("--shard_rows=2", "--lease=5")
    run = tmp_path / "run"
    shutil.copytree(root / "run", run)
    dying = add_host(cluster, 3)
    encode = command(
        "encode.py", f"--workdir={run}", f"--corpus={root / 'data'}", *options, "--engine=ray", "--workers=2"
    )
    job = subprocess.Popen(encode, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while not any((run / "embeddings" / "data").glob("shard-*.json")):
            assert job.poll() is None, job.communicate()
            time.sleep(0.01)
        cluster.remove_node(dying, allow_graceful=False)
        assert not (run / "embeddings" / "data" / "manifest.json").exists()
        add_host(cluster, 4)
        add_host(cluster, 5)
        output, _ = job.communicate(timeout=240)
    finally:
        job.kill()
    assert job.returncode == 0, output
    assert "2 workers of Ray, each with CPU:1" in output
    alone = run_script("encode.py", f"--workdir={root / 'run'}", f"--corpus={root / 'data'}", *options)
    assert alone.returncode == 0, alone.stderr
    ours, theirs = (shards(folder / "embeddings" / "data") for folder in (root / "run", run))
    assert len(ours) > 3 * 60
    assert ours == theirs


def test_the_command_ends_with_the_error_of_a_worker(root: Path, cluster: Any, tmp_path: Path) -> None:
    add_host(cluster, 3)
    (tmp_path / "bad.jsonl").write_text('{"_id": "1", "text": "fine"}\n{"_id": "2"}\n')
    done = run_script("encode.py", f"--workdir={root / 'run'}", f"--corpus={tmp_path / 'bad.jsonl'}", "--engine=ray")
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1
    assert "bad.jsonl:2: " in done.stderr


def test_a_worker_without_the_platform_is_an_error(root: Path) -> None:
    job = EncodeJob(RunOpening(str(root / "run"), "best", "tpu", {}), str(root / "data"), "", EncodeOptions())
    assert job.encode().startswith("--platform is 'tpu', but JAX")


def test_an_unreachable_cluster(root: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (requirements-ray.txt)")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # no process listens on this port
        address = f"ray://127.0.0.1:{bound.getsockname()[1]}"
        done = run_script("encode.py", f"--workdir={root / 'run'}", f"--corpus={root / 'data'}", f"--engine={address}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: no Ray cluster answers at {address} (")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": "dask"}, r"engine .*'dask'; .*ray"),
        ({"engine": "ray", "resources": "GPU"}, "resources is 'GPU'"),
        ({"engine": "ray", "resources": "GPU:0"}, "resources is 'GPU:0'"),
        ({"engine": "ray", "workers": 0}, "workers is 0"),
        ({"workers": 2}, "workers needs engine"),
        ({"explicit_fields": ("resources",)}, "resources needs engine"),
    ],
)
def test_contradicting_options_are_errors(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions(**values)
