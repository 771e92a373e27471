"""What `jaxret rerank` does: a run and texts in, the run by a cross-encoder's scores out; or training data in, and the
same with its scores out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxret.data.files import Where
from jaxret.data.formats import (
    CorpusScan,
    Policy,
    corpus_file,
    example_files,
    found_queries,
    read_corpus,
    read_examples,
    read_queries,
    read_run,
    scan_corpus,
    source_path,
    write_run,
)
from jaxret.data.formats.example_writers import tevatron_record
from jaxret.data.formats.readers import found_judgements, keeps_first, run_files
from jaxret.data.formats.writing import write_records
from jaxret.data.records import Example, Passage, Query, Rankings
from jaxret.evaluation.answers import check_answers
from jaxret.evaluation.metrics import Evaluation, evaluate
from jaxret.evaluation.report import to_text, write_evaluation
from jaxret.evaluation.self_matches import of_passages, without_self_matches
from jaxret.mining.asked import require_same
from jaxret.retrieval.latency import LATENCY, SECONDS, conditions, percentiles, spread
from jaxret.runs.reranker import Reranker
from jaxret.runs.scorer import Done
from jaxret.storage import require_apart, require_writable, sha256_file
from jaxret.tools.asked import Asked, dataset_name, read_asked, split_asked
from jaxret.tools.search_files import ANSWER_CUTOFFS, accuracy, check_measures
from jaxret.tools.teacher import PairScores, Scorer

PAIRS = 1 << 18  # scored at a time, and sorted by length: of 100 million, 290 bytes each would be 29 GB


def reranked(rankings: Rankings, scores: Mapping[tuple[str, str], float], depth: int, tail: bool = True) -> Rankings:
    """Every ranking with its first `depth` passages by their new scores, ties as they were; the others follow in their
    order, each 1 below the one before, from the lowest new score on. These are no scores of a model: without a `tail`
    they are left out."""
    found: Rankings = {}
    for query, ranking in rankings.items():
        top = [(passage, scores[query, passage]) for passage, _ in ranking[:depth]]
        top.sort(key=lambda pair: -pair[1])
        lowest = top[-1][1] if top else 0.0
        rest = [(passage, lowest - number) for number, (passage, _) in enumerate(ranking[depth:], 1)]
        found[query] = top + rest * tail
    return found


@dataclass(frozen=True)
class Judge:
    """What a reranked run is measured with: as `jaxret search` has them. latency: how many queries are scored again,
    one at a time, to time it."""

    qrels: str = ""
    split: str = "test"
    measures: Sequence[str] | None = None
    self_matches: str = "auto"
    match: str = "string"
    latency: int = LATENCY


def rerank_run(
    reranker: Reranker,
    run: str,
    corpus: str,
    queries: str,
    out: str | Path,
    depth: int = 100,
    judge: Judge = Judge(),
    on_error: str = "error",
    progress: bool = True,
    tail: bool = True,
) -> tuple[Evaluation, Evaluation] | None:
    """Writes a TREC run with the first `depth` passages of each query by their scores, and with a `tail` the others
    behind them. With judgements: measures of the run as it was and as it is. With these, or with answers, an evaluation
    beside the run, as `jaxret search` writes one.

    Raises DataError for a query or a passage that has no text here, ValueError for a measure deeper than the run.
    """
    require_writable(Path(out).absolute().parent)
    require_apart(out, run_files(run), "the run that is reranked")
    require_apart(out, [found.path for found in found_queries(queries, judge.split)], f"the queries ({queries})")
    require_apart(out, [corpus_file(corpus)], f"the corpus ({corpus})")
    if judge.qrels:
        require_apart(out, [found_judgements(judge.qrels, judge.split).path], f"the judgements ({judge.qrels})")
    policy = Policy(on_error)
    rankings, remove = read_run(run, policy), judge.self_matches == "remove"
    longest = max(map(len, rankings.values()), default=0)
    if not longest:
        raise Where(run_files(run)[0]).error("empty run", "it ranks nothing", "give a run that has rankings")
    if remove or (judge.self_matches == "auto" and of_passages(dataset_name(queries))):
        rankings, remove = without_self_matches(rankings, longest), True
    k = longest if tail else min(depth, longest)
    names = check_measures(judge.measures, k, run if k == longest else "")
    asked = _queries(queries, judge.split, run, rankings, policy)
    looked = min(k, max(ANSWER_CUTOFFS))  # how deep answers are looked for
    texts = {query: max(depth, looked if asked[query].answers else 0) for query in rankings}
    scan, passages = _passages(corpus, run, rankings, texts, policy)
    judged = read_asked(queries, judge.qrels, judge.split, Policy(on_error)) if judge.qrels else None
    check_answers(judged.queries if judged else asked.values(), judge.match)
    pairs = [(query, passage) for query, ranking in rankings.items() for passage, _ in ranking[:depth]]
    where = "stay behind them" if tail else "are left out"
    print(f"scoring {len(pairs):,} pairs: the first {depth} passages of each query, the others {where}")
    scores, cut = reranker(asked, {passage: passages[passage] for _, passage in pairs}, pairs, progress)
    print(*cut, sep="\n")
    after = reranked(rankings, dict(zip(pairs, map(float, scores))), depth, tail)
    write_run(out, after, tag="jaxret-rerank")
    print(f"run: {out}")
    both = None
    if judged:
        both = evaluate(rankings, judged.judgements, names), evaluate(after, judged.judgements, names)
        print(to_text({"before": both[0], "after": both[1]}))
    judged = judged or Asked(list(asked.values()), [], dataset_name(queries), split_asked(queries, "", judge.split))
    answers = accuracy(after, judged.queries, passages, k, judge.match)
    evaluation = both[1] if both else answers
    if evaluation:
        made = _provenance(reranker, scan, run, depth, k)
        made["dataset"] = judged.source(queries, judge.qrels, policy, remove, judge.match)
        found = (evaluation, made, answers if both else None)
        cost: dict[str, Any] = {"bytes_per_passage": 0.0}  # it keeps none: it reads the texts
        write_evaluation(evaluation_path(out), *found, cost)
        if judge.latency:
            cost["latency"] = _latency(reranker, asked, passages, rankings, depth, judge.latency)
            write_evaluation(evaluation_path(out), *found, cost)  # again: nothing is lost if timing is stopped
            print(_told(cost["latency"]))
        print(f"evaluation: {evaluation_path(out)}")
    return both


def _latency(
    reranker: Reranker,
    queries: Mapping[str, Query],
    passages: Mapping[str, Passage],
    rankings: Rankings,
    depth: int,
    most: int,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Scores the first `depth` passages of up to `most` queries, a query at a time, twice, the first time as a warm-up;
    ends as `retrieval.latency.measure` does, whose JSON it has: "rerank_ms" is from texts to scores on the host."""
    times: list[float] = []  # ms
    begun = clock()
    for query in spread([queries[key] for key in rankings], most):
        pairs = [(query.id, passage) for passage, _ in rankings[query.id][:depth]]
        texts = {passage: passages[passage] for _, passage in pairs}
        reranker({query.id: query}, texts, pairs)
        start = clock()
        reranker({query.id: query}, texts, pairs)
        times.append(1000 * (clock() - start))
        if clock() - begun > seconds:
            break
    return {"rerank_ms": percentiles(times), **conditions(len(times), depth, reranker.scorer.mesh)}


