"""Rerank a run by the scores of a cross-encoder, and evaluate it, or score training data (`jaxret rerank`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxret.data.errors import Location
from jaxret.data.formats import CorpusScan, Policy, TrainingSource, source_path, write_run
from jaxret.data.formats.outputs import require_other_output
from jaxret.data.records import Passage, Query, Rankings
from jaxret.evaluation.answer_matching import check_answers
from jaxret.evaluation.evaluation_report import emit_table, evaluation_text
from jaxret.evaluation.metrics import Evaluation, evaluate
from jaxret.evaluation.self_matches import removes_self_matches, without_self_matches
from jaxret.experiments.rerank_request import RerankRequest
from jaxret.experiments.score_examples import score_examples
from jaxret.experiments.searches.evaluate_search import (
    answer_accuracies,
    evaluation_path,
    require_answers,
    write_measures,
)
from jaxret.experiments.searches.evaluation_measures import MeasureNames, choose_measures
from jaxret.experiments.searches.evaluation_queries import EvaluationQueries, EvaluationSource, read_evaluation_queries
from jaxret.parallel.processes import require_platform
from jaxret.parallel.progress import print_line
from jaxret.runs.reranker import Reranker, open_pretrained_reranker, open_reranker
from jaxret.search.latency import is_over, measurement_conditions, percentiles, spread_evenly
from jaxret.storage.atomic import sha256_file
from jaxret.storage.buckets.working_copy import require_writable, shown_message


def rerank_top(rankings: Rankings, scores: Mapping[tuple[str, str], float], depth: int, tail: bool = True) -> Rankings:
    """Return rankings whose first `depth` passages are sorted by new scores. Passages with equal scores keep their
    order.

    Args:
        rankings: query id -> [(passage id, score)], best first.
        scores: (query id, passage id) -> new score, of the first `depth` passages of each query.
        depth: number of passages per query that are sorted.
        tail: whether the other passages follow in their order. Each has a score 1 below the previous passage, beginning
            below the lowest new score; these are not scores of a model.
    """
    result: Rankings = {}
    for query, ranking in rankings.items():
        top = [(passage, scores[query, passage]) for passage, _ in ranking[:depth]]
        top.sort(key=lambda pair: -pair[1])
        lowest = top[-1][1] if top else 0.0
        later = [(passage, lowest - number) for number, (passage, _) in enumerate(ranking[depth:], 1)]
        result[query] = top + later * tail
    return result


@dataclass(frozen=True)
class _Inputs:
    """The contents of a request's files."""

    rankings: Rankings  # without self-matches if they are removed
    self_matches_removed: bool  # whether self-matches were removed
    k: int  # number of passages in the longest ranking that is written
    measures: MeasureNames
    queries: dict[str, Query]  # query id -> query, for the queries of the run
    scan: CorpusScan  # digest and size of the corpus
    passages: dict[str, Passage]  # passage id -> passage, for the passages whose texts are needed
    evaluation_queries: EvaluationQueries  # queries and judgements of the evaluation
    policy: Policy  # counts skipped records


def rerank_run(
    reranker: Reranker, request: RerankRequest, progress: bool = True
) -> tuple[Evaluation, Evaluation] | None:
    """Write the reranked run. With judgements, print and return (evaluation of the first stage, evaluation after
    reranking).

    With judgements or answers, an evaluation file like `jaxret search`'s is written next to the run.

    Raises:
        DataError: a query or a passage of the run has no text, or the run is empty.
        ValueError: a measure is deeper than the run, or an output would overwrite an input.
    """
    _require_separate_output(request)
    inputs = _read_inputs(request)
    pairs = [(query, passage) for query, ranking in inputs.rankings.items() for passage, _ in ranking[: request.k]]
    tail = "follow them" if request.tail else "are left out"
    print_line(f"scoring {len(pairs):,} pairs: the first {request.k} passages of each query; the other passages {tail}")
    passages = {passage: inputs.passages[passage] for _, passage in pairs}
    scores, cut = reranker(inputs.queries, passages, pairs, progress)
    print(*cut, sep="\n")
    rankings = rerank_top(inputs.rankings, dict(zip(pairs, map(float, scores))), request.k, request.tail)
    write_run(request.out, rankings, tag="jaxret-rerank")
    print(f"run: {request.out}")
    judgements, evaluations = inputs.evaluation_queries.judgements, None
    if request.source.judgements:
        first_stage, after = (evaluate(run, judgements, inputs.measures.names) for run in (inputs.rankings, rankings))
        evaluations = first_stage, after
        print(evaluation_text({"before": first_stage, "after": after}))
        emit_table({"before": first_stage, "after": after})
    answers = answer_accuracies(
        rankings, inputs.evaluation_queries.queries, inputs.passages, inputs.measures.cutoffs, request.match
    )
    write_measures(
        (request.out, evaluation_path(request.out)),
        evaluations[1] if evaluations else None,
        answers,
        _provenance(reranker, request, inputs),
        {"bytes_per_passage": 0.0},  # a cross-encoder reads texts and stores no vectors
        (lambda: _measure_latency(reranker, inputs, request)) if request.latency != 0 else None,
    )
    return evaluations


def _require_separate_output(request: RerankRequest) -> None:
    """Raise ValueError if an output would overwrite an input, OSError if its folder is not writable."""
    queries, judgements = request.source.queries, request.source.judgements
    sources = [("the run that is reranked", request.rankings.data), ("the queries", queries.data)]
    sources += [("the corpus", request.texts.data), *([("the judgements", judgements.data)] if judgements else [])]
    for path in (request.out, evaluation_path(request.out)):
        require_other_output(path, sources, [queries.split])
    require_writable(Path(request.out).absolute().parent)


