"""Warnings about the tokens of training data: cut texts, dev queries in the training data, equal passages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxret.data.tokens.batches import Examples, TrainingSet
from jaxret.runs.run_warnings import RunWarning
from jaxret.types import Ragged

_BLOCK_ROWS = 2**16  # rows that are hashed at the same time


def data_warnings(train: Examples | None, dev: TrainingSet | None) -> Iterator[RunWarning]:
    """Yield the warnings about the examples of a run. The texts of pre-training have no warnings."""
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
        trained_rows = first[np.isin(queries, row_hashes(train.queries))]
        if len(trained_rows):
            yield RunWarning(
                "leak",
                f"dev: {len(trained_rows):,} of {len(first):,} queries are also trained on, such as "
                f"{dev.query_ids[min(trained_rows)]!r}: validation overstates the quality of the model",
            )


def row_hashes(rows: Ragged) -> np.ndarray:
    """Return a hash of the token ids of each row, uint64 [rows]. Equal rows have equal hashes. Rows are read in
    blocks."""
    longest = int(rows.lengths.max(initial=1))
    factors = np.random.default_rng(0).integers(0, 2**64, longest, np.uint64) | np.uint64(1)
    hashes = np.empty(len(rows), np.uint64)
    for start in range(0, len(rows), _BLOCK_ROWS):
        offsets = np.asarray(rows.offsets[start : start + _BLOCK_ROWS + 1])
        flat = np.asarray(rows.flat[offsets[0] : offsets[-1]]).astype(np.uint64) + np.uint64(1)
        lengths, begins = np.diff(offsets), offsets[:-1] - offsets[0]
        places = np.arange(len(flat)) - np.repeat(begins, lengths)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(flat * factors[places], dtype=np.uint64)])
        hashes[start : start + len(lengths)] = sums[begins + lengths] - sums[begins]
    return hashes
