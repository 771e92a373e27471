"""Texts laid side by side in rows, so that an encoder computes few tokens that are none. All of it on the host.

A bin is what an encoder computes at a time: a chunk of a device's part of a batch. Every bin gets as many texts as the
others, about as many tokens, and the same number of rows of the same width, so that a batch is one static shape, and a
run few of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

SAMPLE = 100  # batches that widths and sizes are chosen from
STEP = 32  # a width is a multiple of it
# What parts of a run's batches the two usual sizes are for. Passages are most of the work, so theirs differ.
USUAL = {"query": (0.95, 0.95), "passage": (0.5, 0.9)}


@dataclass(frozen=True)
class Placed:
    """Texts of a batch as devices get them: order [N] of their rows in the batch, bin after bin; starts [N] of each in
    the rows of its bin, laid end to end."""

    order: np.ndarray
    starts: np.ndarray
    rows: int


def forth_and_back(lengths: np.ndarray, bins: int) -> np.ndarray:
    """[bins, N / bins]: rows of texts, longest first, dealt out forwards and backwards in turn. Best where many texts
    are as long as a row: bins have as many of them as others."""
    rounds = np.argsort(-lengths, kind="stable").reshape(-1, bins)
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds.T


def to_the_poorest(lengths: np.ndarray, bins: int) -> np.ndarray:
    """The same in rounds, in each of which the bin with the fewest tokens gets the longest text. Best where few texts
    are long: bins have as many tokens as others."""
    rounds = np.argsort(-lengths, kind="stable").reshape(-1, bins)
    dealt, tokens = np.empty_like(rounds), np.zeros(bins, np.int64)
    for given, texts in zip(dealt, rounds):
        poorest = np.argsort(tokens, kind="stable")
        given[poorest] = texts
        tokens[poorest] += lengths[texts]
    return dealt.T


def lay(lengths: np.ndarray, width: int) -> Placed:
    """Texts into as few rows of `width` tokens as best fit finds, longest first: each goes where it leaves the least
    room. Their order is that of their places; those without tokens are last, behind all rows.

    Raises ValueError if one is longer than a row.
    """
    starts = np.zeros(len(lengths), np.int64)
    room: dict[int, list[int]] = defaultdict(list)  # tokens that are free -> rows
    free, rows = 0, 0  # bit n of `free`: there is a row with room for n
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
    return Placed(order, starts[order], rows)


def place(lengths: np.ndarray, bins: int, width: int) -> Placed:
    """All texts of a batch, dealt out in the way that needs fewer rows, and laid; rows: what the bin with the most
    needs."""

    def placed(dealt: np.ndarray) -> Placed:
        laid = [lay(lengths[texts], width) for texts in dealt]
        order = np.concatenate([texts[found.order] for texts, found in zip(dealt, laid)])
        return Placed(order, np.concatenate([found.starts for found in laid]), max(found.rows for found in laid))

    if bins == 1:
        return placed(forth_and_back(lengths, 1))
    return min((placed(deal(lengths, bins)) for deal in (forth_and_back, to_the_poorest)), key=lambda found: found.rows)


@dataclass(frozen=True)
class Side:
    """Rows for the queries of a run, or for its passages. length: of a text, padded, as it leaves the encoder; slots:
    what takes the place of its first token there; sizes: rows that a bin may have, the last of them holds any texts."""

    length: int
    slots: int
    width: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.sizes[:-1]))} or at most {self.sizes[-1]} rows of {self.width} tokens"

    def place(self, lengths: np.ndarray, bins: int) -> Placed:
        return place(taken(np.minimum(lengths, self.length), self.slots), bins, self.width)


@dataclass(frozen=True)
class Packer:
    """How every batch of a run is packed. Queries and passages have the same number of sizes, which go together: a
    batch takes the first into which both fit, and a run compiles so many programs at most."""

    bins: int
    queries: Side
    passages: Side

    def __str__(self) -> str:
        sides = (f"{name} in {side}" for name, side in (("queries", self.queries), ("passages", self.passages)))
        return f"packed for each of {self.bins} devices and chunks: {', '.join(sides)}"

    def __call__(self, queries: np.ndarray, passages: np.ndarray) -> tuple[Placed, Placed]:
        """The places of texts of these lengths, 0 for an empty slot."""
        q, p = self.queries.place(queries, self.bins), self.passages.place(passages, self.bins)
        fitting = (
            sizes for sizes in zip(self.queries.sizes, self.passages.sizes) if q.rows <= sizes[0] and p.rows <= sizes[1]
        )
        query_rows, passage_rows = next(fitting)
        return replace(q, rows=query_rows), replace(p, rows=passage_rows)


def taken(lengths: np.ndarray, slots: int) -> np.ndarray:
    """Places that texts take in a row."""
    return np.where(lengths > 0, lengths + slots - 1, 0)


def choose(
    sample: Sequence[np.ndarray],
    length: int,
    slots: int,
    bins: int,
    hidden_size: int,
    usual: tuple[float, float] = (0.5, 0.9),
) -> Side:
    """The rows for texts that are as long as in `sample`, the lengths [N] of some batches, cut at `length`.

    width: the one with which a transformer of this size has least to compute: its attention grows with the width, by a
    token's 1 part in 6 hidden sizes. Wider rows than for the longest text leave less room, but only few are tried.
    sizes: what these parts of the sample need; as far above all of it as that is above its half, where hardly a batch
    of these lengths is; and a row for every text, which is what padding costs, so that whatever comes has a program.
    """
    longest = length + slots - 1
    first = -(-longest // STEP) * STEP
    widths = range(first, max(256, first + first // 2) + 1, STEP)

    def needed(width: int) -> np.ndarray:
        return np.array([place(taken(np.minimum(n, length), slots), bins, width).rows for n in sample])

    def work(width: int) -> float:
        return needed(width).mean() * width * (1 + width / (6 * hidden_size))

    width = min(widths, key=work)
    found, most = needed(width), len(sample[0]) // bins
    small, large, half = (int(np.quantile(found, part, method="higher")) for part in (*usual, 0.5))
    sizes = small, large, 2 * int(found.max()) - half, most
    return Side(length, slots, width, tuple(min(rows, most) for rows in sizes))
