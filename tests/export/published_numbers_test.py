"""An untrained run of a published model reproduces the published numbers, with a user's three commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from jaxret.data.formats import Corpus
from jaxret.data.records import Passage
from jaxret.export.compare_original import original_vectors
from jaxret.export.import_model import make_run
from jaxret.runs.run import open_run
from tests.pipeline import REPOSITORY, environment

PUBLISHED = 0.6451  # nDCG@10 of all-MiniLM-L6-v2 on SciFact, from mteb's results


@pytest.fixture
def scifact(data_dir: Path) -> Path:
    folder = data_dir / "scifact"
    if not folder.is_dir():
        pytest.skip(f"no SciFact at {folder}")
    return folder


@pytest.mark.exhaustive
def test_passages_with_titles_have_the_vectors_of_torch(minilm_dir: Path, scifact: Path, tmp_path: Path) -> None:
    """mteb gives sentence-transformers a title, a space and the text."""
    pytest.importorskip("torch", reason="PyTorch is only needed for live parity")
    make_run(str(minilm_dir), tmp_path / "run", progress=False)
    run = open_run(tmp_path / "run")
    passages = list(islice(Corpus.open(scifact).read(), 4))
    joined = [f"{passage.title} {passage.text}".strip() for passage in passages]
    assert all(passage.title for passage in passages)
    theirs = original_vectors(run, minilm_dir, "transformers", joined, "passage")
    ours = run.embedder()(run.tokenizer.passages(passages), "passage").stacked()[:, 0]
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    apart = [Passage(passage.id, f"{passage.title} [SEP] {passage.text}") for passage in passages]
    separated = run.embedder()(run.tokenizer.passages(apart), "passage").stacked()[:, 0]
    assert np.abs(separated - theirs).max() > 1e-3, "control: titles with [SEP] give other vectors"


@pytest.mark.exhaustive
def test_scifact(minilm_dir: Path, scifact: Path, tmp_path: Path) -> None:
    workdir = f"--workdir={tmp_path}/run"
    settings = environment() | {"XLA_FLAGS": ""}  # XLA uses one device and optimizes its code
    settings |= {name: "" for name in os.environ if name.startswith("JAX_COMPILATION_CACHE")}
    for arguments in (
        ["open", str(minilm_dir), workdir],
        ["encode", workdir, f"--corpus={scifact}"],
        ["search", workdir, f"--queries={scifact}", f"--qrels={scifact}", "--latency=0"],
    ):
        command = [sys.executable, "-m", "jaxret", *arguments]
        done = subprocess.run(command, cwd=REPOSITORY, env=settings, capture_output=True, text=True, timeout=3600)
        assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "eval" / "scifact.test.json").read_text())
    assert abs(result["mean"]["nDCG@10"] - PUBLISHED) < 0.002
