"""Mining from files to files, against a plain loop over the same files, and training on the output."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.errors import DataError, Policy
from jaxret.data.formats import (
    Corpus,
    JudgementSource,
    QuerySource,
    RankingSource,
    TrainingSource,
    write_dpr_examples,
    write_dpr_queries,
    write_run,
)
from jaxret.data.formats.dpr_results import write_retrieval_results
from jaxret.data.formats.example_writers import make_tevatron_record, write_tevatron_examples
from jaxret.data.records import Example, Passage, Query
from jaxret.experiments.teachers import check_teacher, open_teacher
from jaxret.index.encoding.encode import encode_corpus
from jaxret.mining import mining_job
from jaxret.mining.mining_audit import audit_mined_file
from jaxret.mining.mining_job import MiningJob, mine_negatives, parents_path, require_same_sources
from jaxret.mining.mining_settings import MiningSettings
from jaxret.mining.pools import RankingFilePool, RunPool
from jaxret.mining.training_queries import (
    open_concatenated,
    open_training_queries,
    read_training_queries,
    stream_mined_examples,
)
from jaxret.runs.mismatch import ContractError
from jaxret.storage.atomic import read_with_digest, sha256_file
from tests.pipeline import untrained_run, write_data, write_encoder

TOP = MiningSettings(depth=20, keep=5, draw="top", answers=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set, and a run file for its training queries."""
    folder = tmp_path_factory.mktemp("mining")
    write_data(folder / "data")
    random, passages = np.random.default_rng(0), [p.id for p in Corpus.open(folder / "data").read()]
    queries = dict.fromkeys(j.query_id for j in JudgementSource.open(folder / "data", "train").read())
    rankings = {}
    for query in reversed(queries):  # another order than that of the queries
        ids = random.choice(passages, 30, replace=False)
        rankings[query] = list(zip(ids.tolist(), np.sort(random.random(30))[::-1].tolist()))
    write_run(folder / "run.trec", rankings, "test")
    return folder


def job(root: Path, out: Path, *pools: str, settings: MiningSettings = TOP) -> MiningJob:
    positives, corpus = not settings.positives_from_retrieval, Corpus.open(root / "data")
    data = open_training_queries(str(root / "data"), "train", positives)
    return MiningJob(data, pools or (str(root / "run.trec"),), str(out), corpus=corpus, settings=settings)


def plainly(root: Path, settings: MiningSettings) -> dict[str, list[str]]:
    """Map each query to its first passages in the run file that neither are judged relevant nor have the text of
    a relevant one."""
    texts = {p.id: " ".join(p.text.lower().split()) for p in Corpus.open(root / "data").read()}
    relevant: dict[str, set[str]] = {}
    for one in JudgementSource.open(root / "data", "train").read():
        if one.relevance > 0:
            relevant.setdefault(one.query_id, set()).add(one.passage_id)
    negatives = {}
    for query, ranking in RankingSource.open(root / "run.trec").read().items():
        relevant_texts = {texts[key] for key in relevant[query]}
        left = [
            key
            for key, _ in ranking[: settings.depth]
            if key not in relevant[query] and texts[key] not in relevant_texts
        ]
        negatives[query] = left[: settings.keep]
    return negatives


def test_mining_from_a_run_file_equals_a_simple_loop(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mining_job, "RANK_BLOCK", 16)  # three blocks, each read in parts
    monkeypatch.setattr(mining_job, "TEXT_BLOCK", 5)
    done = mine_negatives(job(root, tmp_path / "a.jsonl"))
    examples = TrainingSource.open(tmp_path / "a.jsonl").read(targets=False)
    assert {e.query.id: [p.id for p in e.negatives] for e in examples} == plainly(root, TOP)
    assert plainly(root, TOP) != plainly(root, replace(TOP, depth=4)), "control: another depth gives other negatives"
    assert [e.query.id for e in examples] == [
        one.query.id
        for one in read_training_queries(open_training_queries(str(root / "data"), "train"), Policy()).queries
    ]
    assert done.tally.negatives == sum(len(e.negatives) for e in examples)
    monkeypatch.undo()
    mine_negatives(job(root, tmp_path / "b.jsonl"))
    assert sha256_file(tmp_path / "a.jsonl") == sha256_file(tmp_path / "b.jsonl"), "block sizes have no effect"


