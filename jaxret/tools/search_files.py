"""What `jaxret search` does: files in, run file and evaluation out, or an answer on the terminal."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxret.contract import ContractError
from jaxret.data.files import check_question
from jaxret.data.formats import (
    Policy,
    called,
    describe,
    is_named,
    read_judgements,
    read_queries,
    source_path,
    write_run,
)
from jaxret.data.records import Passage, Query, Rankings
from jaxret.evaluation.answers import answer_accuracy
from jaxret.evaluation.metrics import Evaluation, parse_measure
from jaxret.evaluation.report import to_text, write_evaluation
from jaxret.retrieval.proof import SearchResult
from jaxret.retrieval.retrieve import Searcher, choose_corpus, evaluate_retrieved, provenance
from jaxret.retrieval.shards import ShardError
from jaxret.runs.run import Run
from jaxret.storage import require_writable, sweep

MEASURES = ("nDCG@10", "RR@10", "R@100", "Success@5", "Success@20")
ANSWER_CUTOFFS = (5, 20, 100)
SHARED_NAMES = (
    "train",
    "dev",
    "test",
    "val",
    "valid",
    "validation",
    "queries",
    "questions",
)  # of files of any data set


def dataset_name(queries: str | Path) -> str:
    """What results are called. A folder or its queries.jsonl -> the folder's name; any other file -> its name without
    suffixes, after its folder's if many data sets have a file of that name ("nq/test.qa.csv" -> "nq-test")."""
    if is_named(source_path(queries)):
        return called(queries)
    path = source_path(queries).absolute()
    if path.is_dir():
        return path.name
    name = path.name.split(".")[0]
    if path.name.startswith("queries.jsonl"):
        return path.parent.name or name
    return f"{path.parent.name}-{name}" if name.lower() in SHARED_NAMES and path.parent.name else name


def measures_for(k: int) -> list[str]:
    """MEASURES, those deeper than k at k."""
    parsed = [parse_measure(name) for name in MEASURES]
    return list(dict.fromkeys(f"{measure.kind}@{min(measure.cutoff or k, k)}" for measure in parsed))


def search_files(
    run: Run,
    queries: str,
    qrels: str,
    split: str,
    k: int,
    measures: Sequence[str] | None = None,
    corpus: str = "",
    backend: str = "auto",
    on_error: str = "error",
    progress: bool = True,
    label: str = "",
    filters: Sequence[str] = (),
    precision: str = "float32",
) -> Evaluation | None:
    """Searches for every query, and writes `runs/<dataset>.trec` in the run's folder. With judgements: for every judged
    query; writes `runs/<dataset>.<split>.trec` and `eval/<dataset>.<split>.json`, and prints the table. Where the
    queries have answer strings, their accuracy is in eval/ too, also without judgements.

    measures: by default MEASURES, those deeper than k at k. label: comes after the data set's name in the files' names,
    for results that are not to replace others; those of a search with filters have "filtered". Raises ValueError,
    before the search, for a measure deeper than k.
    """
    parsed = [parse_measure(measure) for measure in measures or measures_for(k)]
    deepest = max(parsed, key=lambda measure: measure.cutoff or 0)
    if (deepest.cutoff or 0) > k:
        raise ValueError(f"{deepest.name} needs --k={deepest.cutoff} or more; only {k} passages a query are asked for")
    if measures is None and qrels and measures_for(k) != list(MEASURES):
        print(f"with --k={k}, the measures are {', '.join(measures_for(k))}")
    policy = Policy(on_error)
    print(f"{queries}: {describe(queries, 'queries', split)}")
    asked = read_queries(queries, policy, split)
    judgements = []
    if qrels:
        print(f"{qrels}: {describe(qrels, 'judgements', split)}")
        judgements = read_judgements(qrels, split, policy, query_ids={query.id for query in asked})
        judged = {judgement.query_id for judgement in judgements}
        asked = [query for query in asked if query.id in judged]
        if source_path(qrels).is_file():
            split = source_path(qrels).name.split(".")[0]
    if policy.report():
        print(policy.report())
    if not asked:
        what = "judged query" if qrels else "query"
        raise ValueError(f"{queries} has no {what} to search for; give a folder or a file with some")
    labels = [split] * bool(qrels) + [label] * bool(label) + ["filtered"] * bool(filters)
    name = ".".join([dataset_name(queries), *labels])
    run_file, results = run.workdir.rankings(name), run.workdir.evaluation(name)
    for path in (run_file, results):
        require_writable(path.parent)  # now, not after the search
        sweep(path.parent, age=3600)
    searcher = Searcher(run, choose_corpus(run, corpus), backend, filters, precision=precision)
    retrieved = searcher.search(asked, k, progress)
    cut = retrieved.shards.fingerprint["contract"].get("passage_length")
    print(retrieved.truncation)
    print(
        f"exact search of {searched(searcher)} (of at most {cut} tokens) for {len(asked):,} "
        f"queries by {retrieved.result.backend}"
    )
    print(proven(retrieved.result))
    write_run(run_file, retrieved.rankings, tag=f"jaxret-{run.workdir.name}")
    print(f"run: {run_file}")

    source: dict[str, Any] = {"queries": str(queries), "skipped": dict(policy.skipped)}
    answers = answers_found(searcher, retrieved.rankings, asked, k)
    evaluation = None
    if qrels:
        evaluation = evaluate_retrieved(retrieved, judgements, [measure.name for measure in parsed])
        relevant = {judgement.passage_id for judgement in judgements if judgement.relevance > 0}
        missing = len(retrieved.shards.without(relevant))
        if missing:
            where = "among those that match" if filters else "in the corpus"
            print(f"{missing:,} of {len(relevant):,} relevant passages are not {where}: they count as not found")
        source |= {"qrels": str(qrels), "split": split, "relevant_passages_not_in_corpus": missing}
    found = [one for one in (evaluation, answers) if one]
    if found:
        write_evaluation(results, found[0], provenance(run, retrieved, k, dataset=source), *found[1:])
        if evaluation:
            print(to_text({run.workdir.name: evaluation}))
        print(f"evaluation: {results}")
    return evaluation


