"""What must not become a negative: each filter looks at all that one pool found for one query.

A comparison with a score that nobody knows counts as failed: what cannot be shown to be below a limit is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxret.data.records import Passage, Query
from jaxret.evaluation.answers import MATCHES, AnswerMatcher

TOP, SAMPLE = "top", "sample"


@dataclass(frozen=True)
class Settings:
    """How negatives are chosen. Ranks count from 1.

    depth, skip: of a ranking, ranks skip + 1 to depth are looked at. keep: how many of each pool, the `top` ones or a
    `sample` (draw), which depends on the seed, the query's id and the pool alone. answers: passages with an answer
    string are left out (DPR); match: what answers are, strings or regular expressions. margin: left out are those that
    score above the positive less this (NV-Retriever's MarginPos); share: above this part of the positive's score
    (PercPos); min_score, max_score: below the one, at or above the other (RocketQA: a cross-encoder's .1). Of several
    positives the one with the lowest score counts.

    positives_from_retrieval: as MLR's published code mines, retrieved passages with an answer string are the positives,
    in rank order, and the first one is the target; judged ones are not looked at.
    """

    depth: int = 200
    skip: int = 0
    keep: int = 30
    draw: str = SAMPLE
    seed: int = 12345
    answers: bool = True
    match: str = "string"
    margin: float | None = None
    share: float | None = None
    min_score: float | None = None
    max_score: float | None = None
    positives_from_retrieval: bool = False

    def __post_init__(self) -> None:
        for name in ("depth", "skip", "keep", "seed"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a whole number")
        for name in ("margin", "share", "min_score", "max_score"):
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
                raise ValueError(f"{name} is {value!r}; it must be a finite number")
        if self.min_score is not None and self.max_score is not None and self.min_score >= self.max_score:
            raise ValueError(f"min_score is {self.min_score} and max_score {self.max_score}: nothing is between")
        if not 0 <= self.skip < self.depth:
            raise ValueError(f"ranks {self.skip + 1} to {self.depth}: there are none; skip must be below depth")
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}; it must be at least 1")
        if self.draw not in (TOP, SAMPLE):
            raise ValueError(f"draw is {self.draw!r}; it must be {TOP} or {SAMPLE}")
        if self.match not in MATCHES:
            raise ValueError(f"match is {self.match!r}; it must be {' or '.join(MATCHES)}")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; it is a part of the positive's score, above 0 and at most 1")
        if self.margin is not None and self.margin < 0:
            raise ValueError(f"margin is {self.margin}; it must be at least 0")
        if self.positives_from_retrieval and not self.answers:
            raise ValueError("positives_from_retrieval goes by answer strings; leave answers on")

    @property
    def compares(self) -> bool:
        """Whether the positive's score is asked for."""
        return self.margin is not None or self.share is not None

    @property
    def limit(self) -> str:
        """The first of its limits that are scores; "" if it has none."""
        limits = ("margin", "share", "min_score", "max_score")
        return next((name for name in limits if getattr(self, name) is not None), "")


@dataclass(frozen=True)
class Case:
    """One query, and the passages [N] that one pool found for it in the window, best first.

    scores: float64 [N], a teacher's if there is one, else the pool's; positive: the lowest of those of the query's
    positives. NaN where nobody knows. relevant: the ids of its positives."""

    query: Query
    positives: tuple[Passage, ...]
    relevant: frozenset[str]
    passages: tuple[Passage, ...]
    scores: np.ndarray
    positive: float


Filter = Callable[[Case, Settings, AnswerMatcher], np.ndarray]  # bool [N], True for what is left out


def normalised(text: str) -> str:
    """A text without what does not make it another one: case and white space."""
    return " ".join(text.lower().split())


def _positive(case: Case, settings: Settings, matcher: AnswerMatcher) -> np.ndarray:
    return np.array([passage.id in case.relevant for passage in case.passages], bool)


def _same_text(case: Case, settings: Settings, matcher: AnswerMatcher) -> np.ndarray:
    known = {normalised(text) for text in (case.query.text, *(positive.text for positive in case.positives))}
    return np.array([normalised(passage.text) in known for passage in case.passages], bool)


def _answer(case: Case, settings: Settings, matcher: AnswerMatcher) -> np.ndarray:
    if not settings.answers or not case.query.answers:
        return np.zeros(len(case.passages), bool)
    return np.array(matcher((passage.text for passage in case.passages), case.query), bool)


def _margin(case: Case, settings: Settings, matcher: AnswerMatcher) -> np.ndarray:
    return _not_below(case, None if settings.margin is None else case.positive - settings.margin)


def _share(case: Case, settings: Settings, matcher: AnswerMatcher) -> np.ndarray:
    """The limit is below the positive's score whatever its sign: a part of a negative number would be above it."""
    limit = None if settings.share is None else case.positive - (1 - settings.share) * abs(case.positive)
    return _not_below(case, limit)


def _too_high(case: Case, settings: Settings, matcher: AnswerMatcher) -> np.ndarray:
    return _not_below(case, settings.max_score)


def _too_low(case: Case, settings: Settings, matcher: AnswerMatcher) -> np.ndarray:
    if settings.min_score is None:
        return np.zeros(len(case.passages), bool)
    return ~(case.scores >= settings.min_score)


def _not_below(case: Case, limit: float | None) -> np.ndarray:
    return np.zeros(len(case.passages), bool) if limit is None else ~(case.scores < limit)


FILTERS: dict[str, Filter] = {  # what a passage is left out for counts as the first of these
    "a positive of the query": _positive,
    "the text of a positive or of the query": _same_text,
    "an answer string in it": _answer,
    "within the margin of the positive's score": _margin,
    "within the share of the positive's score": _share,
    "at or above the highest score": _too_high,
    "below the lowest score": _too_low,
}


def kept_by(case: Case, settings: Settings, matcher: AnswerMatcher) -> tuple[np.ndarray, dict[str, int]]:
    """Which passages [N] may be negatives, and how many each filter left out."""
    kept, left_out = np.ones(len(case.passages), bool), {}
    for name, test in FILTERS.items():
        found = kept & test(case, settings, matcher)
        left_out[name] = int(found.sum())
        kept &= ~found
    return kept, left_out
