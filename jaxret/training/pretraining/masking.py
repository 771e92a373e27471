"""Whole-word masking, drawn on the host for every batch, depending only on (seed, number of the batch, row).

A word begins at a token that is not a continuation ("##" in WordPiece). As in BERT's whole-word masking, words come in
random order. A word is hidden if it fits into what is left of the budget, max(1, round(rate * length)) tokens, and
skipped if not. Of the hidden tokens, 80 % become [MASK], 10 % a random token, and 10 % stay (Devlin et al. 2019).
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
    special: Bool[np.ndarray, " V"]  # whether a token is a marker, which is never hidden
    mask_id: int  # id of [MASK]

    @classmethod
    def from_tokenizer(cls, tokenizer: TextTokenizer) -> MaskingVocabulary:
        """Return the properties of a tokenizer's ids. Raises ValueError if it has no [MASK], or if its tokens do not
        show where words begin."""
        if tokenizer.mask_id is None:
            raise ValueError("the tokenizer has no [MASK], which pre-training needs; choose another encoder")
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

    WordPiece marks tokens that continue a word; byte-pair encodings and SentencePiece mark tokens that begin one. The
    tokenizer's mark is the prefix of the largest number of tokens, because "##" is also a word in Markdown texts.
    """
    marks = {mark: np.array([token.startswith(mark) for token in tokens]) for mark in ("##", "Ġ", "▁")}
    mark = max(marks, key=lambda prefix: int(marks[prefix].sum()))
    if marks[mark].any():
        return marks[mark] if mark == "##" else ~marks[mark]
    raise ValueError("no token of the tokenizer begins with '##', 'Ġ' or '▁', so the beginnings of words are unknown")


def masking_budget(rate: float, length: int) -> int:
    """Return the number of tokens that may be hidden in a text of `length` tokens."""
    return max(1, round(rate * length))


def draw_hidden(
    words: Int[np.ndarray, " T"], budget: int, random: np.random.Generator, count: int = 1
) -> Bool[np.ndarray, "count T"]:
    """Draw words to hide, and return a mask of their tokens for each draw.

    Args:
        words: number of each token's word, from `MaskingVocabulary.word_numbers`.
        budget: largest number of tokens to hide.
        random: source of random numbers.
        count: number of independent draws.
    """
    sizes = np.bincount(words[words >= 0])
    order = np.argsort(random.random((count, len(sizes))), axis=1)
    choice = np.zeros(order.shape, bool)
    np.put_along_axis(choice, order, _choose_words(sizes[order], budget), axis=1)
    return choice[:, words] & (words >= 0) if len(sizes) else np.zeros((count, len(words)), bool)


def _choose_words(sizes: Int[np.ndarray, "count W"], budget: int) -> Bool[np.ndarray, "count W"]:
    """Return a mask of the words of each row that are hidden: from left to right, each word that still fits into the
    budget. `sizes` are the words' numbers of tokens."""
    choice = sizes <= budget
    while True:
        totals = np.cumsum(np.where(choice, sizes, 0), axis=1)
        over = choice & (totals > budget)
        if not np.any(over):
            return choice
        first = np.argmax(over, axis=1)[:, None]  # the choice of earlier words is final
        room = budget - np.take_along_axis(totals - sizes, first, axis=1)
        is_later = np.arange(sizes.shape[1]) >= first
        choice &= ~(np.any(over, axis=1, keepdims=True) & is_later & (sizes > room))


def corrupt(
    ids: Int[np.ndarray, " T"],
    mask: Bool[np.ndarray, " T"],
    vocabulary: MaskingVocabulary,
    random: np.random.Generator,
) -> Int[np.ndarray, " T"]:
    """Return the ids that the encoder reads. Of the tokens in `mask`, 80 % become [MASK], 10 % a random token, and 10 %
    stay.

    Args:
        ids: token ids of the text.
        mask: True for tokens to hide.
        vocabulary: properties of the tokenizer's ids.
        random: source of random numbers.
    """
    draw, random_ids = random.random(len(ids)), random.integers(len(vocabulary.special), size=len(ids))
    replacement = np.where(draw < 0.8, vocabulary.mask_id, np.where(draw < 0.9, random_ids, ids))
    return np.where(mask, replacement, ids).astype(np.int32)


def decoder_mask(
    words: Int[np.ndarray, " T"], rate: float, masks: int, random: np.random.Generator
) -> Bool[np.ndarray, "T T"]:
    """Return the attention mask of RetroMAE's decoder (Xiao et al. 2022). A position sees the markers and the words
    that its draw does not hide, but not itself.

    Args:
        words: number of each token's word; -1 for markers.
        rate: fraction of tokens that a draw hides.
        masks: number of draws, at most T; each position has one of them.
        random: source of random numbers.
    """
    length = len(words)
    draws = draw_hidden(words, masking_budget(rate, length), random, min(length, masks))
    visible = ~draws[random.integers(len(draws), size=length)]
    np.fill_diagonal(visible, False)
    return visible
