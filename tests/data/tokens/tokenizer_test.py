"""From text to padded ids: tests that need no real vocabulary (tokenizer_golden_test.py has one)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.records import Example, Passage, Query
from jaxret.data.tokens import tokenizer as tokenizer_module
from jaxret.data.tokens.batches import BatchPlan, tokenize_examples
from jaxret.data.tokens.tokenizer import TOKENIZER_FILES, TextTokenizer, Truncation
from jaxret.storage.atomic import read_json, sha256_file, write_json
from jaxret.types import Ragged
from tests.pipeline import WORDS, write_encoder, write_t5

RAGGED = Ragged.from_lists([[5, 6, 7], [], [8]])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def test_padded_rows_in_any_order_with_empty_ones() -> None:
    ids, mask = RAGGED.padded([2, -1, 0, 1, 0], 4, fill=9)
    assert ids.tolist() == [[8, 9, 9, 9], [9, 9, 9, 9], [5, 6, 7, 9], [9, 9, 9, 9], [5, 6, 7, 9]]
    assert mask.sum(axis=1).tolist() == [1, 0, 3, 0, 3]
    assert (mask == (ids != 9)).all()
    assert ids.dtype == np.int32
    assert mask.dtype == np.bool_


def test_padded_with_nothing_but_empty_rows() -> None:
    ids, mask = RAGGED.padded([-1, -1], 3, fill=9)
    assert (ids == 9).all()
    assert not mask.any()
    assert RAGGED.padded([], 3, fill=9)[0].shape == (0, 3)


def test_rows_of_a_ragged_array() -> None:
    assert len(RAGGED) == 3
    assert RAGGED.lengths.tolist() == [3, 0, 1]
    assert [RAGGED[i].tolist() for i in range(3)] == [[5, 6, 7], [], [8]]
    assert len(Ragged.from_lists([])) == 0


def test_layout_of_special_tokens(encoder: Path) -> None:
    tokenizer = TextTokenizer.load(encoder, 32, 32)
    to_id = tokenizer.backend.token_to_id
    river, stone, x, x2 = (to_id(token) for token in ("river", "stone", "x", "##x"))
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    assert (to_id("[CLS]"), to_id("[SEP]"), to_id("[PAD]")) == (cls, sep, tokenizer.pad_id)
    passages = tokenizer.passages([Passage("1", "river xx", "Stone"), Passage("2", "river")])
    assert passages[0].tolist() == [cls, stone, sep, river, x, x2, sep]
    assert passages[1].tolist() == [cls, river, sep]
    assert tokenizer.queries(["stone river"])[0].tolist() == [cls, stone, river, sep]


TEXTS = [("river stone", "music"), ("river stone", ""), ("", "music"), ("light [SEP] xx", ""), ("zz", "a: b")]


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "minilm"])
@pytest.mark.parametrize("separator", ["[SEP]", " ", " - ", " [SEP] "])
@pytest.mark.parametrize("prompt", ["", "paper: ", "paper"])
def test_prompts_and_separators_are_text(
    kind: str, separator: str, prompt: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The ids equal those of the library for the whole text, including its special tokens."""
    write = {"wordpiece": write_encoder, "unigram": write_t5}
    folder = write[kind](tmp_path) if kind in write else request.getfixturevalue("minilm_dir")
    joins: dict[str, Any] = {"query_prompt": prompt, "passage_prompt": prompt, "title_separator": separator}
    tokenizer = TextTokenizer.load(folder, 64, 64, **joins)
    assert tokenizer.joins == joins

    def written(text: str) -> list[int]:
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        return [*([] if tokenizer.cls_id is None else [tokenizer.cls_id]), *ids, tokenizer.sep_id]

    if separator == "[SEP]":
        separator = " [SEP] " if tokenizer.cls_id is not None else "</s>"
    actual = tokenizer.passages(Passage(str(i), *both) for i, both in enumerate(TEXTS))
    for row, (text, title) in enumerate(TEXTS):
        parts = [title, text] if text and title else [title + text]
        if not text and joins["title_separator"] == "[SEP]":
            parts = [title, ""]  # a marker follows every title
        assert actual[row].tolist() == written(prompt + separator.join(parts)), (text, title)
    queries = tokenizer.queries(["river", "stone music"])
    assert [query.tolist() for query in queries] == [written(prompt + text) for text in ("river", "stone music")]
    bare = [query.tolist() for query in tokenizer.without_markers(["river", ""])]
    assert bare == [tokenizer.backend.encode(prompt + "river", add_special_tokens=False).ids, []]
    if prompt:
        blank = tokenizer.passages([Passage("1", "river", " \n")])
        assert blank[0].tolist() == written(prompt + "river")


