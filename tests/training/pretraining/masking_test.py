"""Whole words are hidden as in the published collators, and the draw depends only on (seed, step, row)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.training.pretraining.masked_batches import MaskedBatches
from jaxret.training.pretraining.masking import (
    MaskingVocabulary,
    _choose_words,
    _continues,
    corrupt,
    decoder_mask,
    draw_hidden,
    masking_budget,
)
from jaxret.training.pretraining.spans import Spans, cut_spans
from jaxret.types import MaskedTexts, Ragged
from tests.pipeline import write_encoder

# Ids: 0 [PAD], 1 [CLS], 2 [SEP], 3 [MASK]; 4 to 13 begin words, 14 to 19 continue words.
CONTINUES = np.arange(20) >= 14
SPECIAL = np.arange(20) < 4
VOCABULARY = MaskingVocabulary(CONTINUES, SPECIAL, mask_id=3)
TEXT = np.array([1, 4, 14, 15, 5, 6, 16, 7, 8, 9, 10, 17, 18, 19, 11, 2])


def greedy(sizes: list[int], most: int) -> list[bool]:
    """The loop of BERT's collator: words in order; a word that does not fit is skipped."""
    taken, count = [], 0
    for size in sizes:
        taken.append(count + size <= most)
        count += size * taken[-1]
    return taken


def test_chosen_words_equal_the_collators_loop() -> None:
    random = np.random.default_rng(0)
    for most in (1, 2, 3, 7, 20):
        sizes = random.integers(1, 6, (40, 12))
        expected = [greedy(row.tolist(), most) for row in sizes]
        assert _choose_words(sizes, most).tolist() == expected
        prefixes = np.cumsum(sizes, axis=1) <= most  # control: only the first words that fit
        assert most == 1 or prefixes.tolist() != expected


def test_words_of_a_text() -> None:
    assert VOCABULARY.word_numbers(TEXT).tolist() == [-1, 0, 0, 0, 1, 2, 2, 3, 4, 5, 6, 6, 6, 6, 7, -1]
    begins_inside = np.array([1, 14, 15, 4, 2, 16, 2])  # the first piece after a marker begins a word
    assert VOCABULARY.word_numbers(begins_inside).tolist() == [-1, 0, 0, 1, -1, 2, -1]


def test_whole_words_up_to_the_budget_and_never_markers() -> None:
    words = VOCABULARY.word_numbers(TEXT)
    draws = draw_hidden(words, 5, np.random.default_rng(1), count=2000)
    for draw in draws[:200]:
        for word in range(words.max() + 1):
            assert len(set(draw[words == word])) == 1  # all tokens of a word are hidden, or none
    assert not draws[:, [0, -1]].any()
    counts = draws.sum(axis=1)
    assert counts.max() == 5
    # Of the words, five have one token: only the word of four can leave one token unfilled.
    assert np.isin(counts, [4, 5]).all()
    alone = draws[:, 4].mean(), draws[:, 11].mean()
    assert alone[0] > alone[1] > 0  # a long word fits less often
    assert masking_budget(0.15, 14) == 2
    assert masking_budget(0.15, 2) == 1
    none = draw_hidden(np.array([-1, 0, 0, -1]), 1, np.random.default_rng(2))
    assert not none.any()  # as in the collators, a word of two tokens does not fit into one


def test_shares_of_masked_random_and_kept_tokens() -> None:
    ids, random = np.full(60_000, 7), np.random.default_rng(3)
    chosen = np.arange(len(ids)) % 2 == 0
    corrupted = corrupt(ids, chosen, VOCABULARY, random)
    assert (corrupted[~chosen] == 7).all()
    masks, kept = (corrupted[chosen] == 3).mean(), (corrupted[chosen] == 7).mean()
    assert masks == pytest.approx(0.8 + 0.1 / 20, abs=0.01)
    assert kept == pytest.approx(0.1 + 0.1 / 20, abs=0.01)
    assert set(corrupted[chosen]) == set(range(20))


def test_rows_of_the_decoder() -> None:
    words = VOCABULARY.word_numbers(TEXT)
    seen = decoder_mask(words, 0.5, 4, np.random.default_rng(4))
    assert not seen.diagonal().any()
    others = seen | np.eye(len(words), dtype=bool)
    assert others[:, [0, -1]].all()  # markers are seen by all
    assert len({row.tobytes() for row in others | np.eye(len(words), dtype=bool)}) > 1
    for i, row in enumerate(seen):
        for word in range(words.max() + 1):
            own = (words == word) & (np.arange(len(words)) != i)
            assert len(set(row[own])) <= 1  # all other tokens of a word are treated alike
    assert masking_budget(0.5, len(words)) == 8
    assert ((~others).sum(axis=1) <= 8).all()
    assert (~others).sum(axis=1).mean() > 5
    one = decoder_mask(words, 0.5, 1, np.random.default_rng(4))
    assert len({tuple(row) for row in one | np.eye(len(words), dtype=bool)}) <= len(words)


def documents(count: int = 7) -> Ragged:
    random = np.random.default_rng(5)
    return Ragged.from_lists([random.integers(4, 20, size).tolist() for size in [3, 0, 40, 12, 25, 9, 61][:count]])


