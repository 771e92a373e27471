"""Packing of texts side by side in rows, so that an encoder computes little padding. All of it runs on the host.

A bin is the part of a batch that an encoder computes at a time: a chunk of a device's part. Every bin gets the same
number of texts, about the same number of tokens, and the same number of rows of the same width. A batch therefore has
one static shape, and a run has few shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

SAMPLE = 100  # number of batches whose lengths decide widths and sizes
STEP = 32  # widths are multiples of it
# Quantiles of the sampled row counts that give the two usual sizes. Passages are most of the work: theirs differ.
USUAL = {"query": (0.95, 0.95), "passage": (0.5, 0.9)}


@dataclass(frozen=True)
class Placement:
    """Packed positions of the texts of a batch.

    Attributes:
        order: Rows of the texts in the batch [N], bin after bin.
        starts: First position of each text in its bin [N], with the bin's rows one after the other.
        rows: Rows of each bin.
    """

    order: np.ndarray
    starts: np.ndarray
    rows: int


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
    return Placement(order, starts[order], rows)


def place_texts(lengths: np.ndarray, bins: int, width: int) -> Placement:
    """Pack all texts of a batch with the way of dealing that needs fewer rows; `rows` is the maximum over the bins."""

    def placed(assigned: np.ndarray) -> Placement:
        placements = [fit_into_rows(lengths[texts], width) for texts in assigned]
        order = np.concatenate([texts[placement.order] for texts, placement in zip(assigned, placements)])
        return Placement(
            order,
            np.concatenate([placement.starts for placement in placements]),
            max(placement.rows for placement in placements),
        )

    if bins == 1:
        return placed(assign_in_snake_order(lengths, 1))
    return min(
        (placed(assign(lengths, bins)) for assign in (assign_in_snake_order, assign_to_smallest)),
        key=lambda pack: pack.rows,
    )


@dataclass(frozen=True)
class RowShape:
    """Shape of the packed rows for the queries of a run, or for its passages.

    Attributes:
        length: Length of a text, padded, at the output of the encoder, in tokens.
        slots: Positions that replace the first token there.
        width: Tokens of a row.
        sizes: Numbers of rows that a bin may have, ascending; the last one has room for any texts.
    """

    length: int
    slots: int
    width: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.sizes[:-1]))} or at most {self.sizes[-1]} rows of {self.width} tokens"

    def place(self, lengths: np.ndarray, bins: int) -> Placement:
        return place_texts(packed_lengths(np.minimum(lengths, self.length), self.slots), bins, self.width)


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
        return f"packed for each of {self.bins} devices and chunks: {', '.join(sides)}"

    def __call__(self, queries: np.ndarray, passages: np.ndarray) -> tuple[Placement, Placement]:
        """Return the packed positions of queries and passages of these lengths; length 0: empty slot."""
        q, p = self.queries.place(queries, self.bins), self.passages.place(passages, self.bins)
        fitting = (
            sizes for sizes in zip(self.queries.sizes, self.passages.sizes) if q.rows <= sizes[0] and p.rows <= sizes[1]
        )
        query_rows, passage_rows = next(fitting)
        return replace(q, rows=query_rows), replace(p, rows=passage_rows)


def packed_lengths(lengths: np.ndarray, slots: int) -> np.ndarray:
    """Return the number of positions that each text takes in a packed row."""
    return np.where(lengths > 0, lengths + slots - 1, 0)


def choose_row_shape(
    sample: Sequence[np.ndarray],
    length: int,
    slots: int,
    bins: int,
    hidden_size: int,
    usual: tuple[float, float] = (0.5, 0.9),
) -> RowShape:
    """Return the rows for texts whose lengths are distributed as in `sample`.

    The width is the one with the least work for a transformer: attention grows with the width, by 1 part in 6 hidden
    sizes per token. Rows wider than the longest text waste less room, but only few widths are tried. The sizes are the
    two `usual` quantiles of the sample's row counts; a size as far above the sample's maximum as that is above its
    median; and one row for every text (as much as padding), so that every batch has a program.

    Args:
        sample: Lengths [N] of the texts of some batches.
        length: Lengths are cut at this number of tokens.
        slots: Positions that replace the first token of a text.
        bins: Parts of a batch that are packed separately.
        hidden_size: Hidden size of the encoder.
        usual: Quantiles of the two usual sizes.
    """
    longest = length + slots - 1
    first = -(-longest // STEP) * STEP
    widths = range(first, max(256, first + first // 2) + 1, STEP)

    def needed(width: int) -> np.ndarray:
        return np.array([place_texts(packed_lengths(np.minimum(n, length), slots), bins, width).rows for n in sample])

    def work(width: int) -> float:
        return needed(width).mean() * width * (1 + width / (6 * hidden_size))

    width = min(widths, key=work)
    row_counts, most = needed(width), len(sample[0]) // bins
    small, large, half = (int(np.quantile(row_counts, part, method="higher")) for part in (*usual, 0.5))
    sizes = small, large, 2 * int(row_counts.max()) - half, most
    return RowShape(length, slots, width, tuple(min(rows, most) for rows in sizes))
