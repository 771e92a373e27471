"""Questions -> run file and evaluation, and the errors when something does not belong together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxret.contract import ContractError
from jaxret.data.formats import read_judgements, read_queries, read_run
from jaxret.data.records import Query
from jaxret.evaluation.metrics import evaluate
from jaxret.retrieval.encode import encode_corpus
from jaxret.retrieval.retrieve import choose_corpus, retrieve
from jaxret.retrieval.shard_set import open_shards
from jaxret.runs.run import Run, open_run
from jaxret.storage import read_json
from jaxret.tools.search_files import answer, dataset_name, search_files
from tests.pipeline import untrained_run, write_data, write_encoder

MEASURES = ("nDCG@10", "RR@10", "R@20")
K = 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retrieve")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    run = untrained_run(folder / "run", folder / "encoder", folder / "data", head__token="mean", normalize=True)
    encode_corpus(run, folder / "data", progress=False)
    return folder


@pytest.fixture(scope="module")
def run(root: Path) -> Run:
    return open_run(root / "run")


def copied(root: Path, to: Path) -> Run:
    shutil.copytree(root / "run", to)
    return open_run(to)


def test_the_ranking_is_that_of_a_full_product(root: Path, run: Run) -> None:
    queries = read_queries(root / "data")
    folder = choose_corpus(run)
    found = retrieve(run, queries, folder, K, progress=False)
    shards = open_shards(folder)
    passages = shards.rows(range(shards.total_rows))[:, 0].astype(np.float64)
    ids = shards.ids(range(shards.total_rows))
    vectors = run.embedder()(run.tokenizer.queries(q.text for q in queries), "query").stacked()[:, 0]
    for query, vector in zip(queries, vectors, strict=True):
        scores = passages @ vector.astype(np.float64)
        ranking = found.rankings[query.id]
        assert len({key for key, _ in ranking}) == len(ranking) == K
        by_id = dict(zip(ids, scores.tolist(), strict=True))
        np.testing.assert_allclose([score for _, score in ranking], np.sort(scores)[::-1][:K], atol=1e-5)
        np.testing.assert_allclose([score for _, score in ranking], [by_id[key] for key, _ in ranking], atol=1e-5)
    assert found.corpus["passages"] == shards.total_rows


def test_run_file_and_evaluation(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = copied(root, tmp_path / "mine"), str(root / "data")
    evaluation = search_files(run, data, data, "test", K, MEASURES, progress=False)
    judgements = read_judgements(data, "test")
    judged = {j.query_id for j in judgements}
    lines = [line.split() for line in (tmp_path / "mine" / "runs" / "data.test.trec").read_text().splitlines()]
    assert {line[0] for line in lines} == judged
    assert len(judged) < len(read_queries(data))  # queries that nobody judged are left out
    assert len(lines) == K * len(judged)
    assert all(len(line) == 6 and line[1] == "Q0" and line[5] == "jaxret-mine" for line in lines)
    for query in judged:
        own = [line for line in lines if line[0] == query]
        assert [int(line[3]) for line in own] == list(range(1, K + 1))
        assert [float(line[4]) for line in own] == sorted((float(line[4]) for line in own), reverse=True)

    assert evaluation is not None
    again = evaluate(read_run(tmp_path / "mine" / "runs" / "data.test.trec"), judgements, MEASURES)
    assert again.mean == evaluation.mean
    stored = read_json(tmp_path / "mine" / "eval" / "data.test.json")
    assert set(stored["provenance"]) == {
        "checkpoint",
        "config",
        "training_data",
        "environment",
        "corpus",
        "search",
        "dataset",
        "answer_accuracy",
    }
    provenance = stored["provenance"]
    assert provenance["checkpoint"] == run.checkpoint
    assert provenance["config"]["seed"] == {"init": 12345, "data": 12345, "dropout": 12345, "negatives": 12345}
    assert {"jax", "numpy", "flax"} <= set(provenance["environment"]["packages"])
    assert len(provenance["corpus"]["sha256"]) == len(provenance["training_data"]["train"]["sha256"]) == 64
    assert (provenance["search"]["k"], provenance["search"]["exact"]) == (K, True)
    assert set(provenance["answer_accuracy"]) == {"Accuracy@5", "Accuracy@20"}
    assert 0 < provenance["answer_accuracy"]["Accuracy@5"] <= provenance["answer_accuracy"]["Accuracy@20"] <= 1
    printed = capsys.readouterr().out
    assert "nDCG@10" in printed
    assert f"Queries found: {len(judged)} of {len(judged)}" in printed


def test_questions_of_a_table_with_answers(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied(root, tmp_path / "mine")
    table = tmp_path / "small.qa.csv"
    table.write_text("river stone\t['river']\nlight paper\t['no such words']\n")
    assert search_files(run, str(table), "", "test", 100, MEASURES, progress=False) is None
    assert "Accuracy@100 0.5000" in capsys.readouterr().out
    assert (tmp_path / "mine" / "runs" / "small.trec").exists()
    assert not (tmp_path / "mine" / "eval").exists()
    (run.workdir / "embeddings" / "data" / "corpus.json").write_text('{"path": "/nowhere"}')
    search_files(run, str(table), "", "test", 100, MEASURES, progress=False)  # the ranking is written all the same
    assert "answer strings cannot be looked for: the corpus that was encoded is no longer at /nowhere" in (
        capsys.readouterr().out
    )


def test_a_corpus_that_was_copied_and_one_that_changed(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(root, tmp_path / "mine")
    shutil.copytree(root / "data", tmp_path / "data", copy_function=shutil.copyfile)  # other times, the same text
    place = run.workdir / "embeddings" / "data" / "corpus.json"
    place.write_text(json.dumps(read_json(place) | {"path": str(tmp_path / "data")}))
    answer(run, "river stone", 1, progress=False)
    assert "\n  1. " in capsys.readouterr().out
    text = (tmp_path / "data" / "corpus.jsonl").read_text()
    (tmp_path / "data" / "corpus.jsonl").write_text(text.replace("river", "rivet"))
    answer(run, "river stone", 1, progress=False)
    printed = capsys.readouterr().out
    assert f"in {tmp_path / 'data'}" in printed
    assert "rivet" not in printed.splitlines()[-1], "the text is not shown, the id is"


def test_relevant_passages_that_were_not_encoded_are_counted(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(root, tmp_path / "mine")
    qrels = tmp_path / "few.tsv"
    rows = ["query-id corpus-id score", "q0 p0 1", "q0 gone 1", "q3 p3 1", "q3 gone-too 0"]
    qrels.write_text("".join(row.replace(" ", "\t") + "\n" for row in rows))
    search_files(run, str(root / "data"), str(qrels), "test", 5, MEASURES, progress=False)
    assert "1 of 3 relevant passages are not in the corpus: they count as not found" in capsys.readouterr().out
    written = read_json(run.workdir / "eval" / "data.few.json")
    assert written["provenance"]["dataset"]["relevant_passages_not_in_corpus"] == 1


def test_an_unknown_measure_is_found_before_the_search(root: Path, tmp_path: Path) -> None:
    run = copied(root, tmp_path / "mine")
    with pytest.raises(ValueError, match="unknown measure 'nDGC@10'"):
        search_files(run, str(root / "data"), str(root / "data"), "test", 5, ["nDGC@10"], progress=False)
    assert not (run.workdir / "runs").exists()


def test_an_answer_on_the_terminal(root: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    question = read_queries(root / "data")[0]
    answer(run, question.text, 3, progress=False)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(question.text)
    assert [line.split(".")[0].strip() for line in lines] == ["1", "2", "3"]
    best = retrieve(run, [question], choose_corpus(run), 1, progress=False).rankings[question.id][0][1]
    assert f"{best:.4f}" in lines[0]


def test_shards_of_another_checkpoint(root: Path, run: Run) -> None:
    other = Run(**{**vars(run), "checkpoint": {"step": 7, "digest": "ab"}})
    with pytest.raises(ContractError) as caught:
        retrieve(other, [Query("0", "river")], choose_corpus(run), 3, progress=False)
    assert "checkpoint.step: 0 in" in str(caught.value)
    assert "7 in the model in" in str(caught.value)
    assert "--checkpoint=0" in str(caught.value)


def test_which_corpus(root: Path, tmp_path: Path) -> None:
    run = copied(root, tmp_path / "run")
    assert choose_corpus(run) == choose_corpus(run, "data")
    with pytest.raises(FileNotFoundError, match=r"has no corpus 'wiki'; it has data"):
        choose_corpus(run, "wiki")
    encode_corpus(run, root / "data", name="again", progress=False)
    with pytest.raises(ValueError, match=r"several corpora, again, data: choose one with --corpus"):
        choose_corpus(run)
    assert choose_corpus(run, "again").name == "again"
    shutil.rmtree(run.workdir / "embeddings")
    with pytest.raises(FileNotFoundError, match=r"no encoded corpus; encode\.py --workdir="):
        choose_corpus(run)


@pytest.mark.parametrize(("queries", "k", "message"), [([], 3, "no query"), ([Query("0", "x")], 0, "k is 0")])
def test_nothing_to_search_for(queries: list[Query], k: int, message: str, run: Run) -> None:
    with pytest.raises(ValueError, match=message):
        retrieve(run, queries, choose_corpus(run), k, progress=False)


def test_dataset_names(root: Path) -> None:
    assert dataset_name(root / "data") == dataset_name(root / "data" / "queries.jsonl") == "data"
    assert dataset_name("x/nq-test.qa.csv") == "nq-test"
