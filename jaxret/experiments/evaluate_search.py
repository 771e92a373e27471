"""Evaluate what a search returned, for any system: the run file, measures, answers, costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxret.data.formats import Policy, write_retrieval_results, write_run
from jaxret.data.records import Passage, PassageLookup, Query, Rankings
from jaxret.evaluation.answers import AnswerMatcher, answer_accuracy, check_answers
from jaxret.evaluation.evaluation_report import emit_evaluation, evaluation_text, write_evaluation
from jaxret.evaluation.metrics import Evaluation, evaluate
from jaxret.evaluation.self_matches import removes_self_matches, self_matching_queries, without_self_matches
from jaxret.experiments.evaluation_measures import MEASURES, MeasureNames, choose_measures
from jaxret.experiments.evaluation_options import EvaluationOptions
from jaxret.experiments.evaluation_queries import EvaluationQueries, EvaluationSource, read_evaluation_queries
from jaxret.index.shards import ShardError
from jaxret.parallel.progress import print_line
from jaxret.runs.mismatch import ContractError
from jaxret.runs.workdir import Workdir
from jaxret.search.latency import describe_latency
from jaxret.storage.unfinished import remove_leftovers
from jaxret.storage.working_copy import require_writable

_QUESTIONS = 200  # whose texts are held at a time


@dataclass(frozen=True)
class EvaluationPlan:
    """The queries of an evaluation, what is measured, and the files to write; made by `plan_evaluation`."""

    system: str  # name of the run
    options: EvaluationOptions  # as requested
    dataset: EvaluationQueries  # queries and judgements
    measures: MeasureNames  # names of the measures
    remove: bool  # whether passages with the id of their query are left out
    policy: Policy  # counts skipped records
    # run_file, results: files to write
    run_file: Path
    results: Path

    @property
    def depth(self) -> int:
        """Return the passages to search for: one more where self-matches are removed."""
        return self.options.k + self.remove


@dataclass(frozen=True)
class Retrieved:
    """The rankings of a system, and access to its corpus."""

    rankings: Rankings  # of all queries, `EvaluationPlan.depth` passages each
    texts: PassageLookup  # returns passages by id
    missing_ids: Callable[[set[str]], set[str]]  # returns those of some ids that are not searched
    provenance: Mapping[str, Any]  # of the evaluation, without the data set
    bytes_per_passage: float  # what the system stores for a passage
    latency: Callable[[], dict[str, Any]]  # measures the time of a question
    where: str = "in the corpus"  # the passages that are searched, for messages


def plan_evaluation(
    workdir: Workdir, source: EvaluationSource, options: EvaluationOptions, label: str = ""
) -> EvaluationPlan:
    """Read the queries and judgements of an evaluation, and check all that can be checked before the search.

    Args:
        source: queries and judgements.
        options: measures and further results.
        label: of the search, comes last in the names of the files.

    Raises:
        ValueError: a measure is deeper than k, an answer is not a regular expression, or no query has the answers that
            are needed.
    """
    measures = choose_measures(options.measures, options.k)
    if options.measures is None and source.judgements and measures.names != MEASURES:
        print_line(f"with --k={options.k}, the measures are {', '.join(measures.names)}")
    policy = Policy(options.on_error)
    dataset = read_evaluation_queries(source, policy)
    check_answers(dataset.queries, options.match)
    require_answers(source.queries.source, dataset.queries, measures, options.dpr_results)
    remove = removes_self_matches(options.self_matches, source.dataset)
    name = ".".join(filter(None, (options.name or source.name, options.label, label)))
    run_file, results = workdir.rankings(name), workdir.evaluation(name)
    for path in (run_file, results):
        require_writable(path.parent)  # now, not after the search
        remove_leftovers(path.parent, age=3600)
    return EvaluationPlan(workdir.name, options, dataset, measures, remove, policy, run_file, results)


def require_answers(source: str, queries: Sequence[Query], measures: MeasureNames, dpr_results: bool = False) -> None:
    """Raise ValueError if answers are needed and no query has some.

    Args:
        source: where the queries were read.
        measures: may need answers.
        dpr_results: whether results as DPR writes them are requested, which need answers too.
    """
    if any(query.answers for query in queries):
        return
    if dpr_results:
        raise ValueError(f"{source} has no answer strings, which results as DPR writes them say of every passage")
    if measures.answers_needed:
        raise ValueError(
            f"Accuracy@{measures.cutoffs[0]} looks for answers, and no query of {source} has some; Success@"
            f"{measures.cutoffs[0]} is the same by judgements"
        )


def treat_self_matches(plan: EvaluationPlan, rankings: Rankings) -> Rankings:
    """Return rankings without self-matches, if the plan removes these, else as they are; print how many there are."""
    dataset, own = plan.dataset, self_matching_queries(rankings)
    if not plan.remove:
        first = [query for query in own if rankings[query][0][0] == query]
        if first:
            print_line(
                f"{len(first):,} of {len(dataset.queries):,} queries found the passage of their own id first: if "
                "queries are passages here, --self_matches=remove leaves these out, as BEIR does"
            )
        return rankings
    relevant_pairs = {(one.query_id, one.passage_id) for one in dataset.judgements if one.relevance > 0}
    print_line(f"{len(own):,} of {len(dataset.queries):,} queries found the passage of their own id, which is left out")
    if wrong := sum((query, query) in relevant_pairs for query in own):
        print_line(
            f"{wrong:,} of these are judged relevant: where queries and passages are each numbered for themselves, "
            "--self_matches=keep is right"
        )
    return without_self_matches(rankings, plan.options.k)


def write_results(plan: EvaluationPlan, retrieval: Retrieved) -> Evaluation | None:
    """Write the evaluation of rankings, and print it; with judgements, return their measures.

    Timing comes last, and the evaluation is written before it: nothing is lost if timing is stopped.
    """
    dataset, options, is_judged = plan.dataset, plan.options, plan.dataset.source.judgements is not None
    write_run(plan.run_file, retrieval.rankings, tag=f"jaxret-{plan.system}")
    print(f"run: {plan.run_file}")
    answers = look_for_answers(retrieval, dataset.queries, plan.measures.cutoffs, options.match)
    evaluation = evaluate(retrieval.rankings, dataset.judgements, plan.measures.names) if is_judged else None
    cost: dict[str, Any] = {}
    if first := evaluation or answers:
        source = dataset.provenance(plan.policy, plan.remove, options.match)
        if is_judged:
            source |= {"relevant_passages_not_in_corpus": _count_missing_relevant(retrieval, dataset)}
        if evaluation:
            print(evaluation_text({plan.system: evaluation}))
        provenance = {**retrieval.provenance, "dataset": source}
        answers = answers if evaluation else None
        cost["bytes_per_passage"] = round(retrieval.bytes_per_passage, 1)
        write_evaluation(plan.results, first, provenance, answers, cost)
        print(f"{cost['bytes_per_passage']:,.0f} bytes a passage")
        if options.latency != 0:
            cost["latency"] = retrieval.latency()
            write_evaluation(plan.results, first, provenance, answers, cost)
            print(describe_latency(cost["latency"]))
        print(f"evaluation: {plan.results}")
    emit_evaluation(plan.run_file, plan.results, first, answers if evaluation else None, cost)
    if options.dpr_results:
        path = plan.run_file.with_suffix(".dpr.json")
        write_dpr_results(path, retrieval.texts, retrieval.rankings, dataset.queries, options.match)
    return evaluation


def _count_missing_relevant(retrieval: Retrieved, dataset: EvaluationQueries) -> int:
    """Return how many relevant passages are not searched; print it if there are some."""
    relevant = {judgement.passage_id for judgement in dataset.judgements if judgement.relevance > 0}
    count = len(retrieval.missing_ids(relevant))
    if count:
        print(f"{count:,} of {len(relevant):,} relevant passages are not {retrieval.where}: they count as not found")
    return count


def write_dpr_results(
    path: Path, texts: PassageLookup, rankings: Rankings, queries: Sequence[Query], match: str
) -> None:
    """Write the rankings as DPR does, with the passages' texts and whether each has an answer.

    Args:
        path: JSON file to write.
        texts: returns passages by id, of _QUESTIONS queries at a time.
        rankings: passages and scores of each query.
        queries: their answers count.
        match: "string" or "regex".
    """
    matcher = AnswerMatcher(match)

    def results() -> Iterator[tuple[Query, list[tuple[Passage, float, bool]]]]:
        for start in range(0, len(queries), _QUESTIONS):
            part = queries[start : start + _QUESTIONS]
            by_id = texts({passage for query in part for passage, _ in rankings[query.id]})
            for query in part:
                passages = [by_id[passage] for passage, _ in rankings[query.id]]
                has_answer = matcher((passage.text for passage in passages), query)
                scores = (score for _, score in rankings[query.id])
                yield query, list(zip(passages, scores, has_answer, strict=True))

    write_retrieval_results(path, results())
    none = sum(not query.answers for query in queries)
    remark = f" (has_answer is false throughout for {none:,} of {len(queries):,} queries, which have no answers)"
    print(f"results as DPR writes them: {path}{remark * bool(none)}")


def look_for_answers(
    retrieval: Retrieved, queries: Sequence[Query], cutoffs: Sequence[int], match: str = "string"
) -> Evaluation | None:
    """Return top-k accuracy by answer string (DPR's measure); None if no query has answers, or the texts cannot be
    read.

    Args:
        retrieval: rankings, and a reader of texts.
        queries: their answers count.
        cutoffs: the k.
        match: "string" or "regex".
    """
    queries_with_answers = [query for query in queries if query.answers]
    if not queries_with_answers:
        return None
    deepest = max(cutoffs)
    try:
        texts = retrieval.texts(
            {passage for query in queries_with_answers for passage, _ in retrieval.rankings[query.id][:deepest]}
        )
    except (FileNotFoundError, ContractError, ShardError) as error:  # the judgements can be used all the same
        print(f"answer strings cannot be looked for: {error}")
        return None
    return answer_accuracies(retrieval.rankings, queries, texts, cutoffs, match)


def answer_accuracies(
    rankings: Rankings, queries: Sequence[Query], texts: Mapping[str, Passage], cutoffs: Sequence[int], match: str
) -> Evaluation | None:
    """Return top-k accuracy of the queries that have answers, and print it; None if none has answers.

    Args:
        rankings: passages and scores of each query.
        queries: their answers count.
        texts: passages by id.
        cutoffs: the k, in the order of the output.
        match: "string" or "regex".
    """
    queries_with_answers = [query for query in queries if query.answers]
    if not queries_with_answers:
        return None
    by_id = {key: passage.text for key, passage in texts.items()}
    evaluation = answer_accuracy(rankings, queries_with_answers, by_id, cutoffs, match)
    kind = "answer strings" if match == "string" else "answers, as regular expressions,"
    none = len(queries) - len(queries_with_answers)
    counts = (
        f" (of {len(queries_with_answers):,} of {len(queries):,} queries: {none:,} have no answers)" if none else ""
    )
    print(f"{kind} found: " + ", ".join(f"{name} {value:.4f}" for name, value in evaluation.mean.items()) + counts)
    return replace(evaluation, answer_counts=(len(queries_with_answers), len(queries)))
