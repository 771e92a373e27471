"""Retrieval measures under ir-measures' names, with its (trec_eval's) definitions, 0-1.

One difference, on purpose: the order of a ranking is taken as given. trec_eval ignores ranks and breaks ties between
equal scores by passage id, so its numbers on a run with ties can differ from those of the search that made the run.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxret.configs.synonyms import similar_name
from jaxret.data.records import Judgement, Ranking
from jaxret.evaluation.text_table import html_paragraphs, html_table

MEAN_DECIMALS = 4  # decimals of means in files and tables


@dataclass(frozen=True, slots=True)
class _Hits:
    """The relevant passages of a query and their ranks. Passages with less relevance than the measure needs are left
    out."""

    ranks: Sequence[int]  # ranks of the retrieved relevant passages, from 1, ascending
    gains: Sequence[int]  # relevance of these passages
    ideal: Sequence[int]  # relevance of all relevant passages, descending; never empty, and not cut


def _discounted_gain(gains: Iterable[int], ranks: Iterable[int]) -> float:
    return math.fsum(gain / math.log2(rank + 1) for gain, rank in zip(gains, ranks))


def _ndcg(hits: _Hits, cutoff: int | None) -> float:
    ideal = hits.ideal[:cutoff]
    return _discounted_gain(hits.gains, hits.ranks) / _discounted_gain(ideal, range(1, len(ideal) + 1))


def _average_precision(hits: _Hits, cutoff: int | None) -> float:
    return math.fsum(number / rank for number, rank in enumerate(hits.ranks, 1)) / len(hits.ideal)


_FORMULAS: dict[str, Callable[[_Hits, int | None], float]] = {
    "nDCG": _ndcg,  # linear gain: the relevance itself, not 2**relevance - 1
    "RR": lambda hits, _: 1 / hits.ranks[0] if hits.ranks else 0.0,
    # The divisor is the number of all relevant passages, also if it is above the cut-off.
    "R": lambda hits, _: len(hits.ranks) / len(hits.ideal),
    "Success": lambda hits, _: float(bool(hits.ranks)),  # top-k accuracy
    "AP": _average_precision,
}
MEASURE_KINDS = tuple(_FORMULAS)
_NEEDS_CUTOFF = ("R", "Success")
_WITHOUT_REL = ("nDCG",)  # measures of graded gains, for which ir-measures has no rel=
_NAME = re.compile(r"(?P<kind>[A-Za-z]+)(\(rel=(?P<relevance>[1-9][0-9]{0,8})\))?(@(?P<cutoff>[1-9][0-9]{0,8}))?")
KNOWN_MEASURES = (
    "nDCG@k, RR@k, R@k, Success@k, AP@k, and whole rankings' nDCG, RR, AP, with k from 1, as in nDCG@10; "
    "all but nDCG also count only relevance n and above as NAME(rel=n), as in RR(rel=2)@10"
)


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure, made by `parse_measure`."""

    name: str  # name in ir-measures, such as "nDCG@10"
    kind: str  # the name without cut-off and grade, such as "nDCG"
    cutoff: int | None  # the depth; None for whole rankings
    min_relevance: int  # the lowest grade that counts as relevant

    def score(self, relevances: Sequence[tuple[int, int]], grades: Iterable[int]) -> float:
        """Return the measure for one query.

        Args:
            relevances: (rank from 1, relevance) of the retrieved judged passages, by rank.
            grades: relevance of every judged passage of the query.
        """
        ideal = sorted((relevance for relevance in grades if relevance >= self.min_relevance), reverse=True)
        if not ideal:
            return 0.0
        depth = self.cutoff or math.inf
        hits = [(rank, gain) for rank, gain in relevances if gain >= self.min_relevance and rank <= depth]
        query_hits = _Hits([rank for rank, _ in hits], [gain for _, gain in hits], ideal)
        return _FORMULAS[self.kind](query_hits, self.cutoff)


def parse_measure(name: str) -> Measure:
    """Return the measure with a name such as "nDCG@10" or "AP(rel=2)". Raises ValueError with the valid names."""
    match = _NAME.fullmatch(name)
    if match is None or match["kind"] not in _FORMULAS:
        raise ValueError(f"unknown measure {name!r:.60}; the measures are {KNOWN_MEASURES}{_suggest_measure(name)}")
    kind, relevance, cutoff = match["kind"], match["relevance"], match["cutoff"]
    if cutoff is None and kind in _NEEDS_CUTOFF:
        raise ValueError(f"measure {name!r} needs a cut-off, as in '{name}@100'; the measures are {KNOWN_MEASURES}")
    if relevance is not None and kind in _WITHOUT_REL:
        raise ValueError(
            f"measure {name!r} takes no rel= because it uses graded gains; the measures are {KNOWN_MEASURES}"
        )
    return Measure(name, kind, int(cutoff) if cutoff else None, int(relevance or 1))


def _suggest_measure(name: str) -> str:
    """Return "; did you mean RR@10?" for another library's name: "MRR@10", "mrr_10", "ndcg_cut_10", "recall_at_100"."""
    match = re.fullmatch(r"(?P<kind>[A-Za-z_-]+?)(_at|_cut)?[@_-]*(?P<cutoff>[1-9][0-9]*)?", name)
    kind = similar_name(match["kind"], MEASURE_KINDS) if match else ""
    if not match or not kind:
        return ""
    cutoff = f"@{match['cutoff']}" if match["cutoff"] else "@k" if kind in _NEEDS_CUTOFF else ""
    return f"; did you mean {kind}{cutoff}?"


