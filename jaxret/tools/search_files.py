"""What `jaxret search` does: files in, run file and evaluation out, or an answer on the terminal."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxret.contract import ContractError
from jaxret.data.files import check_question
from jaxret.data.formats import Policy, write_results, write_run
from jaxret.data.records import Passage, Query, Rankings
from jaxret.evaluation.answers import AnswerMatcher, answer_accuracy, check_answers
from jaxret.evaluation.metrics import Evaluation, parse_measure
from jaxret.evaluation.report import to_text, write_evaluation
from jaxret.evaluation.self_matches import found_themselves, of_passages, without_self_matches
from jaxret.retrieval.approximate import Chosen
from jaxret.retrieval.candidates import read_wanted
from jaxret.retrieval.candidates import told as missed
from jaxret.retrieval.latency import LATENCY, measure, told
from jaxret.retrieval.proof import SearchResult
from jaxret.retrieval.retrieve import Retrieved, Searcher, choose_corpus, evaluate_retrieved, provenance
from jaxret.retrieval.shards import ShardError
from jaxret.runs.run import Run
from jaxret.storage import require_writable, sweep, write_json
from jaxret.tools.asked import Asked, read_asked

MEASURES = ("nDCG@10", "RR@10", "R@100", "Success@5", "Success@20")
ANSWER_CUTOFFS = (5, 20, 100)
_QUESTIONS = 200  # whose texts are held at a time


def measures_for(k: int) -> list[str]:
    """MEASURES, those deeper than k at k."""
    parsed = [parse_measure(name) for name in MEASURES]
    return list(dict.fromkeys(f"{measure.kind}@{min(measure.cutoff or k, k)}" for measure in parsed))


def check_measures(measures: Sequence[str] | None, k: int, where: str = "") -> list[str]:
    """The names of the measures, by default `measures_for(k)`. where: what has k passages a query, if it is not what is
    asked for (--k). Raises ValueError for one that is unknown or deeper than k."""
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
    self_matches: str = "auto",
    latency: int = LATENCY,
    dpr_results: bool = False,
    match: str = "string",
    precision: str = "float32",
    candidates: str = "",
    index: Chosen | None = None,
) -> Evaluation | None:
    """Searches for every query, and writes `runs/<dataset>.trec` in the run's folder. With judgements: for every judged
    query; writes `runs/<dataset>.<split>.trec` and `eval/<dataset>.<split>.json`, and prints the table. Where the
    queries have answer strings, their accuracy is in eval/ too, also without judgements.

    measures: by default MEASURES, those deeper than k at k. label: comes after the data set's name in the files' names,
    for results that are not to replace others; those of a search with filters have "filtered", those of an approximate
    one its `candidates` or the name of its `index` and what settings were asked for. self_matches: "remove" leaves out
    a passage with the id of its query; "auto" does so for the data sets that `self_matches.py` knows.
    latency: how many questions are asked again, one at a time, to measure it. dpr_results: also writes
    `runs/<name>.dpr.json`, with texts. match: what answers are, "string" or "regex". Raises ValueError, before the
    search, for a measure deeper than k, an answer that is no regular expression, and for results as DPR's of queries
    without answers.
    """
    names = check_measures(measures, k)
    if measures is None and qrels and names != list(MEASURES):
        print(f"with --k={k}, the measures are {', '.join(names)}")
    policy = Policy(on_error)
    asked = read_asked(queries, qrels, split, policy)
    remove = self_matches == "remove" or (self_matches == "auto" and of_passages(asked.dataset))
    if candidates:
        read_wanted(candidates).require(k + remove)  # now, not after the corpus was read
    check_answers(asked.queries, match)
    if dpr_results and not any(query.answers for query in asked.queries):
        raise ValueError(f"{queries} has no answer strings, which results as DPR writes them say of every passage")
    how = ("filtered" if filters else "", candidates.replace(":", "-"), index.label if index else "")
    name = ".".join(part for part in (asked.name, label, *how) if part)
    run_file, results = run.workdir.rankings(name), run.workdir.evaluation(name)
    for path in (run_file, results):
        require_writable(path.parent)  # now, not after the search
        sweep(path.parent, age=3600)
    searcher = Searcher(run, choose_corpus(run, corpus), backend, filters, latency > 0, precision, candidates, index)
    if dpr_results:
        searcher.passages(())  # they are written with texts: what is wrong with these is told before the search
    retrieved = searched_once(searcher, asked, k, remove, progress)
    write_run(run_file, retrieved.rankings, tag=f"jaxret-{run.workdir.name}")
    print(f"run: {run_file}")
    if searcher.proposer and retrieved.approximate:
        write_json(run_file.with_suffix(".candidates.json"), {**retrieved.approximate, "k": k})

    answers = answers_found(searcher, retrieved.rankings, asked.queries, k, match)
    evaluation = evaluate_retrieved(retrieved, asked.judgements, names) if qrels else None
    found = [one for one in (evaluation, answers) if one]
    if found:
        source = asked.source(str(queries), str(qrels), policy, remove, match)
        if qrels:
            source |= {"relevant_passages_not_in_corpus": relevant_missing(retrieved, asked)}
        if evaluation:
            print(to_text({run.workdir.name: evaluation}))
        made = provenance(run, retrieved, k, dataset=source)
        keep_evaluation(results, searcher, found, made, asked.queries, k, latency)
    if dpr_results:
        write_dpr_results(run_file.with_suffix(".dpr.json"), searcher, retrieved.rankings, asked.queries, match)
    return evaluation


def keep_evaluation(
    path: Path,
    searcher: Searcher,
    found: Sequence[Evaluation],
    made: Mapping[str, Any],
    queries: Sequence[Query],
    k: int,
    latency: int,
) -> None:
    """Writes the measures, and then again with what a passage and a question cost: nothing is lost if the process ends
    while questions are timed."""
    answers = found[1] if len(found) > 1 else None
    cost: dict[str, Any] = {"bytes_per_passage": round(searcher.shards.bytes_per_passage, 1)}
    write_evaluation(path, found[0], made, answers, cost)
    print(f"{cost['bytes_per_passage']:,.0f} bytes a passage")
    if latency:
        cost["latency"] = measure(searcher, queries, k, latency)
        write_evaluation(path, found[0], made, answers, cost)
        print(told(cost["latency"]))
    print(f"evaluation: {path}")


def searched_once(searcher: Searcher, asked: Asked, k: int, remove: bool, progress: bool) -> Retrieved:
    """The search for all queries, with what is to be known of it printed. remove: without passages that have the id of
    their query."""
    retrieved = searcher.search(asked.queries, k + remove, progress)
    print(retrieved.truncation)
    cut = retrieved.shards.fingerprint["contract"].get("passage_length")
    print(
        f"{kind(searcher)} of {searched(searcher)} (of at most {cut} tokens) for {len(asked.queries):,} "
        f"queries by {retrieved.result.backend}"
    )
    retrieved = searcher.compared(retrieved)
    if searcher.index:
        print(f"approximate: {searcher.index.told(k + remove)}")
    else:
        print(missed(retrieved.approximate) if retrieved.approximate else proven(retrieved.result))
    own = found_themselves(retrieved.rankings)
    if not remove:
        first = [query for query in own if retrieved.rankings[query][0][0] == query]
        if first:
            print(
                f"{len(first):,} of {len(asked.queries):,} queries found the passage of their own id first: if queries "
                "are passages here, --self_matches=remove leaves these out, as BEIR does"
            )
        return retrieved
    judged = {(j.query_id, j.passage_id) for j in asked.judgements if j.relevance > 0}
    print(f"{len(own):,} of {len(asked.queries):,} queries found the passage of their own id, which is left out")
    if wrong := sum((query, query) in judged for query in own):
        print(
            f"{wrong:,} of these are judged relevant: where queries and passages are each numbered for themselves, "
            "--self_matches=keep is right"
        )
    return replace(retrieved, rankings=without_self_matches(retrieved.rankings, k))


def relevant_missing(retrieved: Retrieved, asked: Asked) -> int:
    """How many relevant passages were not there to be found; says so if there are some."""
    relevant = {judgement.passage_id for judgement in asked.judgements if judgement.relevance > 0}
    missing = len(retrieved.shards.without(relevant))
    if missing:
        where = "among those that match" if retrieved.filters else "in the corpus"
        print(f"{missing:,} of {len(relevant):,} relevant passages are not {where}: they count as not found")
    return missing


def write_dpr_results(path: Path, searcher: Searcher, rankings: Rankings, queries: Sequence[Query], match: str) -> None:
    """The rankings with the passages' texts, read for some questions at a time, and whether each has an answer."""

    matcher = AnswerMatcher(match)

    def results() -> Iterator[tuple[Query, list[tuple[Passage, float, bool]]]]:
        for start in range(0, len(queries), _QUESTIONS):
            some = queries[start : start + _QUESTIONS]
            texts = searcher.passages({passage for query in some for passage, _ in rankings[query.id]})
            for query in some:
                found = [texts[passage] for passage, _ in rankings[query.id]]
                right = matcher((passage.text for passage in found), query)
                scores = (score for _, score in rankings[query.id])
                yield query, list(zip(found, scores, right, strict=True))

    write_results(path, results())
    none = sum(not query.answers for query in queries)
    told = f" (has_answer is false throughout for {none:,} of {len(queries):,} queries, which have no answers)"
    print(f"results as DPR writes them: {path}{told * bool(none)}")


