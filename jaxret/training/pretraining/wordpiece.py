"""Train a WordPiece vocabulary like BERT's on a corpus. Equal corpora give equal vocabularies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxret.storage.atomic import write_json

SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ALPHABET = 1000  # number of characters that are pieces; a word with another character is unknown, as in BERT


def train_wordpiece(texts: Callable[[], Iterable[str]], vocabulary: int, lowercase: bool) -> Tokenizer:
    """Return a tokenizer with BERT's rules and at most `vocabulary` pieces, trained on the texts. `texts` is called
    twice. Raises ValueError if `vocabulary` is not larger than the number of markers and characters."""
    rules = _bert({}, lowercase)
    pieces = [*SPECIAL.values(), *frequent_characters(texts(), rules)]
    if vocabulary <= len(pieces):
        raise ValueError(
            f"pretraining.scratch.vocabulary is {vocabulary}; it must be above {len(pieces)}, the number of markers "
            "and characters of the corpus"
        )
    # The trainer numbers characters in an order that differs from process to process, and breaks ties between pieces by
    # these numbers. Characters that are special tokens have fixed numbers.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary, special_tokens=pieces, limit_alphabet=len(pieces), show_progress=False
    )
    rules.train_from_iterator(texts(), trainer)
    return _bert(rules.get_vocab(with_added_tokens=True), lowercase)


def frequent_characters(texts: Iterable[str], rules: Tokenizer) -> list[str]:
    """Return pieces for the most frequent characters after normalization: at the beginning of words ("a") and inside
    ("##a")."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(rules.normalizer.normalize_str(text))
    characters = (char for char in counts if not char.isspace())
    frequent = sorted(sorted(characters, key=lambda char: (-counts[char], char))[:ALPHABET])
    return [*frequent, *(f"##{char}" for char in frequent)]


def save_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int, lowercase: bool) -> None:
    """Write the files that transformers' BertTokenizer reads.

    Args:
        tokenizer: the tokenizer.
        folder: an existing folder.
        longest: largest number of tokens of a text.
        lowercase: whether the tokenizer ignores case.
    """
    write_json(folder / "tokenizer.json", json.loads(tokenizer.to_str()))
    names = {f"{name}_token": token for name, token in SPECIAL.items()}
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lowercase, "model_max_length": longest}
    write_json(folder / "tokenizer_config.json", settings | names)


def _bert(vocabulary: dict[str, int], lowercase: bool) -> Tokenizer:
    """Return a tokenizer with BERT's rules and these pieces."""
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL["unk"]))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece(prefix="##")  # type: ignore[assignment]
    if vocabulary:
        cls, sep = SPECIAL["cls"], SPECIAL["sep"]
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
        )
        tokenizer.add_special_tokens(list(SPECIAL.values()))
    return tokenizer
