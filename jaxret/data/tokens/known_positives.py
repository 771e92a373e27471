"""Known positives of training examples: one set of passages for all examples of a query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxret.types import Ragged


@dataclass(frozen=True)
class KnownPositives:
    """Passage rows that are known to be relevant to each of E examples.

    A query has one example for each of its positives; their set is stored once. A table with a row for each example
    would grow as the number of examples times the most positives of any query.
    """

    sets: Ragged  # passage rows, ascending
    rows: np.ndarray  # int32 [E], the set of each example

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> KnownPositives:
        """Return the known positives of examples from a list of passage rows for each."""
        numbers: dict[tuple[int, ...], int] = {}
        rows = [numbers.setdefault(tuple(sorted(set(own))), len(numbers)) for own in lists]
        return cls(Ragged.from_lists(list(numbers)), np.array(rows, np.int32))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, example: int | np.integer) -> np.ndarray:
        return self.sets[self.rows[example]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.sets[row] for row in self.rows)

    @cached_property
    def most(self) -> int:
        """Largest number of positives of an example."""
        return int(self.sets.lengths_of(np.unique(self.rows)).max(initial=0))

    @property
    def passages(self) -> np.ndarray:
        """Return the rows of all positives, each once, ascending."""
        return np.unique(self.sets.take(np.unique(self.rows)).flat)

    def take(self, examples: np.ndarray) -> KnownPositives:
        """Return the known positives of some examples."""
        return KnownPositives(self.sets, self.rows[examples])

    def table(self, examples: np.ndarray) -> np.ndarray:
        """Return int32 [examples, most], filled up with -1; example -1 has none."""
        rows = np.where(examples >= 0, self.rows[np.maximum(examples, 0)], -1)
        return self.sets.padded(rows, self.most, -1)[0]
