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

SAMPLE_BATCHES = 100  # number of batches whose lengths decide widths and sizes
STEP, WIDTHS = 16, 16  # widths are multiples of the first; about so many are tried
EXCHANGES = 40  # pairs of texts that are tried, to save a row of a bin
FEW_TEXTS = 32  # of a bin: more fill their rows without exchanges
# Share of the sample that a usual size holds; None: the sizes that compute least. Passages are most of the work: theirs
# differ.
USUAL = {"query": 0.95, "passage": None}


class RowsSize(NamedTuple):
    """A number of rows and their width in tokens."""

    rows: int
    width: int


@dataclass(frozen=True)
class Placement:
    """Packed positions of the texts of a batch."""

    order: np.ndarray  # Rows of the texts in the batch [N], bin after bin
    starts: np.ndarray  # First position of each text in its bin [N], with the bin's rows one after the other
    rows: int  # Rows of each bin
    width: int  # Tokens of a row


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
    assignment, tokens = np.empty_like(rounds), np.zeros(bins, np.int64)
    for round_of_texts, texts in zip(assignment, rounds):
        smallest = np.argsort(tokens, kind="stable")
        round_of_texts[smallest] = texts
        tokens[smallest] += lengths[texts]
    return assignment.T


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
        fits = free >> length
        if fits:
            space = length + (fits & -fits).bit_length() - 1
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
    """Pack all texts of a batch, assigned to bins in the way that needs the fewest rows; `rows` is the maximum over the
    bins."""
    ways = (assign_in_snake_order, assign_to_smallest) if bins > 1 else (assign_in_snake_order,)
    assignments = [_exchanged(assign(lengths, bins), lengths, width) for assign in ways]

    def placed(bins_of_texts: np.ndarray) -> Placement:
        placements = [fit_into_rows(lengths[texts], width) for texts in bins_of_texts]
        order = np.concatenate([texts[placement.order] for texts, placement in zip(bins_of_texts, placements)])
        return Placement(
            order,
            np.concatenate([placement.starts for placement in placements]),
            max(placement.rows for placement in placements),
            width,
        )

    return min(map(placed, assignments), key=lambda placement: placement.rows)


