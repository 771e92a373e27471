"""Progress of commands whose streams are files: lines on standard error, also for nested work, and no bar."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pipeline import REPOSITORY, environment, train_arguments, write_data, write_encoder

OFTEN = """
import sys
from jaxret.__main__ import main
from jaxret.parallel import progress
progress.LINE_INTERVAL = 1e-4
main()
"""
LINE = re.compile(
    r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d ([\w .]+): [\d,]+ (of [\d,]+ )?\w+ (\(\d+%\) )?(for|in) \d\d:\d\d(, .*)?"
)


def works(*arguments: str) -> set[str]:
    """Run a command that writes progress often; return the names in its progress lines. stderr has no other lines."""
    command = [sys.executable, "-c", OFTEN, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [LINE.fullmatch(line) for line in done.stderr.split("\n")[:-1]]
    assert all(lines), done.stderr
    assert "\r" not in done.stdout
    return {line[1] for line in lines if line}


@pytest.mark.exhaustive
def test_commands_write_lines_into_files(tmp_path: Path) -> None:
    encoder, data, run = write_encoder(tmp_path / "encoder"), str(write_data(tmp_path / "data")), tmp_path / "run"
    shown = works("train", *train_arguments(encoder, Path(data), run, train__steps=2, train__checkpoint_every=1))
    assert {"train", "validate", "rank passages"} <= shown
    if find_spec("torch"):
        assert "compare with transformers" in works("open", str(encoder), f"--workdir={tmp_path}/opened")
    assert "encode" in works("encode", f"--workdir={run}", f"--corpus={data}")
    assert "search" in works("search", f"--workdir={run}", f"--queries={data}", f"--qrels={data}", "--k=10")
    assert any(name.startswith("layers of ") for name in works("probe", data, f"--workdir={run}"))
    mined = works(
        "mine", f"--data={data}", f"--corpus={data}", "--pool=bm25", f"--pool={run}", f"--out={tmp_path}/m.jsonl"
    )
    assert {"mine", "encode queries", "BM25 search"} <= mined
