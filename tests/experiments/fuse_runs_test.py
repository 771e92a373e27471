"""`jaxret fuse` as a process: it reads runs, and writes a run and its evaluation; bad input is reported in one
sentence."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.formats import Corpus, DataError, QuerySource, RankingSource, write_beir, write_run
from jaxret.data.records import Judgement, Passage, Query
from jaxret.evaluation.fusion import fuse
from jaxret.experiments.compare_runs import compare_runs
from jaxret.experiments.fuse_job import FuseJob
from jaxret.experiments.fuse_runs import fuse_runs
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_bm25 import search_bm25
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.runs.run import open_run
from jaxret.search.bm25 import BM25
from jaxret.search.bm25_settings import BM25Settings
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import read_json
from tests.pipeline import environment, untrained_run, write_data, write_encoder


def jaxret(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxret", "fuse", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_data(tmp_path / "data")
    for name, offset in (("one", 0), ("two", 1)):
        rankings = {f"q{i}": [(f"p{i + offset}", 2.0), (f"n{i}", 1.0 + offset / 2)] for i in range(0, 36, 3)}
        write_run(tmp_path / f"{name}.trec", rankings, tag=name)
    (tmp_path / "empty.trec").touch()
    return tmp_path


def test_two_runs_are_fused_without_judgements(runs: Path) -> None:
    """The command gets only its two files; all flags have defaults."""
    done = jaxret(runs, "one.trec", "two.trec", "--out=both.trec")
    assert done.returncode == 0, done.stderr
    assert RankingSource.open(runs / "both.trec").read().keys() == RankingSource.open(runs / "one.trec").read().keys()


@pytest.mark.slow
def test_two_runs_are_fused_and_evaluated(runs: Path) -> None:
    done = jaxret(runs, "one.trec", "two.trec", "--out=both.trec", "--queries=data", "--qrels=data", "--measures=RR@10")
    assert done.returncode == 0, done.stderr
    expected = fuse([RankingSource.open(runs / "one.trec").read(), RankingSource.open(runs / "two.trec").read()], "rrf")
    assert {
        query: [p for p, _ in ranking] for query, ranking in RankingSource.open(runs / "both.trec").read().items()
    } == {query: [p for p, _ in ranking] for query, ranking in expected.items()}
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in lines if line and line[0] in ("one", "two", "fused")} == {"one", "two", "fused"}
    evaluation = read_json(runs / "both.trec.eval.json")
    assert evaluation["provenance"]["fused"]["method"] == "rrf"
    assert evaluation["provenance"]["fused"]["weights"] == [1.0, 1.0]


@pytest.mark.slow
def test_weights_are_tuned_on_other_judgements(runs: Path) -> None:
    tune = ["--tune=one.trec,two.trec", "--tune_qrels=data", "--tune_split=test", "--measures=RR@10"]
    done = jaxret(runs, "one.trec", "two.trec", "--method=min_max", "--out=both.trec", *tune)
    assert done.returncode == 0, done.stderr
    assert "weights 0.5, 0.5: RR@10 " in done.stdout, "of equal values, the most even weights win"


def test_a_tuned_fusion_names_the_queries_of_tuning_and_of_measurement(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both files are of one folder, so that its name does not tell them apart."""
    monkeypatch.chdir(runs)
    files = ("one.trec", "two.trec")
    tuning = {"tune_runs": files, "tune_qrels": "data", "tune_split": "train"}
    fuse_runs(FuseJob(files, "both.trec", "min_max", queries="data", qrels="data", **tuning))  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("weights ") and line.endswith("queries of data/qrels/train.tsv") for line in lines)
    assert any(line.startswith("measured on ") and line.endswith("queries of data/qrels/test.tsv") for line in lines)
    provenance = read_json(Path("both.trec.eval.json"))["provenance"]
    assert provenance["fused"]["tuned_on"]["qrels"] == "data/qrels/train.tsv"
    assert provenance["dataset"]["split"] == "test"