def _told(latency: Mapping[str, Any]) -> str:
    found = latency["rerank_ms"]
    return (
        f"one query at a time ({latency['questions']} asked, {latency['k']} passages each): reranking "
        f"p50 {found['p50']:.0f} ms, p99 {found['p99']:.0f} ms"
    )


def _provenance(reranker: Reranker, scan: CorpusScan, run: str, depth: int, k: int) -> dict[str, Any]:
    """What reranked results were measured on, and by whom, as `retrieval.retrieve.provenance` has it."""
    tokenizer = reranker.tokenizer
    search = {"k": k, "reranked": {"depth": depth, "of": [sha256_file(path) for path in run_files(run)]}, "run": run}
    search |= {"query_length": tokenizer.query_length, "passage_length": tokenizer.passage_length}
    return {**reranker.origin, "corpus": {"sha256": scan.sha256, "passages": scan.passages}, "search": search}


def evaluation_path(out: str | Path) -> Path:
    """Where the evaluation of a reranked run is: beside it."""
    name = Path(out).name
    for ending in (".trec", ".tsv", ".txt", ".run"):
        name = name.removesuffix(ending)
    return Path(out).with_name(f"{name}.eval.json")


def _queries(source: str, split: str, run: str, rankings: Rankings, policy: Policy) -> dict[str, Query]:
    """The queries of a run, by id."""
    asked = {query.id: query for query in read_queries(source, policy, split) if query.id in rankings}
    if missing := [query for query in rankings if query not in asked]:
        told = f"{run} has query {missing[0]!r}, one of {len(missing):,} that are not here"
        raise Where(source_path(source)).error("no such query", told, "give its queries")
    return asked


