"""Passages, queries, judgements and training examples. They are the same for all file formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Passage:
    """A unit of the corpus. `id` has no white space; `title` may be empty.

    `metadata` is for passages that a program gives to `jaxret.Index`: values of JSON, by which filters select passages.
    The metadata of passages in files stay in their records.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] | None = field(default=None, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Query:
    """A question."""

    id: str
    text: str
    answers: tuple[str, ...] = ()  # answer strings; () if the data set has none
    instruction: str = ""  # a text that describes the relevant passages; "" if the data set has none

    def to_json(self) -> list[Any]:
        """Return all fields, for digests, without the instruction if it is empty."""
        return [self.id, self.text, list(self.answers), *([self.instruction] if self.instruction else [])]


@dataclass(frozen=True, slots=True)
class Judgement:
    """One line of a qrels file: `relevance` > 0 means relevant."""

    query_id: str
    passage_id: str
    relevance: int


@dataclass(frozen=True, slots=True)
class Example:
    """A training example. Scores of different examples cannot be compared."""

    query: Query
    # the first one is the target; the others are known positives, which are never used as negatives
    positives: tuple[Passage, ...]
    negatives: tuple[Passage, ...] = ()  # hard negatives
    # a teacher's scores of the positives, in their order; NaN for a passage without a score; () if no passage has one
    positive_scores: tuple[float, ...] = ()
    negative_scores: tuple[float, ...] = ()  # a teacher's scores of the negatives, likewise

    @property
    def is_distillable(self) -> bool:
        """Whether a teacher scored the target and a negative: distillation learns the difference of two scores."""
        return any(map(math.isfinite, self.positive_scores[:1])) and any(map(math.isfinite, self.negative_scores))

    @property
    def score_count(self) -> int:
        """Number of passages of the example that have a score."""
        return sum(map(math.isfinite, (*self.positive_scores, *self.negative_scores)))


# Function of ids that returns id -> passage. Ids that no passage has are left out.
PassageLookup = Callable[[Collection[str]], Mapping[str, Passage]]
Record = dict[str, Any]  # an entry of a data file: a value for each key
Ranking = Sequence[tuple[str, float]]  # (passage id, score) of one query, best first
Rankings = dict[str, list[tuple[str, float]]]  # query id -> its ranking: the content of a TREC run file