def test_run_files_that_differ_in_their_suffix_have_their_own_evaluations(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    outputs = ("both", "both.trec", "both.tsv", "both.v1")
    for k, out in enumerate(outputs, 1):
        fuse_runs(FuseJob(("one.trec", "two.trec"), out, queries="data", qrels="data", measures=("RR@10",), k=k))
    depths = [read_json(runs / f"{out}.eval.json")["provenance"]["fused"]["k"] for out in outputs]
    assert depths == [1, 2, 3, 4]


def test_an_exact_fusion_is_compared_with_its_systems(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fusion of files has no corpus, so that it may be of other passages: an error names what to do."""
    monkeypatch.chdir(runs)
    for name, k1 in (("words", 0.9), ("counts", 2.0)):
        settings, options = BM25Settings(k1=k1), EvaluationOptions(measures=("RR@10",), latency=0)
        search_bm25(name, Corpus.open("data"), EvaluationSource.open("data", "data"), settings, options)
    job = FuseJob(("words", "counts"), "both.trec", queries="data", qrels="data", measures=("RR@10",))
    fuse_runs(job)
    fuse_runs(replace(job, out="words.v2.trec", weights=(1.0, 0.0)))  # control: the first system alone
    results = [str(next(Path("words", "eval").glob("*.json"))), "both.trec.eval.json", "words.v2.trec.eval.json"]
    comparison, systems = compare_runs(results)
    assert list(systems) == ["words", "both.trec", "words.v2.trec"]
    first, fused, again = (comparison.score(system, "RR@10").mean for system in systems)
    assert first == again
    assert fused == pytest.approx(read_json(runs / "both.trec.eval.json")["mean"]["RR@10"], abs=1e-4)
    job = replace(job, runs=("one.trec", "two.trec"), out="files.trec")
    fuse_runs(job)
    with pytest.raises(ValueError, match=r"files\.trec\.eval\.json names no corpus"):
        compare_runs([results[0], "files.trec.eval.json"])


@pytest.mark.parametrize("sources", [{"queries": "none"}, {"queries": "data", "qrels": "none"}])
def test_a_mistyped_source_is_an_error_before_the_fusion(
    sources: dict[str, Any], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    with pytest.raises(DataError, match="none"):
        fuse_runs(FuseJob(("one.trec", "two.trec"), "both.trec", **sources))
    assert not (runs / "both.trec").exists()


def test_own_passages_of_queries_in_arguana(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of ArguAna are passages, which are removed from results of files and of systems, also when weights are
    tuned; other data keep them."""
    monkeypatch.chdir(runs)
    passages = [Passage(f"q{i}", f"{word} paper") for i, word in enumerate(("river", "stone", "music"))]
    queries = [Query(one.id, one.text) for one in passages]
    judgements = [Judgement("q0", "q1", 1), Judgement("q1", "q2", 1), Judgement("q2", "q0", 1)]
    for folder in ("arguana", "other"):
        write_beir(folder, passages, queries, {"test": judgements})
    for name in ("words", "again"):
        search_bm25(
            name,
            Corpus.open("arguana"),
            EvaluationSource.open("arguana"),
            BM25Settings(),
            EvaluationOptions(self_matches="keep"),
        )
    files = tuple(str(next(Path(name, "runs").glob("*.trec"))) for name in ("words", "again"))
    for sources, tune in ((files, {"tune_runs": files}), (("words", "again"), {"tune_runs": ("arguana",)})):
        for data, options, removed in (
            ("arguana", {}, True),
            ("arguana", {**tune, "tune_qrels": "arguana", "tune_split": "test"}, True),
            ("other", {}, False),
            ("arguana", {"self_matches": "keep"}, False),
            ("other", {"self_matches": "remove"}, True),
        ):
            job = FuseJob(sources, "both.trec", queries=data, qrels=data, measures=("RR@10",), **options)
            evaluation = fuse_runs(job)
            assert evaluation
            rankings = RankingSource.open("both.trec").read()
            assert any(key == query for query, ranking in rankings.items() for key, _ in ranking) is not removed
            assert (evaluation.mean["RR@10"] > 0.5) is removed
            provenance = read_json(runs / "both.trec.eval.json")["provenance"]
            assert provenance["dataset"]["self_matches"] == ("removed" if removed else "kept")
            if "tune_qrels" in options:
                assert provenance["fused"]["tuned_on"]["value"] > 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tune_qrels": "data"}, r"--tune_qrels needs --tune\b"),
        ({"explicit_fields": ("tune_split",)}, r"--tune_split needs --tune\b"),
        ({"measures": ("RR@10",)}, "--measures needs --qrels, or --tune"),
        ({"explicit_fields": ("measures",), "queries": "data"}, "--measures needs --qrels"),
        ({"explicit_fields": ("split",)}, "--split needs --queries"),
        ({"encoded_name": "data"}, "--corpus=data .*folders of systems"),
    ],
)
def test_a_setting_without_effect_is_an_error(
    settings: dict[str, Any], message: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--tune_qrels alone gave weights of 1 without a message."""
    monkeypatch.chdir(runs)
    with pytest.raises(ValueError, match=message):
        fuse_runs(FuseJob(("one.trec", "two.trec"), "both.trec", **settings))
    assert not Path("both.trec").exists()


def test_judgements_for_tuning_are_read_before_the_runs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    tune = ("one.trec", "two.trec")
    with pytest.raises(DataError, match="none"):
        fuse_runs(FuseJob(("one.trec", "gone.trec"), "both.trec", tune_runs=tune, tune_qrels="none"))


@pytest.mark.exhaustive
def test_folders_of_systems_are_fused_exactly(runs: Path) -> None:
    """A run of a model and BM25: every score is the sum of both systems' scores of the passage."""
    untrained_run(runs / "dense", write_encoder(runs / "encoder"), runs / "data")
    verbs = (("encode", "--workdir=dense", "--corpus=data"), ("bm25", "--workdir=bm25", "--corpus=data"))
    for verb, *arguments in verbs:
        queries = ["--queries=data", "--latency=0"] if verb == "bm25" else []
        command = [sys.executable, "-m", "jaxret", verb, *arguments, *queries]
        done = subprocess.run(command, cwd=runs, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    options = ["--method=sum", "--weights=0.25,1", "--k=5", "--queries=data", "--qrels=data", "--measures=RR@5"]
    done = jaxret(runs, "bm25", "dense", "--out=both.trec", *options)
    assert done.returncode == 0, done.stderr
    fused = RankingSource.open(runs / "both.trec").read()
    run = open_run(runs / "dense")
    searcher = Searcher(run, corpus_folder(run.workdir), many=True)
    index, passages = BM25.of(Corpus.open(runs / "data").read()), list(Corpus.open(runs / "data").read())
    for query in (query for query in QuerySource.open(runs / "data").read() if query.id in fused):
        _, vectors = searcher.encode([query])
        (dense,) = searcher.scores(vectors, [list(range(len(passages)))])
        words = index.scores(query, [passage.id for passage in passages])
        sums = np.array([0.25 * words[passage.id] for passage in passages]) + np.array(dense)
        best = np.argsort(-sums, kind="stable")[:5]
        assert [key for key, _ in fused[query.id]] == [passages[row].id for row in best]
        assert [score for _, score in fused[query.id]] == pytest.approx(sums[best].tolist(), rel=1e-6)
    provenance = read_json(runs / "both.trec.eval.json")["provenance"]["fused"]
    assert (provenance["exact"], provenance["weights"]) == (True, [0.25, 1.0])
    tune = ["--tune=data", "--tune_qrels=data", "--tune_split=train"]
    done = jaxret(runs, "bm25", "dense", "--out=tuned.trec", "--queries=data", "--qrels=data", *tune)
    assert done.returncode == 0, done.stderr
    provenance = read_json(runs / "tuned.trec.eval.json")["provenance"]["fused"]
    assert f"nDCG@10 {provenance['tuned_on']['value']:.4f} on the " in done.stdout
    assert provenance["tuned_on"]["qrels"] == "data/qrels/train.tsv"
    assert sum(provenance["weights"]) == pytest.approx(1)
    both = jaxret(runs, "bm25", "dense", "--out=o.trec", "--queries=data", "--weights=1,1", *tune)
    assert "give either --weights or --tune" in both.stderr
    files = jaxret(runs, "bm25", "dense", "--out=o.trec", "--queries=data", "--tune=one.trec,two.trec")
    assert "--tune of folders of systems takes the queries, one folder or file, and --tune_qrels" in files.stderr
    mixed = jaxret(runs, "bm25", "one.trec", "--out=o.trec", "--queries=data")
    assert "one.trec is not a folder of a run; give folders of systems or files of rankings" in mixed.stderr
    ranks = jaxret(runs, "bm25", "dense", "--method=rrf", "--out=o.trec", "--queries=data")
    assert "method is 'rrf'; for folders of systems it must be one of min_max, z_score, sum" in ranks.stderr
    write_data(runs / "data", train=44)
    other = jaxret(runs, "bm25", "dense", "--out=o.trec", "--corpus=none", "--queries=data")
    assert "bm25 has the BM25 indexes data: choose the corpus with --corpus=NAME" in other.stderr


@pytest.mark.table
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("one.trec", "two.trec", "--out=o.trec", "--weights=1"), "--weights has 1 number(s) for 2 runs"),
        (("one.trec", "two.trec", "--out=o.trec", "--weights=nan,1"), "--weights has nan"),
        (("one.trec", "two.trec", "--out=o.trec", "--weights=1,-0.5"), "--weights has -0.5"),
        (("one.trec", "empty.trec", "--out=o.trec"), "empty.trec: it has no rankings"),
        *(
            pytest.param(*values, marks=pytest.mark.exhaustive)
            for values in [
                (("one.trec", "--out=o.trec"), "1 run is given; fusion takes two or more"),
                (("one.trec", "two.trec", "--out=one.trec"), "a run that is fused"),
                (("one.trec", "two.trec", "--out=o.trec", "--weights=a,b"), "--weights=a,b: these must be numbers"),
                (("one.trec", "two.trec", "--out=o.trec", "--tune=one.trec"), "--tune needs a run for each run"),
                (("one.trec", "two.trec", "--out=o.trec", "--qrels=data"), "--qrels needs --queries"),
                (("one.trec", "none.trec", "--out=o.trec"), "none.trec"),
                (
                    ("one.trec", "two.trec", "--out=o.trec", "--method=sum"),
                    "--method=sum needs folders of systems; for files",
                ),
            ]
        ),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], message: str, runs: Path) -> None:
    done = jaxret(runs, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert not (runs / "o.trec").exists()
