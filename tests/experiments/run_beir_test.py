"""`jaxret beir`: every data set of a folder, including nested ones; means as in papers, other systems, and a kill in
between."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from jaxret.data.dataset_check import check_data
from jaxret.data.errors import DataError
from jaxret.data.formats import Corpus, DataSource
from jaxret.data.formats.set_folders import list_sets
from jaxret.experiments import run_beir as beir_module
from jaxret.experiments.beir_job import BeirJob
from jaxret.experiments.reproduce.papers import paper_means
from jaxret.experiments.run_beir import (
    beir_table,
    choose_sets,
    combined_members,
    evaluate_beir,
    mean_of,
    missing_sets,
    read_columns,
    unjudged_sets,
)
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_bm25 import search_bm25
from jaxret.runs.workdir import Workdir
from jaxret.search.bm25_settings import BM25Settings
from jaxret.storage.atomic import read_json, write_json
from tests.pipeline import REPOSITORY, environment, untrained_run, write_data, write_encoder

SMALL = ("arguana", "fiqa", "nfcorpus", "scidocs", "scifact")
FORUMS = ("android", "english")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beir") / "sets"
    for seed, name in enumerate((*SMALL, *(f"cqadupstack/{forum}" for forum in FORUMS))):
        write_data(folder / name, train=12, dev=3, seed=seed)
    (folder / "README.md").write_text("no set")
    (folder / "empty").mkdir()
    return folder


def entry(value: float, queries: int = 2, path: str = "x.json") -> dict[str, Any]:
    return {"measures": {"nDCG@10": value, "R@100": value / 2}, "queries": queries, "qrels": "q", "evaluation": path}


def test_sets_of_a_folder(sets: Path) -> None:
    listed = list_sets(sets)
    assert list(listed) == sorted([*SMALL, "cqadupstack"])
    assert listed["cqadupstack"] == {f"cqadupstack-{forum}": sets / "cqadupstack" / forum for forum in FORUMS}
    assert listed["scifact"] == {"scifact": sets / "scifact"}


def test_a_set_of_forums_is_their_mean() -> None:
    one = combined_members({"a": entry(0.2, 1), "b": entry(0.6, 9)})  # the mean is not weighted by queries
    assert one["measures"] == {"nDCG@10": pytest.approx(0.4), "R@100": pytest.approx(0.2)}
    assert one["queries"] == 10
    assert combined_members({"a": entry(0.2)}) == entry(0.2)


def test_a_mean_needs_all_its_sets() -> None:
    assert set(paper_means()["BEIR small"]) == set(SMALL)
    assert [len(names) for names in paper_means().values()] == [14, 15, 5]
    results = {name: entry(i / 10) for i, name in enumerate(SMALL)}
    assert mean_of("BEIR small", results) == {"nDCG@10": pytest.approx(0.2), "R@100": pytest.approx(0.1)}
    table = beir_table({"mine": results, "other": {"scifact": entry(0.5)}})
    assert [line.split() for line in table.splitlines() if line.startswith(("scifact", "BEIR small"))] == [
        ["scifact", "2", "0.4000", "0.5000", "0.2000", "0.2500"],
        ["BEIR", "small", "0.2000", "-", "0.1000", "-"],
    ]
    del results["fiqa"]
    assert mean_of("BEIR small", results) == {}
    assert missing_sets("BEIR small", results) == ["fiqa"]
    assert "BEIR small: missing fiqa" in beir_table({"mine": results})


def test_other_systems_are_columns(tmp_path: Path) -> None:
    def write(folder: Path, name: str, value: float, qrels: str = "q", queries: int = 2) -> None:
        data = {"provenance": {"dataset": {"sha256": {"qrels": qrels}}}, "queries_expected": queries}
        write_json(folder / name, data | {"mean": {"nDCG@10": value, "R@100": value}})

    forums = {f"cqadupstack-{forum}": entry(0.1, path=f"cqadupstack-{forum}.test.q16.json") for forum in FORUMS}
    results = {"scifact": entry(0.1, path="scifact.test.q16.json"), "cqadupstack": combined_members(forums)}
    write(tmp_path / "run" / "eval", "scifact.test.json", 0.3)
    # Preferred: the results have the same query length, q16.
    write(tmp_path / "run" / "eval", "scifact.test.q16.json", 0.4)
    write(tmp_path / "bm25", "cqadupstack-android.test.json", 0.2)
    write(tmp_path / "bm25", "cqadupstack-english.test.json", 0.4)
    columns = read_columns([str(tmp_path / "run"), f"BM25={tmp_path / 'bm25'}"], results)
    assert {name: {key: one["measures"]["nDCG@10"] for key, one in of.items()} for name, of in columns.items()} == {
        "run": {"scifact": 0.4},
        "BM25": {"cqadupstack": pytest.approx(0.3)},
    }
    write(tmp_path / "bm25", "scifact.test.json", 0.2, qrels="others")
    with pytest.raises(ValueError, match=r"scifact\.test\.json was evaluated with other judgements"):
        read_columns([str(tmp_path / "bm25")], results)
    with pytest.raises(FileNotFoundError, match=r"evaluation .*these .*scifact\.test\.json"):
        read_columns([str(tmp_path)], results)
    (tmp_path / "scifact.test.json").write_text('{"mean": {"RR": 1}}')
    with pytest.raises(ValueError, match=r"scifact\.test\.json .*evaluation .*nDCG@10 .*R@100"):
        read_columns([str(tmp_path)], results)


@pytest.mark.parametrize(
    "settings",
    [
        {"columns": ("other/mlr",)},
        {"columns": ("mlr=other/dual",)},
        {"columns": ("one/dual", "other/dual")},
        {"columns": ("BM25=words",), "bm25": True},
    ],
)
def test_two_columns_of_one_name(settings: dict[str, Any]) -> None:
    """One of the columns would replace the other in the table; the run's own column counts, too."""
    with pytest.raises(ValueError, match=r"columns .*(mlr|dual|BM25); .*NAME=FOLDER"):
        BeirJob("sets", "runs/mlr", **settings)
    BeirJob("sets", "runs/mlr", columns=("other=other/mlr", "BM25=words"))


