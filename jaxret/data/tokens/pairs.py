"""Pairs of a query and a passage, as a cross-encoder reads them: [CLS] query [SEP] passage [SEP]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxret.data.tokens.batches import BatchPlan, TrainingSet
from jaxret.data.tokens.packing import Packer
from jaxret.types import PairBatch, Ragged, Tokens


@dataclass(frozen=True)
class PairJoiner:
    """Joins the token ids of a query, [CLS] query [SEP], and of a passage, [CLS] passage [SEP], to a pair."""

    between: tuple[int, ...]  # Ids of further markers between query and passage (RoBERTa's second </s>)
    # Upper bound of a pair's length in tokens. A longer pair loses the end of its passage, but keeps the last [SEP].
    limit: int
    pad_id: int  # Id of padding

    def lengths(
        self, queries: Ragged, passages: Ragged, query_rows: np.ndarray, passage_rows: np.ndarray
    ) -> np.ndarray:
        """Return the length of each pair in tokens, cut at `limit`; 0 if the pair has no query or no passage.

        Args:
            queries, passages, query_rows, passage_rows: see `tokens`.
        """
        return np.minimum(self.whole_lengths(queries, passages, query_rows, passage_rows), self.limit)

    def whole_lengths(
        self, queries: Ragged, passages: Ragged, query_rows: np.ndarray, passage_rows: np.ndarray
    ) -> np.ndarray:
        """Return the length of each pair in tokens before it is cut; 0 if the pair has no query or no passage.

        Args:
            queries, passages, query_rows, passage_rows: see `tokens`.
        """
        exists = (query_rows >= 0) & (passage_rows >= 0)
        sums = queries.lengths_of(np.maximum(query_rows, 0)) + passages.lengths_of(np.maximum(passage_rows, 0)) - 1
        return np.where(exists, sums + len(self.between), 0)

    def tokens(
        self, queries: Ragged, passages: Ragged, query_rows: np.ndarray, passage_rows: np.ndarray, length: int
    ) -> Tokens:
        """Return padded pairs [N, length]; the tokens of the passage have type 1.

        Args:
            queries: token ids of queries.
            passages: token ids of passages.
            query_rows: row of each pair's query [N]; -1: no pair.
            passage_rows: row of each pair's passage [N]; -1: no pair.
            length: padded length in tokens.
        """
        sizes = self.lengths(queries, passages, query_rows, passage_rows)
        ids = np.full((len(query_rows), length), self.pad_id, np.int32)
        first = np.zeros(len(query_rows), np.int32)
        for row in np.flatnonzero(sizes):
            query, passage = queries[query_rows[row]], passages[passage_rows[row]]
            first[row] = len(query) + len(self.between)
            pair = np.concatenate([query, np.array(self.between, query.dtype), passage[1:]])[: sizes[row]]
            pair[-1] = passage[-1]
            ids[row, : sizes[row]] = pair
        return Tokens(ids, np.arange(length) < sizes[:, None], first=first)


@dataclass(frozen=True)
class PairPlan:
    """Makes batches of pairs: each query with its positive and its hard negatives, as drawn by `plan`."""

    plan: BatchPlan
    joiner: PairJoiner
    packer: Packer | None = None  # always None: pairs are not packed

    @property
    def batch_size(self) -> int:
        """Number of queries of a batch, each with its pairs."""
        return self.plan.batch_size

    @property
    def padded_size(self) -> int:
        """Number of queries of a batch, empty slots included: a multiple of the devices."""
        return self.plan.padded_size

    def describe_batch(self, data: TrainingSet, batch_number: int) -> str:
        """Return the ids of a training batch's first queries, for an error message."""
        return self.plan.describe_batch(data, batch_number)

    def training_batch(self, data: TrainingSet, batch_number: int, part: tuple[int, int] = (0, 1)) -> PairBatch:
        """Return the rows of a batch that belong to process `part[0]` of `part[1]`.

        The padded length is chosen from the whole batch, so every process compiles the same program.
        """
        examples = self.plan.pad_examples(self.plan.batch_examples(batch_number, len(data)))
        group = 1 + self.plan.negatives
        query_rows = np.repeat(examples, group)
        passage_rows = self.plan.passage_rows(data, examples, batch_number).reshape(-1, group)
        passage_rows = without_positives(data, examples, passage_rows)
        longest = int(self.joiner.lengths(data.queries, data.passages, query_rows, passage_rows).max())
        multiple = self.plan.length_multiple
        length = min(-(-longest // multiple) * multiple, self.joiner.limit)
        index, count = part
        mine = slice(index * len(examples) // count, (index + 1) * len(examples) // count)
        pairs = slice(mine.start * group, mine.stop * group)
        scores = self.plan.teacher_scores(data, examples, batch_number)
        return PairBatch(
            pairs=self.joiner.tokens(data.queries, data.passages, query_rows[pairs], passage_rows[pairs], length),
            positives=np.where(examples >= 0, np.arange(len(examples)) * group, -1)[mine].astype(np.int32),
            passage_ids=passage_rows.reshape(-1, group)[mine],
            teacher_scores=None if scores is None else scores[mine],
        )


def without_positives(data: TrainingSet, examples: np.ndarray, passage_rows: np.ndarray) -> np.ndarray:
    """Return the passage rows of a batch [examples * G], with known positives among the negatives replaced by -1.

    Such passages are not negatives of a retriever either (`competing_passages`).
    """
    known_positives = data.known_positives.table(np.maximum(examples, 0))
    is_positive = (passage_rows[:, :, None] == known_positives[:, None, :]).any(axis=-1)
    is_positive[:, 0] = False  # the target stays
    return np.where(is_positive, -1, passage_rows).reshape(-1)
