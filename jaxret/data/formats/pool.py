"""Passages of training files, shared by the examples that name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxret.data.files import DataError, Policy, Where
from jaxret.data.records import Example, Passage, Query

Scored = dict[str, tuple[Passage, float | None]]  # by id, in order


@dataclass
class Pool:
    """The passages of a file by id. One id with two texts is bad input."""

    policy: Policy
    known: dict[str, tuple[Passage, Where]] = field(default_factory=dict)

    def read(self, values: Iterable[Any], key: str, where: Where, parse: Callable[[Any, Where], Passage]) -> Scored:
        """What `parse` makes of the values of a record's `key`, in order, each id once. What is bad among them leaves
        the record, under a policy that skips."""
        return self.scored(((value, None) for value in values), key, where, parse)

    def scored(
        self,
        values: Iterable[tuple[Any, float | None]],
        key: str,
        where: Where,
        parse: Callable[[Any, Where], Passage],
    ) -> Scored:
        """As `read`, of (value, score)."""
        found: Scored = {}
        for number, (value, score) in enumerate(values):
            place = Where(where.path, f"{where.line}, {key}[{number}]")
            try:
                passage = self.shared(parse(value, place), place)
            except DataError as error:
                self.policy.reject(error)
                continue
            found.setdefault(passage.id, (passage, score))
        return found

    def shared(self, passage: Passage, where: Where) -> Passage:
        """The passage, as it was met first."""
        known, first = self.known.setdefault(passage.id, (passage, where))
        if known != passage:
            found = f"passage id {passage.id!r} has another title or text than at {first.line}"
            raise where.error("duplicate id", found, "give different passages different ids")
        return known


def make_example(query: Query, positives: Mapping[str, tuple[Passage, float | None]], negatives: Scored) -> Example:
    """A positive is never a negative. A passage without a score among others with one has NaN."""
    others = {key: both for key, both in negatives.items() if key not in positives}
    sides = [[math.nan if score is None else score for _, score in side.values()] for side in (positives, others)]
    scores = map(tuple, sides if any(map(math.isfinite, (*sides[0], *sides[1]))) else ((), ()))
    return Example(query, _passages(positives), _passages(others), *scores)


def _passages(scored: Mapping[str, tuple[Passage, float | None]]) -> tuple[Passage, ...]:
    return tuple(passage for passage, _ in scored.values())


def no_positive(where: Where, key: str) -> DataError:
    return where.error("no positive", f"{key!r} holds no passage", "add one, or leave the record out")