def test_a_file_never_has_the_record_of_another(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a job ends between writing the file and its record, there is no record, so that a program cannot use an old
    one."""
    out = tmp_path / "a.jsonl"
    mine_negatives(job(root, out))
    assert parents_path(out).exists()
    monkeypatch.setattr(mining_job, "audit_mined_file", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mine_negatives(job(root, out, settings=replace(TOP, depth=4)))
    assert not parents_path(out).exists()


def test_scores_equal_those_of_the_run(root: Path, tmp_path: Path) -> None:
    mine_negatives(job(root, tmp_path / "a.jsonl"))
    run = RankingSource.open(root / "run.trec").read()
    scored = [e for e in TrainingSource.open(tmp_path / "a.jsonl").read(targets=False) if e.negative_scores]
    assert scored, "some positives are among the 30"
    for example in scored:
        scores = dict(run[example.query.id])
        assert list(example.negative_scores) == [scores[p.id] for p in example.negatives]
        np.testing.assert_array_equal(example.positive_scores, [scores.get(p.id, np.nan) for p in example.positives])


def test_the_mined_file_is_self_contained_and_names_its_parents(root: Path, tmp_path: Path) -> None:
    mine_negatives(job(root, tmp_path / "a.jsonl"))
    texts = {p.id: p for p in Corpus.open(root / "data").read()}
    for example in stream_mined_examples(tmp_path / "a.jsonl", Policy()):
        assert all(texts[p.id] == p for p in (*example.positives, *example.negatives))
        assert example.query.answers
    parents = read_with_digest(parents_path(tmp_path / "a.jsonl"))
    assert parents["file"] == {"name": "a.jsonl", "sha256": sha256_file(tmp_path / "a.jsonl")}
    assert parents["pools"][0]["files"] == {str(root / "run.trec"): sha256_file(root / "run.trec")}
    assert parents["corpus"]["sha256"] == sha256_file(root / "data" / "corpus.jsonl")
    assert parents["settings"]["keep"] == 5
    assert parents["queries"]["count"] == 40


def test_each_file_has_parents_of_its_own(root: Path, tmp_path: Path) -> None:
    names = [parents_path(tmp_path / name).name for name in ("a.jsonl", "a.jsonl.gz", "a.json", "a")]
    assert names == ["a.jsonl.parents.json", "a.jsonl.gz.parents.json", "a.json.parents.json", "a.parents.json"]
    (tmp_path / "a.jsonl").touch()
    out = tmp_path / "a.jsonl"
    with pytest.raises(ValueError, match=r"file of tevatron.examples:.*a.jsonl .*follows"):
        mine_negatives(replace(job(root, out), concat=(open_concatenated(f"tevatron.examples:{out}"),)))


def test_bm25_scores_positives_that_it_did_not_retrieve(root: Path, tmp_path: Path) -> None:
    scores = {}
    for depth in (1, 1000):
        mine_negatives(job(root, tmp_path / "a.jsonl", "bm25", settings=replace(TOP, depth=depth)))
        examples = list(stream_mined_examples(tmp_path / "a.jsonl", Policy()))
        scores[depth] = {e.query.id: e.positive_scores for e in examples}
    assert scores[1] == scores[1000]
    assert (
        {len(e.positives) for e in examples}
        == {len(positive_scores) for positive_scores in scores[1].values()}
        == {1, 2}
    )
    assert sum(len(e.negatives) for e in examples) > 100


def test_a_margin_with_unbounded_scores_prints_a_notice(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine_negatives(job(root, tmp_path / "a.jsonl", "bm25", settings=replace(TOP, margin=2.0)))
    text = capsys.readouterr().out
    assert "margin 2 is in scores of bm25, which have no upper limit" in text
    scores = [e.positive_scores for e in stream_mined_examples(tmp_path / "a.jsonl", Policy())]
    low, middle, high = np.quantile([min(row) for row in scores], (0.05, 0.5, 0.95))
    assert f"positives score {middle:.4g} in the middle, nine of ten from {low:.4g} to {high:.4g}" in text


def test_negatives_of_the_data_are_ignored(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine_negatives(job(root, tmp_path / "a.jsonl"))
    monkeypatch.setattr(TrainingSource, "read", None)  # `read` would hold all examples in memory
    again, first = (
        read_training_queries(open_training_queries(str(tmp_path / "a.jsonl"), "train"), Policy()) for _ in range(2)
    )
    monkeypatch.undo()
    whole = read_training_queries(open_training_queries(str(root / "data"), "train"), Policy())
    assert again.queries == first.queries == whole.queries
    assert len({id(p) for one in again.queries for p in one.positives}) == len(
        {p.id for one in again.queries for p in one.positives}
    )


def test_a_teacher_decides_the_margin_and_its_scores_are_kept(root: Path, tmp_path: Path) -> None:
    # The teacher ranks the passages in the opposite order.
    rankings = {
        query: sorted(((key, float(i)) for i, (key, _) in enumerate(ranking)), key=lambda pair: -pair[1])
        for query, ranking in RankingSource.open(root / "run.trec").read().items()
    }
    write_run(tmp_path / "teacher.trec", rankings, "test")
    settings = replace(TOP, margin=1.0)
    with_teacher = replace(job(root, tmp_path / "a.jsonl", settings=settings), teacher=str(tmp_path / "teacher.trec"))
    mine_negatives(with_teacher)
    examples = list(stream_mined_examples(tmp_path / "a.jsonl", Policy()))
    assert any(e.negatives for e in examples)
    for example in examples:
        scores = dict(rankings[example.query.id])
        assert all(scores[n.id] < min(scores[p.id] for p in example.positives) - 1.0 for n in example.negatives)
        if example.negatives:
            assert list(example.negative_scores) == [scores[n.id] for n in example.negatives]


def test_a_teacher_may_score_only_some_passages(root: Path, tmp_path: Path) -> None:
    some = {query: ranking[:10] for query, ranking in RankingSource.open(root / "run.trec").read().items()}
    write_run(tmp_path / "teacher.trec", some, "test")
    mine_negatives(replace(job(root, tmp_path / "a.jsonl"), teacher=str(tmp_path / "teacher.trec")))
    every = [
        s
        for e in stream_mined_examples(tmp_path / "a.jsonl", Policy())
        for s in (*e.positive_scores, *e.negative_scores)
    ]
    assert 0 < np.isnan(every).sum() < len(every)
    for e in stream_mined_examples(tmp_path / "a.jsonl", Policy()):
        scores = dict(some[e.query.id])
        np.testing.assert_array_equal(e.negative_scores, [scores.get(p.id, np.nan) for p in e.negatives])


@pytest.mark.slow
def test_appended_records_have_scores_of_the_teacher_or_none(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores of BM25 and of a run are not comparable."""
    mine_negatives(job(root, tmp_path / "bm25.jsonl", "bm25"))
    assert any(e.score_count for e in stream_mined_examples(tmp_path / "bm25.jsonl", Policy()))
    both = replace(job(root, tmp_path / "a.jsonl"), concat=(TrainingSource.open(tmp_path / "bm25.jsonl"),))
    mine_negatives(both)
    text = "scores of two pools or files are not comparable"
    assert text in capsys.readouterr().out
    assert not any(e.score_count for e in stream_mined_examples(tmp_path / "a.jsonl", Policy()))
    queries = [
        one.query for one in read_training_queries(open_training_queries(str(root / "data"), "train"), Policy()).queries
    ]
    ids = [p.id for p in Corpus.open(root / "data").read()]
    scores = {query.id: [(key, 100.0 - n) for n, key in enumerate(ids)] for query in queries[1:]}
    write_run(tmp_path / "teacher.trec", scores, "test")
    *_, last = stream_mined_examples(tmp_path / "bm25.jsonl", Policy())  # the passages of another question with this id
    other = replace(last, query=replace(last.query, text="another question"))
    with open(tmp_path / "bm25.jsonl", "a") as file:
        file.write(json.dumps(make_tevatron_record(other)) + "\n")
    mine_negatives(replace(both, teacher=str(tmp_path / "teacher.trec")))
    *mined, another = stream_mined_examples(tmp_path / "a.jsonl", Policy())
    assert (another.query.text, another.score_count) == ("another question", 0)
    assert len(mined) == 80
    for e in mined:
        teacher_scores = dict(scores.get(e.query.id, ()))
        assert e.negative_scores == tuple(teacher_scores[p.id] for p in e.negatives if teacher_scores)
    text = capsys.readouterr().out
    assert "2 queries of --concat have no score of the teacher" in text
    assert "not comparable" not in text


def test_rankings_without_scores_give_a_file_without_scores(root: Path, tmp_path: Path) -> None:
    """For MS MARCO's run format. Where scores are needed, it is an error."""
    ranks = tmp_path / "run.tsv"
    ranked = RankingSource.open(root / "run.trec").read().items()
    ranks.write_text("".join(f"{q}\t{key}\t{n}\n" for q, ranking in ranked for n, (key, _) in enumerate(ranking, 1)))
    here = job(root, tmp_path / "a.jsonl", str(ranks))
    mine_negatives(here)
    examples = list(stream_mined_examples(tmp_path / "a.jsonl", Policy()))
    assert {e.query.id: [p.id for p in e.negatives] for e in examples} == plainly(root, TOP)
    assert not any(e.score_count for e in examples)
    refused: list[tuple[MiningJob, str]] = [
        (replace(here, settings=replace(TOP, margin=0.1)), r"scores to compare \(--margin\) are needed"),
        (replace(here, settings=replace(TOP, min_score=0.1)), r"scores to compare \(--min_score\) are needed"),
        (replace(here, teacher=str(ranks)), "the scores of a teacher are needed"),
    ]
    for bad_job, message in refused:
        with pytest.raises(DataError, match=rf"run\.tsv: .*ranking .*\(MS MARCO run.*{message}"):
            mine_negatives(bad_job)
    scored = replace(here, teacher=str(root / "run.trec"), settings=replace(TOP, margin=0.1))
    mine_negatives(scored)
    assert any(e.score_count for e in stream_mined_examples(tmp_path / "a.jsonl", Policy())), (
        "the scores come from the teacher"
    )


@pytest.mark.parametrize("read", ["run.trec", "teacher.trec", "data/corpus.jsonl", "train.json"])
def test_input_files_are_not_overwritten(read: str, root: Path, tmp_path: Path) -> None:
    """They are protected under any name, before any file is read: none of these files is complete."""
    (tmp_path / "data").mkdir()
    for name, line in {
        "run.trec": "q Q0 p 1 1.0 x",
        "teacher.trec": "q Q0 p 1 1.0 x",
        "data/corpus.jsonl": '{"_id": "p", "text": "x"}',
        "train.json": '{"query_id": "q", "query": "x", "positive_passages": []}',
    }.items():
        (tmp_path / name).write_text(f"{line}\nbroken\n")
    (tmp_path / "link").symlink_to(tmp_path / read)
    here = MiningJob(
        data=TrainingSource.open(tmp_path / "train.json"),
        pools=(str(tmp_path / "run.trec"),),
        out=str(tmp_path / "link"),
        corpus=Corpus.open(tmp_path / "data"),
        teacher=str(tmp_path / "teacher.trec"),
    )
    with pytest.raises(ValueError, match=r"link .*\(.*\), .*another"):
        mine_negatives(here)
    with pytest.raises(DataError):
        mine_negatives(replace(here, out=str(tmp_path / "other")))


@pytest.mark.slow
def test_the_corpus_of_a_pool_is_not_overwritten(root: Path, tmp_path: Path) -> None:
    """A run records its corpus, and reads texts from it if there is no --corpus."""
    write_encoder(tmp_path / "encoder")
    write_data(tmp_path / "data", train=4, dev=2)
    run = untrained_run(tmp_path / "run", tmp_path / "encoder", tmp_path / "data")
    corpus = tmp_path / "data" / "corpus.jsonl"
    whole = corpus.read_bytes()
    job_of_run = MiningJob(TrainingSource.open(root / "data", "train"), (str(run.workdir.path),), str(corpus))
    with pytest.raises(FileNotFoundError, match="run has no encoded corpus"):
        mine_negatives(job_of_run)
    encode_corpus(run, Corpus.open(tmp_path / "data"), progress=False)
    with pytest.raises(ValueError, match=r"corpus.jsonl .*run encoded"):
        mine_negatives(job_of_run)
    assert corpus.read_bytes() == whole
    encode_corpus(run, Corpus.open(tmp_path / "data"), name="again", progress=False)
    with pytest.raises(ValueError, match=r"several corpora, .*--encoded"):
        mine_negatives(job_of_run)


def test_appended_files_and_records_with_one_target(root: Path, tmp_path: Path) -> None:
    """MLR's second stage: retrieved positives, then the records of the first stage, all cut to the same number of
    negatives."""
    mine_negatives(job(root, tmp_path / "first.jsonl", settings=replace(TOP, keep=10)))
    first = list(stream_mined_examples(tmp_path / "first.jsonl", Policy()))
    settings = replace(TOP, depth=4, answers=True, positives_from_retrieval=True)
    concat = f"tevatron.examples:{tmp_path / 'first.jsonl'}"
    concatenated = replace(job(root, tmp_path / "a.jsonl", settings=settings), concat=(open_concatenated(concat),))
    mine_negatives(concatenated)
    (followed_by,) = read_with_digest(parents_path(tmp_path / "a.jsonl"))["concat"]
    assert followed_by == {"source": concat, "sha256": sha256_file(tmp_path / "first.jsonl")}
    examples = TrainingSource.open(tmp_path / "a.jsonl").read()
    targets = sum(len(e.positives) for e in first)
    mined, followed = examples[:-targets], examples[-targets:]
    assert {(e.query.id, e.positives[0].id) for e in followed} == {
        (e.query.id, p.id) for e in first for p in e.positives
    }
    assert max(len(e.negatives) for e in followed) == 5
    run = RankingSource.open(root / "run.trec").read()
    for example in mined:
        (answer,) = example.query.answers
        ranks = [key for key, _ in run[example.query.id][:4]]
        assert all(answer in p.text.split() for p in example.positives)
        assert [p.id for p in example.positives] == sorted((p.id for p in example.positives), key=ranks.index)
        assert not any(answer in p.text.split() for p in example.negatives)
    assert 0 < len({e.query.id for e in mined}) == len(mined) < 40, "one example per query, not per positive"
    assert any(len(e.positives) > 1 for e in mined)


def test_a_bad_record_that_follows_is_an_error_before_pools_are_opened(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tevatron_examples(
        tmp_path / "more.jsonl", TrainingSource.open(root / "data", "train").read(targets=False)[:2]
    )
    with open(tmp_path / "more.jsonl", "a") as file:
        file.write('{"query_id": "q"\n')
    monkeypatch.setattr(mining_job, "open_pools", lambda *_: pytest.fail("a pool was opened"))
    with pytest.raises(DataError, match=r"more\.jsonl:3"):
        mine_negatives(
            replace(job(root, tmp_path / "a.jsonl"), concat=(TrainingSource.open(tmp_path / "more.jsonl"),)),
        )


def test_questions_alone_can_be_mined_from_retrieval(root: Path, tmp_path: Path) -> None:
    queries = QuerySource.open(root / "data").read()[:7]
    write_dpr_queries(tmp_path / "train.qa.csv", queries)
    settings = MiningSettings(depth=20, positives_from_retrieval=True)
    questions_alone = MiningJob(
        QuerySource.open(tmp_path / "train.qa.csv"),
        ("bm25",),
        str(tmp_path / "a.jsonl"),
        corpus=Corpus.open(root / "data"),
    )
    mine_negatives(replace(questions_alone, settings=settings))
    examples = TrainingSource.open(tmp_path / "a.jsonl").read()
    assert {e.query.id for e in examples} == {str(i) for i in range(7)}
    assert TrainingSource.open(tmp_path / "a.jsonl").read(targets=False) == examples


def test_an_answer_that_is_no_regular_expression_is_refused_before_a_corpus_is_read(tmp_path: Path) -> None:
    write_dpr_queries(tmp_path / "train.qa.csv", [Query("0", "which river", ("(a",))])
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"_id": "1", "text": "the river"}\n{"_id": "2"\n')
    settings = MiningSettings(depth=20, positives_from_retrieval=True, match="regex")
    bad_answer = MiningJob(
        QuerySource.open(tmp_path / "train.qa.csv"), ("bm25",), str(tmp_path / "a.jsonl"), corpus=Corpus.open(corpus)
    )
    with pytest.raises(ValueError, match=r"'\(a' .*regular expression"):
        mine_negatives(replace(bad_answer, settings=settings))
    with pytest.raises(DataError, match=r"corpus\.jsonl:2"):
        mine_negatives(replace(bad_answer, settings=replace(settings, match="string")))


def test_questions_with_equal_row_numbers_get_different_ids(root: Path, tmp_path: Path) -> None:
    """DPR's files have no ids: each file numbers its questions from 0."""
    originals = TrainingSource.open(root / "data", "train").read(targets=False)
    for name, some in (("a", originals[:3]), ("b", originals[10:13])):
        write_dpr_examples(tmp_path / f"{name}.json", some)
    both = replace(
        job(root, tmp_path / "both.jsonl", "bm25"),
        data=TrainingSource.open(tmp_path / "a.json"),
        concat=(TrainingSource.open(tmp_path / "b.json"),),
    )
    mine_negatives(both)
    mined = TrainingSource.open(tmp_path / "both.jsonl").read()
    assert {e.query.text for e in mined} == {e.query.text for e in (*originals[:3], *originals[10:13])}
    assert len({e.query.id for e in mined}) == len({e.query.text for e in mined})
    again = replace(
        both, data=TrainingSource.open(tmp_path / "both.jsonl"), concat=(), out=str(tmp_path / "again.jsonl")
    )
    mine_negatives(again)
    assert [e.positives for e in TrainingSource.open(tmp_path / "again.jsonl").read()] == [e.positives for e in mined]


def test_positives_are_written_with_the_corpus_text(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DPR's positives may differ in a few letters from its passages, but in the output an id has one text."""
    originals = TrainingSource.open(root / "data", "train").read(targets=False)
    edited = [
        replace(one, positives=tuple(replace(p, text=p.text + " .") for p in one.positives)) for one in originals[:2]
    ]
    write_dpr_examples(tmp_path / "train.json", [*edited, *originals[2:]])
    mine_negatives(
        replace(job(root, tmp_path / "a.jsonl", "bm25"), data=TrainingSource.open(tmp_path / "train.json")),
    )
    assert [e.positives for e in TrainingSource.open(tmp_path / "a.jsonl").read()] == [e.positives for e in originals]
    assert "2 queries have a positive that is other text in the corpus, which is taken" in capsys.readouterr().out


def test_two_questions_with_one_id_are_refused(root: Path, tmp_path: Path) -> None:
    first, second, *_ = TrainingSource.open(root / "data", "train").read(targets=False)
    twice = replace(second, query=replace(second.query, id=first.query.id))
    write_tevatron_examples(tmp_path / "twice.jsonl", [first, twice])
    with pytest.raises(ValueError, match=f"query '{first.query.id}'"):
        mine_negatives(
            replace(job(root, tmp_path / "a.jsonl", "bm25"), data=TrainingSource.open(tmp_path / "twice.jsonl")),
        )


def test_results_of_other_questions_are_refused(root: Path, tmp_path: Path) -> None:
    """Ids of results may also be row numbers."""
    originals = TrainingSource.open(root / "data", "train").read(targets=False)[:4]
    write_dpr_examples(tmp_path / "train.json", originals)
    results = [(one.query, [(one.positives[0], 2.0, True)]) for one in originals]
    write_retrieval_results(tmp_path / "same.json", results)
    write_retrieval_results(tmp_path / "turned.json", reversed(results))
    here = replace(
        job(root, tmp_path / "a.jsonl", str(tmp_path / "same.json")), data=TrainingSource.open(tmp_path / "train.json")
    )
    mine_negatives(here)
    with pytest.raises(ValueError, match=r"query 0 .*'.*', .*'.*'"):
        mine_negatives(replace(here, pools=(str(tmp_path / "turned.json"),)))
    (tmp_path / "other.trec").write_text("nobody Q0 p1 1 2.0 x\n")
    with pytest.raises(ValueError, match=r"ranks .*4 queries"):
        mine_negatives(replace(here, pools=(str(tmp_path / "other.trec"),)))


def test_dpr_records_keep_their_one_target(root: Path, tmp_path: Path) -> None:
    originals = TrainingSource.open(root / "data", "train").read(targets=False)
    write_dpr_examples(tmp_path / "train.json", originals)
    mine_negatives(
        replace(job(root, tmp_path / "a.jsonl", "bm25"), data=TrainingSource.open(tmp_path / "train.json")),
    )
    examples = TrainingSource.open(tmp_path / "a.jsonl").read()
    assert [e.positives for e in examples] == [e.positives for e in originals]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda j: replace(j, pools=()), "there is no pool to mine"),
        (lambda j: replace(j, pools=("bm26",)), "pool 'bm26' is neither bm25 nor the folder of a run nor a file"),
        (
            lambda j: replace(j, pools=(j.data.source,), corpus=None),
            "data' is neither bm25 nor the folder of a run nor a file",
        ),
        (lambda j: replace(j, corpus=None), r"give the corpus \(--corpus\)"),
        (lambda j: replace(j, pools=("bm25",), settings=MiningSettings(share=0.95)), "scores of bm25 have no bound"),
        (
            lambda j: replace(j, pools=("bm25", *j.pools), settings=MiningSettings(positives_from_retrieval=True)),
            r"takes .*positives .*pool",
        ),
        (lambda j: replace(j, concat=(open_concatenated(j.data.source),)), r"file; .*training records"),
        (lambda j: replace(j, encoded_name="data"), "--encoded=data .*no pool"),
        (lambda j: replace(j, explicit_fields=("seed",)), "--seed .*--draw=top"),
        (lambda j: replace(j, subset=(41, 0)), r"data.subset .*41, .*40 training"),
    ],
)
def test_invalid_settings_are_errors(
    change: Callable[[MiningJob], MiningJob], message: str, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        mine_negatives(change(job(root, tmp_path / "a.jsonl")))
    assert not (tmp_path / "a.jsonl").exists()


def test_sources_of_a_mined_file_are_compared(root: Path, tmp_path: Path) -> None:
    for name in ("pool.trec", "teacher.trec"):
        (tmp_path / name).write_bytes((root / "run.trec").read_bytes())
    mine_negatives(job(root, tmp_path / "first.jsonl"))
    follow = open_concatenated(str(tmp_path / "first.jsonl"))
    pool, teacher = str(tmp_path / "pool.trec"), str(tmp_path / "teacher.trec")
    here = replace(job(root, tmp_path / "a.jsonl", pool), teacher=teacher, concat=(follow,))
    mine_negatives(here)
    require_same_sources(here)
    others = (
        replace(here, pools=("bm25",)),
        replace(here, teacher=""),
        replace(here, concat=()),
        replace(here, subset=(9, 0)),
        replace(here, settings=replace(TOP, keep=4)),
    )
    for other in others:
        with pytest.raises(ContractError, match="another output"):
            require_same_sources(other)
    (tmp_path / "pool.trec").write_text("q Q0 p 1 1.0 x\n")
    with pytest.raises(ContractError, match=r"pools: .*"):
        require_same_sources(here)


def test_a_run_of_another_corpus(root: Path, tmp_path: Path) -> None:
    write_data(tmp_path / "other", train=2, dev=1)
    corpus = (tmp_path / "other" / "corpus.jsonl").read_text()
    (tmp_path / "other" / "corpus.jsonl").write_text(re.sub(r'"_id": "', '"_id": "x', corpus))
    with pytest.raises(ValueError, match=r"no retrieved passage .*corpus"):
        mine_negatives(replace(job(root, tmp_path / "a.jsonl"), corpus=Corpus.open(tmp_path / "other")))


def test_a_run_file_whose_queries_are_scattered(tmp_path: Path) -> None:
    lines = ["q1 Q0 a 1 3.0 t", "q2 Q0 a 1 3.0 t", "q1 Q0 b 2 2.0 t"]
    (tmp_path / "a.trec").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"a\.trec:3: .*'q1' .*together"):
        RankingFilePool(RankingSource.open(tmp_path / "a.trec"), Policy())
    (tmp_path / "a.trec").write_text("\n".join([*lines[::2], lines[1]]) + "\n")
    pool = RankingFilePool(RankingSource.open(tmp_path / "a.trec"), Policy())
    assert pool.ranking("q1") == [("a", 3.0), ("b", 2.0)]
    assert pool.ranking("q3") == []


