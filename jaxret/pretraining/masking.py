"""Which tokens are hidden: whole words, drawn anew at every step from (seed, step, row) alone, on the host.

A word begins where a token is no continuation ("##" of WordPiece). As in BERT's whole-word masking: words come in
random order, each is hidden if it still fits into what may be hidden, max(1, round(rate * length)) tokens, and else
skipped. Of the hidden tokens 80 % become [MASK], 10 % a random one, and 10 % stay. [Devlin et al. 2019]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from jaxret.data.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Vocabulary:
    """What masking knows of a tokenizer. continues, special: of each id, whether it goes on with a word, and whether it
    is a marker, which is never hidden."""

    continues: Bool[np.ndarray, " V"]
    special: Bool[np.ndarray, " V"]
    mask_id: int

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> Vocabulary:
        """Raises ValueError for a tokenizer that has no [MASK], or whose tokens do not show where words begin."""
        if tokenizer.mask_id is None:
            raise ValueError("the tokenizer has no [MASK]; pre-training hides tokens behind it")
        known = tokenizer.backend.get_vocab(with_added_tokens=True)
        tokens = np.empty(max(known.values()) + 1, object)
        tokens[:] = ""
        for token, number in known.items():
            tokens[number] = token
        special = np.zeros(len(tokens), bool)
        special[[number for number in tokenizer.special_ids.values() if number is not None]] = True
        return cls(_continues(list(tokens)) & ~special, special, tokenizer.mask_id)

    def words(self, ids: Int[np.ndarray, " T"]) -> Int[np.ndarray, " T"]:
        """The number of each token's word, from 0; -1 for markers. A text that begins inside a word begins one."""
        real = ~self.special[ids]
        inside = self.continues[ids] & np.concatenate([[False], real[:-1]])
        return np.where(real, np.cumsum(real & ~inside) - 1, -1)


def _continues(tokens: list[str]) -> Bool[np.ndarray, " V"]:
    """Of each token, whether it goes on with a word. In WordPiece those are marked; in byte-pair encodings and
    SentencePiece those that begin one are. The mark is what most tokens begin with: texts with headings in Markdown
    make "##" a word of its own."""
    marked = {mark: np.array([token.startswith(mark) for token in tokens]) for mark in ("##", "Ġ", "▁")}
    mark = max(marked, key=lambda each: int(marked[each].sum()))
    if marked[mark].any():
        return marked[mark] if mark == "##" else ~marked[mark]
    raise ValueError("none of the tokenizer's tokens begins with '##', 'Ġ' or '▁': where words begin cannot be seen")


def budget(rate: float, length: int) -> int:
    """How many tokens of a text of `length` may be hidden."""
    return max(1, round(rate * length))


def hidden(
    words: Int[np.ndarray, " T"], most: int, random: np.random.Generator, count: int = 1
) -> Bool[np.ndarray, "count T"]:
    """`count` draws of whole words, at most `most` tokens in each. words: as `Vocabulary.words`."""
    sizes = np.bincount(words[words >= 0])
    order = np.argsort(random.random((count, len(sizes))), axis=1)
    chosen = np.zeros(order.shape, bool)
    np.put_along_axis(chosen, order, _fitting(sizes[order], most), axis=1)
    return chosen[:, words] & (words >= 0) if len(sizes) else np.zeros((count, len(words)), bool)


def _fitting(sizes: Int[np.ndarray, "count W"], most: int) -> Bool[np.ndarray, "count W"]:
    """Which words are taken of each row, from left to right, skipping those that do not fit any more."""
    taken = sizes <= most
    while True:
        reached = np.cumsum(np.where(taken, sizes, 0), axis=1)
        over = taken & (reached > most)
        if not np.any(over):
            return taken
        first = np.argmax(over, axis=1)[:, None]  # up to there all is as it will be
        left = most - np.take_along_axis(reached - sizes, first, axis=1)
        after = np.arange(sizes.shape[1]) >= first
        taken &= ~(np.any(over, axis=1, keepdims=True) & after & (sizes > left))


def corrupted(
    ids: Int[np.ndarray, " T"], chosen: Bool[np.ndarray, " T"], vocabulary: Vocabulary, random: np.random.Generator
) -> Int[np.ndarray, " T"]:
    """The text as the encoder reads it."""
    draw, others = random.random(len(ids)), random.integers(len(vocabulary.special), size=len(ids))
    found = np.where(draw < 0.8, vocabulary.mask_id, np.where(draw < 0.9, others, ids))
    return np.where(chosen, found, ids).astype(np.int32)


def visible(
    words: Int[np.ndarray, " T"], rate: float, masks: int, random: np.random.Generator
) -> Bool[np.ndarray, "T T"]:
    """What each token's row of RetroMAE's decoder sees: all but the words that one of min(T, `masks`) draws hides at
    `rate`, which one is drawn for each row, and but itself. Markers are always seen, by others. [Xiao et al. 2022]"""
    length = len(words)
    draws = hidden(words, budget(rate, length), random, min(length, masks))
    seen = ~draws[random.integers(len(draws), size=length)]
    np.fill_diagonal(seen, False)
    return seen