def test_documents_are_cut_into_few_equal_spans() -> None:
    corpus = documents()
    spans = cut_spans(corpus, longest=10, shortest=4)
    lengths = (spans.stops - spans.starts).tolist()
    assert lengths == [10, 10, 10, 10, 6, 6, 8, 8, 9, 9, 8, 9, 9, 8, 9, 9, 9]
    assert np.diff(spans.first).tolist() == [0, 0, 4, 2, 3, 1, 7]
    assert spans.left_out == 3
    for document in range(len(corpus)):  # no token is lost, and no span crosses a document
        parts = [spans[i] for i in range(spans.first[document], spans.first[document + 1])]
        assert not parts or np.concatenate(parts).tolist() == corpus[document].tolist()
    assert spans.documents_with_pairs.tolist() == [2, 3, 4, 6]
    two = cut_spans(corpus, longest=30, shortest=4, least=2)
    assert np.diff(two.first).tolist() == [0, 0, 2, 2, 2, 2, 3]


def make(in_pairs: bool = False, decoder: bool = False, **more: int) -> MaskedBatches:
    spans = cut_spans(documents(), longest=10, shortest=4, least=2 if in_pairs else 1)
    settings: dict[str, Any] = {"size": 5, "devices": 4, "data_seed": 1, "mask_seed": 1} | more
    half = (0.5, 256) if decoder else None
    return MaskedBatches(spans, VOCABULARY, (1, 2), 0, length=12, rate=0.3, in_pairs=in_pairs, decoder=half, **settings)


def leaves(batch: MaskedTexts) -> list[bytes]:
    fields = (
        batch.tokens.ids,
        batch.tokens.mask,
        batch.positions,
        batch.labels,
        batch.original_ids,
        batch.attention_mask,
        batch.targets,
    )
    return [x.tobytes() for x in fields if x is not None]


@pytest.mark.parametrize("decoder", [False, True])
def test_a_batch_depends_only_on_seeds_and_number(decoder: bool) -> None:
    batches = make(decoder=decoder)
    assert batches.padded_size == 8
    whole = batches(3)
    assert leaves(make(decoder=decoder)(3)) == leaves(whole)
    halves = [batches(3, (i, 2)) for i in range(2)]
    joined = [np.concatenate([getattr(half, name) for half in halves]) for name in ("positions", "labels")]
    assert joined[0].tolist() == whole.positions.tolist()  # each process makes its own rows
    assert joined[1].tolist() == whole.labels.tolist()
    for other in (make(decoder=decoder, mask_seed=2)(3), make(decoder=decoder, data_seed=2)(3), batches(4)):
        assert leaves(other) != leaves(whole)  # control: another seed or number gives another batch
    again = batches(3 + 17)  # 17 spans: five epochs later, the same numbers of the stream, but other masks
    assert leaves(again) != leaves(whole)


def test_labels_are_the_hidden_tokens() -> None:
    batches = make(decoder=True)
    batch: Any = batches(0)
    chosen = batches.spans_of(0)
    assert (chosen[5:] == -1).all()
    for row, span in enumerate(chosen):
        length = int(batch.tokens.mask[row].sum())
        if span < 0:
            assert length == 0
            assert (batch.labels[row] == -1).all()
            assert (batch.targets[row] == -1).all()
            continue
        text = np.concatenate([[1], batches.spans[int(span)], [2]])
        assert batch.original_ids[row, :length].tolist() == text.tolist()
        labelled = batch.labels[row] >= 0
        assert 1 <= labelled.sum() <= masking_budget(0.3, length)
        positions = batch.positions[row][labelled]
        assert text[positions].tolist() == batch.labels[row][labelled].tolist()
        others = np.setdiff1d(np.arange(length), positions)
        assert batch.tokens.ids[row, others].tolist() == text[others].tolist()
        assert batch.targets[row, :length].tolist() == [-1, *text[1:-1], -1]
        assert not batch.attention_mask[row, :, length:].any()


def test_pairs_are_two_spans_of_one_document() -> None:
    batches = make(in_pairs=True)
    assert len(batches) == 5
    drawn = set()
    for number in range(30):
        chosen = batches.spans_of(number)
        spans = chosen[chosen >= 0].reshape(-1, 2)
        assert len(spans) == 5
        of = np.searchsorted(batches.spans.first, spans, side="right") - 1
        assert (of[:, 0] == of[:, 1]).all()
        assert (spans[:, 0] != spans[:, 1]).all()
        drawn |= {tuple(sorted(pair)) for pair in spans[of[:, 0] == 6]}
    assert len(drawn) > 5  # the spans of the long document form new pairs in every epoch


def test_word_starts_are_read_from_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(write_encoder(tmp_path), 12, 24)
    vocabulary = MaskingVocabulary.from_tokenizer(tokenizer)
    ids = tokenizer.passages([], sink=lambda _: tokenizer.without_markers(["river stonex"]))[0]
    assert vocabulary.word_numbers(np.concatenate([[tokenizer.cls_id], ids, [tokenizer.sep_id]])).tolist()[:3] == [
        -1,
        0,
        1,
    ]
    assert vocabulary.special.sum() == 4
    assert vocabulary.mask_id == tokenizer.mask_id
    assert isinstance(cut_spans(documents(), 10, 4), Spans)


@pytest.mark.parametrize(
    ("tokens", "goes_on"),
    [
        (["[PAD]", "river", "##s", "##bank", "▁"], [False, False, True, True, False]),
        (["Ġriver", "s", "Ġthe", "##", "###", "Ġbank"], [False, True, False, True, True, False]),
        (["▁river", "s", "##", "▁bank"], [False, True, True, False]),
    ],
)
def test_continuation_pieces_of_every_tokenizer(tokens: list[str], goes_on: list[bool]) -> None:
    """A "##" of headings in a byte-pair vocabulary does not make it a WordPiece vocabulary."""
    assert _continues(tokens).tolist() == goes_on


def test_a_tokenizer_without_word_marks() -> None:
    with pytest.raises(ValueError, match=r"beginnings of words"):
        _continues(["river", "bank"])
