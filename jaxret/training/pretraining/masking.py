"""Whole-word masking, drawn on the host at every step from (seed, step, row) alone.

A word begins where a token is not a continuation ("##" of WordPiece). As in BERT's whole-word masking, words come in
random order; each is hidden if it fits into the rest of the budget, max(1, round(rate * length)) tokens, and else
skipped. Of the hidden tokens 80 % become [MASK], 10 % a random token, and 10 % stay (Devlin et al. 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from jaxret.data.tokens.tokenizer import TextTokenizer


@dataclass(frozen=True)
class MaskingVocabulary:
    """The properties of token ids that masking needs."""

    continues: Bool[np.ndarray, " V"]  # whether a token continues a word
    special: Bool[np.ndarray, " V"]  # whether it is a marker, which is never hidden
    mask_id: int  # of [MASK]

    @classmethod
    def from_tokenizer(cls, tokenizer: TextTokenizer) -> MaskingVocabulary:
        """Return those of a tokenizer. Raises ValueError without a [MASK], or without marks of where words begin."""
        if tokenizer.mask_id is None:
            raise ValueError("the tokenizer has no [MASK]; pre-training hides tokens behind it")
        ids = tokenizer.backend.get_vocab(with_added_tokens=True)
        tokens = np.empty(max(ids.values()) + 1, object)
        tokens[:] = ""
        for token, number in ids.items():
            tokens[number] = token
        special = np.zeros(len(tokens), bool)
        special[[number for number in tokenizer.special_ids.values() if number is not None]] = True
        return cls(_continues(list(tokens)) & ~special, special, tokenizer.mask_id)

    def word_numbers(self, ids: Int[np.ndarray, " T"]) -> Int[np.ndarray, " T"]:
        """Return the number of each token's word, from 0; -1 for markers. The first token always begins a word."""
        real = ~self.special[ids]
        inside = self.continues[ids] & np.concatenate([[False], real[:-1]])
        return np.where(real, np.cumsum(real & ~inside) - 1, -1)


def _continues(tokens: list[str]) -> Bool[np.ndarray, " V"]:
    """Return whether each token continues a word.

    WordPiece marks tokens that continue one; byte-pair encodings and SentencePiece mark those that begin one. The mark
    is the one that most tokens begin with: in texts with Markdown headings "##" is a word too."""
    marks = {mark: np.array([token.startswith(mark) for token in tokens]) for mark in ("##", "Ġ", "▁")}
    mark = max(marks, key=lambda prefix: int(marks[prefix].sum()))
    if marks[mark].any():
        return marks[mark] if mark == "##" else ~marks[mark]
    raise ValueError("none of the tokenizer's tokens begins with '##', 'Ġ' or '▁': where words begin cannot be seen")


def masking_budget(rate: float, length: int) -> int:
    """Return how many tokens of a text of `length` may be hidden."""
    return max(1, round(rate * length))


def draw_hidden(
    words: Int[np.ndarray, " T"], most: int, random: np.random.Generator, count: int = 1
) -> Bool[np.ndarray, "count T"]:
    """Draw words to hide.

    Args:
        words: number of each token's word, as of `MaskingVocabulary.word_numbers`.
        most: tokens of a draw.
        count: of independent draws.
    """
    sizes = np.bincount(words[words >= 0])
    order = np.argsort(random.random((count, len(sizes))), axis=1)
    choice = np.zeros(order.shape, bool)
    np.put_along_axis(choice, order, _fitting(sizes[order], most), axis=1)
    return choice[:, words] & (words >= 0) if len(sizes) else np.zeros((count, len(words)), bool)


def _fitting(sizes: Int[np.ndarray, "count W"], most: int) -> Bool[np.ndarray, "count W"]:
    """Return which words of each row are chosen, from left to right, skipping words that do not fit any more."""
    choice = sizes <= most
    while True:
        totals = np.cumsum(np.where(choice, sizes, 0), axis=1)
        over = choice & (totals > most)
        if not np.any(over):
            return choice
        first = np.argmax(over, axis=1)[:, None]  # up to this word nothing changes any more
        left = most - np.take_along_axis(totals - sizes, first, axis=1)
        after = np.arange(sizes.shape[1]) >= first
        choice &= ~(np.any(over, axis=1, keepdims=True) & after & (sizes > left))


def corrupt(
    ids: Int[np.ndarray, " T"],
    mask: Bool[np.ndarray, " T"],
    vocabulary: MaskingVocabulary,
    random: np.random.Generator,
) -> Int[np.ndarray, " T"]:
    """Return the text as the encoder reads it: 80 % of the chosen tokens masked, 10 % replaced, 10 % unchanged.

    Args:
        ids: of the text.
        mask: tokens to hide.
        vocabulary: of the tokenizer.
    """
    draw, others = random.random(len(ids)), random.integers(len(vocabulary.special), size=len(ids))
    replacement = np.where(draw < 0.8, vocabulary.mask_id, np.where(draw < 0.9, others, ids))
    return np.where(mask, replacement, ids).astype(np.int32)


def decoder_mask(
    words: Int[np.ndarray, " T"], rate: float, masks: int, random: np.random.Generator
) -> Bool[np.ndarray, "T T"]:
    """Return the attention mask of RetroMAE's decoder (Xiao et al. 2022). A row sees neither itself nor the words that
    its draw hides; every row sees markers.

    Args:
        words: number of each token's word; -1 for markers.
        rate: of tokens that a draw hides.
        masks: number of draws, at most T; each row is given one of them.
    """
    length = len(words)
    draws = draw_hidden(words, masking_budget(rate, length), random, min(length, masks))
    visible = ~draws[random.integers(len(draws), size=length)]
    np.fill_diagonal(visible, False)
    return visible
