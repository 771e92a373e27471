"""Filters of negatives: each is applied to all passages that one pool retrieved for one query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxret.data.records import Passage, Query
from jaxret.evaluation.answer_matching import AnswerMatcher
from jaxret.mining.mining_settings import MiningSettings


@dataclass(frozen=True)
class RetrievedPassages:
    """One query, and the N passages that one pool retrieved for it at the ranks in use."""

    query: Query
    positives: tuple[Passage, ...]
    relevant: frozenset[str]  # ids of the positives
    passages: tuple[Passage, ...]  # best first
    scores: np.ndarray  # float64 [N], scores of the teacher if there is one, else of the pool; NaN: unknown
    positive: float  # the lowest score of a positive; NaN: unknown


# Returns bool [N], True for candidates that are left out; False if none is.
NegativeFilter = Callable[[RetrievedPassages, MiningSettings, AnswerMatcher], np.ndarray | bool]


def normalized_text(text: str) -> str:
    """Return a text in lower case with single spaces, for comparing texts regardless of layout."""
    return " ".join(text.lower().split())


def normalized_passage(passage: Passage) -> str:
    """Return the normalized text of a passage, or its title if it has no text: all passages that have only a title have
    the same text."""
    return normalized_text(passage.text) or normalized_text(passage.title)


def _same_text(case: RetrievedPassages, settings: MiningSettings, matcher: AnswerMatcher) -> np.ndarray:
    texts = {normalized_text(case.query.text), *map(normalized_passage, case.positives)}
    return np.array([normalized_passage(passage) in texts for passage in case.passages], bool)


def _answer(case: RetrievedPassages, settings: MiningSettings, matcher: AnswerMatcher) -> np.ndarray | bool:
    if not settings.answers or not case.query.answers:
        return False
    return np.array(matcher((passage.text for passage in case.passages), case.query), bool)


def _score_gap(case: RetrievedPassages, settings: MiningSettings, matcher: AnswerMatcher) -> np.ndarray | bool:
    """Return the passages that no limit can be compared with: a teacher may lack their score, or the positive's."""
    if settings.margin is not None or settings.share is not None:
        return np.isnan(case.scores) | np.isnan(case.positive)
    return (settings.max_score is not None or settings.min_score is not None) and np.isnan(case.scores)


def _share(case: RetrievedPassages, settings: MiningSettings, matcher: AnswerMatcher) -> np.ndarray | bool:
    """Return the share of a positive's score as a limit. It is below the score even if the score is negative."""
    limit = None if settings.share is None else case.positive - (1 - settings.share) * abs(case.positive)
    return _not_below(case, limit)


def _not_below(case: RetrievedPassages, limit: float | None) -> np.ndarray | bool:
    return limit is not None and ~(case.scores < limit)  # a limit may be NaN: a share of an infinite score


FILTERS: dict[str, NegativeFilter] = {  # a passage is counted for the first filter that leaves it out
    "a positive of the query": lambda case, *_: np.array(
        [passage.id in case.relevant for passage in case.passages], bool
    ),
    "the text of a positive or of the query": _same_text,
    "an answer string in it": _answer,
    "without a score for the limits": _score_gap,
    "within the margin of the positive's score": lambda case, settings, _: _not_below(
        case, None if settings.margin is None else case.positive - settings.margin
    ),
    "within the share of the positive's score": _share,
    "at or above the highest score": lambda case, settings, _: _not_below(case, settings.max_score),
    "below the lowest score": lambda case, settings, _: (
        settings.min_score is not None and case.scores < settings.min_score
    ),
}


def filter_passages(
    case: RetrievedPassages, settings: MiningSettings, matcher: AnswerMatcher
) -> tuple[np.ndarray, dict[str, int]]:
    """Return a mask [N] of the passages that may be negatives, and how many each filter left out."""
    mask, left_out = np.ones(len(case.passages), bool), {}
    for name, test in FILTERS.items():
        rejections = mask & test(case, settings, matcher)
        left_out[name] = int(rejections.sum())
        mask &= ~rejections
    return mask, left_out