def answers_found(searcher: Searcher, rankings: Rankings, queries: Sequence[Query], k: int) -> Evaluation | None:
    """Top-k accuracy by answer string (DPR's measure), for the cut-offs that k covers; None if no query has answers, or
    no text is there to look for them."""
    asked = [query for query in queries if query.answers]
    if not asked:
        return None
    try:
        texts = searcher.passages({passage for query in asked for passage, _ in rankings[query.id]})
    except (FileNotFoundError, ContractError, ShardError) as error:  # the judgements can be used all the same
        print(f"answer strings cannot be looked for: {error}")
        return None
    cutoffs = [cutoff for cutoff in ANSWER_CUTOFFS if cutoff <= k] or [k]
    found = answer_accuracy(rankings, asked, {key: passage.text for key, passage in texts.items()}, cutoffs)
    print("answer strings found: " + ", ".join(f"{m} {v:.4f}" for m, v in found.mean.items()))
    return found


def searched(searcher: Searcher) -> str:
    """What a searcher searches, in a few words: "12 of 57,578 passages, those with section:python"."""
    rows, passages = searcher.shards.total_rows, searcher.shards.corpus["passages"]
    if not searcher.filters:
        return f"{passages:,} passages"
    return f"{rows:,} of {passages:,} passages, those with {' '.join(searcher.filters)}"


def answer(
    run: Run,
    question: str,
    k: int,
    corpus: str = "",
    backend: str = "auto",
    progress: bool = True,
    filters: Sequence[str] = (),
    precision: str = "float32",
) -> None:
    """Prints the k best passages for a question."""
    searcher = Searcher(run, choose_corpus(run, corpus), backend, filters, precision=precision)
    show_answer(searcher, question, k, progress)


def proven(result: SearchResult) -> str:
    """What it took to prove a result, in a line."""
    queries, width = result.rows.shape
    deeper = f"; {result.rounds[1]:,} queries looked deeper" if len(result.rounds) > 1 else ""
    return f"proven: {result.scored / queries:,.0f} candidates a query scored exactly for the best {width}{deeper}"


def show_answer(searcher: Searcher, question: str, k: int, progress: bool = True) -> None:
    begun = time.perf_counter()
    retrieved = searcher.search([check_question(question)], k, progress)
    found = retrieved.rankings["0"]
    passages: dict[str, Passage] = {}
    try:
        passages = searcher.passages({passage for passage, _ in found})
    except (FileNotFoundError, ContractError, ShardError) as error:
        print(error)
    seconds = time.perf_counter() - begun
    print(f"{question}   (exact search of {searched(searcher)} by {retrieved.result.backend}, {seconds:.3f} s)")
    print_ranking(found, passages)


def print_ranking(found: Sequence[tuple[str, float]], passages: dict[str, Passage]) -> None:
    """A line each: rank, score, title, and the beginning of the text."""
    for rank, (key, score) in enumerate(found, 1):
        passage = passages.get(key)
        title = (passage.title or key) if passage else key
        text = textwrap.shorten(passage.text, 90, placeholder=" ...") if passage else ""
        print(f"{rank:3d}. {score:8.4f}  {title:<36} {text}")
