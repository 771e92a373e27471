"""Text to table: the shipped demo, shrunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxret.storage import read_json
from jaxret.tools import demo as tool
from tests.pipeline import run_script

SMALL: dict[str, Any] = {
    "train.steps": 2,
    "train.batch_size": 8,
    "validation.batch_size": 8,
    "validation.pool_size": 40,
    "tokens.passage_length": 32,
}
TITLES = ("BM25", *tool.SYSTEMS.values())


@pytest.mark.slow
def test_demo(minilm_dir: Path, tmp_path: Path) -> None:
    table = tool.demo(tmp_path, SMALL, max_passages=200)
    text = table.read_text()
    assert all(title in text for title in TITLES)
    for family in tool.SYSTEMS:
        folder = tmp_path / family
        assert (folder / "runs" / "python-docs.test.trec").exists()
        assert (folder / "embeddings" / "python-docs" / "manifest.json").exists()
        assert (folder / "eval" / "python-docs.test.json").exists()
    measured = {f: read_json(tmp_path / f / "eval" / "python-docs.test.json") for f in tool.SYSTEMS}
    assert [measured[f]["provenance"]["config"]["train"]["steps"] for f in tool.SYSTEMS] == [0, 2, 2]
    for evaluation in measured.values():  # two steps change little; BM25 finds a third of this
        assert 0.4 < evaluation["mean"]["nDCG@10"] < 1
        assert evaluation["queries_found"] == evaluation["queries_expected"] > 150
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("checkpoints/*/params/*")}
    assert tool.demo(tmp_path, SMALL, max_passages=200).read_text() == text
    assert stamps == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("checkpoints/*/params/*")}
    done = run_script("search.py", f"--workdir={tmp_path / 'mlr'}", "--query=how do I join two paths?", "--k=3")
    assert done.returncode == 0, done.stderr
    assert "  3. " in done.stdout
