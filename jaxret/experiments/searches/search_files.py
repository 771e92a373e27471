"""Search an encoded corpus for the queries of files: `jaxret search --queries`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxret.evaluation.evaluation_report import emit_table, evaluation_text
from jaxret.evaluation.metrics import Evaluation
from jaxret.experiments.searches.answer_question import describe_passages, search_kind
from jaxret.experiments.searches.evaluate_search import (
    EvaluationPlan,
    Retrieved,
    plan_evaluation,
    treat_self_matches,
    write_results,
)
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.shard_set import read_shards
from jaxret.index.shards import read_manifest
from jaxret.parallel.progress import print_line
from jaxret.runs.provenance import make_provenance
from jaxret.runs.run import Run
from jaxret.runs.run_warnings import RunWarning, keep_warnings
from jaxret.search.approximate.candidates import describe_recall
from jaxret.search.latency import measure_by_passages, measure_latency
from jaxret.search.proof import SearchResult
from jaxret.search.ray_search import open_searcher
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher, SearchOutcome
from jaxret.storage.atomic import write_json


def search_files(
    run: Run,
    source: EvaluationSource,
    evaluation: EvaluationOptions = EvaluationOptions(),
    options: SearchOptions = SearchOptions(),
    encoded_name: str = "",
    progress: bool = True,
) -> Evaluation | None:
    """Search for every query, and write `runs/<dataset>.trec` in the run's folder.

    With judgements, search for every judged query, write `runs/<dataset>.<split>.trec` and
    `eval/<dataset>.<split>.json`, print the evaluation, and return it. If queries have answer strings, their accuracy
    is in eval/, too, also without judgements. File names also contain `evaluation.label`, filters, and the settings of
    an approximate search. If several processes search together (`SearchOptions.several`), only process 0 writes and
    returns results.

    Args:
        run: the run that encoded the corpus.
        source: queries and judgements.
        evaluation: measures and further results.
        options: options of the search.
        encoded_name: the encoded corpus: its name, or the path that was encoded; "" for the only one.
        progress: whether progress is printed.

    Raises:
        ValueError: a check of `plan_evaluation` fails, before the search.
    """
    if options.several:
        evaluation = replace(evaluation, latency=0)
    plan = plan_evaluation(run.workdir, source, evaluation, _search_label(run, options, encoded_name))
    if options.candidate_spec:
        options.candidate_spec.require(plan.depth)  # an error before the corpus is read
    searcher = open_searcher(run, corpus_folder(run.workdir, encoded_name), options, many=evaluation.latency != 0)
    for count in evaluation.latency_passages:
        searcher.require_first(count)
    if evaluation.dpr_results:  # the results contain texts; missing texts are an error before the search
        searcher.group.agree_on(lambda: searcher.texts.read(()) if searcher.group.leads else None)
    outcome = search_queries(searcher, plan, progress)
    if not searcher.group.leads:
        return None
    if searcher.vectors.generator and outcome.approximate:
        write_json(plan.run_file.with_suffix(".candidates.json"), {**outcome.approximate, "k": evaluation.k})
    retrieval = Retrieved(
        rankings=outcome.rankings,
        texts=searcher.texts.read,
        missing_ids=searcher.texts.missing_ids,
        provenance=make_provenance(run, outcome.encoded_corpus.corpus_identity, outcome.to_json(run, evaluation.k)),
        bytes_per_passage=searcher.encoded_corpus.bytes_per_passage,
        latency=lambda: _measure_times(searcher, plan),
        scope="among those that match" if outcome.filters else "in the corpus",
    )
    cut = [RunWarning("truncation", str(outcome.truncation))] if outcome.truncation.cut else []
    keep_warnings(run.workdir, f"search {plan.results.stem}", cut)
    return write_results(plan, retrieval)


def _search_label(run: Run, options: SearchOptions, encoded_name: str) -> str:
    """Return the part of result file names that distinguishes a search. A corpus that was encoded with shorter vectors
    has the label of --dimension, because the results are equal."""
    manifest = corpus_folder(run.workdir, encoded_name) / "manifest.json"
    if options.dimension or not manifest.is_file():
        return options.label
    size = read_manifest(manifest).dimension
    return (options if size == run.model.dimension else replace(options, dimension=size)).label


def _measure_times(searcher: Searcher, plan: EvaluationPlan) -> dict[str, Any]:
    """Return the times of single queries, and of a search of each number of passages."""
    queries, options = plan.evaluation_queries.queries, plan.options
    times = measure_latency(searcher, queries, options.k, options.latency)
    if options.latency_passages:
        counts = sorted({*options.latency_passages, searcher.encoded_corpus.total_rows})
        times["search_ms_by_passages"] = measure_by_passages(searcher, queries, options.k, options.latency, counts)
    return times


def search_queries(searcher: Searcher, plan: EvaluationPlan, progress: bool) -> SearchOutcome:
    """Search for all queries of an evaluation, print how the search was made, and return its outcome."""
    queries = plan.evaluation_queries.queries
    outcome = searcher.search(queries, plan.depth, progress)
    print_line(str(outcome.truncation))
    cut = outcome.encoded_corpus.fingerprint["contract"].get("passage_length")
    print_line(
        f"{search_kind(searcher)} of {describe_passages(searcher)} (of at most {cut} tokens) for "
        f"{len(queries):,} queries by {outcome.result.backend}"
    )
    outcome = searcher.with_recall(outcome)
    if searcher.vectors.index:
        print_line(f"approximate: {searcher.vectors.index.describe(plan.depth)}")
    else:
        print_line(describe_recall(outcome.approximate) if outcome.approximate else describe_proof(outcome.result))
    return replace(outcome, rankings=treat_self_matches(plan, outcome.rankings))


def describe_proof(result: SearchResult) -> str:
    """Return a line about the work that proved that a result is exact."""
    queries, width = result.rows.shape
    deeper = f"; {result.rounds[1]:,} queries looked deeper" if len(result.rounds) > 1 else ""
    candidates = result.scored_pairs / queries
    return f"proven: {candidates:,.0f} candidates a query scored exactly for the best {width}{deeper}"


def search_sizes(
    run: Run,
    sizes: Sequence[int],
    source: EvaluationSource,
    evaluation: EvaluationOptions = EvaluationOptions(),
    options: SearchOptions = SearchOptions(),
    encoded_name: str = "",
) -> dict[int, Evaluation]:
    """Search for the queries of files with each size (`search_files`), and print and return size -> evaluation.

    Args:
        run: the run that encoded the corpus.
        sizes: numbers of dimensions; 0 for all that are stored.
        source: queries and judgements.
        evaluation: measures and further results.
        options: options of the search.
        encoded_name: the encoded corpus: its name, or the path that was encoded; "" for the only one.

    Raises:
        ValueError: a size is larger than the stored vectors, vectors cannot be cut, or several sizes have no
            judgements.
    """
    full_size = read_shards(corpus_folder(run.workdir, encoded_name)).dimension
    numbers = [size or full_size for size in sizes]
    if len(sizes) > 1 and source.judgements is None:
        raise ValueError("several sizes of --dimension are compared by judgements: give --qrels too, or one size")
    for size in numbers:
        if size > full_size:
            raise ValueError(f"--dimension={size}: the vectors of this corpus have {full_size} dimensions")
        run.with_dimension(size, "--dimension")
    evaluations: dict[int, Evaluation] = {}
    for size, count in zip(sizes, numbers, strict=True):
        print(f"by {'all' if size == 0 else 'the first'} {count} dimensions:")
        result = search_files(run, source, evaluation, replace(options, dimension=size), encoded_name)
        evaluations |= {count: result} if result else {}
    if len(evaluations) > 1:
        print("\nby number of dimensions:")
        table = {str(count): evaluations[count] for count in sorted(evaluations)}
        print(evaluation_text(table))
        emit_table(table)
    return evaluations
