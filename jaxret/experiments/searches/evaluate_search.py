"""Evaluate the rankings of a system: write the run file, and measures, answers and costs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxret.data.formats import Policy, write_retrieval_results, write_run
from jaxret.data.lines import PathLike
from jaxret.data.records import Passage, PassageLookup, Query, Rankings
from jaxret.evaluation.answer_matching import AnswerMatcher, answer_accuracy, check_answers
from jaxret.evaluation.evaluation_report import emit_evaluation, evaluation_text, write_evaluation
from jaxret.evaluation.metrics import Evaluation, evaluate
from jaxret.evaluation.self_matches import removes_self_matches, self_matching_queries, without_self_matches
from jaxret.experiments.searches.evaluation_measures import MEASURES, MeasureNames, choose_measures
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import (
    EvaluationQueries,
    EvaluationSource,
    read_evaluation_queries,
    require_same_dataset,
)
from jaxret.index.shards import ShardError
from jaxret.parallel.progress import print_line
from jaxret.runs.mismatch import ContractError
from jaxret.runs.workdir import Workdir
from jaxret.search.latency import describe_latency
from jaxret.storage.atomic import write_json
from jaxret.storage.buckets.working_copy import require_writable
from jaxret.storage.unfinished import remove_leftovers

_BLOCK_QUERIES = 200  # queries whose passages' texts are in memory at the same time


@dataclass(frozen=True)
class EvaluationPlan:
    """The queries, measures and files of an evaluation; made by `plan_evaluation`."""

    system: str  # name of the run
    options: EvaluationOptions  # the requested options
    evaluation_queries: EvaluationQueries  # queries and judgements
    measures: MeasureNames  # names of the measures
    remove: bool  # whether passages with the id of their query are left out
    policy: Policy  # counts skipped records
    # run_file, results: files to write
    run_file: Path
    results: Path

    @property
    def depth(self) -> int:
        """The number of passages to search for: k, and one more if self-matches are removed."""
        return self.options.k + self.remove


@dataclass(frozen=True)
class Retrieved:
    """The rankings of a system, and access to its corpus."""

    rankings: Rankings  # rankings of all queries, with `EvaluationPlan.depth` passages
    texts: PassageLookup  # returns passages by id
    missing_ids: Callable[[set[str]], set[str]]  # passage ids -> the ids that are not searched
    provenance: Mapping[str, Any]  # provenance of the evaluation, without the data set
    bytes_per_passage: float  # bytes that the system stores per passage
    latency: Callable[[], dict[str, Any]]  # measures the times of single queries
    scope: str = "in the corpus"  # description of the searched passages, for messages


def plan_evaluation(
    workdir: Workdir, source: EvaluationSource, options: EvaluationOptions, label: str = ""
) -> EvaluationPlan:
    """Read the queries and judgements of an evaluation, and make all checks that are possible before the search.

    Args:
        workdir: the run's folder.
        source: queries and judgements.
        options: measures and further results.
        label: label of the search, the last part of file names.

    Raises:
        ValueError: a measure is deeper than k, an answer is not a regular expression, no query has the answers that
            are needed, or the result of another data set has the name of this one.
    """
    measures = choose_measures(options.measures, options.k)
    if options.measures is None and source.judgements and measures.names != MEASURES:
        print_line(f"with --k={options.k}, the measures are {', '.join(measures.names)}")
    policy = Policy(options.on_error)
    evaluation_queries = read_evaluation_queries(source, policy)
    check_answers(evaluation_queries.queries, options.match)
    require_answers(source.queries.source, evaluation_queries.queries, measures, options.dpr_results)
    remove = removes_self_matches(options.self_matches, source.dataset_name)
    name = ".".join(filter(None, (options.name or source.name, options.label, label)))
    run_file, results = workdir.rankings(name), workdir.evaluation(name)
    record = evaluation_queries.record()
    for path in (results, _record_path(run_file)):
        require_same_dataset(path, record)
    for path in (run_file, results):
        require_writable(path.parent)  # an error before the search, not after it
        remove_leftovers(path.parent, age=3600)
    return EvaluationPlan(workdir.name, options, evaluation_queries, measures, remove, policy, run_file, results)


def require_answers(source: str, queries: Sequence[Query], measures: MeasureNames, dpr_results: bool = False) -> None:
    """Raise ValueError if answers are needed and no query has any.

    Args:
        source: source of the queries, for the error.
        queries: the queries.
        measures: the requested measures.
        dpr_results: whether results in DPR's format are requested, which need answers, too.
    """
    if any(query.answers for query in queries):
        return
    if dpr_results:
        raise ValueError(f"{source} has no answer strings, which results in DPR's format need")
    if measures.answers_needed:
        raise ValueError(
            f"Accuracy@{measures.cutoffs[0]} needs answers, but no query of {source} has any; Success@"
            f"{measures.cutoffs[0]} is the corresponding measure by judgements"
        )


def treat_self_matches(plan: EvaluationPlan, rankings: Rankings) -> Rankings:
    """Return rankings without self-matches if the plan removes them, else unchanged, and print their number."""
    evaluation_queries, self_matches = plan.evaluation_queries, self_matching_queries(rankings)
    if not plan.remove:
        first = [query for query in self_matches if rankings[query][0][0] == query]
        if first:
            print_line(
                f"{len(first):,} of {len(evaluation_queries.queries):,} queries found the passage with their own id "
                "first: if the queries are passages of the corpus, --self_matches=remove leaves these passages out, as "
                "BEIR does"
            )
        return rankings
    count = f"{len(self_matches):,} of {len(evaluation_queries.queries):,} queries"
    print_line(f"{count} found the passage with their own id, which is left out")
    relevant = {(j.query_id, j.passage_id) for j in evaluation_queries.judgements if j.relevance > 0}
    if relevant_count := sum((query, query) in relevant for query in self_matches):
        print_line(
            f"{relevant_count:,} of these passages are judged relevant: if queries and passages have separate numbers, "
            "use --self_matches=keep"
        )
    return without_self_matches(rankings, plan.options.k)


def _record_path(run_file: Path) -> Path:
    """Return the path of the provenance of a run file that has no evaluation."""
    return run_file.with_suffix(".json")


def evaluation_path(run_file: PathLike) -> Path:
    """Return the path of a run file's evaluation: NAME.eval.json, next to the run file."""
    return Path(run_file).with_name(f"{Path(run_file).name}.eval.json")


