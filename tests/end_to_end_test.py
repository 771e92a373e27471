"""From text to table: the shipped demo with small sizes, run as a process like a user's."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxret.demo import demo as tool
from jaxret.storage.atomic import read_json
from tests.pipeline import REPOSITORY, environment, run_script

SMALL: dict[str, Any] = {
    "train.steps": 2,
    "train.batch_size": 8,
    "validation.batch_size": 8,
    "validation.pool_size": 40,
    "tokens.passage_length": 32,
}
PASSAGES = 200


def run_demo(workdir: Path) -> str:
    """Run the demo in a new process, and return its output."""
    call = f"from jaxret.demo.demo import demo; demo({str(workdir)!r}, {SMALL}, max_passages={PASSAGES})"
    done = subprocess.run(
        [sys.executable, "-c", call],
        cwd=REPOSITORY,
        env={**environment(), "XLA_FLAGS": ""},  # one device
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_demo(minilm_dir: Path, tmp_path: Path) -> None:
    printed = run_demo(tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert len(re.findall(r"^  [123]\. +\d+\.\d{4}  \w+", printed, re.MULTILINE)) == 15, "the top 3 of five questions"
    assert len(re.findall(r"the training step was compiled to [1-4] program\(s\)", printed)) == 2
    assert re.search(r"[\d,]+ passages: \d+\.\d% cut at 32 tokens, \d+\.\d% of tokens lost", printed)
    assert f"The report, which a browser opens: {tmp_path / 'report.html'}\n" in printed
    verb, *arguments = shlex.split(printed.splitlines()[-1])
    assert verb == "jaxret"
    answered = subprocess.run([sys.executable, "-m", verb, *arguments], capture_output=True, text=True, check=True)
    assert re.search(r"^  1\. +\d+\.\d{4}  \w+", answered.stdout, re.MULTILINE), (
        "the last printed line is a command that works"
    )
    assert "<title>Questions about Python</title>" in (tmp_path / "report.html").read_text()
    own_data = printed.split("The same on your own data")[1]
    assert re.findall(r"^  jaxret (\w+) ", own_data, re.MULTILINE) == ["train", "encode", "search", "search"]
    assert all(title in text and title in printed for title in ("BM25", *(system.title for system in tool.SYSTEMS)))
    changed = r"^dual encoder from these +training: 2 steps of 8 pairs +[+-]0\.\d{4} .* (yes|no)$"
    assert re.search(changed, printed, re.MULTILINE)
    configs = [system.config for system in tool.SYSTEMS]
    for name in configs:
        folder = tmp_path / name
        assert (folder / "runs" / "python-docs.test.trec").exists()
        assert (folder / "embeddings" / "python-docs" / "manifest.json").exists()
    measured = {name: read_json(tmp_path / name / "eval" / "python-docs.test.json") for name in configs}
    assert [measured[name]["provenance"]["config"]["train"]["steps"] for name in configs] == [0, 2, 2, 0]
    assert [measured[name]["provenance"]["config"]["encoder"]["layers"] for name in configs] == [5, 5, 5, 0]
    for name, evaluation in measured.items():  # two training steps change the measures little
        assert (0.4 if name == "as_it_comes" else 0.1) < evaluation["mean"]["nDCG@10"] < 1
        assert evaluation["queries_found"] == evaluation["queries_expected"] > 150
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("checkpoints/*/params/*")}
    assert stamps
    run_demo(tmp_path)
    assert (tmp_path / "results.md").read_text() == text
    assert stamps == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("checkpoints/*/params/*")}
    done = run_script("search.py", f"--workdir={tmp_path / 'mlr'}", "--query=how do I join two paths?", "--k=3")
    assert done.returncode == 0, done.stderr
    assert "  3. " in done.stdout
