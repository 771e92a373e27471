"""Batches of spans with hidden tokens, each a pure function of (seeds, number): a resumed run needs only its step, and
each process makes its own rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxret.data.tokens.batches import padded_batch_size, shuffled_rows
from jaxret.training.pretraining.masking import MaskingVocabulary, corrupt, decoder_mask, draw_hidden, masking_budget
from jaxret.training.pretraining.spans import Spans
from jaxret.types import MaskedTexts, Tokens


@dataclass(frozen=True)
class MaskedBatches:
    """How spans become batches over all processes: the plan of the task of pre-training."""

    spans: Spans  # of the corpus
    vocabulary: MaskingVocabulary  # of the tokenizer
    markers: tuple[int, int]  # ids of [CLS] and [SEP]
    pad_id: int  # of the tokenizer
    size: int  # examples of a batch
    devices: int  # empty rows follow where they do not divide a batch
    length: int  # tokens of a row, markers included
    rate: float  # of tokens to hide
    data_seed: int  # draws the examples
    mask_seed: int  # draws the hidden tokens
    in_pairs: bool = False  # whether an example is a document with two of its spans side by side; else it is a span
    decoder: tuple[float, int] | None = None  # (rate, masks) of RetroMAE's decoder; None: the method has none

    packer: None = None  # every row is a text

    def __len__(self) -> int:
        """Return the examples of an epoch."""
        return len(self.spans.paired) if self.in_pairs else len(self.spans)

    @property
    def batch_size(self) -> int:
        """Spans of a batch."""
        return self.size * (2 if self.in_pairs else 1)

    @property
    def padded_size(self) -> int:
        return padded_batch_size(self.batch_size, self.devices)

    def spans_of(self, number: int) -> np.ndarray:
        """Return the spans of a batch [rows]; -1 is an empty row. Two spans of a document are drawn in each epoch."""
        examples = shuffled_rows(self.data_seed, number, self.size, len(self))
        if self.in_pairs:
            first = self.spans.first
            documents = self.spans.paired[examples]
            random = np.random.default_rng(
                (self.data_seed, number, 0, 2)
            )  # as long as the seeds of masks, but different
            pairs = [first[d] + random.choice(first[d + 1] - first[d], 2, replace=False) for d in documents]
            examples = np.concatenate(pairs)
        return np.concatenate([examples, np.full(self.padded_size - len(examples), -1)])

    def training_batch(self, data: Any, number: int, part: tuple[int, int] = (0, 1)) -> MaskedTexts:
        """Return a process's rows of a batch. data: unused, the spans are known."""
        return self(number, part)

    def __call__(self, number: int, part: tuple[int, int] = (0, 1)) -> MaskedTexts:
        """Return the rows of a batch that belong to process `part[0]` of `part[1]`, as host arrays."""
        index, count = part
        spans = self.spans_of(number)
        rows = range(index * len(spans) // count, (index + 1) * len(spans) // count)
        trees = [self._row(int(spans[row]), np.random.default_rng((self.mask_seed, number, row, 1))) for row in rows]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    def describe_batch(self, data: Any, number: int) -> str:
        """Return the documents that a batch begins with, for an error."""
        spans = self.spans_of(number)
        documents = np.searchsorted(self.spans.first, spans[spans >= 0][:8], side="right")
        return f"documents {', '.join(map(str, documents))} of the corpus (from 1)"

    def _row(self, span: int, random: np.random.Generator) -> MaskedTexts:
        text, length = np.full(self.length, self.pad_id, np.int32), 0
        if span >= 0:
            ids = np.concatenate([self.markers[:1], self.spans[span], self.markers[1:]])
            text[: len(ids)], length = ids, len(ids)
        real, most = np.arange(self.length) < length, masking_budget(self.rate, self.length)
        words = self.vocabulary.word_numbers(text[:length])
        hidden = np.zeros(self.length, bool)
        token_count = (
            length if self.decoder else int((words >= 0).sum())
        )  # RetroMAE's rate counts markers, though they are never hidden
        hidden[:length] = draw_hidden(words, masking_budget(self.rate, token_count), random)[0]
        positions, labels = np.zeros(most, np.int32), np.full(most, -1, np.int32)
        count = int(hidden.sum())
        positions[:count], labels[:count] = np.flatnonzero(hidden), text[hidden]
        texts = MaskedTexts(Tokens(corrupt(text, hidden, self.vocabulary, random), real), positions, labels)
        return texts if self.decoder is None else self._decoded(texts, text, words, random)

    def _decoded(
        self, texts: MaskedTexts, text: np.ndarray, words: np.ndarray, random: np.random.Generator
    ) -> MaskedTexts:
        assert self.decoder is not None
        visible, length = np.zeros((self.length, self.length), bool), len(words)
        if length:
            visible[:length, :length] = decoder_mask(words, *self.decoder, random)
        targets = np.full(self.length, -1, np.int32)
        targets[:length] = np.where(words >= 0, text[:length], -1)
        return replace(texts, original_ids=text, attention_mask=visible, targets=targets)
