"""What `jaxret rerank` does: a run and texts in, the run by a cross-encoder's scores out; or training data in, and the
same with its scores out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jaxret.data.files import Where
from jaxret.data.formats import (
    Policy,
    read_corpus,
    read_examples,
    read_judgements,
    read_queries,
    read_run,
    source_path,
    write_run,
)
from jaxret.data.formats.example_writers import tevatron_examples, tevatron_first
from jaxret.data.formats.readers import keeps_first
from jaxret.data.records import Example, Passage, Rankings
from jaxret.evaluation.metrics import Evaluation, evaluate
from jaxret.evaluation.report import to_text
from jaxret.runs.reranker import Reranker
from jaxret.storage import require_writable

MEASURES = ("nDCG@10", "RR@10", "R@100")


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


def rerank_run(
    reranker: Reranker,
    run: str | Path,
    corpus: str | Path,
    queries: str | Path,
    out: str | Path,
    depth: int = 100,
    qrels: str | Path = "",
    split: str = "test",
    on_error: str = "error",
    progress: bool = True,
    tail: bool = True,
) -> tuple[Evaluation, Evaluation] | None:
    """Writes a TREC run with the first `depth` passages of each query by their scores, and with a `tail` the others
    behind them. With judgements: measures of the run as it was and as it is. Raises DataError for a query or a passage
    that has no text here."""
    require_writable(Path(out).absolute().parent)
    policy = Policy(on_error)
    rankings = read_run(run, policy)
    asked = {query.id: query for query in read_queries(queries, policy, split) if query.id in rankings}
    missing = [query for query in rankings if query not in asked]
    if missing:
        raise Where(source_path(queries)).error(
            "no such query",
            f"{run} has query {missing[0]!r}, one of {len(missing):,} that are not here",
            "give its queries",
        )
    wanted = {passage for ranking in rankings.values() for passage, _ in ranking[:depth]}
    passages = {passage.id: passage for passage in read_corpus(corpus, policy) if passage.id in wanted}
    if gone := sorted(wanted - passages.keys()):
        raise Where(source_path(corpus)).error(
            "no such passage",
            f"{run} has passage {gone[0]!r}, one of {len(gone):,} that are not here",
            "give its corpus",
        )
    pairs = [(query, passage) for query, ranking in rankings.items() for passage, _ in ranking[:depth]]
    where = "stay behind them" if tail else "are left out"
    print(f"scoring {len(pairs):,} pairs: the first {depth} passages of each query, the others {where}")
    scores, cut = reranker(asked, passages, pairs, progress)
    print(*cut, sep="\n")
    after = reranked(rankings, dict(zip(pairs, map(float, scores))), depth, tail)
    write_run(out, after, tag="jaxret-rerank")
    print(f"run: {out}")
    if not qrels:
        return None
    judgements = read_judgements(qrels, split, policy)
    both = evaluate(rankings, judgements, MEASURES), evaluate(after, judgements, MEASURES)
    print(to_text({"before": both[0], "after": both[1]}))
    return both


def score_examples(
    reranker: Reranker,
    source: str,
    out: str | Path,
    split: str = "train",
    negatives_run: str = "",
    on_error: str = "error",
    progress: bool = True,
) -> int:
    """Writes training examples with the scores of all their passages, in Tevatron's format, which any training here
    reads (docs/training.md), with the same targets; how many pairs there are."""
    require_writable(Path(out).absolute().parent)
    policy = Policy(on_error)
    examples = read_examples(source, split, policy, negatives_run=negatives_run or None, targets=False)
    queries = {example.query.id: example.query for example in examples}
    passages = {p.id: p for example in examples for p in (*example.positives, *example.negatives)}
    pairs = dict.fromkeys((e.query.id, p.id) for e in examples for p in (*e.positives, *e.negatives))
    print(f"scoring {len(pairs):,} pairs of {len(queries):,} queries of {source}")
    found, cut = reranker(queries, passages, list(pairs), progress)
    scores = dict(zip(pairs, map(float, found)))
    print(*cut, sep="\n")

    def scored(example: Example) -> Example:
        def side(found: Sequence[Passage]) -> tuple[float, ...]:
            return tuple(scores[example.query.id, passage.id] for passage in found)

        return replace(example, positive_scores=side(example.positives), negative_scores=side(example.negatives))

    first_alone = not negatives_run and keeps_first(source, split)
    lost = (tevatron_first if first_alone else tevatron_examples)(Path(out), map(scored, examples))
    told = ", ".join(f"{count:,} {what}" for what, count in lost.items() if count)
    print(f"training data with scores: {out}" + (f" (its format does not hold: {told})" if told else ""))
    return len(pairs)
