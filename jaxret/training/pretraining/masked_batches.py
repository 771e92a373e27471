"""Batches of spans with hidden tokens. A batch is a pure function of seeds and its number, so a resumed run needs only
its step, and each process makes its own rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxret.data.tokens.batches import padded_batch_size, shuffled_rows
from jaxret.training.pretraining.masking import MaskingVocabulary, corrupt, decoder_mask, draw_hidden, masking_budget
from jaxret.training.pretraining.spans import Spans
from jaxret.types import MaskedTexts, Tokens


@dataclass(frozen=True)
class MaskedBatches:
    """How spans become batches over all processes: the training plan of pre-training."""

    spans: Spans  # spans of the corpus
    vocabulary: MaskingVocabulary  # properties of the tokenizer's ids
    markers: tuple[int, int]  # ids of [CLS] and [SEP]
    pad_id: int  # id of padding
    size: int  # examples of a batch
    devices: int  # number of devices; a batch is padded with empty rows to a multiple of it
    length: int  # tokens of a row, markers included
    rate: float  # fraction of tokens to hide
    data_seed: int  # seed that draws the examples
    mask_seed: int  # seed that draws the hidden tokens
    in_pairs: bool = False  # whether an example is two spans of a document; if not, it is one span
    decoder: tuple[float, int] | None = None  # (rate, masks) of RetroMAE's decoder; None: the method has no decoder

    packer: None = None  # every row is a text

    def __len__(self) -> int:
        """Return the number of examples of an epoch."""
        return len(self.spans.documents_with_pairs) if self.in_pairs else len(self.spans)

    @property
    def batch_size(self) -> int:
        """Number of spans in a batch."""
        return self.size * (2 if self.in_pairs else 1)

    @property
    def padded_size(self) -> int:
        """Number of spans of a batch, empty slots included: a multiple of the devices."""
        return padded_batch_size(self.batch_size, self.devices)

    def spans_of(self, batch_number: int) -> np.ndarray:
        """Return the numbers of the spans of a batch [rows]; -1 is an empty row. With `in_pairs`, two spans of a
        document are drawn in each epoch."""
        examples = shuffled_rows(self.data_seed, batch_number, self.size, len(self))
        if self.in_pairs:
            first = self.spans.first
            documents = self.spans.documents_with_pairs[examples]
            # The seed has as many numbers as the seeds of masks, and differs from them.
            random = np.random.default_rng((self.data_seed, batch_number, 0, 2))
            pairs = [first[d] + random.choice(first[d + 1] - first[d], 2, replace=False) for d in documents]
            examples = np.concatenate(pairs)
        return np.concatenate([examples, np.full(self.padded_size - len(examples), -1)])

    def training_batch(self, data: object, batch_number: int, part: tuple[int, int] = (0, 1)) -> MaskedTexts:
        """Return a process's rows of a batch. `data` is not used, because `spans` has the data."""
        return self(batch_number, part)

    def __call__(self, batch_number: int, part: tuple[int, int] = (0, 1)) -> MaskedTexts:
        """Return the rows of a batch that belong to process `part[0]` of `part[1]`, as host arrays."""
        index, count = part
        spans = self.spans_of(batch_number)
        rows = range(index * len(spans) // count, (index + 1) * len(spans) // count)
        trees = [
            self._make_row(int(spans[row]), np.random.default_rng((self.mask_seed, batch_number, row, 1)))
            for row in rows
        ]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    def describe_batch(self, data: object, batch_number: int) -> str:
        """Return the first documents of a batch, for an error."""
        spans = self.spans_of(batch_number)
        documents = np.searchsorted(self.spans.first, spans[spans >= 0][:8], side="right")
        return f"documents {', '.join(map(str, documents))} of the corpus (from 1)"

    def _make_row(self, span: int, random: np.random.Generator) -> MaskedTexts:
        text, length = np.full(self.length, self.pad_id, np.int32), 0
        if span >= 0:
            ids = np.concatenate([self.markers[:1], self.spans[span], self.markers[1:]])
            text[: len(ids)], length = ids, len(ids)
        real, budget = np.arange(self.length) < length, masking_budget(self.rate, self.length)
        words = self.vocabulary.word_numbers(text[:length])
        hidden = np.zeros(self.length, bool)
        # RetroMAE's rate counts markers, though they are never hidden.
        token_count = length if self.decoder else int((words >= 0).sum())
        hidden[:length] = draw_hidden(words, masking_budget(self.rate, token_count), random)[0]
        positions, labels = np.zeros(budget, np.int32), np.full(budget, -1, np.int32)
        count = int(hidden.sum())
        positions[:count], labels[:count] = np.flatnonzero(hidden), text[hidden]
        texts = MaskedTexts(Tokens(corrupt(text, hidden, self.vocabulary, random), real), positions, labels)
        return texts if self.decoder is None else self._with_decoder_inputs(texts, text, words, random)

    def _with_decoder_inputs(
        self, texts: MaskedTexts, text: np.ndarray, words: np.ndarray, random: np.random.Generator
    ) -> MaskedTexts:
        assert self.decoder is not None
        visible, length = np.zeros((self.length, self.length), bool), len(words)
        if length:
            visible[:length, :length] = decoder_mask(words, *self.decoder, random)
        targets = np.full(self.length, -1, np.int32)
        targets[:length] = np.where(words >= 0, text[:length], -1)
        return replace(texts, original_ids=text, attention_mask=visible, targets=targets)
