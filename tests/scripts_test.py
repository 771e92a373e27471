"""The scripts as a user runs them, in processes of their own."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from jaxret.storage import read_json
from tests.pipeline import (
    REPOSITORY,
    command,
    contents,
    environment,
    run_script,
    untrained_run,
    write_data,
    write_encoder,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/ (BEIR) and run/, an untrained run whose shards hold three passages."""
    folder = tmp_path_factory.mktemp("scripts")
    data = write_data(folder / "data")
    untrained_run(folder / "run", write_encoder(folder / "encoder"), data, encode__shard_rows=3)
    return folder


@pytest.mark.slow
def test_encode_killed_and_continued(root: Path) -> None:
    """kill -9 after some shard is written: the same command continues, and every byte is that of a job left alone."""
    arguments = (f"--workdir={root / 'run'}", f"--corpus={root / 'data'}")
    folder = root / "run" / "embeddings" / "killed"
    process = subprocess.Popen(
        command("encode.py", *arguments, "--name=killed"),
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not list(folder.glob("shard-*.json")):
        assert process.poll() is None, "encode.py ended before it wrote a shard"
        time.sleep(0.001)
    process.kill()
    process.wait()
    done = {path.name: path.stat().st_mtime_ns for path in folder.glob("vectors-*.npy")}
    assert not (folder / "manifest.json").exists(), "control: it was killed before the end"

    continued = run_script("encode.py", *arguments, "--name=killed")
    assert continued.returncode == 0, continued.stderr
    alone = run_script("encode.py", *arguments, "--name=alone")
    assert alone.returncode == 0, alone.stderr
    assert contents(folder) == contents(root / "run" / "embeddings" / "alone")
    first = sorted(done)[0]
    assert (folder / first).stat().st_mtime_ns == done[first], "a shard that was whole is not written again"
    assert len(read_json(folder / "manifest.json")["shards"]) > len(done)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("train.py", ("--config=configs/minilm.py", "--workdir=w", "--config.data.trian=x"), "no such key"),
        ("train.py", ("--config=configs/minilm.py",), "--workdir must have a value"),
        ("train.py", ("--config=configs/minilm.py", "--workdir=w", "stray"), "every argument is a flag"),
        ("encode.py", ("--workdir=nowhere", "--corpus=x"), "nowhere is no run"),
        ("search.py", ("--workdir=nowhere",), "give either --query"),
    ],
)
def test_a_mistake_is_one_sentence(script: str, arguments: tuple[str, ...], message: str) -> None:
    done = run_script(script, *arguments)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert message in line
    assert "Traceback" not in done.stderr
