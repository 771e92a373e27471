"""Packing of texts side by side in rows, so that an encoder computes little padding. Packing runs on the host.

A bin is the part of a batch that an encoder computes at a time: a chunk of a device's part. Every bin gets the same
number of texts, about the same number of tokens, and the same number of rows of the same width. A batch therefore has
one static shape, and a run has few shapes: pairs of a number of rows and a width. Several widths exist because rows of
one width would stay partly empty in a bin of few texts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

SAMPLE_BATCHES = 100  # number of batches whose lengths decide widths and sizes
STEP = 16  # widths are multiples of this number of tokens
WIDTHS = 16  # number of widths that are tried, about
EXCHANGES = 40  # pairs of texts whose exchange is tried to save a row of a bin
FEW_TEXTS = 32  # upper bound of the texts of a bin for exchanges: more texts fill their rows without exchanges
# Share of the sampled batches that fit into the one usual size. None: several usual sizes with the least work are
# chosen. Passages have several, because they are most of the work.
USUAL = {"query": 0.95, "passage": None}


class RowsSize(NamedTuple):
    """A number of rows and their width in tokens."""

    rows: int
    width: int


@dataclass(frozen=True)
class Placement:
    """Packed positions of the texts of a batch."""

    order: np.ndarray  # Rows of the texts in the batch [N], bin after bin
    starts: np.ndarray  # First position of each text in the concatenated rows of its bin [N]
    rows: int  # Rows of each bin
    width: int  # Tokens of a row


def assign_in_snake_order(lengths: np.ndarray, bins: int) -> np.ndarray:
    """Return an assignment of texts to bins [bins, N / bins]: the longest texts first, in the order of the bins and in
    the reverse order by turns.

    This is best if many texts are as long as a row, because every bin gets the same number of them.
    """
    rounds = np.argsort(-lengths, kind="stable").reshape(-1, bins)
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds.T


def assign_to_smallest(lengths: np.ndarray, bins: int) -> np.ndarray:
    """Return an assignment of texts to bins [bins, N / bins]: every round gives each bin a text, and the bin with the
    fewest tokens gets the longest one.

    This is best if few texts are long, because every bin gets about the same number of tokens.
    """
    rounds = np.argsort(-lengths, kind="stable").reshape(-1, bins)
    assignment, tokens = np.empty_like(rounds), np.zeros(bins, np.int64)
    for round_of_texts, texts in zip(assignment, rounds):
        smallest = np.argsort(tokens, kind="stable")
        round_of_texts[smallest] = texts
        tokens[smallest] += lengths[texts]
    return assignment.T


def fit_into_rows(lengths: np.ndarray, width: int) -> Placement:
    """Pack texts into rows of `width` tokens by best fit: the longest text first, each into the row where it leaves the
    least room.

    Texts are ordered by position. Texts without tokens come last, after all rows. Raises ValueError if a text is longer
    than a row.
    """
    starts = np.zeros(len(lengths), np.int64)
    room: dict[int, list[int]] = defaultdict(list)  # free tokens -> rows
    free, rows = 0, 0  # bit n of `free` is set if a row has n free tokens
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
    """Pack all texts of a batch. They are assigned to bins in the way that needs the fewest rows; `rows` is the maximum
    over the bins."""
    ways = (assign_in_snake_order, assign_to_smallest) if bins > 1 else (assign_in_snake_order,)
    assignments = [_exchange_texts(assign(lengths, bins), lengths, width) for assign in ways]

    def place_bins(bins_of_texts: np.ndarray) -> Placement:
        placements = [fit_into_rows(lengths[texts], width) for texts in bins_of_texts]
        order = np.concatenate([texts[placement.order] for texts, placement in zip(bins_of_texts, placements)])
        return Placement(
            order,
            np.concatenate([placement.starts for placement in placements]),
            max(placement.rows for placement in placements),
            width,
        )

    return min(map(place_bins, assignments), key=lambda placement: placement.rows)


def _exchange_texts(assignment: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """Return an assignment [bins, N / bins] that needs fewer rows, if exchanges of texts between bins lead to one."""
    if assignment.shape[1] > FEW_TEXTS:
        return assignment
    rows = np.array([fit_into_rows(lengths[texts], width).rows for texts in assignment])
    least = max(1, -(-int(lengths.sum()) // (len(assignment) * width)))
    while (largest := int(rows.max())) > least:
        new_assignment, new_rows = assignment.copy(), rows.copy()
        full_bins = np.flatnonzero(rows == largest).tolist()
        if not all(_exchange(new_assignment, new_rows, bin, lengths, width) for bin in full_bins):
            break
        assignment, rows = new_assignment, new_rows
    return assignment


def _exchange(assignment: np.ndarray, rows: np.ndarray, bin: int, lengths: np.ndarray, width: int) -> bool:
    """Exchange a text of a bin for a shorter text of another bin, in place, so that both have fewer rows than the bin
    had. Return whether such a pair was found.

    At most EXCHANGES pairs are tried. The pairs that leave about equally many tokens in both bins come first.

    Args:
        assignment: texts of each bin [bins, N / bins].
        rows: number of rows of each bin.
        bin: the number of the bin that has too many rows.
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
    for long_text, other_bin, short_text in pairs[np.argsort(larger, kind="stable")[:EXCHANGES]]:
        bins = assignment[[bin, other_bin]]
        bins[0, long_text], bins[1, short_text] = bins[1, short_text], bins[0, long_text]
        rows_needed = [fit_into_rows(lengths[texts], width).rows for texts in bins]
        if max(rows_needed) <= target:
            assignment[[bin, other_bin]], rows[[bin, other_bin]] = bins, rows_needed
            return True
    return False


