"""Warnings about training data, as the model reads them: cut texts, dev queries that are trained on, equal passages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxret.data.tokens.batches import Examples, TrainingSet
from jaxret.runs.run_warnings import RunWarning
from jaxret.types import Ragged

_ROWS = 2**16  # hashed at a time


def data_warnings(train: Examples | None, dev: TrainingSet | None) -> Iterator[RunWarning]:
    """Yield the warnings of the examples of a run; none of texts that are not pairs."""
    if not isinstance(train, TrainingSet):
        return
    for name, data in (("train", train), ("dev", dev)):
        for truncation in data.truncations if data else ():
            if truncation.cut:
                yield RunWarning("truncation", f"{name}: {truncation}")
    passages = row_hashes(train.passages)
    if copies := len(passages) - len(np.unique(passages)):
        yield RunWarning(
            "duplicates",
            f"train: {copies:,} of {len(passages):,} passages have the tokens of another one; in a batch with it, "
            "such a passage is a negative of a query that it answers",
        )
    if dev:
        queries, first = np.unique(row_hashes(dev.queries), return_index=True)
        both = first[np.isin(queries, row_hashes(train.queries))]
        if len(both):
            yield RunWarning(
                "leak",
                f"dev: {len(both):,} of {len(first):,} queries are trained on, too, as {dev.query_ids[min(both)]!r}: "
                "validation is better than the model",
            )


def row_hashes(rows: Ragged) -> np.ndarray:
    """Return a hash of the token ids of every row, uint64 [rows]: equal for equal rows. Rows are read in blocks."""
    longest = int(rows.lengths.max(initial=1))
    factors = np.random.default_rng(0).integers(0, 2**64, longest, np.uint64) | np.uint64(1)
    hashes = np.empty(len(rows), np.uint64)
    for start in range(0, len(rows), _ROWS):
        offsets = np.asarray(rows.offsets[start : start + _ROWS + 1])
        flat = np.asarray(rows.flat[offsets[0] : offsets[-1]]).astype(np.uint64) + np.uint64(1)
        lengths, begins = np.diff(offsets), offsets[:-1] - offsets[0]
        places = np.arange(len(flat)) - np.repeat(begins, lengths)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(flat * factors[places], dtype=np.uint64)])
        hashes[start : start + len(lengths)] = sums[begins + lengths] - sums[begins]
    return hashes