def write_measures(
    files: tuple[PathLike, Path],
    evaluation: Evaluation | None,
    answers: Evaluation | None,
    provenance: Mapping[str, Any],
    cost: Mapping[str, Any],
    latency: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """Write the evaluation of a run file, print its path, and emit its event. If there are no measures, only emit the
    event.

    Timing comes last. The evaluation is written before it, so that it is not lost if timing is stopped.

    Args:
        files: the run file, and the file of its evaluation.
        evaluation: measures by judgements, if there are any.
        answers: accuracies by answers, if there are any.
        provenance: provenance of the evaluation.
        cost: costs of the system, without times.
        latency: function that measures the times of single queries; None if they are not measured.
    """
    run_file, results = files
    first, second = (evaluation, answers) if evaluation else (answers, None)
    if first is None:
        emit_evaluation(run_file, results, None)
        return
    write_evaluation(results, first, provenance, second, cost)
    if latency:
        cost = {**cost, "latency": latency()}
        write_evaluation(results, first, provenance, second, cost)
        print(describe_latency(cost["latency"]))
    print(f"evaluation: {results}")
    emit_evaluation(run_file, results, first, second, cost)


def write_results(plan: EvaluationPlan, retrieval: Retrieved) -> Evaluation | None:
    """Write and print the evaluation of rankings, and return their measures by judgements; None without judgements."""
    evaluation_queries, options = plan.evaluation_queries, plan.options
    is_judged = evaluation_queries.source.judgements is not None
    system = re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", "-", plan.system)  # the tag of a run file is one word
    write_run(plan.run_file, retrieval.rankings, tag=f"jaxret-{system}")
    print(f"run: {plan.run_file}")
    answers = look_for_answers(retrieval, evaluation_queries.queries, plan.measures.cutoffs, options.match)
    evaluation = evaluate(retrieval.rankings, evaluation_queries.judgements, plan.measures.names) if is_judged else None
    source = evaluation_queries.provenance(plan.policy, plan.remove, options.match)
    if evaluation:
        source |= {"relevant_passages_not_in_corpus": _count_missing_passages(retrieval, evaluation_queries)}
        print(evaluation_text({plan.system: evaluation}))
    cost = {"bytes_per_passage": round(retrieval.bytes_per_passage, 1)}
    if evaluation or answers:
        print(f"{cost['bytes_per_passage']:,.0f} bytes per passage")
    provenance = {**retrieval.provenance, "dataset": source}
    if not (evaluation or answers):
        write_json(_record_path(plan.run_file), {"provenance": provenance})
    latency = retrieval.latency if options.latency != 0 else None
    write_measures((plan.run_file, plan.results), evaluation, answers, provenance, cost, latency)
    if options.dpr_results:
        path = plan.run_file.with_suffix(".dpr.json")
        write_dpr_results(path, retrieval.texts, retrieval.rankings, evaluation_queries.queries, options.match)
    return evaluation


def _count_missing_passages(retrieval: Retrieved, evaluation_queries: EvaluationQueries) -> int:
    """Return the number of relevant passages that are not searched, and print it if it is not 0."""
    relevant = {judgement.passage_id for judgement in evaluation_queries.judgements if judgement.relevance > 0}
    count = len(retrieval.missing_ids(relevant))
    if count:
        print(f"{count:,} of {len(relevant):,} relevant passages are not {retrieval.scope}: they count as not found")
    return count


def write_dpr_results(
    path: Path, texts: PassageLookup, rankings: Rankings, queries: Sequence[Query], match: str
) -> None:
    """Write the rankings in DPR's format, with the passages' texts and whether each has an answer.

    Args:
        path: JSON file to write.
        texts: returns passages by id; it is called for _BLOCK_QUERIES queries at a time.
        rankings: passages and scores of each query.
        queries: queries with their answers.
        match: how answers are read, "string" or "regex".
    """
    matcher = AnswerMatcher(match)

    def results() -> Iterator[tuple[Query, list[tuple[Passage, float, bool]]]]:
        for start in range(0, len(queries), _BLOCK_QUERIES):
            part = queries[start : start + _BLOCK_QUERIES]
            by_id = texts({passage for query in part for passage, _ in rankings[query.id]})
            for query in part:
                passages = [by_id[passage] for passage, _ in rankings[query.id]]
                has_answer = matcher((passage.text for passage in passages), query)
                scores = (score for _, score in rankings[query.id])
                yield query, list(zip(passages, scores, has_answer, strict=True))

    write_retrieval_results(path, results())
    count = sum(not query.answers for query in queries)
    remark = f" ({count:,} of {len(queries):,} queries have no answers, so that has_answer is false)" if count else ""
    print(f"results in DPR's format: {path}{remark}")


def look_for_answers(
    retrieval: Retrieved, queries: Sequence[Query], cutoffs: Sequence[int], match: str = "string"
) -> Evaluation | None:
    """Return top-k accuracy by answer string (DPR's measure); None if no query has answers, or if the texts cannot be
    read.

    Args:
        retrieval: rankings, and a reader of texts.
        queries: queries with their answers.
        cutoffs: the values of k.
        match: how answers are read, "string" or "regex".
    """
    rankings = [retrieval.rankings[query.id] for query in queries if query.answers]
    ids = {passage for ranking in rankings for passage, _ in ranking[: max(cutoffs)]}
    try:
        texts = retrieval.texts(ids) if ids else {}
    except (FileNotFoundError, ContractError, ShardError) as error:  # measures by judgements need no texts
        print(f"accuracy by answers is not measured: {error}")
        return None
    return answer_accuracies(retrieval.rankings, queries, texts, cutoffs, match)


def answer_accuracies(
    rankings: Rankings, queries: Sequence[Query], texts: Mapping[str, Passage], cutoffs: Sequence[int], match: str
) -> Evaluation | None:
    """Return top-k accuracy of the queries that have answers, and print it; None if no query has answers.

    Args:
        rankings: passages and scores of each query.
        queries: queries with their answers.
        texts: passages by id.
        cutoffs: the values of k, in the order of the output.
        match: how answers are read, "string" or "regex".
    """
    queries_with_answers = [query for query in queries if query.answers]
    if not queries_with_answers:
        return None
    by_id = {key: passage.text for key, passage in texts.items()}
    evaluation = answer_accuracy(rankings, queries_with_answers, by_id, cutoffs, match)
    kind = "answer strings" if match == "string" else "answers, as regular expressions,"
    count, total = len(queries_with_answers), len(queries)
    note = f" (of {count:,} of {total:,} queries: {total - count:,} have no answers)" if count < total else ""
    print(f"{kind} found: " + ", ".join(f"{name} {value:.4f}" for name, value in evaluation.mean.items()) + note)
    return replace(evaluation, answer_counts=(count, total))
