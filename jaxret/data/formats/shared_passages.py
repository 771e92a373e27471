"""Passages of training files. Examples with the same passage share one object."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxret.data.errors import DataError, Location, Policy
from jaxret.data.records import Example, Passage, Query

ScoredPassages = dict[str, tuple[Passage, float | None]]  # id -> (passage, score), in the record's order


@dataclass
class SharedPassages:
    """The passages of a file by id. An id with two texts is an error."""

    policy: Policy
    by_id: dict[str, tuple[Passage, Location]] = field(default_factory=dict)

    def parse_scored(
        self,
        values: Iterable[tuple[Any, float | None]],
        key: str,
        location: Location,
        parse: Callable[[Any, Location], Passage],
    ) -> ScoredPassages:
        """Return the passages of a record's key, in order, each id once. A policy that skips drops bad passages.

        Args:
            values: (unparsed passage, its score or None).
            key: key of the passages in the record, for errors.
            location: location of the record, for errors.
            parse: function of (value, location) that returns a passage, or raises DataError.
        """
        passages: ScoredPassages = {}
        places = ((Location(location.path, f"{location.line}, {key}[{n}]"), entry) for n, entry in enumerate(values))

        def parse_shared(entry: tuple[Any, float | None], location: Location) -> tuple[Passage, float | None]:
            return self.share(parse(entry[0], location), location), entry[1]

        for _, (passage, score) in self.policy.parse_records(places, parse_shared):
            passages.setdefault(passage.id, (passage, score))
        return passages

    def share(self, passage: Passage, location: Location) -> Passage:
        """Return the first object that is equal to a passage. Raises DataError if its id occurred with another title or
        text."""
        original, first = self.by_id.setdefault(passage.id, (passage, location))
        if original != passage:
            problem = f"passage id {passage.id!r} has another title or text than at {first.line}"
            raise location.error("duplicate id", problem, "give different passages different ids")
        return original


def make_example(
    query: Query, positives: Mapping[str, tuple[Passage, float | None]], negatives: ScoredPassages
) -> Example:
    """Return an example without the negatives that are positives. If some passages have scores, the missing scores are
    NaN."""
    negatives = {key: entry for key, entry in negatives.items() if key not in positives}
    sides = [[math.nan if score is None else score for _, score in side.values()] for side in (positives, negatives)]
    scores = map(tuple, sides if any(map(math.isfinite, (*sides[0], *sides[1]))) else ((), ()))
    return Example(query, _passages(positives), _passages(negatives), *scores)


def _passages(entries: Mapping[str, tuple[Passage, float | None]]) -> tuple[Passage, ...]:
    return tuple(passage for passage, _ in entries.values())


def no_positive_error(location: Location, key: str) -> DataError:
    return location.error("no positive", f"{key!r} holds no passage", "add a passage, or remove the record")