def test_the_audit_counts_what_is_in_the_file(root: Path, tmp_path: Path) -> None:
    queries = read_training_queries(open_training_queries(str(root / "data"), "train"), Policy()).queries
    one, other = queries[1], queries[2]
    positive = one.positives[0]
    words = positive.text.split()
    rows = [
        {"docid": positive.id, "text": "as it was before", "score": 3.0},  # repeated with the same id
        {"docid": "copy", "text": positive.text.upper(), "score": 1.0},  # repeated with the same text
        # The positive of another query.
        {"docid": other.positives[0].id, "text": other.positives[0].text, "score": 0.5},
        {"docid": "nearly", "text": " ".join([*dict.fromkeys(words), "extra"])},  # without a score
        {"docid": "else", "text": "nothing alike", "score": 2.5},
    ]
    record = {
        "query_id": one.query.id,
        "query": one.query.text,
        "answers": ["alike"],
        "positive_passages": [{"docid": "first", "text": "a passage", "score": 2.0}],
        "negative_passages": rows,
    }
    record["positive_passages"].append({"docid": "second", "text": positive.text, "score": 2.7})  # type: ignore[attr-defined]
    empty = {"query_id": "x", "query": "x", "positive_passages": [{"docid": "y", "text": "y"}], "negative_passages": []}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [record, empty])) + "\n")
    counts = audit_mined_file(tmp_path / "a.jsonl", queries)
    near = len(set(words)) / (len(set(words)) + 1) >= 0.8
    assert (counts.records, counts.without_negatives, counts.negatives) == (2, 1, 5)
    assert (counts.repeats_positive, counts.positive_of_other_query, counts.near_positive) == (2, 1, int(near))
    assert (counts.with_answer, counts.answerable, counts.above_best_positive, counts.scored) == (1, 5, 1, 4)
    assert vars(counts)["scored"] == 4  # the record keeps this key
    assert "2 of 5  the positive again" in str(counts)