@dataclass(frozen=True)
class RowShape:
    """Shapes of the packed rows for the queries of a run, or for its passages."""

    length: int  # Padded length of a text at the output of the encoder, in tokens
    slots: int  # Number of positions that replace the first token of a text
    sizes: tuple[RowsSize, ...]  # Sizes that a bin may have, the smallest first; the last one has room for all texts

    def __str__(self) -> str:
        *usual, last = self.sizes
        sizes = dict.fromkeys(f"{size.rows} x {size.width}" for size in usual)
        return f"{', '.join(sizes)} or at most {last.rows} x {last.width}"

    def place(self, lengths: np.ndarray, bins: int, width: int) -> Placement:
        """Pack all texts of a batch into rows (`place_texts`). Longer texts count as texts of `length` tokens.

        Args:
            lengths: lengths of the texts in tokens [N].
            bins: number of bins, which all get the same number of texts.
            width: tokens of a row.

        Raises:
            ValueError: a text is longer than a row.
        """
        return place_texts(packed_lengths(np.minimum(lengths, self.length), self.slots), bins, width)


@dataclass(frozen=True)
class Packer:
    """Packer of every batch of a run.

    Queries and passages have the same number of sizes, used in pairs. A batch takes the first pair into which both fit,
    so a run compiles at most one program for each pair.
    """

    bins: int
    queries: RowShape
    passages: RowShape

    def __str__(self) -> str:
        sides = (f"{name} in {side}" for name, side in (("queries", self.queries), ("passages", self.passages)))
        return f"packed for each of {self.bins} devices and chunks, rows x tokens: {'; '.join(sides)}"

    def __call__(self, queries: np.ndarray, passages: np.ndarray) -> tuple[Placement, Placement]:
        """Return the packed positions of queries and of passages with these lengths. Length 0 is an empty slot."""
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

    The cost of a size is a transformer's work: each token costs 1 + width / (6 * hidden size), because attention grows
    with the width. Rows wider than the longest text waste less room, but only few widths are tried. The sizes are:

    - two usual ones (three for several bins, because single bins differ more than whole batches),
    - a rare one: the largest number of rows in the sample, plus its distance to the median,
    - one row for every text, as many as without packing, so that every batch has a program.

    Args:
        sample: lengths [N] of the texts of some batches.
        length: lengths are cut at this number of tokens.
        slots: positions that replace the first token of a text.
        bins: parts of a batch that are packed separately.
        hidden_size: hidden size of the encoder.
        usual: share of the sample that fits into the usual size, which is then the only one. None: the usual sizes are
            those with which the sample costs least.
    """
    longest, largest_count, count = length + slots - 1, len(sample[0]) // bins, 2 if bins == 1 else 3
    first = -(-longest // STEP) * STEP
    widths = range(first, max(256, 2 * first) + 1, max(STEP, first // WIDTHS // STEP * STEP))
    packed_sample = [packed_lengths(np.minimum(lengths, length), slots) for lengths in sample]
    row_counts = {
        width: np.array([place_texts(lengths, bins, width).rows for lengths in packed_sample]) for width in widths
    }

    def work(rows: float, width: int) -> float:
        return rows * width * (1 + width / (6 * hidden_size))

    def above(counts: np.ndarray) -> int:
        return min(largest_count, 2 * int(counts.max()) - int(np.quantile(counts, 0.5, method="higher")))

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
    return RowShape(length, slots, (*sizes, RowsSize(largest_count, first)))


def _cheapest_together(costs: np.ndarray, count: int) -> list[int]:
    """Return `count` rows of costs [choices, batches] with a small total cost, where each batch takes its cheapest row.

    The rows are chosen one by one. Then each is replaced, `count` times, by the row that fits best with the other ones.
    """
    picks: list[int] = []

    def best(other_picks: list[int]) -> int:
        least = costs[other_picks].min(axis=0, initial=np.inf)
        return int(np.minimum(costs, least).sum(axis=1).argmin())

    while len(picks) < count:
        picks.append(best(picks))
    for _ in range(count):
        for place in range(count):
            picks[place] = best(picks[:place] + picks[place + 1 :])
    return picks
