"""Tokens around the texts of language models follow the post-processor in tokenizer.json."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxret.data.records import Passage
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.storage.atomic import read_json, write_json
from tests.pipeline import write_language_model


@pytest.mark.parametrize(
    ("template", "start", "end"),
    [
        ("$A <|end|>", [], 0),  # Qwen3-Embedding: its eos_token is another token
        ("<|begin|> $A <|end|>", [2], 0),  # EmbeddingGemma
        ("<|begin|> $A", [2], 1),  # Llama: nothing is appended, so the end token is eos_token
        ("$A", [], 1),  # Qwen3
    ],
)
def test_start_and_end_of_a_text(tmp_path: Path, template: str, start: list[int], end: int) -> None:
    tokenizer = TextTokenizer.load(write_language_model(tmp_path, template=template), 8, 8, title_separator=" ")
    ids = tokenizer.backend.encode("ab", add_special_tokens=False).ids
    assert tokenizer.queries(["ab"]).flat.tolist() == [*start, *ids, end]
    cut = tokenizer.queries(["ab" * 20])
    assert cut.lengths.tolist() == [8]
    assert cut.flat[-1] == end, "the end survives truncation"
    passage = tokenizer.passages([Passage("p", "ab", "ab")]).flat.tolist()
    assert passage == [*start, *tokenizer.backend.encode("ab ab", add_special_tokens=False).ids, end]
    assert tokenizer.special_ids["sep"] == end


def test_texts_end_as_tokenizer_json_has_them(tmp_path: Path) -> None:
    def ids(template: str, *texts: str) -> list[list[int]]:
        folder = write_language_model(tmp_path, template=template)
        tokenizer = TextTokenizer.load(folder, 8, 8, end_token=False)
        return [row.tolist() for row in tokenizer.queries(texts)]

    (text,) = ids("$A", "ab")
    assert ids("$A", "ab" * 20) == [text * 4], "a truncated text has no end token"
    assert ids("$A", "") == [[1]], "an empty text still has a token"
    assert ids("<|begin|> $A", "ab", "") == [[2, *text], [2]]
    assert ids("$A <|end|>", "ab", "") == [[*text, 0], [0]]
    tokenizers = [TextTokenizer.load(write_language_model(tmp_path, template="$A"), 8, 8, end) for end in (True, False)]
    assert tokenizers[0].settings("query") != tokenizers[1].settings("query")
    assert [one.markers for one in tokenizers] == ["title [SEP] text [SEP]", "title [SEP] text"]


def test_a_tokenizer_without_padding_pads_with_the_end(tmp_path: Path) -> None:
    settings = write_language_model(tmp_path) / "tokenizer_config.json"
    write_json(settings, {key: value for key, value in read_json(settings).items() if key != "pad_token"})
    tokenizer = TextTokenizer.load(tmp_path, 8, 8)
    assert tokenizer.pad_id == tokenizer.sep_id == 0


def test_several_tokens_on_a_side_are_an_error(tmp_path: Path) -> None:
    folder = write_language_model(tmp_path, template="$A <|turn|> <|end|>")
    with pytest.raises(ValueError, match=r"post_processor .*\[\] .*front .*\[1, 0\]"):
        TextTokenizer.load(folder, 8, 8)