def _read_inputs(request: RerankRequest) -> _Inputs:
    policy = Policy(request.on_error)
    rankings = request.rankings.read(policy)
    longest = max(map(len, rankings.values()), default=0)
    if not longest:
        raise Location(request.rankings.files[0]).error("empty run", "it has no rankings", "give a run with rankings")
    if remove := removes_self_matches(request.self_matches, request.source.dataset_name):
        rankings = without_self_matches(rankings, longest)
    k = longest if request.tail else min(request.k, longest)
    measures = choose_measures(request.measures, k, request.run if k == longest else "")
    evaluation_queries = _read_queries(request, rankings, policy)
    queries = evaluation_queries.run_queries
    answer_depth = max(measures.cutoffs)
    depths = {query: max(request.k, answer_depth if queries[query].answers else 0) for query in rankings}
    scan, passages = _read_run_passages(request, rankings, depths, policy)
    check_answers(evaluation_queries.queries, request.match)
    require_answers(request.source.queries.source, evaluation_queries.queries, measures)
    return _Inputs(rankings, remove, k, measures, queries, scan, passages, evaluation_queries, policy)


def _read_queries(request: RerankRequest, rankings: Rankings, policy: Policy) -> EvaluationQueries:
    """Read the queries of the run; without judgements, these are the queries of the evaluation."""
    read = read_evaluation_queries if request.source.judgements else EvaluationSource.read
    evaluation_queries = read(request.source, policy, rankings)
    if missing_ids := [query for query in rankings if query not in evaluation_queries.run_queries]:
        message = f"{request.run} has query {missing_ids[0]!r}, one of {len(missing_ids):,} that are not here"
        raise Location(source_path(request.source.queries.source)).error(
            "no such query", message, "give the queries of the run"
        )
    if request.source.judgements:
        return evaluation_queries
    return replace(evaluation_queries, queries=list(evaluation_queries.run_queries.values()))


def _read_run_passages(
    request: RerankRequest, rankings: Rankings, depths: Mapping[str, int], policy: Policy
) -> tuple[CorpusScan, dict[str, Passage]]:
    """Scan the corpus, and return the scan, and the passages of a run whose texts are needed, by id. `depths` is query
    id -> number of these passages."""
    passage_ids = {passage for query, ranking in rankings.items() for passage, _ in ranking[: depths[query]]}
    scan = request.texts.scan(policy)
    passages = {passage.id: passage for passage in request.texts.read(policy, scan) if passage.id in passage_ids}
    if missing_ids := sorted(passage_ids - passages.keys()):
        message = f"{request.run} has passage {missing_ids[0]!r}, one of {len(missing_ids):,} that are not here"
        raise Location(source_path(request.texts.source)).error(
            "no such passage", message, "give the corpus of the run"
        )
    return scan, passages


def _measure_latency(reranker: Reranker, inputs: _Inputs, request: RerankRequest) -> dict[str, Any]:
    """Return the times of scoring `request.latency` queries, one at a time.

    Every query is scored twice, the first time as a warm-up. "rerank_ms" is the time from texts to scores on the host;
    the other keys have the meaning that they have for a search.
    """
    times: list[float] = []  # in milliseconds
    first_start = time.perf_counter()
    for query in spread_evenly([inputs.queries[key] for key in inputs.rankings], request.latency):
        pairs = [(query.id, passage) for passage, _ in inputs.rankings[query.id][: request.k]]
        texts = {passage: inputs.passages[passage] for _, passage in pairs}
        reranker({query.id: query}, texts, pairs)
        start = time.perf_counter()
        reranker({query.id: query}, texts, pairs)
        times.append(1000 * (time.perf_counter() - start))
        if is_over(request.latency, time.perf_counter() - first_start):
            break
    device = str(reranker.scorer.mesh.devices.flat[0].device_kind)
    return {"rerank_ms": percentiles(times), "questions": len(times), **measurement_conditions(request.k, device)}


def _provenance(reranker: Reranker, request: RerankRequest, inputs: _Inputs) -> dict[str, Any]:
    """Return the provenance of reranked results, with the keys of a search's provenance."""
    tokenizer = reranker.tokenizer
    source = [sha256_file(path) for path in request.rankings.files]
    search = {"k": inputs.k, "reranked": {"depth": request.k, "of": source}, "run": shown_message(request.run)}
    search |= {"query_length": tokenizer.query_length, "passage_length": tokenizer.passage_length}
    dataset = inputs.evaluation_queries.provenance(inputs.policy, inputs.self_matches_removed, request.match)
    corpus = {"sha256": inputs.scan.sha256, "passages": inputs.scan.passages}
    return {**reranker.origin, "corpus": corpus, "search": search, "dataset": dataset}


def rerank(request: RerankRequest) -> None:
    """Write the reranked run, or the scored training data, of a request. Raises the errors of `rerank_run` and
    `score_examples`."""
    if request.run:
        _ = request.source, request.texts, request.rankings  # missing files are an error before the model is opened
    require_platform(request.platform, "--platform")
    sizes = {name: getattr(request, name) for name in ("query_length", "passage_length", "tokens_per_batch")}
    if request.model:
        reranker = open_pretrained_reranker(request.model, **sizes, download=request.download)
    else:
        reranker = open_reranker(request.workdir, request.checkpoint, **sizes)
    if request.run:
        rerank_run(reranker, request)
    else:
        data = TrainingSource.open(request.train, request.split or "train", request.negatives_run)
        score_examples(reranker, data, request.out, request.on_error)