def answers_found(
    searcher: Searcher, rankings: Rankings, queries: Sequence[Query], k: int, match: str = "string"
) -> Evaluation | None:
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
    return accuracy(rankings, queries, texts, k, match)


def accuracy(
    rankings: Rankings, queries: Sequence[Query], texts: Mapping[str, Passage], k: int, match: str
) -> Evaluation | None:
    """Top-k accuracy of the queries that have answers, for the cut-offs that k covers; prints it, and of how many
    queries it is. None if none has answers."""
    asked = [query for query in queries if query.answers]
    if not asked:
        return None
    cutoffs = [cutoff for cutoff in ANSWER_CUTOFFS if cutoff <= k] or [k]
    found = answer_accuracy(rankings, asked, {key: passage.text for key, passage in texts.items()}, cutoffs, match)
    what = "answer strings" if match == "string" else "answers, as regular expressions,"
    none = len(queries) - len(asked)
    of = f" (of {len(asked):,} of {len(queries):,} queries: {none:,} have no answers)" if none else ""
    print(f"{what} found: " + ", ".join(f"{m} {v:.4f}" for m, v in found.mean.items()) + of)
    return replace(found, answered=(len(asked), len(queries)))


def searched(searcher: Searcher) -> str:
    """What a searcher searches, in a few words: "12 of 57,578 passages, those with section:python"."""
    rows, passages = searcher.shards.total_rows, searcher.shards.corpus["passages"]
    if not searcher.filters:
        return f"{passages:,} passages"
    return f"{rows:,} of {passages:,} passages, those with {' '.join(searcher.filters)}"


def kind(searcher: Searcher) -> str:
    return "approximate search" if searcher.proposer or searcher.index else "exact search"


def answer(
    run: Run,
    question: str,
    k: int,
    corpus: str = "",
    backend: str = "auto",
    progress: bool = True,
    filters: Sequence[str] = (),
    precision: str = "float32",
    candidates: str = "",
    index: Chosen | None = None,
) -> None:
    """Prints the k best passages for a question."""
    searcher = Searcher(run, choose_corpus(run, corpus), backend, filters, False, precision, candidates, index)
    if searcher.index:
        print(f"approximate: {searcher.index.told(k)}")
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
    print(f"{question}   ({kind(searcher)} of {searched(searcher)} by {retrieved.result.backend}, {seconds:.3f} s)")
    print_ranking(found, passages)


def print_ranking(found: Sequence[tuple[str, float]], passages: dict[str, Passage]) -> None:
    """A line each: rank, score, title, and the beginning of the text."""
    for rank, (key, score) in enumerate(found, 1):
        passage = passages.get(key)
        title = (passage.title or key) if passage else key
        text = textwrap.shorten(passage.text, 90, placeholder=" ...") if passage else ""
        print(f"{rank:3d}. {score:8.4f}  {title:<36} {text}")
