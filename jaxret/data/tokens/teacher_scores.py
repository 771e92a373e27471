"""A teacher's scores of training examples, on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxret.data.records import Example
from jaxret.storage.atomic import sha256_bytes
from jaxret.types import Ragged


@dataclass(frozen=True)
class TeacherScores:
    """A teacher's scores of the passages of each of E examples; NaN: no score."""

    positives: np.ndarray  # float32 [E], score of the target passage
    negatives: Ragged  # float32 [E], scores of the hard negatives, in their order

    @classmethod
    def from_examples(cls, examples: Sequence[Example]) -> TeacherScores | None:
        """Return the scores of the examples, or None if no example has scores of its target and of a negative."""
        positives = np.full(len(examples), np.nan, np.float32)
        flat: list[float] = []
        offsets = np.zeros(len(examples) + 1, np.int64)
        for i, example in enumerate(examples):
            if example.positive_scores:
                positives[i] = example.positive_scores[0]
            flat.extend(example.negative_scores or [math.nan] * len(example.negatives))
            offsets[i + 1] = len(flat)
        scores = cls(positives, Ragged(np.array(flat, np.float32), offsets))
        return scores if scores.scored_examples else None

    @property
    def scored_examples(self) -> int:
        """Number of examples with scores of their target and of a negative, which a loss can learn from."""
        return sum(bool(np.isfinite(self.negatives[row]).any()) for row in np.flatnonzero(np.isfinite(self.positives)))

    @property
    def digest(self) -> str:
        """SHA-256 of all scores as little-endian float32: those of the positives, then those of the negatives."""
        return sha256_bytes(self.positives.astype("<f4").tobytes() + self.negatives.flat.astype("<f4").tobytes())


def with_scores(example: Example, scores: Mapping[str, float]) -> Example:
    """Return the example with its scores replaced by `scores`, by passage id."""
    sides = example.positives, example.negatives
    positives, negatives = (tuple(scores.get(passage.id, math.nan) for passage in side) for side in sides)
    if not any(map(math.isfinite, (*positives, *negatives))):
        positives = negatives = ()
    return replace(example, positive_scores=positives, negative_scores=negatives)


def row_subset(rows_of_items: Ragged, rows: np.ndarray, positions: np.ndarray, empty: float | int) -> np.ndarray:
    """Return the items [rows, K] at the given positions of each row.

    Args:
        rows_of_items: rows of different lengths.
        rows: row in `rows_of_items` of each result row; -1: none, and its positions must be -1.
        positions: positions [rows, K] in the row; -1: no item.
        empty: value where there is no item.
    """
    exists = positions >= 0
    items = np.full(positions.shape, empty, rows_of_items.flat.dtype)
    starts = np.broadcast_to(rows_of_items.offsets[np.maximum(rows, 0)][:, None], positions.shape)
    items[exists] = rows_of_items.flat[starts[exists] + positions[exists]]
    return items