@pytest.mark.exhaustive
def test_mining_with_a_run_equals_mining_with_its_run_file(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negatives and scores equal those from the run file of a search; the model also scores the positives."""
    write_encoder(tmp_path / "encoder")
    run = untrained_run(tmp_path / "run", tmp_path / "encoder", root / "data", head__token="mean", normalize=True)
    encode_corpus(run, Corpus.open(root / "data"), progress=False)
    training_queries = read_training_queries(open_training_queries(str(root / "data"), "train"), Policy()).queries
    positives = [[p.id for p in one.positives] for one in training_queries]
    pool = RunPool(str(tmp_path / "run"), "", {key for ids in positives for key in ids})
    every = pool.rank([one.query for one in training_queries], positives, 1000)
    for result, ids in zip(every, positives, strict=True):
        whole = dict(result.ranking)
        assert result.positives == {key: whole[key] for key in ids}, "the scores of a search"
    assert pool.scores([one.query for one in training_queries], positives) == [result.positives for result in every]
    write_run(tmp_path / "own.trec", {one.query.id: f.ranking for one, f in zip(training_queries, every)}, "own")
    settings = replace(TOP, share=0.999)

    def negatives(name: str, mining: MiningJob) -> dict[str, list[str]]:
        mine_negatives(replace(mining, out=str(tmp_path / name), settings=settings))
        examples: list[Example] = list(stream_mined_examples(tmp_path / name, Policy()))
        assert all(s < 0.999 * min(e.positive_scores) for e in examples for s in e.negative_scores)
        return {e.query.id: [p.id for p in e.negatives] for e in examples}

    own = negatives("own.jsonl", MiningJob(TrainingSource.open(root / "data", "train"), (str(tmp_path / "run"),), ""))
    assert own == negatives("file.jsonl", job(root, tmp_path / "x", str(tmp_path / "own.trec")))
    assert any(own.values())
    assert own != negatives("other.jsonl", job(root, tmp_path / "x", str(root / "run.trec"))), (
        "control: another run gives other negatives"
    )
    parents = read_with_digest(tmp_path / "own.jsonl.parents.json")
    assert parents["pools"][0]["checkpoint"] == run.checkpoint
    examples = TrainingSource.open(root / "data", "train").read(targets=False)[:3]
    elsewhere = [replace(examples[0], positives=(Passage("elsewhere", "no passage of the corpus"),)), *examples[1:]]
    write_tevatron_examples(tmp_path / "some.jsonl", elsewhere)
    mine_negatives(
        MiningJob(TrainingSource.open(tmp_path / "some.jsonl"), (str(tmp_path / "run"),), str(tmp_path / "b.jsonl")),
    )
    assert [e.positives for e in TrainingSource.open(tmp_path / "b.jsonl").read()] == [e.positives for e in elsewhere]
    lines = (root / "data" / "corpus.jsonl").read_text().splitlines()
    (tmp_path / "turned.jsonl").write_text("\n".join(lines[::-1]) + "\n")
    turned = MiningJob(
        TrainingSource.open(root / "data", "train"),
        (str(tmp_path / "run"),),
        str(tmp_path / "a"),
        corpus=Corpus.open(tmp_path / "turned.jsonl"),
    )
    with pytest.raises(ContractError, match=r"turned.jsonl .*encoded .*SHA-256"):
        mine_negatives(turned)
    check_teacher(str(tmp_path / "run"), "", Corpus.open(root / "data"), Policy())
    with pytest.raises(ContractError, match=r"turned.jsonl .*encoded .*SHA-256"):
        check_teacher(str(tmp_path / "run"), "", Corpus.open(tmp_path / "turned.jsonl"), Policy())
    queries, passages = {"q": Query("q", "river")}, {key: Passage(key, key) for key in ("p0", "gone", "lost")}
    with pytest.raises(ValueError, match=r"passage 'gone', .*2"):
        open_teacher(str(tmp_path / "run"), "").scorer_of(queries, passages)

    class Raw(RunPool):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.has_bound = False  # a run without normalize has no bound

    monkeypatch.setattr(mining_job, "RunPool", Raw)
    with pytest.raises(ValueError, match=r"scores .*run .*bound"):
        mine_negatives(
            MiningJob(
                TrainingSource.open(root / "data", "train"),
                (str(tmp_path / "run"),),
                str(tmp_path / "z"),
                settings=settings,
            ),
        )
