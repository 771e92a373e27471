"""`jaxret bm25` as a process: a stored index, a run file and an evaluation that other verbs read; bad input."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxret.data.formats import Corpus, JudgementSource, QuerySource, RankingSource
from jaxret.data.records import Passage
from jaxret.evaluation.metrics import evaluate
from jaxret.search.bm25 import BM25
from jaxret.search.bm25_settings import BM25Settings
from jaxret.storage.atomic import read_json
from tests.pipeline import environment, write_data

SOURCES = ("--corpus=data", "--queries=data", "--qrels=data", "--k=20")


def jaxret(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxret", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bm25")
    write_data(folder / "data")
    done = jaxret(folder, "bm25", "--workdir=one", *SOURCES)
    assert done.returncode == 0, done.stderr
    assert "built the index of" in done.stdout
    return folder


def test_rankings_and_evaluation_equal_the_library(root: Path) -> None:
    queries, judgements = QuerySource.open(root / "data").read(), JudgementSource.open(root / "data", "test").read()
    judged = {judgement.query_id for judgement in judgements}
    expected = BM25.of(Corpus.open(root / "data").read()).search([query for query in queries if query.id in judged], 20)
    written = RankingSource.open(root / "one" / "runs" / "data.test.trec").read()
    assert {query: [key for key, _ in ranking] for query, ranking in written.items()} == {
        query: [key for key, _ in ranking] for query, ranking in expected.items() if ranking
    }
    stored = read_json(root / "one" / "eval" / "data.test.json")
    assert stored["per_query"]["RR@10"] == evaluate(expected, judgements, ["RR@10"]).per_query["RR@10"]
    assert stored["answers"]["mean"].keys() == {"Accuracy@1", "Accuracy@5", "Accuracy@20"}
    assert stored["cost"]["bytes_per_passage"] > 8
    assert stored["cost"]["latency"]["questions"] == len(expected)
    assert list(stored["cost"]["latency"]["search_ms"]) == ["p1", "p50", "p90", "p99"]
    assert stored["provenance"]["config"] == {"bm25": {"k1": 0.9, "b": 0.4, "language": "english"}}


@pytest.mark.slow
def test_the_index_is_reused_or_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "one", root / "kept")
    again = jaxret(root, "bm25", "--workdir=kept", *SOURCES, "--measures=RR@5,Accuracy@3", "--latency=2")
    assert again.returncode == 0, again.stderr
    assert "opened the index of" in again.stdout
    assert "one question at a time (2 asked): encoding" in again.stdout
    assert "answer strings found: Accuracy@3 " in again.stdout
    other = jaxret(root, "bm25", "--workdir=one", *SOURCES, "--k1=1.2")
    assert other.returncode == 1
    assert "settings.k1: 0.9 in one/bm25/data/manifest.json, 1.2 in this command" in other.stderr
    write_data(tmp_path / "data", train=44)
    changed = jaxret(root, "bm25", "--workdir=one", f"--corpus={tmp_path / 'data'}", *SOURCES[1:])
    assert changed.returncode == 1
    assert "corpus.sha256: " in changed.stderr
    done = jaxret(root, "bm25", "--workdir=damaged", *SOURCES)
    assert done.returncode == 0
    path = root / "damaged" / "bm25" / "data" / "data.csc.index.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    damaged = jaxret(root, "bm25", "--workdir=damaged", *SOURCES)
    assert damaged.returncode == 1
    assert "damaged/bm25/data/data.csc.index.npy is missing or damaged; remove damaged/bm25/data" in damaged.stderr


@pytest.mark.slow
def test_empty_passages_are_kept_on_request(root: Path) -> None:
    """Some data sets of BEIR have empty passages."""
    shutil.copytree(root / "data", root / "with-empty" / "data")
    with open(root / "with-empty" / "data" / "corpus.jsonl", "a") as file:
        file.write('{"_id": "empty", "title": "", "text": ""}\n')
    stopped = jaxret(root / "with-empty", "bm25", "--workdir=one", *SOURCES)
    assert stopped.returncode == 1
    assert "corpus.jsonl:" in stopped.stderr
    kept = jaxret(root / "with-empty", "bm25", "--workdir=one", *SOURCES, "--on_error=keep")
    assert kept.returncode == 0, kept.stderr
    runs = [RankingSource.open(root / name / "one" / "runs" / "data.test.trec").read() for name in (".", "with-empty")]
    assert [len(run) for run in runs] == [len(runs[0])] * 2
    assert not any(key == "empty" for ranking in runs[1].values() for key, _ in ranking)


@pytest.mark.exhaustive
def test_results_are_compared_and_fused(root: Path) -> None:
    done = jaxret(root, "bm25", "--workdir=two", *SOURCES, "--k1=2", "--b=0.9", "--latency=0")
    assert done.returncode == 0, done.stderr
    compared = jaxret(root, "compare", "one", "two", "--measures=nDCG@10", "--resamples=1000")
    assert compared.returncode == 0, compared.stderr
    assert {"one", "two"} <= {line.split()[0] for line in compared.stdout.splitlines() if line.split()}
    twice = jaxret(root, "compare", "one", "one", "--measures=nDCG@10")
    assert twice.returncode == 1
    runs = [f"{name}/runs/data.test.trec" for name in ("one", "two")]
    assert jaxret(root, "fuse", *runs, "--out=both.trec").returncode == 0


@pytest.mark.table
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--corpus=data",), "give --queries (a folder or file with queries)"),
        (("--corpus=data", "--queries=data", "--b=2"), "b is 2.0; it must be at most 1"),
        (("--corpus=data", "--queries=data", "--language=en"), "language is 'en'; it must be one of arabic"),
        (("--corpus=none", "--queries=data"), "none"),
        (("--corpus=data", "--queries=data", "--qrels=data", "--measures=Accuracy@500"), "Accuracy@500 needs --k=500"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], message: str, root: Path) -> None:
    done = jaxret(root, "bm25", "--workdir=bad", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert not (root / "bad").exists()


@pytest.mark.slow
def test_the_folder_of_a_run_may_have_white_space_in_its_name(root: Path) -> None:
    """The tag of a run file is one word; every search failed when it wrote the rankings."""
    done = jaxret(root, "bm25", "--workdir=Lauf  ä 1", *SOURCES, "--measures=RR@5", "--latency=0")
    assert done.returncode == 0, done.stderr
    assert (root / "Lauf  ä 1/runs/data.test.trec").read_text().splitlines()[0].endswith(" jaxret-Lauf-ä-1")


def test_no_folders_are_made_of_a_mistyped_path(root: Path) -> None:
    done = jaxret(root, "bm25", "--workdir=rnus/bm25", *SOURCES)
    assert done.returncode == 1
    assert f"--workdir=rnus/bm25: there is no folder {root / 'rnus'}; make it, or correct the path" in done.stderr
    assert not (root / "rnus").exists()


def test_an_index_of_other_settings_differs() -> None:
    passages = [Passage("1", "river stone river"), Passage("2", "river")]
    one, other = (BM25.of(passages, BM25Settings(k1=k1)).rank(["river"], 2) for k1 in (0.9, 2.0))
    assert one != other