def _passages(
    corpus: str, run: str, rankings: Rankings, depths: Mapping[str, int], policy: Policy
) -> tuple[CorpusScan, dict[str, Passage]]:
    """What the corpus is, and the passages of a run whose texts are read, by id. depths: how many, by query."""
    wanted = {passage for query, ranking in rankings.items() for passage, _ in ranking[: depths[query]]}
    scan = scan_corpus(corpus, policy)
    found = {passage.id: passage for passage in read_corpus(corpus, policy, scan) if passage.id in wanted}
    if gone := sorted(wanted - found.keys()):
        told = f"{run} has passage {gone[0]!r}, one of {len(gone):,} that are not here"
        raise Where(source_path(corpus)).error("no such passage", told, "give its corpus")
    return scan, found


def score_examples(
    teacher: Scorer,
    source: str,
    out: str | Path,
    split: str = "train",
    negatives_run: str = "",
    on_error: str = "error",
    progress: bool = True,
) -> int:
    """Writes training examples with the scores of all their passages, in Tevatron's format, which any training here
    reads (docs/training.md), with the same targets; how many pairs there are. The file is written as scores come."""
    require_writable(Path(out).absolute().parent)
    require_apart(out, example_files(source, split, negatives_run or None), f"the training data ({source})")
    policy = Policy(on_error)
    examples = read_examples(source, split, policy, negatives_run=negatives_run or None, targets=False)
    queries: dict[str, Query] = {}
    for example in examples:
        require_same(queries.setdefault(example.query.id, example.query), example.query, source)
    passages = {p.id: p for example in examples for p in (*example.positives, *example.negatives)}
    pairs = sum(len(example.positives) + len(example.negatives) for example in examples)
    print(f"scoring {pairs:,} pairs of {len(queries):,} queries of {source}")
    scorer = teacher.over(queries, passages, progress)
    first_alone = not negatives_run and keeps_first(source, split)
    with tqdm(total=pairs, desc="score", unit="pair", disable=not progress, delay=1) as bar:
        found = scored(examples, scorer, bar.update)
        write_records(Path(out), (tevatron_record(example, every_positive=not first_alone) for example in found))
    for line in scorer.cut:
        print(line)
    print(f"training data with scores: {out}")
    return pairs


def scored(examples: Iterable[Example], scorer: PairScores, done: Done) -> Iterator[Example]:
    """The examples with the scores of all their passages: as many at a time as have PAIRS of these. done: as
    PairScores has it. Raises ValueError for a score that is no finite number."""
    for block in _blocks(examples):
        pairs = [(e.query.id, p.id) for e in block for p in (*e.positives, *e.negatives)]
        found = scorer(pairs, done)
        for row in np.flatnonzero(~np.isfinite(found))[:1]:
            query, passage = pairs[row]
            raise ValueError(
                f"the teacher's score of query {query!r} and passage {passage!r} is {found[row]}, and a score is a "
                "finite number; take another checkpoint of it"
            )
        scores = iter(found.tolist())
        for example in block:
            positives, negatives = (tuple(islice(scores, len(s))) for s in (example.positives, example.negatives))
            yield replace(example, positive_scores=positives, negative_scores=negatives)


def _blocks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    block: list[Example] = []
    pairs = 0
    for example in examples:
        block.append(example)
        pairs += len(example.positives) + len(example.negatives)
        if pairs >= PAIRS:
            yield block
            block, pairs = [], 0
    if block:
        yield block