@dataclass(frozen=True)
class Evaluation:
    """The measures of a run. Every judged query counts; a query without a passage in the run counts as zero."""

    mean: dict[str, float]  # measure -> mean over the judged queries, 0-1
    per_query: dict[str, dict[str, float]]  # measure -> query id -> value
    queries_expected: int  # number of judged queries
    queries_found: int  # number of judged queries with at least one passage in the run
    answer_counts: tuple[int, int] | None = None  # for accuracy by answers: (queries with answers, all queries)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the means, and the number of queries."""
        rows = [[name, f"{mean:.{MEAN_DECIMALS}f}"] for name, mean in self.mean.items()]
        counts = f"Queries found: {self.queries_found:,} of {self.queries_expected:,} expected."
        return html_paragraphs([html_table(["measure", "mean"], rows), counts])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value with means rounded to four decimals, and unrounded values for each query."""
        return {
            "mean": {name: round(mean, MEAN_DECIMALS) for name, mean in self.mean.items()},
            "queries_expected": self.queries_expected,
            "queries_found": self.queries_found,
            **({"queries_asked": self.answer_counts[1]} if self.answer_counts else {}),
            "per_query": self.per_query,
        }


def evaluate(run: Mapping[str, Ranking], judgements: Iterable[Judgement], measures: Iterable[str]) -> Evaluation:
    """Return the measures of a run.

    As in ir-measures, every query with a judgement counts: it scores zero if the run lacks it, or if it has no relevant
    passage. Queries of the run without a judgement are ignored. A passage without a judgement is not relevant.

    Args:
        run: query id -> [(passage id, score)], best first. Passages with equal scores keep this order.
        judgements: the judgements.
        measures: names for `parse_measure`.

    Raises:
        ValueError: an unknown measure, no judgement, contradicting judgements, no judged query in the run, or a
            ranking with a duplicate passage, a NaN, or scores that do not descend.

    Example:
        >>> from jaxret.data.records import Judgement
        >>> run = {"q1": [("p2", 3.0), ("p1", 1.0)]}
        >>> evaluate(run, [Judgement("q1", "p1", 1)], ["RR@10", "R@100"]).mean
        {'RR@10': 0.5, 'R@100': 1.0}
    """
    parsed_measures = [parse_measure(name) for name in measures]
    grades_by_query = _by_query(judgements)
    if run and run.keys().isdisjoint(grades_by_query):
        raise ValueError(
            f"none of the run's {len(run)} queries is judged (the run has {next(iter(run))!r}, the judgements "
            f"{next(iter(grades_by_query))!r}); use the judgements of the same queries"
        )
    per_query: dict[str, dict[str, float]] = {measure.name: {} for measure in parsed_measures}
    for query_id, relevance in grades_by_query.items():
        ranks = _judged_ranks(query_id, run.get(query_id, ()), relevance)
        for measure in parsed_measures:
            per_query[measure.name][query_id] = measure.score(ranks, relevance.values())
    mean = {name: math.fsum(values.values()) / len(grades_by_query) for name, values in per_query.items()}
    return Evaluation(
        mean, per_query, len(grades_by_query), sum(bool(run.get(query_id)) for query_id in grades_by_query)
    )


def _by_query(judgements: Iterable[Judgement]) -> dict[str, dict[str, int]]:
    """Return query id -> passage id -> relevance."""
    grades_by_query: dict[str, dict[str, int]] = {}
    for judgement in judgements:
        grade = grades_by_query.setdefault(judgement.query_id, {}).setdefault(judgement.passage_id, judgement.relevance)
        if grade != judgement.relevance:
            raise ValueError(
                f"query {judgement.query_id!r} judges passage {judgement.passage_id!r} {grade} and "
                f"{judgement.relevance}; keep one of the two"
            )
    if not grades_by_query:
        raise ValueError("there are no judgements to evaluate with; give the qrels of the run's queries")
    return grades_by_query


def _judged_ranks(query_id: str, ranking: Ranking, relevance: Mapping[str, int]) -> list[tuple[int, int]]:
    """Check a ranking, and return (rank, relevance) of its judged passages."""
    scores = [score for _, score in ranking]
    # Comparisons with NaN are false, so one pass finds a NaN and scores that do not descend.
    if (scores and math.isnan(scores[0])) or not all(map(operator.ge, scores, scores[1:])):
        _raise_bad_scores(query_id, ranking)
    passages = [passage_id for passage_id, _ in ranking]
    if len(set(passages)) < len(passages):
        duplicate = next(passage_id for i, passage_id in enumerate(passages) if passage_id in passages[:i])
        raise ValueError(f"query {query_id!r} retrieves passage {duplicate!r} twice; remove the lower one from the run")
    return [(rank, relevance[passage_id]) for rank, passage_id in enumerate(passages, 1) if passage_id in relevance]


def _raise_bad_scores(query_id: str, ranking: Ranking) -> None:
    for rank, (passage_id, score) in enumerate(ranking, 1):
        location = f"query {query_id!r}, rank {rank}, passage {passage_id!r}"
        if math.isnan(score):
            raise ValueError(f"{location}: the score is NaN, so the passages cannot be ranked; write the run again")
        if rank > 1 and score > ranking[rank - 2][1]:
            raise ValueError(
                f"{location}: score {score!r} is above {ranking[rank - 2][1]!r} one rank before; "
                "sort the ranking by descending score"
            )