def _exchanged(assignment: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """Return texts assigned to bins [bins, N / bins], after exchanges of texts between bins that save a row of every
    bin, as often as such exchanges are found."""
    if assignment.shape[1] > FEW_TEXTS:
        return assignment
    rows = np.array([fit_into_rows(lengths[texts], width).rows for texts in assignment])
    least = max(1, -(-int(lengths.sum()) // (len(assignment) * width)))
    while (most := int(rows.max())) > least:
        better, fewer = assignment.copy(), rows.copy()
        if not all(_exchange(better, fewer, bin, lengths, width) for bin in np.flatnonzero(rows == most).tolist()):
            break
        assignment, rows = better, fewer
    return assignment


def _exchange(assignment: np.ndarray, rows: np.ndarray, bin: int, lengths: np.ndarray, width: int) -> bool:
    """Exchange a text of a bin that has the most rows for a shorter one of a bin that has fewer, in place, so that both
    have fewer; return whether such a pair was found.

    The pairs that leave about as many tokens in both bins are tried first, and at most EXCHANGES.

    Args:
        assignment: texts of each bin [bins, N / bins].
        rows: rows of each bin.
        bin: the bin.
        lengths: lengths of the texts.
        width: tokens of a row.
    """
    target = rows[bin] - 1
    tokens = lengths[assignment].sum(axis=1)
    gains = lengths[assignment[bin]][:, None, None] - lengths[assignment]  # [texts of the bin, bins, texts of a bin]
    fits = (gains > 0) & (tokens[None, :, None] + gains <= target * width) & (rows <= target)[None, :, None]
    fits &= tokens[bin] - gains <= target * width
    pairs = np.argwhere(fits)
    larger = np.maximum(tokens[bin] - gains[fits], tokens[pairs[:, 1]] + gains[fits])
    for own, other, text in pairs[np.argsort(larger, kind="stable")[:EXCHANGES]]:
        texts = assignment[[bin, other]]
        texts[0, own], texts[1, text] = texts[1, text], texts[0, own]
        rows_needed = [fit_into_rows(lengths[each], width).rows for each in texts]
        if max(rows_needed) <= target:
            assignment[[bin, other]], rows[[bin, other]] = texts, rows_needed
            return True
    return False


@dataclass(frozen=True)
class RowShape:
    """Shapes of the packed rows for the queries of a run, or for its passages."""

    length: int  # Length of a text, padded, at the output of the encoder, in tokens
    slots: int  # Positions that replace the first token there
    sizes: tuple[RowsSize, ...]  # Sizes that a bin may have, the least first; the last one has room for any texts

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
        placements: dict[tuple[str, int], Placement] = {}  # several sizes may have one width

        def fits(side: str, shape: RowShape, lengths: np.ndarray, size: RowsSize) -> bool:
            if (side, size.width) not in placements:
                placements[side, size.width] = shape.place(lengths, self.bins, size.width)
            return placements[side, size.width].rows <= size.rows

        query, passage = next(
            (query, passage)
            for query, passage in zip(self.queries.sizes, self.passages.sizes)
            if fits("query", self.queries, queries, query) and fits("passage", self.passages, passages, passage)
        )
        return (
            replace(placements["query", query.width], rows=query.rows),
            replace(placements["passage", passage.width], rows=passage.rows),
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
    wider than the longest text waste less room, but only few widths are tried. The sizes are usual ones, two, or three
    for several bins, which are rarely as full as all of them together; one that holds, at its width, as many rows more
    than the largest of the sample as that has more than the median; and one row for every text (as much as padding), so
    that every batch has a program.

    Args:
        sample: lengths [N] of the texts of some batches.
        length: lengths are cut at this number of tokens.
        slots: positions that replace the first token of a text.
        bins: parts of a batch that are packed separately.
        hidden_size: hidden size of the encoder.
        usual: share of the sample that a usual size holds, with the least work, and that is the only one; None: those
            with which the sample costs least.
    """
    longest, most, count = length + slots - 1, len(sample[0]) // bins, 2 if bins == 1 else 3
    first = -(-longest // STEP) * STEP
    widths = range(first, max(256, 2 * first) + 1, max(STEP, first // WIDTHS // STEP * STEP))
    packed_sample = [packed_lengths(np.minimum(lengths, length), slots) for lengths in sample]
    row_counts = {
        width: np.array([place_texts(lengths, bins, width).rows for lengths in packed_sample]) for width in widths
    }

    def work(rows: float, width: int) -> float:
        return rows * width * (1 + width / (6 * hidden_size))

    def above(counts: np.ndarray) -> int:
        return min(most, 2 * int(counts.max()) - int(np.quantile(counts, 0.5, method="higher")))

    rare = min((RowsSize(above(counts), width) for width, counts in row_counts.items()), key=lambda size: work(*size))
    if usual is not None:
        enough = (
            RowsSize(int(np.quantile(counts, usual, method="higher")), width) for width, counts in row_counts.items()
        )
        size = min(enough, key=lambda size: work(*size))
        sizes = [*(size for _ in range(count)), rare]
    else:
        choices = [RowsSize(int(rows), width) for width in widths for rows in np.unique(row_counts[width])]
        costs = np.array([np.where(row_counts[size.width] <= size.rows, work(*size), work(*rare)) for size in choices])
        sizes = sorted(
            [*(choices[row] for row in _cheapest_together(costs, count)), rare], key=lambda size: work(*size)
        )
    return RowShape(length, slots, (*sizes, RowsSize(most, first)))


def _cheapest_together(costs: np.ndarray, count: int) -> list[int]:
    """Return `count` rows of costs [choices, batches] of which each batch takes the cheapest, with a small sum: chosen
    one by one, then replaced one by one while that helps."""
    picks: list[int] = []

    def best(others: list[int]) -> int:
        least = costs[others].min(axis=0, initial=np.inf)
        return int(np.minimum(costs, least).sum(axis=1).argmin())

    while len(picks) < count:
        picks.append(best(picks))
    for _ in range(count):
        for place in range(count):
            picks[place] = best(picks[:place] + picks[place + 1 :])
    return picks
