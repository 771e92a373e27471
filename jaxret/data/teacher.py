"""A teacher's scores of training examples, on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxret.data.records import Example
from jaxret.storage import sha256_bytes
from jaxret.types import Ragged


@dataclass(frozen=True)
class Teacher:
    """A teacher's scores of the documents of each example; NaN where it gave none."""

    positives: np.ndarray  # float32 [E], of the target
    negatives: Ragged  # float32 [E], in the order of the example's hard negatives

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Teacher | None:
        """None if it teaches nothing: no example has scores of its target and of a negative."""
        positives = np.full(len(examples), np.nan, np.float32)
        flat: list[float] = []
        offsets = np.zeros(len(examples) + 1, np.int64)
        for i, example in enumerate(examples):
            if example.positive_scores:
                positives[i] = example.positive_scores[0]
            flat.extend(example.negative_scores or [math.nan] * len(example.negatives))
            offsets[i + 1] = len(flat)
        found = cls(positives, Ragged(np.array(flat, np.float32), offsets))
        return found if found.taught else None

    @property
    def taught(self) -> int:
        """How many examples have scores of their target and of a negative: a loss learns from these."""
        return sum(bool(np.isfinite(self.negatives[row]).any()) for row in np.flatnonzero(np.isfinite(self.positives)))

    @property
    def digest(self) -> str:
        return sha256_bytes(self.positives.astype("<f4").tobytes() + self.negatives.flat.astype("<f4").tobytes())


def scored_by(example: Example, scores: Mapping[str, float]) -> Example:
    """The example with somebody's scores of its passages, by their ids, and with no others."""
    sides = example.positives, example.negatives
    positives, negatives = (tuple(scores.get(passage.id, math.nan) for passage in side) for side in sides)
    if not any(map(math.isfinite, (*positives, *negatives))):
        positives = negatives = ()
    return replace(example, positive_scores=positives, negative_scores=negatives)


def picked(of: Ragged, rows: np.ndarray, places: np.ndarray, empty: float | int) -> np.ndarray:
    """[rows, K]: of each row (-1: none) the items at `places` [rows, K]; `empty` where a place is -1."""
    there = places >= 0
    found = np.full(places.shape, empty, of.flat.dtype)
    starts = np.broadcast_to(of.offsets[np.maximum(rows, 0)][:, None], places.shape)
    found[there] = of.flat[starts[there] + places[there]]
    return found
