"""Questions to run file and evaluation, and errors if files do not belong together."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval

from jaxret.data.formats import Corpus, JudgementSource, QuerySource, RankingSource, write_beir
from jaxret.data.records import Judgement, Passage, Query, Rankings
from jaxret.data.tokens.tokenizer import TASK
from jaxret.evaluation.answer_matching import has_answer
from jaxret.evaluation.metrics import evaluate
from jaxret.experiments.explain import explain, open_as_encoded, stored_passage
from jaxret.experiments.searches.answer_question import print_ranking, show_answer
from jaxret.experiments.searches.evaluation_measures import measures_for
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_files import search_files
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.shard_set import open_shards
from jaxret.index.shards import ShardError, read_shard_json
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import Run, open_run
from jaxret.search.backends.faiss_backend import FaissCpu
from jaxret.search.latency import measure_by_passages, measure_latency
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.search.vectors import in_memory
from jaxret.storage.atomic import read_json, with_digest, write_json
from jaxret.types import Ragged
from tests.pipeline import copied_run, encoded_folder, untrained_run

MEASURES = ("nDCG@10", "RR@10", "R@20")
K = 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoded_folder(tmp_path_factory.mktemp("retrieve"), head__token="mean", normalize=True)


@pytest.fixture(scope="module")
def run(root: Path) -> Run:
    return open_run(root / "run")


def test_the_ranking_equals_a_full_product(root: Path, run: Run) -> None:
    queries = QuerySource.open(root / "data").read()
    folder = corpus_folder(run.workdir)
    result = Searcher(run, folder).search(queries, K)
    shards = open_shards(folder)
    passages = np.concatenate([vectors for _, vectors in shards])[:, 0].astype(np.float64)
    ids = shards.ids(range(shards.total_rows))
    vectors = run.embedder()(run.tokenizer.queries(q.text for q in queries), "query").stacked()[:, 0]
    for query, vector in zip(queries, vectors, strict=True):
        scores = passages @ vector.astype(np.float64)
        ranking = result.rankings[query.id]
        assert len({key for key, _ in ranking}) == len(ranking) == K
        by_id = dict(zip(ids, scores.tolist(), strict=True))
        np.testing.assert_allclose([score for _, score in ranking], np.sort(scores)[::-1][:K], atol=1e-5)
        np.testing.assert_allclose([score for _, score in ranking], [by_id[key] for key, _ in ranking], atol=1e-5)
    assert result.encoded_corpus.corpus_identity["passages"] == shards.total_rows


def test_queries_are_encoded_as_queries(root: Path, tmp_path: Path) -> None:
    """A passage of MVR has the vectors of its viewers, a query has one."""
    run = untrained_run(tmp_path, root / "encoder", root / "data", head__name="mvr", head__mvr__count=2)
    encode_corpus(run, Corpus.open(root / "data"), progress=False)
    _, vectors = Searcher(run, corpus_folder(run.workdir)).encode([Query("1", "river")])
    assert isinstance(vectors, Ragged)
    np.testing.assert_array_equal(vectors.flat, run.embedder()(run.tokenizer.queries(["river"]), "query").flat)
    assert len(vectors.flat) == 1


def test_run_file_and_evaluation(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = copied_run(root, tmp_path / "mine"), str(root / "data")
    left = run.workdir.path / "runs" / ".data.test.trec.0123456789abcdef01234567.tmp"  # the file of a killed search
    left.parent.mkdir(exist_ok=True)
    left.touch()
    os.utime(left, (0, 0))
    evaluation = search_files(
        run, EvaluationSource.open(data, data), EvaluationOptions(k=K, measures=tuple(MEASURES)), progress=False
    )
    assert not left.exists()
    judgements = JudgementSource.open(data, "test").read()
    judged = {j.query_id for j in judgements}
    lines = [line.split() for line in (tmp_path / "mine" / "runs" / "data.test.trec").read_text().splitlines()]
    assert {line[0] for line in lines} == judged
    assert len(judged) < len(QuerySource.open(data).read())  # queries without judgements are left out
    assert len(lines) == K * len(judged)
    assert all(len(line) == 6 and line[1] == "Q0" and line[5] == "jaxret-mine" for line in lines)
    for query in judged:
        own = [line for line in lines if line[0] == query]
        assert [int(line[3]) for line in own] == list(range(1, K + 1))
        assert [float(line[4]) for line in own] == sorted((float(line[4]) for line in own), reverse=True)

    assert evaluation is not None
    again = evaluate(RankingSource.open(tmp_path / "mine" / "runs" / "data.test.trec").read(), judgements, MEASURES)
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
    }
    provenance = stored["provenance"]
    assert provenance["checkpoint"] == run.checkpoint
    assert provenance["config"]["seed"] == {"init": 12345, "data": 12345, "dropout": 12345, "negatives": 12345}
    assert {"jax", "numpy", "flax"} <= set(provenance["environment"]["packages"])
    assert len(provenance["corpus"]["sha256"]) == len(provenance["training_data"]["train"]["sha256"]) == 64
    assert (provenance["search"]["k"], provenance["search"]["exact"]) == (K, True)
    assert (provenance["search"]["query_length"], provenance["search"]["passage_length"]) == (12, 24)
    answers = stored["answers"]["mean"]
    assert set(answers) == {"Accuracy@1", "Accuracy@5", "Accuracy@20"}
    assert 0 < answers["Accuracy@5"] <= answers["Accuracy@20"] <= 1
    assert stored["per_query"] == evaluation.per_query
    assert stored["per_query"]["RR@10"].keys() == stored["answers"]["per_query"]["Accuracy@5"].keys() == judged
    printed = capsys.readouterr().out
    assert "nDCG@10" in printed
    assert f"Queries found: {len(judged)} of {len(judged)}" in printed

    search_files(run, EvaluationSource.open(data), evaluation=EvaluationOptions(k=K), progress=False)
    everybody = (tmp_path / "mine" / "runs" / "data.trec").read_text().splitlines()
    assert len(everybody) == K * len(QuerySource.open(data).read())
    assert f"{len(QuerySource.open(data).read())} queries, of every split; --qrels=" in capsys.readouterr().out


def test_questions_of_a_table_with_answers(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied_run(root, tmp_path / "mine")
    table = tmp_path / "small.qa.csv"
    table.write_text("river stone\t['river']\nlight paper\t['no such words']\nold stone\t[]\n")
    assert (
        search_files(
            run,
            EvaluationSource.open(table),
            evaluation=EvaluationOptions(k=100, measures=tuple(MEASURES), dpr_results=True),
            progress=False,
        )
        is None
    )
    printed = capsys.readouterr().out
    assert "Accuracy@100 0.5000 (of 2 of 3 queries: 1 have no answers)\n" in printed
    assert "small.dpr.json (1 of 3 queries have no answers, so that has_answer is false)\n" in printed
    assert (tmp_path / "mine" / "runs" / "small.trec").exists()
    # A search without judgements does not replace this file.
    stored = read_json(tmp_path / "mine" / "eval" / "small.json")
    assert stored["mean"]["Accuracy@100"] == 0.5
    assert (stored["queries_expected"], stored["queries_asked"]) == (2, 3)
    assert stored["per_query"]["Accuracy@100"] == {"0": 1.0, "1": 0.0}
    write_json(run.workdir / "embeddings" / "data" / "corpus.json", with_digest({"path": "/nowhere"}))
    # The ranking is still written.
    search_files(run, EvaluationSource.open(table), evaluation=EvaluationOptions(k=100), progress=False)
    assert "accuracy by answers is not measured: the corpus that was encoded is no longer at /nowhere" in (
        capsys.readouterr().out
    )


def test_copied_and_changed_corpora(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied_run(root, tmp_path / "mine")
    # `copyfile` copies the text and not the time.
    shutil.copytree(root / "data", tmp_path / "data", copy_function=shutil.copyfile)
    place = run.workdir / "embeddings" / "data" / "corpus.json"
    place.write_text(json.dumps(with_digest(read_shard_json(place) | {"path": str(tmp_path / "data")})))
    show_answer(Searcher(run, corpus_folder(run.workdir)), "river stone", 1, progress=False)
    assert "\n  1. " in capsys.readouterr().out
    text = (tmp_path / "data" / "corpus.jsonl").read_text()
    (tmp_path / "data" / "corpus.jsonl").write_text(text.replace("river", "rivet"))
    show_answer(Searcher(run, corpus_folder(run.workdir)), "river stone", 1, progress=False)
    printed = capsys.readouterr().out
    assert f"in {tmp_path / 'data'}" in printed
    assert "rivet" not in printed.splitlines()[-1], "the warning shows the id, not the text"


def test_relevant_passages_that_were_not_encoded_are_counted(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied_run(root, tmp_path / "mine")
    qrels = tmp_path / "few.tsv"
    rows = ["query-id corpus-id score", "q0 p0 1", "q0 gone 1", "q3 p3 1", "q3 gone-too 0"]
    qrels.write_text("".join(row.replace(" ", "\t") + "\n" for row in rows))
    search_files(
        run, EvaluationSource.open(root / "data", qrels), EvaluationOptions(k=5, measures=("RR@5",)), progress=False
    )
    assert "1 of 3 relevant passages are not in the corpus: they count as not found" in capsys.readouterr().out
    written = read_json(run.workdir / "eval" / "data.few.json")
    assert written["provenance"]["dataset"]["relevant_passages_not_in_corpus"] == 1


def test_an_unknown_measure_is_an_error_before_the_search(root: Path, tmp_path: Path) -> None:
    run = copied_run(root, tmp_path / "mine")
    with pytest.raises(ValueError, match="unknown measure 'nDGC@10'"):
        search_files(
            run,
            EvaluationSource.open(root / "data", root / "data"),
            EvaluationOptions(k=5, measures=("nDGC@10",)),
            progress=False,
        )
    assert not (run.workdir / "runs").exists()


def test_an_invalid_regular_expression_is_an_error_before_the_search(root: Path, tmp_path: Path) -> None:
    run = copied_run(root, tmp_path / "mine")
    (tmp_path / "small.qa.csv").write_text("river stone\t['(river']\n")
    with pytest.raises(ValueError, match=r"'0': .*'\(river' .*expression"):
        search_files(
            run,
            EvaluationSource.open(tmp_path / "small.qa.csv"),
            evaluation=EvaluationOptions(k=5, match="regex"),
            progress=False,
        )
    assert not (run.workdir / "runs").exists()


def test_a_measure_deeper_than_k_is_an_error_and_defaults_are_not_deeper(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = copied_run(root, tmp_path / "mine"), str(root / "data")
    with pytest.raises(ValueError, match=r"R@1000 .*--k=1000 .*20 .*requested"):
        search_files(
            run,
            EvaluationSource.open(data, data),
            EvaluationOptions(
                k=K,
                measures=(
                    "RR@10",
                    "R@1000",
                ),
            ),
            progress=False,
        )
    assert not (run.workdir / "runs").exists()
    assert measures_for(100) == measures_for(1000) == ("nDCG@10", "RR@10", "R@100", "Success@5", "Success@20")
    assert measures_for(3) == ("nDCG@3", "RR@3", "R@3", "Success@3")
    evaluation = search_files(run, EvaluationSource.open(data, data), EvaluationOptions(k=K), progress=False)
    assert evaluation is not None
    assert list(evaluation.mean) == ["nDCG@10", "RR@10", "R@20", "Success@5", "Success@20"]
    assert "with --k=20, the measures are nDCG@10, RR@10, R@20, Success@5, Success@20\n" in capsys.readouterr().out


@pytest.mark.slow
def test_results_have_digests_and_costs(root: Path, tmp_path: Path) -> None:
    """The digests of queries and judgements do not depend on order and format; the costs are bytes and latency."""
    run, data = copied_run(root, tmp_path / "mine"), root / "data"
    search_files(
        run, EvaluationSource.open(data, data), EvaluationOptions(k=5, measures=("RR@5",), latency=3), progress=False
    )
    first = read_json(run.workdir / "eval" / "data.test.json")
    judgements = JudgementSource.open(data, "test").read()
    write_beir(
        tmp_path / "data", Corpus.open(data).read(), QuerySource.open(data).read()[::-1], {"test": judgements[::-1]}
    )
    search_files(
        run,
        EvaluationSource.open(tmp_path / "data", tmp_path / "data"),
        EvaluationOptions(k=5, measures=("RR@5",), latency=0),
        progress=False,
    )
    again = read_json(run.workdir / "eval" / "data.test.json")
    assert again["provenance"]["dataset"]["sha256"] == first["provenance"]["dataset"]["sha256"]
    write_beir(tmp_path / "data", Corpus.open(data).read(), QuerySource.open(data).read(), {"test": judgements[1:]})
    search_files(
        run,
        EvaluationSource.open(tmp_path / "data", tmp_path / "data"),
        EvaluationOptions(k=5, measures=("RR@5",)),
        progress=False,
    )
    other = read_json(run.workdir / "eval" / "data.test.json")["provenance"]["dataset"]["sha256"]
    assert other["qrels"] != first["provenance"]["dataset"]["sha256"]["qrels"]

    shards = open_shards(corpus_folder(run.workdir))
    size = sum(path.stat().st_size for path in shards.folder.glob("vectors-*.npy"))
    assert first["cost"]["bytes_per_passage"] == round(size / shards.total_rows, 1)
    assert "latency" not in again["cost"], "latency was not requested"
    latency = first["cost"]["latency"]
    assert (latency["questions"], latency["batch"], latency["k"]) == (3, 1, 5)
    assert (latency["percentiles"], latency["vectors"]) == ("nearest rank", "memory")
    for half in (latency["encode_ms"], latency["search_ms"]):
        assert 0 < half["p1"] <= half["p50"] <= half["p90"] <= half["p99"]


def test_latency_is_measured_per_question_with_a_default_time_limit(run: Run, root: Path) -> None:
    """The clock is fake: the times of encoding and search are separate, and do not include the warm-up."""
    searcher, queries = (
        Searcher(run, corpus_folder(run.workdir), many=True),
        QuerySource.open(root / "data").read()[:12],
    )

    def clock(unit: float) -> Callable[[], float]:
        times = iter([0.0, *(t for start in range(12) for t in (start + 0.0, start + 0.1 * (start + 1), start + 1.0))])
        return lambda: unit * next(times)

    result = measure_latency(searcher, queries, 3, 10, clock(1.0))
    assert result["questions"] == 10
    assert result["encode_ms"] == {"p1": 100.0, "p50": 500.0, "p90": 900.0, "p99": 1000.0}
    assert result["search_ms"] == {"p1": 0.0, "p50": 400.0, "p90": 800.0, "p99": 900.0}
    compiled = searcher.embedder.programs
    assert measure_latency(searcher, queries, 3, None, clock(8.0))["questions"] == 3, (
        "after 20 s, no other question begins"
    )
    assert measure_latency(searcher, queries, 3, 12, clock(8.0))["questions"] == 12, (
        "the requested number has no time limit"
    )
    assert measure_latency(searcher, queries, 3, None, clock(1.0))["questions"] == 12, "at most 100 questions"
    assert searcher.embedder.programs == compiled


def test_the_latency_is_of_compiled_programs(root: Path, tmp_path: Path) -> None:
    """The warm-up uses the lengths of the queries with their own instructions."""
    mine = copied_run(root, tmp_path / "mine")
    mine = replace(mine, tokenizer=replace(mine.tokenizer, query_prompt=f"{TASK} "))
    searcher = Searcher(mine, corpus_folder(mine.workdir), many=True)
    queries = [Query("1", "river", instruction="a b c d e f g"), Query("2", "stone")]
    warm = searcher.warm_up(queries, 3)
    assert len(warm) == 3
    compiled = searcher.embedder.programs
    measure_latency(searcher, queries, 3, 2)
    assert searcher.embedder.programs == compiled


def test_the_time_of_a_search_by_its_number_of_passages(run: Run, root: Path, tmp_path: Path) -> None:
    """Each number of passages is searched separately: the first passages have the same scores as in a search of all."""
    searcher, queries = Searcher(run, corpus_folder(run.workdir), many=True), QuerySource.open(root / "data").read()[:3]
    total = searcher.encoded_corpus.total_rows
    part, ids = searcher.first(7), searcher.encoded_corpus.ids(range(7))
    rankings, everything = (each.search(queries, each.encoded_corpus.total_rows).rankings for each in (part, searcher))
    for query, ranking in rankings.items():
        assert ranking == [(key, score) for key, score in everything[query] if key in ids]
    times = measure_by_passages(searcher, queries, 5, 2, (3, total))
    assert list(times) == ["3", str(total)]
    assert all(0 < ms["p1"] <= ms["p99"] for ms in times.values())
    with pytest.raises(ValueError, match=f"the first {total + 1} passages .* has {total}"):
        searcher.first(total + 1)
    with pytest.raises(ValueError, match="the first 0 passages"):
        searcher.first(0)
    mine = copied_run(root, tmp_path / "mine")
    options = EvaluationOptions(k=5, measures=("RR@5",), latency=2, latency_passages=(4,))
    search_files(mine, EvaluationSource.open(root / "data", root / "data"), options, progress=False)
    latency = read_json(mine.workdir / "eval" / "data.test.json")["cost"]["latency"]
    assert latency["search_ms_by_passages"].keys() == {"4", str(total)}


@pytest.mark.slow
def test_documents_are_ranked_by_their_best_passage(root: Path, tmp_path: Path) -> None:
    """A document has the rank of its first passage among all passages, even if most passages are parts of one document,
    so that the first candidates have too few others."""
    parts = [*Corpus.open(root / "data").read()]
    chunks = [
        Passage(f"many#{i}" if i < 60 else f"{part.id}#{i % 3}" if i % 2 else part.id, part.text, part.title)
        for i, part in enumerate(parts)
    ]
    queries, judgements = (
        QuerySource.open(root / "data").read(),
        [Judgement("q0", "many", 1), Judgement("q0", "none", 1)],
    )
    write_beir(tmp_path / "data", chunks, queries, {"test": judgements})
    run = untrained_run(tmp_path / "run", root / "encoder", root / "data", head__token="mean", normalize=True)
    encode_corpus(run, Corpus.open(tmp_path / "data"), progress=False)
    folder = corpus_folder(run.workdir)
    plain = Searcher(run, folder).search(queries, len(chunks)).rankings
    searcher = Searcher(run, folder, SearchOptions(max_passage=True))
    for k in (1, 7, len(chunks)):
        outcome = searcher.search(queries, k)
        for query, ranking in outcome.rankings.items():
            first: dict[str, float] = {}
            for key, score in plain[query]:
                first.setdefault(key.split("#")[0], score)
            assert ranking == list(first.items())[:k]
    assert len(first) < len(chunks) - 58
    assert len(searcher.search(queries, 7).result.rounds) > 1
    assert searcher.texts.missing_ids({"many", "none"}) == {"none"}
    assert searcher.texts.read(["many"])["many"].text == " ".join(chunk.text for chunk in chunks[:60])
    options = EvaluationOptions(k=5, measures=("RR@5",))
    search_files(
        run, EvaluationSource.open(tmp_path / "data", tmp_path / "data"), options, SearchOptions(max_passage=True)
    )
    written = read_json(run.workdir / "eval" / "data.test.max-passage.json")
    assert written["provenance"]["search"]["max_passage"] is True
    with pytest.raises(ValueError, match="max_passage needs exact search"):
        SearchOptions(max_passage=True, candidates="mean:10")


def test_only_vectors_in_memory_have_int8_copies(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """If vectors are read from disk for each question, their int8 copies would also be computed for each question."""
    for room, many in ((in_memory.MEMORY_BYTES, True), (0, False)):
        monkeypatch.setattr(in_memory, "MEMORY_BYTES", room)
        searcher = Searcher(run, corpus_folder(run.workdir), SearchOptions("faiss-cpu"), many=True)
        assert isinstance(searcher.vectors.backend, FaissCpu)
        assert (searcher.vectors.location, searcher.vectors.backend.many) == (
            "memory" if many else "disk",
            many,
        )


@pytest.mark.slow
def test_self_matches_are_removed(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, queries = copied_run(root, tmp_path / "mine"), tmp_path / "arguana" / "queries.jsonl"
    passages = list(Corpus.open(root / "data").read())[:8]
    qrels = tmp_path / "test.tsv"
    write_beir(tmp_path / "arguana", [], [Query(p.id, f"{p.title} {p.text}") for p in passages], {})
    qrels.write_text("query-id\tcorpus-id\tscore\n" + "".join(f"{p.id}\to0\t1\n" for p in passages))
    result = {}
    for how in ("keep", "remove", "auto"):
        search_files(
            run,
            EvaluationSource.open(queries, qrels),
            EvaluationOptions(k=5, measures=("RR@5",), self_matches=how),
            progress=False,
        )
        result[how] = RankingSource.open(run.workdir / "runs" / "arguana.test.trec").read()
        stored = read_json(run.workdir / "eval" / "arguana.test.json")["provenance"]["dataset"]["self_matches"]
        assert stored == ("kept" if how == "keep" else "removed")
        printed = capsys.readouterr().out
        assert ("--self_matches=remove leaves these passages out" in printed) == (how == "keep")
        assert ("of 8 queries found the passage with their own id, which is left out" in printed) == (how != "keep")
    assert result["auto"] == result["remove"] != result["keep"]
    assert sum(query in dict(ranking) for query, ranking in result["keep"].items()) >= 2
    assert all(len(ranking) == 5 and query not in dict(ranking) for query, ranking in result["remove"].items())


def test_results_as_dpr_writes_them(root: Path, tmp_path: Path) -> None:
    run, data = copied_run(root, tmp_path / "mine"), str(root / "data")
    search_files(
        run,
        EvaluationSource.open(data, data),
        EvaluationOptions(k=5, measures=("RR@5",), dpr_results=True),
        progress=False,
    )
    path = run.workdir / "runs" / "data.test.dpr.json"
    records, stored = read_json(path), read_json(run.workdir / "eval" / "data.test.json")
    judged = [query for query in QuerySource.open(data).read() if query.id in stored["per_query"]["RR@5"]]
    assert [(one["question"], one["answers"]) for one in records] == [(q.text, list(q.answers)) for q in judged]
    texts = {passage.id: passage for passage in Corpus.open(data).read()}
    for query, one in zip(judged, records, strict=True):
        for context in one["ctxs"]:
            assert context.keys() == {"id", "title", "text", "score", "has_answer"}
            assert (context["title"], context["text"]) == (texts[context["id"]].title, texts[context["id"]].text)
            assert context["has_answer"] == has_answer(context["text"], query.answers)
        hit = float(any(context["has_answer"] for context in one["ctxs"]))
        assert stored["answers"]["per_query"]["Accuracy@5"][query.id] == hit
    ours, theirs = (
        RankingSource.open(run.workdir / "runs" / "data.test.trec").read(),
        RankingSource.open(path).read(),
    )  # DPR's file has row numbers as ids
    assert [[key for key, _ in result] for result in theirs.values()] == [[k for k, _ in ours[q.id]] for q in judged]
    plain = tmp_path / "plain"
    write_beir(plain, [], [Query("q", "no answers")], {})
    with pytest.raises(ValueError, match=r"strings, .*results .*DPR"):
        search_files(
            run, EvaluationSource.open(plain), evaluation=EvaluationOptions(k=5, dpr_results=True), progress=False
        )
    write_json(run.workdir / "embeddings" / "data" / "corpus.json", with_digest({"path": "/nowhere"}))
    (tmp_path / "asked.qa.csv").write_text("river stone\t['river']\n")
    with pytest.raises((FileNotFoundError, ShardError)):
        search_files(
            run,
            EvaluationSource.open(tmp_path / "asked.qa.csv"),
            evaluation=EvaluationOptions(k=5, dpr_results=True),
            progress=False,
        )
    assert not (run.workdir.rankings("asked")).exists(), "the error comes before the search"


@pytest.mark.parametrize("question", ["", " \t", "\udcff"])
def test_an_empty_question_is_refused(question: str, run: Run) -> None:
    with pytest.raises(ValueError, match=r"the question (is blank|holds byte 0xff)"):
        show_answer(Searcher(run, corpus_folder(run.workdir)), question, 3, progress=False)


def test_unwritable_results_are_an_error_before_the_search(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = copied_run(root, tmp_path / "mine"), str(root / "data")
    (run.workdir / "eval").write_text("a file where a folder should be")
    monkeypatch.setattr(Searcher, "__init__", lambda *_: pytest.fail("the search began"))
    with pytest.raises(OSError, match=r"mine/eval cannot be written"):
        search_files(run, EvaluationSource.open(data, data), EvaluationOptions(k=K), progress=False)


def test_results_with_a_label_replace_no_others(root: Path, tmp_path: Path) -> None:
    run, data = copied_run(root, tmp_path / "mine"), str(root / "data")
    for label in ("", "step-0"):
        search_files(run, EvaluationSource.open(data, data), EvaluationOptions(k=5, label=label), progress=False)
    for folder, suffix in (("runs", "trec"), ("eval", "json")):
        assert {path.name for path in (run.workdir / folder).iterdir()} == {
            f"data.test.{suffix}",
            f"data.test.step-0.{suffix}",
        }


def test_a_result_replaces_none_of_another_data_set_of_the_same_name(root: Path, tmp_path: Path) -> None:
    run, data = copied_run(root, tmp_path / "mine"), tmp_path / "a" / "data"
    shutil.copytree(root / "data", data)

    def search(folder: Path, name: str = "") -> None:
        source = EvaluationSource.open(folder, folder)
        search_files(run, source, EvaluationOptions(k=5, latency=0, name=name), progress=False)

    search(data)
    copy = tmp_path / "b" / "data"
    shutil.copytree(data, copy)
    search(copy)  # the same data in another folder
    judgements = JudgementSource.open(copy, "test").read()[1:]
    write_beir(copy, list(Corpus.open(copy).read()), QuerySource.open(copy).read(), {"test": judgements})
    search(copy)  # the same folder with other data
    kept = {path: path.read_bytes() for path in run.workdir.path.glob("*/data.test.*")}
    with pytest.raises(ValueError, match="--name") as error:
        search(data)
    assert f"that on {data} would" in str(error.value)
    assert f"result on {copy}," in str(error.value)
    assert kept == {path: path.read_bytes() for path in run.workdir.path.glob("*/data.test.*")}
    search(data, "original")
    assert (run.workdir / "eval" / "original.json").exists()


def test_rankings_without_an_evaluation_replace_none_of_another_data_set(root: Path, tmp_path: Path) -> None:
    run, files = copied_run(root, tmp_path / "mine"), [tmp_path / name / "asked" / "q.jsonl" for name in "ab"]
    lines = (root / "data" / "queries.jsonl").read_text().splitlines(keepends=True)
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True)
        file.write_text("".join(lines[number : number + 2]))

    def search(file: Path, name: str = "") -> None:
        options = EvaluationOptions(k=5, latency=0, name=name)
        search_files(run, EvaluationSource.open(file), options, progress=False)

    search(files[0])
    path = run.workdir.rankings("q")
    kept = path.read_bytes()
    with pytest.raises(ValueError, match=f"result on {files[0]}, .* on {files[1]} would"):
        search(files[1])
    assert path.read_bytes() == kept
    search(files[1], "second")
    search(files[0])
    files[0].write_text("".join(lines[2:4]))
    search(files[0])  # the same file, changed
    assert path.read_bytes() != kept


@pytest.mark.slow
def test_the_run_file_gives_trec_eval_the_printed_numbers(root: Path, tmp_path: Path) -> None:
    """Every passage is in the corpus three times: the copies have equal scores, and trec_eval orders them by id."""
    passages = [
        Passage(f"{prefix}{p.id}", p.text, p.title)
        for p in Corpus.open(root / "data").read()
        for prefix in ("b", "c", "a")
    ]
    judgements = [
        Judgement(j.query_id, f"b{j.passage_id}", j.relevance)
        for j in JudgementSource.open(root / "data", "test").read()
    ]
    write_beir(tmp_path / "copies", passages, QuerySource.open(root / "data").read(), {"test": judgements})
    run, data = copied_run(root, tmp_path / "mine"), str(tmp_path / "copies")
    encode_corpus(run, Corpus.open(data), progress=False)
    evaluation = search_files(
        run,
        EvaluationSource.open(data, data),
        EvaluationOptions(
            k=K,
            measures=(
                "nDCG@10",
                "RR",
                "R@20",
            ),
        ),
        encoded_name="copies",
        progress=False,
    )
    assert evaluation is not None
    relevance: dict[str, dict[str, int]] = {}
    for judgement in judgements:
        relevance.setdefault(judgement.query_id, {})[judgement.passage_id] = judgement.relevance
    names = {"nDCG@10": "ndcg_cut_10", "RR": "recip_rank", "R@20": "recall_20"}
    lines = [line.split() for line in (run.workdir / "runs" / "copies.test.trec").read_text().splitlines()]
    ranking: dict[str, dict[str, float]] = {}
    for query, _, passage, _, score, _ in lines:
        ranking.setdefault(query, {})[passage] = float(score)
    rankings = pytrec_eval.RelevanceEvaluator(relevance, set(names.values())).evaluate(ranking)
    for ours, theirs in names.items():
        for query, value in evaluation.per_query[ours].items():
            assert rankings[query][theirs] == pytest.approx(value, abs=1e-6), (query, ours)


def test_a_searcher_compiles_once_and_reads_the_lines_it_shows(root: Path, tmp_path: Path) -> None:
    run = copied_run(root, tmp_path / "mine")
    searcher = Searcher(run, corpus_folder(run.workdir))
    everything = {passage.id: passage for passage in Corpus.open(root / "data").read()}
    size = (root / "data" / "corpus.jsonl").stat().st_size
    compiled = 0
    for number, text in enumerate(("river stone", "paper light")):
        before = searcher.embedder.programs, searcher.texts.bytes_read
        result = searcher.search([Query("0", text)], 3)
        shown = searcher.texts.read([passage for passage, _ in result.rankings["0"]])
        assert shown == {passage: everything[passage] for passage, _ in result.rankings["0"]}
        lines = [json.dumps({"_id": p.id, "title": p.title, "text": p.text}) for p in shown.values()]
        assert searcher.texts.bytes_read - before[1] == sum(len(line) + 1 for line in lines) < size / 10
        compiled = searcher.embedder.programs - before[0]
        assert compiled == (1 if number == 0 else 0)
    again = Searcher(run, searcher.folder)  # the index is on disk now
    assert again.texts.read(everything) == everything
    assert again.texts.bytes_read == size
    (searcher.folder / "passages.npy").write_bytes(b"damaged")
    assert Searcher(run, searcher.folder).texts.read(["p3"]) == {"p3": everything["p3"]}


@pytest.mark.slow
def test_lengths_of_encoding_and_search_are_recorded(root: Path, tmp_path: Path) -> None:
    run, data = copied_run(root, tmp_path / "mine"), str(root / "data")
    short = open_run(run.workdir, passage_length=8)
    encode_corpus(short, Corpus.open(data), "short", EncodeOptions(dtype="float16", shard_rows=40), progress=False)
    shards = open_shards(run.workdir / "embeddings" / "short")
    assert shards.fingerprint["contract"]["passage_length"] == 8
    assert (shards.manifest.dtype, shards.manifest.rows_per_shard) == ("float16", 40)
    with pytest.raises(ContractError, match=r"passage_length: 24 in .*, 8 in "):
        encode_corpus(run, Corpus.open(data), "short", EncodeOptions(dtype="float16"), progress=False)
    search_files(
        open_run(run.workdir, query_length=5),
        EvaluationSource.open(data, data),
        EvaluationOptions(k=5),
        encoded_name="short",
        progress=False,
    )
    stored = read_json(run.workdir / "eval" / "data.test.json")["provenance"]["search"]
    assert (stored["query_length"], stored["passage_length"]) == (5, 8)

    folder, question = shards.folder, Query("0", "river stone")
    (key, score), *_ = Searcher(run, folder).search([question], 1).rankings["0"]
    encoded_corpus = open_encoded(folder, verify=False)
    as_encoded, as_trained = (
        float(explain(one, question.text, stored_passage(encoded_corpus, key)).split()[1])
        for one in (open_as_encoded(run.workdir.path, "best", encoded_corpus), run)
    )
    assert as_encoded == pytest.approx(score, abs=1e-3)
    assert as_trained != pytest.approx(score, abs=1e-2), "with the lengths of training, the text is cut"
    with pytest.raises(ValueError, match=r"query_length is 41; it must be 3 to 40"):
        open_run(run.workdir, query_length=41)
    with pytest.raises(ValueError, match=r"passage_length is 2; it must be 3 to 40"):
        open_run(run.workdir, passage_length=2)


@pytest.mark.exhaustive
def test_prompts_precede_encoded_texts(root: Path, tmp_path: Path) -> None:
    """A run with prompts gives the results of a run without prompts on files whose texts include them; each run refuses
    the other's shards."""
    joins = {"tokens__query_prompt": "river: ", "tokens__passage_prompt": "stone ", "tokens__title_separator": " - "}
    prompted = untrained_run(tmp_path / "prompted", root / "encoder", root / "data", **joins)
    plain = untrained_run(tmp_path / "plain", root / "encoder", root / "data")
    passages, queries = list(Corpus.open(root / "data").read()), QuerySource.open(root / "data").read()[:5]
    written = [Passage(p.id, "stone " + " - ".join(part for part in (p.title, p.text) if part)) for p in passages]
    write_beir(tmp_path / "written", written, [], {})
    encode_corpus(prompted, Corpus.open(root / "data"), "data", progress=False)
    encode_corpus(plain, Corpus.open(tmp_path / "written"), "data", progress=False)
    encode_corpus(plain, Corpus.open(root / "data"), "bare", progress=False)

    def rankings_of(run: Run, corpus: str, prompt: str) -> Rankings:
        judged = [Query(query.id, prompt + query.text) for query in queries]
        return Searcher(run, run.workdir.embeddings(corpus), SearchOptions("xla")).search(judged, 5).rankings

    assert rankings_of(prompted, "data", "") == rankings_of(plain, "data", "river: ")
    assert rankings_of(prompted, "data", "") != rankings_of(plain, "bare", "")  # control: prompts change the rankings
    with pytest.raises(ContractError, match=r"passage_prompt: 'stone ' in .*, '' in the model"):
        Searcher(plain, prompted.workdir.embeddings("data"), SearchOptions("xla")).search(queries, 5)