def test_a_prompt_counts_and_leaves_room(encoder: Path) -> None:
    tokenizer = TextTokenizer.load(encoder, 6, 6, query_prompt="river stone ", passage_prompt="paper ")
    cut = Truncation("queries", 6)
    assert tokenizer.queries(["music light silver"], truncation=cut).lengths.tolist() == [6]
    assert (cut.tokens, cut.lost, cut.cut) == (7, 1, 1)
    with pytest.raises(ValueError, match=r"tokens\.query_prompt 'river stone ' .*2 tokens"):
        replace(tokenizer, query_length=4)
    assert replace(tokenizer, query_length=5).queries(["music light"]).lengths.tolist() == [5]


def test_markers_come_after_cls_and_queries_are_filled(encoder: Path) -> None:
    """The length limits include them, as in PyLate."""
    plain = TextTokenizer.load(encoder, 8, 8)
    tokenizer = TextTokenizer.load(encoder, 8, 8, query_marker=95, passage_marker=96, expand_queries=True)
    short, long = "river stone", "river stone music light paper forest market winter"
    cls, sep, mask = plain.cls_id, plain.sep_id, plain.mask_id
    words = plain.queries([long])[0].tolist()[1:-1]
    assert [row.tolist() for row in tokenizer.queries([short, long])] == [
        [cls, 95, *words[:2], sep, mask, mask, mask],
        [cls, 95, *words[:5], sep],
    ]
    passages = [Passage("0", short, "music"), Passage("1", long)]
    assert [row.tolist() for row in tokenizer.passages(passages)] == [
        [cls, 96, plain.queries(["music"])[0][1], sep, *words[:2], sep],
        [cls, 96, *words[:5], sep],
    ]
    assert plain.settings("query", "passage").items() <= tokenizer.settings("query", "passage").items()
    assert tokenizer.settings("query") != plain.settings("query")
    assert "query_marker" not in tokenizer.settings("passage")
    with pytest.raises(ValueError, match=r"leaves none of tokens.query_length=3"):
        TextTokenizer.load(encoder, 3, 8, query_marker=95)


def test_truncation_report(encoder: Path) -> None:
    tokenizer = TextTokenizer.load(encoder, query_length=5, passage_length=10)
    cut = Truncation("queries", 5)
    actual = tokenizer.queries(
        ["river " * 8, "river", "stone " * 3, "river " * 4], truncation=cut
    )  # 10, 3, 5 and 6 tokens
    assert actual.lengths.tolist() == [5, 3, 5, 5]
    assert str(cut) == "4 queries: 50.0% cut at 5 tokens, 25.0% of tokens lost"
    tokenizer.queries(["river"] * 996, truncation=cut)
    assert str(cut).startswith("1,000 queries: 0.2% cut")
    assert str(Truncation("passages", 10)) == "0 passages: 0.0% cut at 10 tokens, 0.0% of tokens lost"


def test_the_digest_is_of_the_rules(encoder: Path, tmp_path: Path) -> None:
    same, other = write_encoder(tmp_path / "same"), write_encoder(tmp_path / "other")
    tokenizer_json = read_json(other / "tokenizer.json")
    tokenizer_json["normalizer"]["lowercase"] = False
    write_json(other / "tokenizer.json", tokenizer_json)
    first, second, third = (TextTokenizer.load(d, 8, 8).digest for d in (encoder, same, other))
    assert first == second != third
    assert TextTokenizer.load(encoder, 16, 24).digest == first  # lengths are separate entries in the contract


@pytest.mark.parametrize(("lengths", "key"), [((2, 8), "query_length is 2"), ((8, 0), "passage_length is 0")])
def test_a_length_without_room_for_a_token(lengths: tuple[int, int], key: str, encoder: Path) -> None:
    with pytest.raises(ValueError, match=rf"tokens\.{key}.*at least 3"):
        TextTokenizer.load(encoder, *lengths)


def test_a_folder_without_tokenizer(tmp_path: Path, encoder: Path) -> None:
    (tmp_path / "config.json").write_bytes((encoder / "config.json").read_bytes())
    with pytest.raises(ValueError, match=f"{tmp_path.name} has no tokenizer"):
        TextTokenizer.load(tmp_path, 8, 8)