def test_a_part_of_the_sets_keeps_the_results_of_the_others(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encode, lengths = SimpleNamespace(dtype="float32", words=0), SimpleNamespace(query_length=8, passage_length=8)
    run = SimpleNamespace(checkpoint={"step": 1}, config=SimpleNamespace(encode=encode), tokenizer=lengths)
    job = BeirJob(str(sets), str(tmp_path / "run"))
    workdir = Workdir(job.workdir)

    def search(run: Any, source: EvaluationSource, options: EvaluationOptions, *rest: Any) -> None:
        name = ".".join(filter(None, (options.name, options.label)))
        write_json(workdir.evaluation(name), {"queries_expected": 2, "mean": {"nDCG@10": 0.5, "R@100": 0.5}})
        write_json(workdir.rankings(name), {})

    for system in ("encoder", "searcher"):
        monkeypatch.setattr(beir_module._Evaluator, system, run)
    monkeypatch.setattr(beir_module, "encode_corpus", lambda *_: None)
    monkeypatch.setattr(beir_module, "search_files", search)
    evaluate_beir(replace(job, sets=("cqadupstack", "fiqa")))
    capsys.readouterr()
    # The two sets before had no bad records, so "skip" would not change them.
    evaluate_beir(replace(job, sets=("scifact",), on_error="skip"))
    assert list(read_json(job.result)["sets"]) == ["cqadupstack", "fiqa", "scifact"]
    assert "fiqa  " not in capsys.readouterr().out  # the table has only the chosen sets
    workdir.evaluation("fiqa.test").unlink()
    workdir.evaluation("cqadupstack-english.test").write_text("{}")  # this file now differs from the ledger's result
    evaluate_beir(replace(job, sets=("arguana",)))
    assert list(read_json(job.result)["sets"]) == ["arguana"]  # a result of "skip" may lack bad records
    evaluate_beir(replace(job, sets=("scifact",)))
    assert list(read_json(job.result)["sets"]) == ["arguana", "scifact"]
    run.checkpoint = {"step": 2}
    evaluate_beir(replace(job, sets=("arguana",)))
    assert list(read_json(job.result)["sets"]) == ["arguana"]
    named = replace(job, sets=("scifact",), name="mine")
    evaluate_beir(named)
    assert list(read_json(named.result)["sets"]) == ["scifact"]
    assert workdir.evaluation("scifact.test.mine").exists()
    assert list(read_json(job.result)["sets"]) == ["arguana"], "the named result is in another file"


@pytest.mark.slow
def test_bm25_is_a_column(sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command computes it, once per set; it is also read from files of `jaxret bm25`, one command per
    forum."""
    run = untrained_run(tmp_path / "run", write_encoder(tmp_path / "encoder"), sets / "scifact")
    job = BeirJob(str(sets), str(run.workdir), sets=("cqadupstack",), bm25=True)
    result = evaluate_beir(job)["sets"]
    columns = read_columns([f"BM25={run.workdir / 'beir' / 'bm25'}"], result)
    android = sets / "cqadupstack" / "android"
    options = EvaluationOptions(k=100, measures=("nDCG@10", "R@100"), latency=0)
    for forum in (android, sets / "cqadupstack" / "english"):
        search_bm25(
            str(tmp_path / "bm25"),
            Corpus.open(forum),
            EvaluationSource.open(forum, forum),
            BM25Settings(),
            options,
            False,
        )
    by_hand = read_columns([f"BM25={tmp_path / 'bm25'}"], result)
    measures = columns["BM25"]["cqadupstack"]["measures"]
    assert by_hand["BM25"]["cqadupstack"]["measures"] == measures
    assert 0 < measures["nDCG@10"] < 1
    capsys.readouterr()
    evaluate_beir(job)
    printed = capsys.readouterr().out
    assert printed.count("already done") == 4
    assert f"{measures['nDCG@10']:.4f}" in printed


def test_wrong_folders_and_sets(sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"folder .*exist; .*folder"):
        list_sets(tmp_path / "gone")
    with pytest.raises(DataError, match=r"data .*folder .*several"):
        list_sets(sets / "scifact")
    with pytest.raises(DataError, match=r"folder .*passages"):
        list_sets(tmp_path)
    with pytest.raises(ValueError, match=r"scifakt; .*arguana, cqadupstack"):
        choose_sets(BeirJob(str(sets), "run", sets=("scifakt",)))
    with pytest.raises(ValueError, match=r"arguana .*judgements .*--split"):
        choose_sets(BeirJob(str(sets), "run", split="other"))
    shutil.copytree(sets, tmp_path / "some")
    (tmp_path / "some" / "cqadupstack" / "english" / "qrels" / "test.tsv").unlink()
    chosen = choose_sets(BeirJob(str(tmp_path / "some"), "run"))
    assert list(chosen) == list(SMALL)
    assert unjudged_sets(list_sets(tmp_path / "some"), "test") == {
        "cqadupstack": "no judgements of test in cqadupstack-english"
    }
    assert "left out: cqadupstack has no judgements of test" in capsys.readouterr().out


@pytest.mark.slow
def test_all_sets_of_a_folder_are_checked(sets: Path, tmp_path: Path) -> None:
    shutil.copytree(sets, tmp_path / "sets")
    with open(tmp_path / "sets" / "cqadupstack" / "english" / "corpus.jsonl", "a") as file:
        file.write("{broken\n")
    check = check_data(DataSource.open(tmp_path / "sets"))
    assert sum("BEIR corpus" in line for line in check.lines) == 7
    assert [error.location.path.parent.name for error in check.policy.errors] == ["english"]


def beir(sets: Path, workdir: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "jaxret", "beir", str(sets), f"--workdir={workdir}", "--query_length=8", *arguments]


def finished(line: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.exhaustive
def test_a_killed_evaluation_continues_to_the_table(sets: Path, tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder")
    untrained_run(tmp_path / "run", encoder, sets / "scifact")
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    whole = finished(beir(sets, tmp_path / "run", "--bm25"))
    assert whole.returncode == 0, whole.stderr
    rows = {line.split("  ")[0]: line.split() for line in whole.stdout.splitlines()}
    assert rows["set"][-2:] == ["R@100", "BM25"]
    assert "-" not in rows["cqadupstack"] + rows["BEIR small"]
    result = read_json(tmp_path / "run" / "beir" / "best.q8.json")
    assert list(result["means"]) == ["BEIR small"]
    for measure, mean in result["means"]["BEIR small"].items():
        assert mean == pytest.approx(fmean(result["sets"][name]["measures"][measure] for name in SMALL))
    assert "trec-covid" in result["missing"]["mean of 14 (Aggretriever)"]
    for name in SMALL:  # each number is that of `jaxret search`; ArguAna's queries do not match themselves
        assert read_json(tmp_path / "run" / "eval" / f"{name}.test.q8.json")["mean"] == result["sets"][name]["measures"]
    data = read_json(tmp_path / "run" / "eval" / "arguana.test.q8.json")["provenance"]["dataset"]
    assert data["self_matches"] == "removed"

    worker = subprocess.Popen(beir(sets, tmp_path / "killed"), cwd=REPOSITORY, env=environment(), stdout=-3, stderr=-3)
    deadline = time.monotonic() + 200
    while not (tmp_path / "killed" / "eval" / "cqadupstack-android.test.q8.json").exists():
        assert worker.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert not (tmp_path / "killed" / "eval" / "scifact.test.q8.json").exists()
    again = finished(beir(sets, tmp_path / "killed", f"--beside=whole={tmp_path / 'run'}"))
    assert again.returncode == 0, again.stderr
    assert "== arguana: already done" in again.stdout
    assert "== scifact\n" in again.stdout
    other = read_json(tmp_path / "killed" / "beir" / "best.q8.json")
    for name, one in result["sets"].items():
        assert other["sets"][name]["measures"] == one["measures"], name
    (row,) = [line.split() for line in again.stdout.splitlines() if line.startswith("BEIR small")]
    assert row[2] == row[3]
    assert row[4] == row[5]
    # A changed set is measured again, and the others are not.
    qrels = sets / "scifact" / "qrels" / "test.tsv"
    text = qrels.read_text()
    qrels.write_text("".join(text.splitlines(True)[:-3]))
    third = finished(beir(sets, tmp_path / "killed"))
    qrels.write_text(text)
    assert "== scifact: runs again, because its inputs changed" in third.stdout
    assert third.stdout.count("already done") == len(SMALL) - 1 + len(FORUMS)
    wrong = finished(beir(sets / "scifact", tmp_path / "run"))
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    assert wrong.stderr.startswith(f"error: {sets / 'scifact'}: this is one data set, not a folder of several")
