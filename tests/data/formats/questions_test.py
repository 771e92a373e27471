"""DPR's training records and a file of questions in another order are joined by text, never by row number."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxret.data.errors import DataError, Location, Policy
from jaxret.data.formats import (
    DataSource,
    JudgementSource,
    QuerySource,
    TrainingSource,
    read_judged_queries,
    write_dpr_corpus,
    write_dpr_examples,
    write_dpr_queries,
    write_run,
)
from jaxret.data.formats.convert import convert_data
from jaxret.data.records import Example, Judgement, Passage, Query
from jaxret.experiments.searches.evaluation_queries import EvaluationSource, read_evaluation_queries
from jaxret.storage.atomic import read_json
from tests.pipeline import REPOSITORY, environment, untrained_run, write_data, write_encoder

PASSAGES = [Passage(f"p{i}", f"text {i}", f"title {i}") for i in range(4)]
QUESTIONS = [Query(str(i), f"what is number {i}", (f"answer {i}",)) for i in range(4)]


def write_folder(folder: Path, questions: list[Query], records: list[int]) -> Path:
    """A DPR folder: dev.qa.csv with some questions, and dev.json, in which passage i is the positive of question i."""
    folder.mkdir(exist_ok=True)
    write_dpr_corpus(folder / "psgs.tsv", PASSAGES)
    write_dpr_queries(folder / "dev.qa.csv", questions)
    write_dpr_examples(folder / "dev.json", [Example(QUESTIONS[i], (PASSAGES[i],)) for i in records])
    return folder


def read_judged(source: Path, split: str | None) -> tuple[list[Query], list[tuple[Location, Judgement]]]:
    return read_judged_queries(QuerySource.open(source, split), JudgementSource.open(source, split), Policy())


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 2, 3, 0], [3, 1, 0, 2]])
@pytest.mark.parametrize("records", [[0, 1, 2, 3], [2, 0]])
def test_questions_are_joined_by_text_not_by_row(order: list[int], records: list[int], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "dpr", [QUESTIONS[i] for i in order], records)
    evaluated = read_evaluation_queries(EvaluationSource.open(folder, folder, "dev"), Policy())
    texts = {query.id: query.text for query in evaluated.queries}
    assert {(texts[j.query_id], j.passage_id) for j in evaluated.judgements} == {
        (f"what is number {i}", f"p{i}") for i in records
    }
    assert [query.id for query in evaluated.queries] == [str(order.index(i)) for i in order if i in records]
    # The same with negatives from a ranking, whose queries are numbered by rows of dev.qa.csv, and after a conversion.
    write_run(tmp_path / "run.trec", {str(row): [("p0", 2.0), ("p1", 1.0)] for row in range(4)}, tag="t")
    for example in TrainingSource.open(folder, "dev", tmp_path / "run.trec").read():
        assert f"text {example.query.text[-1]}" == example.positives[0].text
    convert_data(DataSource.open(folder), tmp_path / "beir", "beir")
    queries, judged = read_judged(tmp_path / "beir", "dev")
    texts = {query.id: query.text for query in queries}
    assert {texts[j.query_id][-1] + j.passage_id[1:] for _, j in judged} == {f"{i}{i}" for i in records}


def test_joining_ignores_case_and_blanks_and_pairs_repeated_questions_in_order(tmp_path: Path) -> None:
    same = Query("0", "What is  number 0")
    folder = write_folder(tmp_path / "dpr", [QUESTIONS[1], same, QUESTIONS[0]], [0, 0, 1, 0])
    _, judged = read_judged(folder, "dev")
    pairs = [(j.query_id, j.passage_id) for _, j in judged]
    assert pairs == [("1", "p0"), ("2", "p0"), ("0", "p1")]  # the third record repeats a judgement of the second


def test_a_file_joined_with_itself_keeps_its_records(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "dpr", QUESTIONS, [2, 0, 2])
    path = folder / "dev.json"
    _, judged = read_judged(path, None)
    assert [j for _, j in judged] == [Judgement("0", "p2", 1), Judgement("1", "p0", 1), Judgement("2", "p2", 1)]


@pytest.mark.slow
def test_a_question_missing_in_the_other_file_is_a_bad_record(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "dpr", QUESTIONS[1:], [0, 1])
    message = r"dev\.json:record 0: its question 'what is number 0' is not in .*dev\.qa\.csv; use files that belong"
    with pytest.raises(DataError, match=message):
        read_evaluation_queries(EvaluationSource.open(folder, folder, "dev"), Policy())
    policy = Policy("skip")
    evaluated = read_evaluation_queries(EvaluationSource.open(folder, folder, "dev"), policy)
    assert [query.text for query in evaluated.queries] == ["what is number 1"]
    assert policy.skip_counts == {"unknown question": 1}
    done = jaxret("data", "check", str(folder))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "bad: " in done.stdout
    assert "its question 'what is number 0' is not in" in done.stdout
    write_folder(folder, [*QUESTIONS[1:], QUESTIONS[0]], [0, 1])  # in another order, but complete
    done = jaxret("data", "check", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert "judgements of dev: 2 for 2 queries" in done.stdout


def jaxret(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "jaxret", *arguments]
    return subprocess.run(line, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.exhaustive
def test_search_and_diversity_with_shifted_questions(tmp_path: Path) -> None:
    encoder, beir = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "beir")
    folder, shifted = tmp_path / "dpr", tmp_path / "shifted.qa.csv"
    convert_data(DataSource.open(beir), folder, "dpr")
    layers = {"head__name": "mlr", "head__mlr__chosen": (1, 2, 3), "pooling": "self_contrastive"}
    run = untrained_run(tmp_path / "run", encoder, beir, **layers)
    questions = QuerySource.open(folder / "dev.qa.csv").read()
    write_dpr_queries(shifted, [*questions[1:], questions[0]])
    workdir = f"--workdir={run.workdir}"
    assert jaxret("encode", workdir, f"--corpus={folder}").returncode == 0
    options = ["search", workdir, f"--qrels={folder / 'dev.json'}", "--k=100", "--latency=0"]
    means = []
    for path in (folder / "dev.qa.csv", shifted):
        done = jaxret(*options, f"--queries={path}")
        assert done.returncode == 0, done.stderr
        name = done.stdout.rpartition("evaluation: ")[2].strip()
        means.append(read_json(name)["mean"])
        assert 0 < means[-1]["nDCG@10"] < 1
    assert means[0] == means[1]
    write_dpr_queries(shifted, questions[1:])
    done = jaxret(*options, f"--queries={shifted}")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {folder}/dev.json:record 0: its question {questions[0].text!r} is not in")
    (folder / "dev.qa.csv").unlink()
    (folder / "psgs.tsv").unlink()
    written = []
    for name, source in (("dpr-dev", folder / "dev.json"), ("dpr.dev", folder)):  # a file; a folder with only this file
        done = jaxret("diversity", workdir, f"--data={source}", "--split=dev")
        assert done.returncode == 0, done.stderr
        result = read_json(run.workdir.path / "eval" / f"{name}.diversity.json")
        dataset = result["dataset"]
        assert (dataset.pop("queries"), dataset.pop("qrels")) == (str(source), str(source))
        written.append(result)
    assert written[0] == written[1]
    assert written[0]["pairs"] == 15