def test_a_tokenizer_without_end_token(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path)
    settings = read_json(folder / "tokenizer_config.json")
    del settings["sep_token"]
    write_json(folder / "tokenizer_config.json", settings)
    rules = read_json(folder / "tokenizer.json")
    # The post-processor would append the end token.
    write_json(folder / "tokenizer.json", rules | {"post_processor": None})
    with pytest.raises(ValueError, match=r"lacks \[SEP\].*'sep': None"):
        TextTokenizer.load(folder, 8, 8)


def test_t5_has_no_cls_and_joins_with_its_end_token(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(write_t5(tmp_path), 32, 32)
    to_id = tokenizer.backend.token_to_id
    river, stone, end = (to_id(piece) for piece in ("▁river", "▁stone", "</s>"))
    passages = tokenizer.passages([Passage("1", "river stone", "stone"), Passage("2", "river")])
    assert passages[0].tolist() == [stone, end, river, stone, end]
    assert passages[1].tolist() == [river, end]
    assert tokenizer.queries(["stone"])[0].tolist() == [stone, end]
    assert tokenizer.pad_id == 0
    assert tokenizer.markers == "title [SEP] text [SEP]"


def random_text(random: np.random.Generator, size: int) -> str:
    """Words, words that are too long, and characters that normalizers drop, keep or replace, separated by any white
    space."""
    pieces = [
        *WORDS,
        "x" * 70,
        "river" * 30,  # 150 characters: too long a word for WordPiece
        "y" * 3000,
        "a,b.c-d" * 40,
        "東京" * 30,
        "e" + "\u0301" * 200,
        "\x00\x01" * 50,
        "☃" * 40,
        "🎉",
    ]
    spaces = [" ", " ", " ", "\n", "\t", "  ", "\r\n", "\u00a0", "\u3000", "\x0b", "\x1c", "\u2028", "\x85", " " * 900]
    text = ""
    while len(text) < size:
        text += str(random.choice(pieces)) + str(random.choice(spaces))
    return text


def fully(tokenizer: TextTokenizer, passage: Passage, limit: int) -> list[int]:
    """Return the ids of the whole text, truncated."""
    parts = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in (passage.title, passage.text)]
    start = [] if tokenizer.cls_id is None else [tokenizer.cls_id]
    ids = [*start, *parts[0], *([tokenizer.sep_id] if parts[0] else []), *parts[1], tokenizer.sep_id]
    return ids if len(ids) <= limit else [*ids[: limit - 1], tokenizer.sep_id]


@pytest.mark.table
@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "minilm"])
@pytest.mark.parametrize("characters", [1, 32])  # size of the first part; with 1, most texts need more than this part
def test_ids_equal_those_of_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, kind: str, characters: int
) -> None:
    write = {"wordpiece": write_encoder, "unigram": write_t5}
    folder = write[kind](tmp_path) if kind in write else request.getfixturevalue("minilm_dir")
    monkeypatch.setattr(tokenizer_module, "_CHARACTERS", characters)
    monkeypatch.setattr(tokenizer_module, "_BLOCK_CHARACTERS", 100_000)
    random = np.random.default_rng(characters)
    passages = []
    for i in range(60):
        text, title = (random_text(random, int(10 ** random.uniform(0, 4.5))) for _ in range(2))
        passages.append(Passage(str(i), text, title if i % 3 == 0 else ""))
    passages += [Passage("s", " " * 30_000 + "river"), Passage("t", "x" * 30_000 + " river stone", "\n" * 9000)]
    # For BERT this is one word, at the end of the first part.
    passages.append(Passage("u", "," * 497 + "riv\x0ber stone"))
    for limit in (3, 40, 500):
        tokenizer, cut = TextTokenizer.load(folder, limit, limit), Truncation("passages", limit)
        actual = tokenizer.passages(passages, truncation=cut)
        expected = [fully(tokenizer, passage, limit) for passage in passages]
        assert [actual[row].tolist() for row in range(len(actual))] == expected
        queries = tokenizer.queries(passage.text for passage in passages)
        assert queries[len(passages) - 3].tolist() == fully(tokenizer, Passage("", passages[-3].text), limit)
        assert cut.texts == len(passages)
        assert (cut.estimated > 0) == ("about" in str(cut))


