"""Known positives of training examples. All examples of a query share one set of passages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxret.types import Ragged


@dataclass(frozen=True)
class KnownPositives:
    """Passage rows that are known to be relevant to each of E examples.

    A query has one example for each of its positives, and these examples share one set. A table with a row for each
    example would have as many columns as the query with the most positives.
    """

    sets: Ragged  # passage rows, ascending
    rows: np.ndarray  # int32 [E], the set of each example

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> KnownPositives:
        """Return the known positives of examples from a list of passage rows for each."""
        numbers: dict[tuple[int, ...], int] = {}
        rows = [numbers.setdefault(tuple(sorted(set(positives))), len(numbers)) for positives in lists]
        return cls(Ragged.from_lists(list(numbers)), np.array(rows, np.int32))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, example: int | np.integer) -> np.ndarray:
        return self.sets[self.rows[example]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.sets[row] for row in self.rows)

    @cached_property
    def largest_count(self) -> int:
        """Largest number of positives of an example."""
        return int(self.sets.lengths_of(np.unique(self.rows)).max(initial=0))

    @property
    def passages(self) -> np.ndarray:
        """Rows of all positives, without repetition, ascending."""
        return np.unique(self.sets.take(np.unique(self.rows)).flat)

    def take(self, examples: np.ndarray) -> KnownPositives:
        """Return the known positives of some examples."""
        return KnownPositives(self.sets, self.rows[examples])

    def table(self, examples: np.ndarray) -> np.ndarray:
        """Return the positives of examples as int32 [examples, largest_count], filled up with -1. Example -1 has
        none."""
        rows = np.where(examples >= 0, self.rows[np.maximum(examples, 0)], -1)
        return self.sets.padded(rows, self.largest_count, -1)[0]
