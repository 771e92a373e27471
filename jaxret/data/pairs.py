"""Queries and passages joined, as a cross-encoder reads them: [CLS] query [SEP] passage [SEP]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxret.data.batches import BatchPlan, TrainingSet
from jaxret.data.packing import Packer
from jaxret.types import PairBatch, Ragged, Tokens


@dataclass(frozen=True)
class Joiner:
    """How token ids of a query, [CLS] query [SEP], and of a passage, [CLS] passage [SEP], become those of a pair.

    between: ids of further markers between them (RoBERTa's second </s>). limit: tokens of a pair; what is longer loses
    the end of its passage, but for the last [SEP].
    """

    between: tuple[int, ...]
    limit: int
    pad_id: int

    def lengths(self, queries: Ragged, passages: Ragged, asked: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Tokens of pairs, by rows of queries and passages; 0 where either is -1."""
        return np.minimum(self.whole_lengths(queries, passages, asked, found), self.limit)

    def whole_lengths(self, queries: Ragged, passages: Ragged, asked: np.ndarray, found: np.ndarray) -> np.ndarray:
        """The same before pairs are cut."""
        there = (asked >= 0) & (found >= 0)
        both = queries.lengths_of(np.maximum(asked, 0)) + passages.lengths_of(np.maximum(found, 0)) - 1
        return np.where(there, both + len(self.between), 0)

    def tokens(self, queries: Ragged, passages: Ragged, asked: np.ndarray, found: np.ndarray, length: int) -> Tokens:
        """Pairs [N,length], padded; of type 1 is what belongs to the passage."""
        sizes = self.lengths(queries, passages, asked, found)
        ids = np.full((len(asked), length), self.pad_id, np.int32)
        first = np.zeros(len(asked), np.int32)
        for row in np.flatnonzero(sizes):
            query, passage = queries[asked[row]], passages[found[row]]
            first[row] = len(query) + len(self.between)
            pair = np.concatenate([query, np.array(self.between, query.dtype), passage[1:]])[: sizes[row]]
            pair[-1] = passage[-1]
            ids[row, : sizes[row]] = pair
        return Tokens(ids, np.arange(length) < sizes[:, None], first=first)


@dataclass(frozen=True)
class PairPlan:
    """How examples become batches of pairs: each query with its positive and its hard negatives, as `plan` draws
    them."""

    plan: BatchPlan
    joiner: Joiner
    packer: Packer | None = None  # pairs are not packed

    @property
    def batch_size(self) -> int:
        return self.plan.batch_size

    @property
    def places(self) -> int:
        return self.plan.places

    def named(self, data: TrainingSet, number: int) -> str:
        """What a batch begins with, for an error."""
        return self.plan.named(data, number)

    def training_batch(self, data: TrainingSet, step: int, part: tuple[int, int] = (0, 1)) -> PairBatch:
        """The rows of a step's batch that belong to process `part[0]` of `part[1]`. The length of pairs is chosen from
        the whole batch, so every process compiles the same program."""
        examples, group = self.plan.filled(self.plan.examples_of(step, len(data))), 1 + self.plan.negatives
        documents = without_positives(data, examples, self.plan.documents_of(data, examples, step).reshape(-1, group))
        asked = np.repeat(examples, group)
        longest = int(self.joiner.lengths(data.queries, data.passages, asked, documents).max())
        multiple = self.plan.length_multiple
        length = min(-(-longest // multiple) * multiple, self.joiner.limit)
        index, count = part
        mine = slice(index * len(examples) // count, (index + 1) * len(examples) // count)
        pairs = slice(mine.start * group, mine.stop * group)
        scores = self.plan.teacher_scores(data, examples, step)
        return PairBatch(
            pairs=self.joiner.tokens(data.queries, data.passages, asked[pairs], documents[pairs], length),
            positives=np.where(examples >= 0, np.arange(len(examples)) * group, -1)[mine].astype(np.int32),
            document_ids=documents.reshape(-1, group)[mine],
            teacher_scores=None if scores is None else scores[mine],
        )


def without_positives(data: TrainingSet, examples: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Rows of passages of a batch [examples * G]: negatives [examples,1..G) that are known to be relevant to their
    query are empty slots, -1, as they are no candidates of a retriever (`training.losses.candidates`)."""
    known = data.known_positives[np.maximum(examples, 0)]
    again = (documents[:, :, None] == known[:, None, :]).any(axis=-1)
    again[:, 0] = False  # the target
    return np.where(again, -1, documents).reshape(-1)
