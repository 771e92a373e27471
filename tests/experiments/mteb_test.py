"""`jaxret mteb` with the real mteb, in the environment of requirements-clients.txt: numbers and files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from jaxret.experiments.mteb.mteb_options import MtebOptions
from jaxret.index.encode import encode_corpus
from jaxret.runs.run import open_run
from tests.pipeline import REPOSITORY, run_script, untrained_run, write_data, write_encoder

MEASURES = {"nDCG@10": "ndcg_at_10", "R@100": "recall_at_100"}


def jaxret(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run jaxret with mteb; skip if there is none."""
    python = os.environ.get("JAXRET_CLIENTS_PYTHON", sys.executable)
    path = f"{REPOSITORY}{os.pathsep}{sysconfig.get_paths()['purelib']}"
    variables = {**os.environ, "PYTHONPATH": path, "HOME": str(home), "HF_HOME": str(home / "hub")}
    check = [python, "-c", "import mteb, sys; print(sys.version_info[:2])"]
    seen = subprocess.run(check, env=variables, capture_output=True, text=True)
    if seen.returncode or seen.stdout.strip() != str(sys.version_info[:2]):
        pytest.skip("mteb is missing for this Python: requirements-clients.txt says how to install it")
    return subprocess.run(
        [python, "-m", "jaxret", *arguments], env=variables, cwd=home, capture_output=True, text=True, timeout=400
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mteb")
    write_encoder(root / "encoder")
    write_data(root / "data")
    untrained_run(root / "one", root / "encoder", root / "data")
    untrained_run(
        root / "several", root / "encoder", root / "data", head__name="mlr", head__mlr__chosen=(2, 3), pooling="none"
    )
    return root


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["several", "one"])
def test_a_folder_has_the_numbers_of_jaxret_search_in_mteb_s_files(root: Path, name: str) -> None:
    arguments = ["mteb", f"--workdir={root / name}", "--tasks=data", f"--out=results-{name}"]
    done = jaxret(*arguments, home=root)
    assert done.returncode == 0, done.stderr
    (result,) = (root / f"results-{name}").rglob("data.json")
    assert result.parent.parent.name == f"jaxret__{name}"
    (scores,) = json.loads(result.read_text())["scores"]["test"]
    meta = json.loads((result.parent / "model_meta.json").read_text())
    run = open_run(root / name)
    assert meta["revision"] == f"step-0-{run.checkpoint['digest'][:12]}" == result.parent.name
    assert (meta["framework"], meta["max_tokens"]) == (["JAX"], run.contract["passage_length"])

    encode_corpus(run, root / "data", progress=False)
    search = [f"--workdir={root / name}", f"--queries={root / 'data'}", f"--qrels={root / 'data'}", "--k=100"]
    assert run_script("search.py", *search, f"--measures={','.join(MEASURES)}").returncode == 0
    values = json.loads((root / name / "eval" / "data.test.json").read_text())["per_query"]
    for ours, theirs in MEASURES.items():
        assert round(sum(values[ours].values()) / len(values[ours]), 5) == pytest.approx(scores[theirs], abs=1e-5)
    assert 0 < scores["ndcg_at_10"] < 1
    assert f"{scores['ndcg_at_10']:.5f}" in done.stdout

    stored = result.read_bytes()
    again = jaxret(*arguments, home=root)
    assert again.stdout.splitlines()[-1] == f"written to {result.parent.relative_to(root)}"
    assert result.read_bytes() == stored, "a task that has a result is not repeated"


@pytest.mark.exhaustive
def test_a_stored_result_is_that_of_its_split_and_judgements(root: Path) -> None:
    arguments = ["mteb", f"--workdir={root / 'one'}", "--tasks=changing", "--out=stored"]
    shutil.copytree(root / "data", root / "changing")

    def score(*more: str, name: str = "changing") -> float:
        done = jaxret(*arguments, *more, home=root)
        assert done.returncode == 0, done.stderr
        (path,) = (root / "stored").rglob(f"{name}.json")
        ((values,),) = json.loads(path.read_text())["scores"].values()
        assert f"{values['ndcg_at_10']:.5f}" in done.stdout
        return float(values["ndcg_at_10"])

    test, dev = score(), score("--split=dev", name="changing.dev")
    assert test != dev, "the data distinguish the splits"
    shutil.copy(root / "changing" / "qrels" / "dev.tsv", root / "changing" / "qrels" / "test.tsv")
    assert score() == dev, "other judgements, another result"

    shutil.copytree(root / "data", root / "other" / "changing")
    done = jaxret(*arguments[:2], "--tasks=changing,other/changing", "--out=stored", home=root)
    assert done.returncode == 1
    assert "--tasks has changing and other/changing" in done.stderr


@pytest.mark.exhaustive
def test_what_is_wrong_is_one_sentence(root: Path) -> None:
    for tasks, sentence in {
        "nothing-of-this-name": "--tasks=nothing-of-this-name is no folder, and mteb has no such task",
        "SciFact": "the data of SciFact are not in the cache of Hugging Face; --download fetches them",
        "STS12": "--tasks=STS12 is of the type STS; jaxret mteb evaluates retrieval",
    }.items():
        done = jaxret("mteb", f"--workdir={root / 'one'}", f"--tasks={tasks}", "--out=other", home=root)
        assert done.returncode == 1
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr


def test_without_mteb_the_remedy_is_named(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxret", "mteb", f"--workdir={root / 'one'}", "--tasks=data", "--out=none"],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: jaxret mteb needs mteb, which is not installed: pip install 'jaxret[mteb]'")
    with pytest.raises(ValueError, match="model_name is 'mlr'; mteb's names are ORGANISATION/NAME"):
        MtebOptions(model_name="mlr")