def test_an_answer_on_the_terminal(root: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    question = QuerySource.open(root / "data").read()[0]
    show_answer(Searcher(run, corpus_folder(run.workdir)), question.text, 3, progress=False)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(question.text)
    assert [line.split(".")[0].strip() for line in lines] == ["1", "2", "3"]
    best = Searcher(run, corpus_folder(run.workdir)).search([question], 1).rankings[question.id][0][1]
    assert f"{best:.4f}" in lines[0]


def test_a_line_of_an_answer_has_the_passage_id_before_the_title(capsys: pytest.CaptureFixture[str]) -> None:
    passages = [
        Passage("P7", "A tent for two.", "Tent"),
        Passage("P8", "A lamp."),
        Passage("sorted", "Sort.", "sorted"),
    ]
    print_ranking([(passage.id, 0.5) for passage in passages], {passage.id: passage for passage in passages})
    lines = [line.split("0.5000")[1].split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["P7", "Tent", "A", "tent", "for", "two."], ["P8", "A", "lamp."], ["sorted", "Sort."]]


def test_shards_of_another_checkpoint(root: Path, run: Run) -> None:
    other = Run(**{**vars(run), "checkpoint": {"step": 7, "digest": "ab"}})
    with pytest.raises(ContractError) as caught:
        Searcher(other, corpus_folder(run.workdir)).search([Query("0", "river")], 3)
    assert "checkpoint.step: 0 in" in str(caught.value)
    assert "7 in the model in" in str(caught.value)
    assert "--checkpoint=0" in str(caught.value)


def test_the_corpus_is_selected_by_name(root: Path, tmp_path: Path) -> None:
    run = copied_run(root, tmp_path / "run")
    assert corpus_folder(run.workdir) == corpus_folder(run.workdir, "data")
    with pytest.raises(FileNotFoundError, match=r"corpus 'wiki'; .*data"):
        corpus_folder(run.workdir, "wiki")
    (folder, file), near = (str(root / "data"), str(root / "data" / "corpus.jsonl")), os.path.relpath(root / "data")
    assert corpus_folder(run.workdir, folder) == corpus_folder(run.workdir, near) == corpus_folder(run.workdir), (
        "the folder, its name and its path mean the same corpus"
    )
    with pytest.raises(FileNotFoundError, match=rf"corpus '{file}'; .*data"):
        corpus_folder(run.workdir, file)
    encode_corpus(run, Corpus.open(root / "data"), name="again", progress=False)
    with pytest.raises(ValueError, match=r"several corpora, .*--corpus"):
        corpus_folder(run.workdir)
    with pytest.raises(ValueError, match=rf"several .*{folder}, .*--corpus"):
        corpus_folder(run.workdir, folder)
    (run.workdir / "embeddings" / "again" / "corpus.json").write_text("{}")
    assert corpus_folder(run.workdir, folder).name == "data", "the origin of the other corpus is no longer known"
    assert corpus_folder(run.workdir, "again").name == "again"
    (run.workdir / "embeddings" / "again" / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"embeddings/again .*finished; .*encodes"):
        corpus_folder(run.workdir, "again")
    shutil.rmtree(run.workdir / "embeddings")
    with pytest.raises(FileNotFoundError, match=r"no encoded corpus; jaxret encode --workdir="):
        corpus_folder(run.workdir)


@pytest.mark.parametrize(("queries", "k", "message"), [([], 3, "no query"), ([Query("0", "x")], 0, "k is 0")])
def test_nothing_to_search_for(queries: list[Query], k: int, message: str, run: Run) -> None:
    with pytest.raises(ValueError, match=message):
        Searcher(run, corpus_folder(run.workdir)).search(queries, k)
