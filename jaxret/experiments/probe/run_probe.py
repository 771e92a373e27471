"""Measure retrieval by each layer of an encoder, without training (`jaxret probe`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.formats import Corpus, Policy
from jaxret.data.records import Passage
from jaxret.evaluation.significance import PairedComparison, holm, paired_comparison
from jaxret.experiments.probe.layer_quality import (
    ProbeData,
    Quality,
    fit_weights,
    layer_pair_choices,
    single_layer_choices,
)
from jaxret.experiments.probe.layer_vectors import encode_layers
from jaxret.experiments.probe.probe_options import ProbeOptions
from jaxret.experiments.searches.evaluation_queries import (
    EvaluationQueries,
    EvaluationSource,
    read_evaluation_queries,
    require_same_dataset,
)
from jaxret.runs.run import Run


@dataclass(frozen=True)
class Finding:
    """A choice of layers that was made on one half of the queries and measured on the other half."""

    name: str  # kind of the choice
    quality: Quality  # measures of the choice on all queries
    # comparison with the last layer on the other half; None for the last layer itself
    comparison: PairedComparison | None = None
    p_value: float | None = None  # p-value of the comparison, corrected by Holm


@dataclass(frozen=True)
class Probe:
    """Measured retrieval by the layers of an encoder."""

    data: ProbeData  # the vectors and the relevance of each pair
    path: Path  # file of the measurements
    dataset: dict[str, Any]  # sources and digests of queries and judgements
    single_layers: list[Quality]  # measures of every single layer
    pairs: list[Quality]  # measures of every layer together with the last one
    findings: list[Finding]  # the best of each kind, the last layer first
    held_out: np.ndarray  # rows of the queries that findings are measured on


def probe_layers(run: Run, source: EvaluationSource, corpus: Corpus, options: ProbeOptions) -> Probe:
    """Measure retrieval by every layer of a run's encoder.

    Args:
        run: a run of any head; it needs no training (`jaxret open` makes a run of another library's model).
        source: queries and judgements.
        corpus: the corpus of the judged passages.
        options: numbers of queries and passages, and the seed.

    Raises:
        ValueError: fewer than four judged queries have a relevant passage in the corpus, or the probe of another data
            set has the name of this one.
    """
    queries = read_evaluation_queries(source, Policy())
    path = run.workdir.evaluation(f"{options.name or source.name}.probe")
    require_same_dataset(path, queries.record())
    vectors = encode_probe_data(run, corpus, queries, options)
    single_layers = [vectors.quality(choice) for choice in single_layer_choices(vectors.last, vectors.queries.tokens)]
    pairs = [vectors.quality(choice) for choice in layer_pair_choices(vectors.last, vectors.queries.tokens)]
    order = np.random.default_rng([options.seed, 1]).permutation(len(vectors.relevance))
    first, second = np.sort(order[: len(order) // 2]), np.sort(order[len(order) // 2 :])
    findings = choose(vectors, [*single_layers, *pairs], first, second, options.seed)
    return Probe(vectors, path, queries.record(), single_layers, pairs, findings, second)


def encode_probe_data(run: Run, corpus: Corpus, queries: EvaluationQueries, options: ProbeOptions) -> ProbeData:
    """Return the vectors of the drawn queries and passages, and the relevance of each pair.

    Args:
        run: the run whose encoder is probed.
        corpus: the corpus from which passages are drawn.
        queries: judged queries of this corpus.
        options: numbers of queries and passages, and the seed.

    Raises:
        ValueError: fewer than four queries have a relevant passage.
    """
    random = np.random.default_rng(options.seed)
    grades: dict[str, dict[str, int]] = {}
    for judgement in queries.judgements:
        if judgement.relevance > 0:
            grades.setdefault(judgement.query_id, {})[judgement.passage_id] = judgement.relevance
    judged_queries = [query for query in queries.queries if query.id in grades]
    sample = [judged_queries[number] for number in _draw(random, len(judged_queries), options.queries)]
    relevant = {passage for query in sample for passage in grades[query.id]}
    passages = _draw_passages(corpus, relevant, options.passages, random)
    row_of = {passage.id: row for row, passage in enumerate(passages)}
    relevance = np.zeros((len(sample), len(passages)), np.int64)
    for row, query in enumerate(sample):
        for passage, grade in grades[query.id].items():
            if passage in row_of:
                relevance[row, row_of[passage]] = grade
    rows = np.flatnonzero(relevance.any(axis=1))
    if len(rows) < 4:
        raise ValueError(
            f"{corpus}: {len(rows)} queries of the split {options.split!r} have a relevant passage in the corpus; "
            "a probe needs at least 4"
        )
    texts = run.tokenizer.queries([sample[row] for row in rows])
    query_vectors = encode_layers(run, texts, "query")
    passage_vectors = encode_layers(run, run.tokenizer.passages(passages), "passage")
    return ProbeData(query_vectors, passage_vectors, relevance[rows])


def _draw(random: np.random.Generator, total: int, count: int) -> np.ndarray:
    return np.sort(random.choice(total, min(count, total), replace=False))


def _draw_passages(corpus: Corpus, relevant: set[str], count: int, random: np.random.Generator) -> list[Passage]:
    """Return the relevant passages and random others, `count` in total, in the order of the corpus. It is read
    twice."""
    other_count = sum(passage.id not in relevant for passage in corpus.read(Policy("skip")))
    numbers = set(_draw(random, other_count, max(0, count - len(relevant))).tolist())
    passages, number = [], 0
    for passage in corpus.read(Policy("skip")):
        if passage.id in relevant or number in numbers:
            passages.append(passage)
        number += passage.id not in relevant
    return passages


def choose(
    data: ProbeData, qualities: Sequence[Quality], first: np.ndarray, second: np.ndarray, seed: int
) -> list[Finding]:
    """Return the best choice of each kind on the first queries, compared with the last layer on the second ones.

    Args:
        data: the vectors and the relevance.
        qualities: measures of single layers and of pairs.
        first: rows of the queries to choose on.
        second: rows of the queries to measure on.
        seed: seed of the significance tests.
    """
    best = partial(max, key=lambda quality: quality.mean(first))
    last = best(quality for quality in qualities if quality.choice.layers == (data.last,))
    mixture = data.quality(fit_weights(data, last.choice.token, last.choice.normalize, first))
    kinds = {
        "one layer": best(quality for quality in qualities if len(quality.choice.layers) == 1),
        "two layers, maximum": best(q for q in qualities if len(q.choice.layers) == 2 and q.choice.pooling == "none"),
        "two layers, average": best(q for q in qualities if q.choice.pooling == "average"),
        "mixture of layers": mixture,
    }
    baseline = _query_values(last, second)
    comparisons = {
        name: paired_comparison(baseline, _query_values(quality, second), seed) for name, quality in kinds.items()
    }
    p_values = holm([comparison.p_permutation for comparison in comparisons.values()])
    findings = [Finding(name, kinds[name], comparisons[name], p) for name, p in zip(kinds, p_values, strict=True)]
    return [Finding("last layer", last), *findings]


def _query_values(quality: Quality, queries: np.ndarray) -> dict[str, float]:
    return {str(row): float(quality.ndcg[row]) for row in queries}
