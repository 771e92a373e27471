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

from jaxret.data.formats import Corpus
from jaxret.experiments.mteb.mteb_request import MtebRequest
from jaxret.index.encoding.encode import encode_corpus
from jaxret.runs.run import open_run
from tests.pipeline import REPOSITORY, run_script, untrained_run, write_data, write_encoder

CARD = """---
license: apache-2.0
language: [en, de]
base_model: google-bert/bert-base-uncased
training_datasets: [NQ]
open_weights: true
tags: [dense]
---

# A model
"""
MEASURES = {"nDCG@10": "ndcg_at_10", "R@100": "recall_at_100"}


def jaxret(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run jaxret with mteb; skip the test if mteb is missing."""
    return with_mteb("-m", "jaxret", *arguments, home=home)


def with_mteb(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with mteb; skip the test if mteb is missing."""
    python = os.environ.get("JAXRET_CLIENTS_PYTHON", sys.executable)
    path = f"{REPOSITORY}{os.pathsep}{sysconfig.get_paths()['purelib']}"
    variables = {**os.environ, "PYTHONPATH": path, "HOME": str(home), "HF_HOME": str(home / "hub")}
    check = [python, "-c", "import mteb, sys; print(sys.version_info[:2])"]
    seen = subprocess.run(check, env=variables, capture_output=True, text=True)
    if seen.returncode or seen.stdout.strip() != str(sys.version_info[:2]):
        pytest.skip("mteb is missing for this Python: requirements-clients.txt says how to install it")
    return subprocess.run([python, *arguments], env=variables, cwd=home, capture_output=True, text=True, timeout=400)


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
def test_results_in_mteb_files_equal_jaxret_search(root: Path, name: str) -> None:
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

    encode_corpus(run, Corpus.open(root / "data"), progress=False)
    search = [f"--workdir={root / name}", f"--queries={root / 'data'}", f"--qrels={root / 'data'}", "--k=100"]
    assert run_script("search.py", *search, f"--measures={','.join(MEASURES)}").returncode == 0
    values = json.loads((root / name / "eval" / "data.test.json").read_text())["per_query"]
    for ours, theirs in MEASURES.items():
        assert round(sum(values[ours].values()) / len(values[ours]), 5) == pytest.approx(scores[theirs], abs=1e-5)
    assert 0 < scores["ndcg_at_10"] < 1
    assert f"{scores['ndcg_at_10']:.5f}" in done.stdout

    assert [meta[key] for key in ("license", "languages", "training_datasets", "open_weights")] == [None] * 4

    stored = result.read_bytes()
    (root / name / "README.md").write_text(CARD)
    again = jaxret(*arguments, home=root)
    assert again.stdout.splitlines()[-1] == f"written to {result.parent.relative_to(root)}"
    assert result.read_bytes() == stored, "a task with a result is not repeated"
    meta = json.loads((result.parent / "model_meta.json").read_text())
    assert (meta["license"], meta["languages"], meta["open_weights"]) == ("apache-2.0", ["deu-Latn", "eng-Latn"], True)
    assert (meta["training_datasets"], meta["adapted_from"]) == (["NQ"], "google-bert/bert-base-uncased")
    assert (meta["release_date"], meta["max_tokens"]) == (None, run.contract["passage_length"])


@pytest.mark.exhaustive
def test_a_stored_result_is_reused_only_for_its_split_and_judgements(root: Path) -> None:
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
    assert test != dev, "the splits have different scores"
    shutil.copy(root / "changing" / "qrels" / "dev.tsv", root / "changing" / "qrels" / "test.tsv")
    assert score() == dev, "other judgements give another result"

    shutil.copytree(root / "data", root / "other" / "changing")
    done = jaxret(*arguments[:2], "--tasks=changing,other/changing", "--out=stored", home=root)
    assert done.returncode == 1
    assert "--tasks has changing and other/changing" in done.stderr


INDEX_TWICE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from jaxret.experiments.mteb import mteb_searcher
corpora = []
def encode(run, corpus, name, *_):
    corpora.append((corpus, name))
    return SimpleNamespace(folder=name)
mteb_searcher.encode_corpus = encode
mteb_searcher.Searcher = lambda *_, **__: None
searcher = mteb_searcher.MtebSearcher(None, Path(sys.argv[1]), None, False)
for revision, text in (("1" * 40, "old"), ("2" * 40, "new")):
    task = SimpleNamespace(name="Task", revision=revision)
    rows = [{"id": "a", "title": "", "text": text}]
    searcher.index(rows, task_metadata=task, hf_split="test", hf_subset="default")
print(*(name for _, name in corpora), *(passage.text for corpus, _ in corpora for passage in corpus.read()))
"""


@pytest.mark.exhaustive
def test_another_revision_of_a_task_is_another_corpus(tmp_path: Path) -> None:
    done = with_mteb("-c", INDEX_TWICE, str(tmp_path), home=tmp_path)
    assert done.returncode == 0, done.stderr
    names = [f"mteb.Task.test.{digit * 12}" for digit in "12"]
    assert done.stdout.splitlines()[-1] == " ".join([*names, "old", "new"])


@pytest.mark.exhaustive
def test_errors_are_one_sentence(root: Path) -> None:
    for tasks, sentence in {
        "nothing-of-this-name": "--tasks=nothing-of-this-name is neither a folder nor a task of mteb",
        "SciFact": "the data of SciFact are not in the cache of Hugging Face; --download fetches them",
        "STS12": "--tasks=STS12 has the type STS; jaxret mteb evaluates only retrieval",
    }.items():
        done = jaxret("mteb", f"--workdir={root / 'one'}", f"--tasks={tasks}", "--out=other", home=root)
        assert done.returncode == 1
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr


CARDS = {  # computed in one process, because importing mteb takes long
    "# A model": "card.md has no metadata: it must begin with YAML between two lines ---",
    "---\nlicense: [a\n---\n": "card.md: the text between the lines --- must be YAML keys and values",
    "---\nlanguage: tlhh\n---\n": "card.md: language is 'tlhh'; it must be a code of ISO 639",
    "---\nlicense: mine\n---\n": "card.md: license is 'mine', which mteb does not take: ",
    "---\nlicense: other\nlicense_link: http://terms.example\n---\n": "licence http://terms.example/, languages None",
}
READ_CARDS = """
import json, pathlib, sys
from jaxret.experiments.mteb.mteb_searcher import model_meta
from jaxret.runs.run import open_run
run = open_run(sys.argv[1])
for text in json.loads(sys.argv[2]):
    pathlib.Path("card.md").write_text(text)
    try:
        meta = model_meta(run, "jaxret/one", "card.md")
        print(f"licence {meta.license}, languages {meta.languages}")
    except ValueError as error:
        print(str(error).replace("\\n", " "))
"""


@pytest.mark.exhaustive
def test_an_invalid_card_is_one_sentence(root: Path) -> None:
    done = with_mteb("-c", READ_CARDS, str(root / "one"), json.dumps(list(CARDS)), home=root)
    assert done.returncode == 0, done.stderr
    for line, sentence in zip(done.stdout.splitlines(), CARDS.values(), strict=True):
        assert line.startswith(sentence)
    done = jaxret("mteb", f"--workdir={root / 'one'}", "--tasks=data", "--out=cards", "--card=none.md", home=root)
    assert (done.returncode, done.stderr) == (1, "error: none.md: No such file or directory\n")


@pytest.mark.slow
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
    with pytest.raises(ValueError, match="model_name is 'mlr'; it must be ORGANIZATION/NAME"):
        MtebRequest(workdir="one", tasks=("data",), out="none", model_name="mlr")
