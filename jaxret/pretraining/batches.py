"""Batches of spans with hidden tokens. A batch is a pure function of (seeds, number), so a resumed run needs to know
only its step, and each process makes its own rows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxret.data.batches import places, stream
from jaxret.pretraining.masking import Vocabulary, budget, corrupted, hidden, visible
from jaxret.pretraining.spans import Spans
from jaxret.types import Masked, Tokens


@dataclass(frozen=True)
class Batches:
    """How spans become batches of `size` examples over all processes: of spans, or, if `paired`, of documents, each
    with two of its spans side by side. Rows are `length` tokens, markers included; where `devices` do not divide them,
    empty ones follow. rate: of tokens to hide. decoder: (rate, masks) of RetroMAE's, or None.
    """

    spans: Spans
    vocabulary: Vocabulary
    markers: tuple[int, int]  # [CLS], [SEP]
    pad_id: int
    size: int
    devices: int
    length: int
    rate: float
    data_seed: int
    mask_seed: int
    paired: bool = False
    decoder: tuple[float, int] | None = None

    packer: None = None  # every row is a text

    def __len__(self) -> int:
        """Examples of an epoch."""
        return len(self.spans.paired) if self.paired else len(self.spans)

    @property
    def batch_size(self) -> int:
        """Texts of a batch."""
        return self.size * (2 if self.paired else 1)

    @property
    def places(self) -> int:
        """The same with the empty rows."""
        return places(self.batch_size, self.devices)

    def chosen(self, number: int) -> np.ndarray:
        """The spans of a batch [rows]; -1 is an empty row. Two of a document are drawn anew each time."""
        examples = stream(self.data_seed, number, self.size, len(self))
        if self.paired:
            first = self.spans.first
            documents = self.spans.paired[examples]
            random = np.random.default_rng((self.data_seed, number, 0, 2))  # as long as those of masks, and another
            found = [first[d] + random.choice(first[d + 1] - first[d], 2, replace=False) for d in documents]
            examples = np.concatenate(found)
        return np.concatenate([examples, np.full(self.places - len(examples), -1)])

    def training_batch(self, data: Any, number: int, part: tuple[int, int] = (0, 1)) -> Masked:
        """As the loop asks for it."""
        return self(number, part)

    def __call__(self, number: int, part: tuple[int, int] = (0, 1)) -> Masked:
        """The rows of a batch that belong to process `part[0]` of `part[1]`, as host arrays."""
        index, count = part
        chosen = self.chosen(number)
        rows = range(index * len(chosen) // count, (index + 1) * len(chosen) // count)
        return stack(
            [self._row(int(chosen[row]), np.random.default_rng((self.mask_seed, number, row, 1))) for row in rows]
        )

    def named(self, data: Any, number: int) -> str:
        """What a batch begins with, for an error."""
        chosen = self.chosen(number)
        documents = np.searchsorted(self.spans.first, chosen[chosen >= 0][:8], side="right")
        return f"documents {', '.join(map(str, documents))} of the corpus (from 1)"

    def _row(self, span: int, random: np.random.Generator) -> Masked:
        text, length = np.full(self.length, self.pad_id, np.int32), 0
        if span >= 0:
            ids = np.concatenate([self.markers[:1], self.spans[span], self.markers[1:]])
            text[: len(ids)], length = ids, len(ids)
        real, most = np.arange(self.length) < length, budget(self.rate, self.length)
        words = self.vocabulary.words(text[:length])
        taken = np.zeros(self.length, bool)
        counted = length if self.decoder else int((words >= 0).sum())  # RetroMAE counts markers; nobody hides them
        taken[:length] = hidden(words, budget(self.rate, counted), random)[0]
        found, labels = np.zeros(most, np.int32), np.full(most, -1, np.int32)
        count = int(taken.sum())
        found[:count], labels[:count] = np.flatnonzero(taken), text[taken]
        masked = Masked(Tokens(corrupted(text, taken, self.vocabulary, random), real), found, labels)
        return masked if self.decoder is None else self._decoded(masked, text, words, random)

    def _decoded(self, masked: Masked, text: np.ndarray, words: np.ndarray, random: np.random.Generator) -> Masked:
        assert self.decoder is not None
        seen, length = np.zeros((self.length, self.length), bool), len(words)
        if length:
            seen[:length, :length] = visible(words, *self.decoder, random)
        targets = np.full(self.length, -1, np.int32)
        targets[:length] = np.where(words >= 0, text[:length], -1)
        return replace(masked, whole=text, seen=seen, targets=targets)


def stack(trees: Sequence[Masked]) -> Masked:
    """Rows, or batches, as one."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
