"""Search an encoded corpus for the queries of files, or for one question: `jaxret search`."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxret.data.formats import Policy, write_retrieval_results, write_run
from jaxret.data.record_checks import check_question
from jaxret.data.records import Passage, Query, Rankings
from jaxret.evaluation.answers import AnswerMatcher, answer_accuracy, check_answers
from jaxret.evaluation.evaluation_report import evaluation_text, write_evaluation
from jaxret.evaluation.metrics import Evaluation, evaluate, parse_measure
from jaxret.evaluation.self_matches import has_passages_as_queries, self_matching_queries, without_self_matches
from jaxret.experiments.evaluation_options import EvaluationOptions
from jaxret.experiments.evaluation_queries import EvaluationQueries, read_evaluation_queries
from jaxret.index.shards import ShardError
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import Run
from jaxret.search.approximate.candidates import describe_recall, parse_candidates
from jaxret.search.latency import describe_latency, measure_latency
from jaxret.search.proof import SearchResult
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher, SearchOutcome, corpus_folder, provenance
from jaxret.storage.atomic import remove_leftovers, require_writable, write_json

MEASURES = ("nDCG@10", "RR@10", "R@100", "Success@5", "Success@20")
ANSWER_CUTOFFS = (5, 20, 100)
_QUESTIONS = 200  # whose texts are held at a time


def measures_for(k: int) -> list[str]:
    """MEASURES, those deeper than k at k."""
    parsed = [parse_measure(name) for name in MEASURES]
    return list(dict.fromkeys(f"{measure.kind}@{min(measure.cutoff or k, k)}" for measure in parsed))


def check_measures(measures: Sequence[str] | None, k: int, where: str = "") -> list[str]:
    """Return the names of the measures, by default `measures_for(k)`.

    Args:
        measures: names as ir-measures has them; None for the default.
        k: passages per query.
        where: the file that has k passages per query; "" where k is the value of --k.

    Raises:
        ValueError: a measure is unknown, or deeper than k.
    """
    parsed = [parse_measure(measure) for measure in measures or measures_for(k)]
    deepest = max(parsed, key=lambda measure: measure.cutoff or 0)
    if (deepest.cutoff or 0) > k:
        if where:
            raise ValueError(f"{deepest.name} needs {deepest.cutoff} passages a query; {where} has {k} at most")
        raise ValueError(f"{deepest.name} needs --k={deepest.cutoff} or more; only {k} passages a query are asked for")
    return [measure.name for measure in parsed]


def search_files(
    run: Run,
    queries: str,
    qrels: str = "",
    evaluation: EvaluationOptions = EvaluationOptions(),
    options: SearchOptions = SearchOptions(),
    corpus: str = "",
    progress: bool = True,
) -> Evaluation | None:
    """Search for every query, and write `runs/<dataset>.trec` in the run's folder.

    With judgements: search for every judged query, write `runs/<dataset>.<split>.trec` and
    `eval/<dataset>.<split>.json`, print the table, and return it. Where the queries have answer strings, their accuracy
    is in eval/ too, also without judgements. The files' names have a part of their own for `evaluation.label`, for
    filters, and for an approximate search.

    Args:
        run: the run that encoded the corpus.
        queries: folder or file with queries.
        qrels: folder or file with judgements; "" for none.
        evaluation: queries, measures and further results.
        options: how candidates are found.
        corpus: the encoded corpus: its name, or the path that was encoded; "" for the only one.
        progress: show bars.

    Raises:
        ValueError: before the search: a measure is deeper than k, an answer is no regular expression, or DPR's results
            are requested for queries without answers.
    """
    k = evaluation.k
    names = check_measures(evaluation.measures, k)
    if evaluation.measures is None and qrels and names != list(MEASURES):
        print(f"with --k={k}, the measures are {', '.join(names)}")
    policy = Policy(evaluation.on_error)
    dataset = read_evaluation_queries(queries, qrels, evaluation.split, policy)
    remove = evaluation.self_matches == "remove"
    remove |= evaluation.self_matches == "auto" and has_passages_as_queries(dataset.dataset)
    if options.candidates:
        parse_candidates(options.candidates).require(k + remove)  # now, not after the corpus was read
    check_answers(dataset.queries, evaluation.match)
    if evaluation.dpr_results and not any(query.answers for query in dataset.queries):
        raise ValueError(f"{queries} has no answer strings, which results as DPR writes them say of every passage")
    name = ".".join(filter(None, (dataset.name, evaluation.label, options.label)))
    run_file, results = run.workdir.rankings(name), run.workdir.evaluation(name)
    for path in (run_file, results):
        require_writable(path.parent)  # now, not after the search
        remove_leftovers(path.parent, age=3600)
    searcher = Searcher(run, corpus_folder(run.workdir, corpus), options, many=evaluation.latency > 0)
    if evaluation.dpr_results:
        searcher.passages(())  # they are written with texts: errors in these are raised before the search
    outcome = search_queries(searcher, dataset, k, remove, progress)
    write_run(run_file, outcome.rankings, tag=f"jaxret-{run.workdir.name}")
    print(f"run: {run_file}")
    if searcher.generator and outcome.approximate:
        write_json(run_file.with_suffix(".candidates.json"), {**outcome.approximate, "k": k})

    answers = look_for_answers(searcher, outcome.rankings, dataset.queries, k, evaluation.match)
    measured = evaluate(outcome.rankings, dataset.judgements, names) if qrels else None
    first = measured or answers
    if first:
        source = dataset.provenance(str(queries), str(qrels), policy, remove, evaluation.match)
        if qrels:
            source |= {"relevant_passages_not_in_corpus": count_missing_relevant(outcome, dataset)}
        if measured:
            print(evaluation_text({run.workdir.name: measured}))
        made = provenance(run, outcome, k, dataset=source)
        answers = answers if measured else None
        cost: dict[str, Any] = {"bytes_per_passage": round(searcher.shards.bytes_per_passage, 1)}
        write_evaluation(results, first, made, answers, cost)
        print(f"{cost['bytes_per_passage']:,.0f} bytes a passage")
        if evaluation.latency:
            cost["latency"] = measure_latency(searcher, dataset.queries, k, evaluation.latency)
            write_evaluation(results, first, made, answers, cost)  # again: nothing is lost if timing is stopped
            print(describe_latency(cost["latency"]))
        print(f"evaluation: {results}")
    if evaluation.dpr_results:
        path = run_file.with_suffix(".dpr.json")
        write_dpr_results(path, searcher, outcome.rankings, dataset.queries, evaluation.match)
    return measured


def search_queries(
    searcher: Searcher, dataset: EvaluationQueries, k: int, remove: bool, progress: bool
) -> SearchOutcome:
    """Search for all queries of a data set, and print how it was done.

    Args:
        searcher: the corpus.
        dataset: the queries.
        k: passages per query.
        remove: leave out passages that have the id of their query.
        progress: show bars.
    """
    outcome = searcher.search(dataset.queries, k + remove, progress)
    print(outcome.truncation)
    cut = outcome.shards.fingerprint["contract"].get("passage_length")
    print(
        f"{search_kind(searcher)} of {describe_passages(searcher)} (of at most {cut} tokens) for "
        f"{len(dataset.queries):,} queries by {outcome.result.backend}"
    )
    outcome = searcher.with_recall(outcome)
    if searcher.index:
        print(f"approximate: {searcher.index.describe(k + remove)}")
    else:
        approximate = outcome.approximate
        print(describe_recall(approximate) if approximate else describe_proof(outcome.result))
    own = self_matching_queries(outcome.rankings)
    if not remove:
        first = [query for query in own if outcome.rankings[query][0][0] == query]
        if first:
            print(
                f"{len(first):,} of {len(dataset.queries):,} queries found the passage of their own id first: if "
                "queries are passages here, --self_matches=remove leaves these out, as BEIR does"
            )
        return outcome
    judged = {(j.query_id, j.passage_id) for j in dataset.judgements if j.relevance > 0}
    print(f"{len(own):,} of {len(dataset.queries):,} queries found the passage of their own id, which is left out")
    if wrong := sum((query, query) in judged for query in own):
        print(
            f"{wrong:,} of these are judged relevant: where queries and passages are each numbered for themselves, "
            "--self_matches=keep is right"
        )
    return replace(outcome, rankings=without_self_matches(outcome.rankings, k))


def count_missing_relevant(outcome: SearchOutcome, dataset: EvaluationQueries) -> int:
    """Return how many relevant passages are not searched; print it if there are some."""
    relevant = {judgement.passage_id for judgement in dataset.judgements if judgement.relevance > 0}
    missing = len(outcome.shards.missing_ids(relevant))
    if missing:
        where = "among those that match" if outcome.filters else "in the corpus"
        print(f"{missing:,} of {len(relevant):,} relevant passages are not {where}: they count as not found")
    return missing


def write_dpr_results(path: Path, searcher: Searcher, rankings: Rankings, queries: Sequence[Query], match: str) -> None:
    """Write the rankings as DPR does, with the passages' texts and whether each has an answer.

    Args:
        path: JSON file to write.
        searcher: reads texts, of _QUESTIONS queries at a time.
        rankings: passages and scores of each query.
        queries: their answers count.
        match: "string" or "regex".
    """
    matcher = AnswerMatcher(match)

    def results() -> Iterator[tuple[Query, list[tuple[Passage, float, bool]]]]:
        for start in range(0, len(queries), _QUESTIONS):
            part = queries[start : start + _QUESTIONS]
            texts = searcher.passages({passage for query in part for passage, _ in rankings[query.id]})
            for query in part:
                passages = [texts[passage] for passage, _ in rankings[query.id]]
                has_answer = matcher((passage.text for passage in passages), query)
                scores = (score for _, score in rankings[query.id])
                yield query, list(zip(passages, scores, has_answer, strict=True))

    write_retrieval_results(path, results())
    none = sum(not query.answers for query in queries)
    remark = f" (has_answer is false throughout for {none:,} of {len(queries):,} queries, which have no answers)"
    print(f"results as DPR writes them: {path}{remark * bool(none)}")


def look_for_answers(
    searcher: Searcher, rankings: Rankings, queries: Sequence[Query], k: int, match: str = "string"
) -> Evaluation | None:
    """Return top-k accuracy by answer string (DPR's measure), for the cut-offs that k covers; None if no query has
    answers, or the texts cannot be read.

    Args:
        searcher: reads texts.
        rankings: passages and scores of each query.
        queries: their answers count.
        k: passages per query.
        match: "string" or "regex".
    """
    answered = [query for query in queries if query.answers]
    if not answered:
        return None
    try:
        texts = searcher.passages({passage for query in answered for passage, _ in rankings[query.id]})
    except (FileNotFoundError, ContractError, ShardError) as error:  # the judgements can be used all the same
        print(f"answer strings cannot be looked for: {error}")
        return None
    return answer_accuracies(rankings, queries, texts, k, match)


def answer_accuracies(
    rankings: Rankings, queries: Sequence[Query], texts: Mapping[str, Passage], k: int, match: str
) -> Evaluation | None:
    """Return top-k accuracy of the queries that have answers, for the cut-offs that k covers, and print it; None if
    none has answers.

    Args:
        rankings: passages and scores of each query.
        queries: their answers count.
        texts: passages by id.
        k: passages per query.
        match: "string" or "regex".
    """
    answered = [query for query in queries if query.answers]
    if not answered:
        return None
    cutoffs = [cutoff for cutoff in ANSWER_CUTOFFS if cutoff <= k] or [k]
    by_id = {key: passage.text for key, passage in texts.items()}
    evaluation = answer_accuracy(rankings, answered, by_id, cutoffs, match)
    kind = "answer strings" if match == "string" else "answers, as regular expressions,"
    none = len(queries) - len(answered)
    of = f" (of {len(answered):,} of {len(queries):,} queries: {none:,} have no answers)" if none else ""
    print(f"{kind} found: " + ", ".join(f"{m} {v:.4f}" for m, v in evaluation.mean.items()) + of)
    return replace(evaluation, answered=(len(answered), len(queries)))


def describe_passages(searcher: Searcher) -> str:
    """Return which passages are searched, as "12 of 57,578 passages, those with section:python"."""
    rows, passages = searcher.shards.total_rows, searcher.shards.corpus["passages"]
    if not searcher.filters:
        return f"{passages:,} passages"
    return f"{rows:,} of {passages:,} passages, those with {' '.join(searcher.filters)}"


def search_kind(searcher: Searcher) -> str:
    return "approximate search" if searcher.generator or searcher.index else "exact search"


def describe_proof(result: SearchResult) -> str:
    """Return a line on the work that proved a result."""
    queries, width = result.rows.shape
    deeper = f"; {result.rounds[1]:,} queries looked deeper" if len(result.rounds) > 1 else ""
    return f"proven: {result.scored / queries:,.0f} candidates a query scored exactly for the best {width}{deeper}"


def show_answer(searcher: Searcher, question: str, k: int, progress: bool = True) -> None:
    """Print the k best passages for a question.

    Args:
        searcher: the corpus.
        question: its text.
        k: passages.
        progress: show bars.
    """
    begun = time.perf_counter()
    outcome = searcher.search([check_question(question)], k, progress)
    ranking = outcome.rankings["0"]
    passages: dict[str, Passage] = {}
    try:
        passages = searcher.passages({passage for passage, _ in ranking})
    except (FileNotFoundError, ContractError, ShardError) as error:
        print(error)
    seconds = time.perf_counter() - begun
    how = f"{search_kind(searcher)} of {describe_passages(searcher)} by {outcome.result.backend}, {seconds:.3f} s"
    print(f"{question}   ({how})")
    print_ranking(ranking, passages)


def print_ranking(ranking: Sequence[tuple[str, float]], passages: Mapping[str, Passage]) -> None:
    """Print a line for each passage: rank, score, title, and the beginning of the text."""
    for rank, (key, score) in enumerate(ranking, 1):
        passage = passages.get(key)
        title = (passage.title or key) if passage else key
        text = textwrap.shorten(passage.text, 90, placeholder=" ...") if passage else ""
        print(f"{rank:3d}. {score:8.4f}  {title:<36} {text}")
