"""jaxret diversity: how different a checkpoint's vectors of one passage are, on judged queries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from jaxret.data.formats import Policy, called, read_corpus, read_judgements, read_queries
from jaxret.evaluation.diversity import Diversity, diversity
from jaxret.runs.run import Run
from jaxret.storage import write_json


@dataclass(frozen=True)
class Pairs:
    """Judged queries with each of their relevant passages, P pairs: ids, and the vectors before any pooling."""

    query_ids: list[str]
    passage_ids: list[str]
    queries: Float[np.ndarray, "P D"]
    passages: Float[np.ndarray, "P V D"]
    rows: Int[np.ndarray, " P"]  # a number for each passage, the same in every pair that has it


def judged_pairs(run: Run, data: str | Path, split: str, progress: bool = True) -> Pairs:
    """Encodes the judged queries of a folder and their relevant passages.

    Raises ValueError if the checkpoint has one vector a passage, or one for every token.
    """
    vectors = run.retriever.unpooled().vectors_per_passage
    if vectors is None or vectors < 2:
        raise ValueError(
            f"head {run.config.head.name!r} has {'a vector for every token' if vectors is None else 'one vector'}; "
            "diversity is measured where every passage has the same several"
        )
    policy = Policy()
    queries = {query.id: query for query in read_queries(data, policy, split)}
    pairs = [j for j in read_judgements(data, split, policy, set(queries)) if j.relevance > 0]
    if not pairs:
        raise ValueError(f"{data} has no query with a relevant passage in the split {split!r}")
    wanted = {judgement.passage_id for judgement in pairs}
    passages = [passage for passage in read_corpus(data, policy) if passage.id in wanted]
    missing = wanted.difference(passage.id for passage in passages)
    if missing:
        raise ValueError(f"{data}: {len(missing):,} relevant passages are not in its corpus, as {min(missing)!r}")
    row = {passage.id: i for i, passage in enumerate(passages)}
    asked = {query_id: i for i, query_id in enumerate(dict.fromkeys(j.query_id for j in pairs))}

    texts = run.tokenizer.queries((queries[query_id].text for query_id in asked), progress)
    query_vectors = run.embedder()(texts, "query", progress).stacked()[:, 0]
    texts = run.tokenizer.passages(passages, progress)
    passage_vectors = run.embedder(unpooled=True)(texts, "passage", progress).stacked()
    left = np.array([asked[j.query_id] for j in pairs])
    right = np.array([row[j.passage_id] for j in pairs])
    names = [j.query_id for j in pairs], [j.passage_id for j in pairs]
    return Pairs(*names, query_vectors[left], passage_vectors[right], right)


def measure(run: Run, data: str | Path, split: str, progress: bool = True) -> Diversity:
    """Of the judged pairs of a folder. Raises what `judged_pairs` raises."""
    pairs = judged_pairs(run, data, split, progress)
    return diversity(pairs.queries, pairs.passages, pairs.rows)


def report(run: Run, data: str | Path, split: str, progress: bool = True) -> str:
    """Measures, writes `eval/<data>.<split>.diversity.json`, and gives the text to print."""
    found = measure(run, data, split, progress)
    names = run.retriever.module.head.vector_names()
    path = run.workdir.evaluation(f"{called(data)}.{split}.diversity")
    winners = dict(zip(names, found.wins, strict=True))
    write_json(path, {**vars(found), "wins": winners, "equal": found.equal, "checkpoint": run.checkpoint})
    lines = [
        f"{found.pairs:,} pairs of a query and a relevant passage; {found.passages:,} passages have several queries"
    ]
    lines.append(f"1 - cos of two vectors of a passage, on average: {found.distance:.2g}")
    if found.equal:
        lines.append("these vectors are equal but for rounding: which of them wins means nothing, and is not shown")
        return "\n".join([*lines, f"written to {path}"])
    lines += [f"local variation ({norm}): {value:.4f}" for norm, value in found.local_variation.items()]
    if found.perplexity is None:
        lines.append("perplexity of the winner: no passage has two queries")
    else:
        lines.append(f"perplexity of the winner: {found.perplexity:.4f} (1: always the same vector)")
    width = max(map(len, names))
    for name, wins in zip(names, found.wins, strict=True):
        share = wins / found.pairs
        lines.append(f"  {name:<{width}}  {share:6.1%}  {'#' * round(40 * share)}")
    return "\n".join([*lines, f"written to {path}"])
