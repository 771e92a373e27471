"""Packing of texts side by side in rows, so that an encoder computes little padding. All of it runs on the host.

A bin is the part of a batch that an encoder computes at a time: a chunk of a device's part. Every bin gets the same
number of texts, about the same number of tokens, and the same number of rows of the same width. A batch therefore has
one static shape, and a run has few shapes: pairs of a number of rows and a width, so that a bin of few texts is filled
where rows of one width would leave a part of a row empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

SAMPLE = 100  # number of batches whose lengths decide widths and sizes
STEP, WIDTHS = 16, 16  # widths are multiples of the first; about so many are tried
# Share of the sample that both usual sizes hold; None: the two sizes that compute least. Passages are most of the work:
# theirs differ.
USUAL = {"query": 0.95, "passage": None}


class RowsSize(NamedTuple):
    """A number of rows and their width in tokens."""

    rows: int
    width: int


@dataclass(frozen=True)
class Placement:
    """Packed positions of the texts of a batch.

    Attributes:
        order: Rows of the texts in the batch [N], bin after bin.
        starts: First position of each text in its bin [N], with the bin's rows one after the other.
        rows: Rows of each bin.
        width: Tokens of a row.
    """

    order: np.ndarray
    starts: np.ndarray
    rows: int
    width: int


def assign_in_snake_order(lengths: np.ndarray, bins: int) -> np.ndarray:
    """Return rows of texts [bins, N / bins], assigned longest first, forwards and backwards in turn.

    Best where many texts are as long as a row: every bin gets the same number of them.
    """
    rounds = np.argsort(-lengths, kind="stable").reshape(-1, bins)
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds.T


def assign_to_smallest(lengths: np.ndarray, bins: int) -> np.ndarray:
    """Return rows of texts [bins, N / bins], assigned in rounds: the bin with the fewest tokens gets the longest text.

    Best where few texts are long: every bin gets about the same number of tokens.
    """
    rounds = np.argsort(-lengths, kind="stable").reshape(-1, bins)
    assigned, tokens = np.empty_like(rounds), np.zeros(bins, np.int64)
    for round_of_texts, texts in zip(assigned, rounds):
        smallest = np.argsort(tokens, kind="stable")
        round_of_texts[smallest] = texts
        tokens[smallest] += lengths[texts]
    return assigned.T


def fit_into_rows(lengths: np.ndarray, width: int) -> Placement:
    """Pack texts into rows of `width` tokens by best fit, longest first: each goes where it leaves the least room.

    Texts are ordered by position; those without tokens come last, behind all rows. Raises ValueError if a text is
    longer than a row.
    """
    starts = np.zeros(len(lengths), np.int64)
    room: dict[int, list[int]] = defaultdict(list)  # free tokens -> rows
    free, rows = 0, 0  # bit n of `free`: a row has n free tokens
    for text in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[text])
        if length > width:
            raise ValueError(f"a text of {length} tokens does not fit into a row of {width}")
        if not length:
            break
        fitting = free >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = room[space].pop()
            free ^= 0 if room[space] else 1 << space
        else:
            row, space = rows, width
            rows += 1
        starts[text] = row * width + width - space
        if space > length:
            room[space - length].append(row)
            free |= 1 << (space - length)
    starts[lengths == 0] = rows * width
    order = np.argsort(starts, kind="stable")
    return Placement(order, starts[order], rows, width)


def place_texts(lengths: np.ndarray, bins: int, width: int) -> Placement:
    """Pack all texts of a batch with the way of dealing that needs fewer rows; `rows` is the maximum over the bins."""

    def placed(assigned: np.ndarray) -> Placement:
        placements = [fit_into_rows(lengths[texts], width) for texts in assigned]
        order = np.concatenate([texts[placement.order] for texts, placement in zip(assigned, placements)])
        return Placement(
            order,
            np.concatenate([placement.starts for placement in placements]),
            max(placement.rows for placement in placements),
            width,
        )

    if bins == 1:
        return placed(assign_in_snake_order(lengths, 1))
    return min(
        (placed(assign(lengths, bins)) for assign in (assign_in_snake_order, assign_to_smallest)),
        key=lambda pack: pack.rows,
    )


@dataclass(frozen=True)
class RowShape:
    """Shapes of the packed rows for the queries of a run, or for its passages.

    Attributes:
        length: Length of a text, padded, at the output of the encoder, in tokens.
        slots: Positions that replace the first token there.
        sizes: Sizes that a bin may have, the least first; the last one has room for any texts.
    """

    length: int
    slots: int
    sizes: tuple[RowsSize, ...]

    def __str__(self) -> str:
        *usual, last = self.sizes
        sizes = dict.fromkeys(f"{size.rows} x {size.width}" for size in usual)
        return f"{', '.join(sizes)} or at most {last.rows} x {last.width}"

    def place(self, lengths: np.ndarray, bins: int, width: int) -> Placement:
        return place_texts(packed_lengths(np.minimum(lengths, self.length), self.slots), bins, width)


@dataclass(frozen=True)
class Packer:
    """Packer of every batch of a run.

    Queries and passages have the same number of sizes, used in pairs: a batch takes the first pair into which both fit,
    so a run compiles at most that many programs.
    """

    bins: int
    queries: RowShape
    passages: RowShape

    def __str__(self) -> str:
        sides = (f"{name} in {side}" for name, side in (("queries", self.queries), ("passages", self.passages)))
        return f"packed for each of {self.bins} devices and chunks, rows x tokens: {'; '.join(sides)}"

    def __call__(self, queries: np.ndarray, passages: np.ndarray) -> tuple[Placement, Placement]:
        """Return the packed positions of queries and passages of these lengths; length 0: empty slot."""
        placed: dict[tuple[str, int], Placement] = {}  # several sizes may have one width

        def fits(side: str, shape: RowShape, lengths: np.ndarray, size: RowsSize) -> bool:
            if (side, size.width) not in placed:
                placed[side, size.width] = shape.place(lengths, self.bins, size.width)
            return placed[side, size.width].rows <= size.rows

        query, passage = next(
            (query, passage)
            for query, passage in zip(self.queries.sizes, self.passages.sizes)
            if fits("query", self.queries, queries, query) and fits("passage", self.passages, passages, passage)
        )
        return (
            replace(placed["query", query.width], rows=query.rows),
            replace(placed["passage", passage.width], rows=passage.rows),
        )


def packed_lengths(lengths: np.ndarray, slots: int) -> np.ndarray:
    """Return the number of positions that each text takes in a packed row."""
    return np.where(lengths > 0, lengths + slots - 1, 0)


def choose_row_shape(
    sample: Sequence[np.ndarray],
    length: int,
    slots: int,
    bins: int,
    hidden_size: int,
    usual: float | None = None,
) -> RowShape:
    """Return the sizes of rows for texts whose lengths are distributed as in `sample`.

    A size costs its work for a transformer: attention grows with the width, by 1 part in 6 hidden sizes per token. Rows
    wider than the longest text waste less room, but only few widths are tried. The sizes are two usual ones; one that
    holds, at its width, as many rows more than the largest of the sample as that has more than the median; and one row
    for every text (as much as padding), so that every batch has a program.

    Args:
        sample: Lengths [N] of the texts of some batches.
        length: Lengths are cut at this number of tokens.
        slots: Positions that replace the first token of a text.
        bins: Parts of a batch that are packed separately.
        hidden_size: Hidden size of the encoder.
        usual: Share of the sample that both usual sizes hold, with the least work; None: the two with which the sample
            costs least.
    """
    longest, most = length + slots - 1, len(sample[0]) // bins
    first = -(-longest // STEP) * STEP
    widths = range(first, max(256, 2 * first) + 1, max(STEP, first // WIDTHS // STEP * STEP))
    packed = [packed_lengths(np.minimum(lengths, length), slots) for lengths in sample]
    needed = {width: np.array([place_texts(lengths, bins, width).rows for lengths in packed]) for width in widths}

    def work(rows: float, width: int) -> float:
        return rows * width * (1 + width / (6 * hidden_size))

    def above(counts: np.ndarray) -> int:
        return min(most, 2 * int(counts.max()) - int(np.quantile(counts, 0.5, method="higher")))

    rare = min((RowsSize(above(counts), width) for width, counts in needed.items()), key=lambda size: work(*size))
    if usual is not None:
        enough = (RowsSize(int(np.quantile(counts, usual, method="higher")), width) for width, counts in needed.items())
        size = min(enough, key=lambda size: work(*size))
        sizes = [size, size, rare]
    else:
        choices = [RowsSize(int(rows), width) for width in widths for rows in np.unique(needed[width])]
        costs = np.array([np.where(needed[size.width] <= size.rows, work(*size), work(*rare)) for size in choices])
        # Of each first size the best second one, row by row: of all pairs at once there may be gigabytes.
        means = [np.minimum(costs, cost).mean(axis=1) for cost in costs]
        one = int(np.argmin([each.min() for each in means]))
        other = int(means[one].argmin())
        sizes = sorted([choices[one], choices[other], rare], key=lambda size: work(*size))
    return RowShape(length, slots, (*sizes, RowsSize(most, first)))