def test_only_the_beginning_of_a_long_text_is_tokenized(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_REACH", 5000)
    tokenizer, cut = TextTokenizer.load(encoder, 16, 16), Truncation("passages", 16)
    longest: list[int] = []
    encode = tokenizer.backend.encode_batch_fast

    class Backend:
        def encode_batch_fast(self, texts: list[str], **options: bool) -> object:
            longest.append(max(map(len, texts)))
            return encode(texts, **options)

    tokenizer.backend = Backend()
    unknown = TextTokenizer.load(encoder, 16, 16).backend.token_to_id("[UNK]")
    actual = tokenizer.passages(
        [Passage("1", "x" * 20_000 + " river"), Passage("2", "river " * 20_000)], truncation=cut
    )
    assert actual[0].tolist() == [tokenizer.cls_id, unknown, tokenizer.sep_id]
    assert len(actual[1]) == 16
    assert max(longest) == 5000
    assert str(cut).startswith("2 passages: 50.0% cut at 16 tokens, about 99.")
    assert cut.estimated == 2
    assert 19_000 < cut.tokens < 21_000  # the texts have 20,002 and 3 tokens


def test_long_texts_are_streamed() -> None:
    """A block is also limited in characters."""
    drawn: list[int] = []

    def passages() -> Iterator[Passage]:
        for i in range(9):
            drawn.append(i)
            yield Passage(str(i), "river " * 100_000)

    blocks = tokenizer_module._split_blocks((p.text, p.title, "") for p in passages())
    assert len(next(blocks)) == 2
    assert len(drawn) == 2


def test_lengths_and_properties_of_a_tokenizer(encoder: Path) -> None:
    tokenizer = TextTokenizer.load(encoder, 16, 32)
    other = replace(tokenizer, query_length=4, passage_length=5)
    assert other.queries(["river " * 9]).lengths.tolist() == [4]
    assert other.passages([Passage("1", "river " * 9)]).lengths.tolist() == [5]
    assert tokenizer.queries(["river " * 9]).lengths.tolist() == [11]
    with pytest.raises(ValueError, match=r"tokens\.query_length is 2"):
        replace(tokenizer, query_length=2)
    assert tokenizer.special_ids == {"cls": 2, "sep": 3, "pad": 0, "mask": 4}
    expected = {name: sha256_file(encoder / name) for name in ("tokenizer.json", "tokenizer_config.json")}
    assert TextTokenizer.digests(encoder) == expected


@pytest.mark.parametrize("name", ["vocab.txt", "added_tokens.json"])
def test_every_file_that_changes_tokens_is_named(tmp_path: Path, name: str) -> None:
    assert name in TOKENIZER_FILES
    (tmp_path / name).write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nriver\n")
    assert list(TextTokenizer.digests(tmp_path)) == [name]


def test_a_broken_tokenizer_json_is_named(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path)
    (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes()[:-9])
    with pytest.raises(ValueError, match=rf"{tmp_path.name} .*tokenizer .*transformers"):
        TextTokenizer.load(folder, 8, 8)


def test_padding_uses_the_tokenizers_pad_id(tmp_path: Path) -> None:
    """The ids of [PAD] and [MASK] are exchanged, from tokenizer to batch, so that 0 is an ordinary token."""
    folder = write_encoder(tmp_path)
    settings = read_json(folder / "tokenizer.json")
    vocabulary = settings["model"]["vocab"]
    vocabulary["[PAD]"], vocabulary["[MASK]"] = vocabulary["[MASK]"], vocabulary["[PAD]"]
    for token in settings["added_tokens"]:
        token["id"] = vocabulary[token["content"]]
    settings["added_tokens"].sort(key=lambda token: token["id"])
    write_json(folder / "tokenizer.json", settings)
    tokenizer = TextTokenizer.load(folder, 8, 16)
    assert tokenizer.pad_id == 4
    examples = [
        Example(Query(str(i), "river " * (1 + i)), (Passage(f"p{i}", "stone " * (9 - i)),), (Passage("n", "light"),))
        for i in range(4)
    ]
    data = tokenize_examples(examples, tokenizer)
    plan = BatchPlan(4, negatives=2, length_multiple=4, max_query_length=8, max_passage_length=16)
    batch = plan.batch(data, np.arange(4), None)
    for tokens in (batch.queries, batch.passages):
        # Four slots are empty.
        assert tokens.mask.any(axis=1).tolist().count(False) == (4 if tokens is batch.passages else 0)
        assert (tokens.ids[~tokens.mask] == 4).all()
        assert (~tokens.mask).any()
        assert not np.isin(tokens.ids[tokens.mask], (0, 4)).any()
    assert [str(cut) for cut in data.truncations] == [
        "4 queries: 0.0% cut at 8 tokens, 0.0% of tokens lost",
        "5 passages: 0.0% cut at 16 tokens, 0.0% of tokens lost",
    ]
