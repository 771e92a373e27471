"""Text to padded ids: the parts that need no real vocabulary (see tokenizer_golden_test.py for one)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxret.data.records import Passage
from jaxret.data.tokenizer import TextTokenizer, Truncation
from jaxret.storage import read_json, write_json
from jaxret.types import Ragged
from tests.pipeline import write_encoder, write_t5

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


def test_ragged_knows_its_rows() -> None:
    assert len(RAGGED) == 3
    assert RAGGED.lengths.tolist() == [3, 0, 1]
    assert [RAGGED[i].tolist() for i in range(3)] == [[5, 6, 7], [], [8]]
    assert len(Ragged.from_lists([])) == 0


def test_what_a_text_becomes(encoder: Path) -> None:
    tokenizer = TextTokenizer.load(encoder, 32, 32)
    to_id = tokenizer.backend.token_to_id
    river, stone, x, x2 = (to_id(token) for token in ("river", "stone", "x", "##x"))
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    assert (to_id("[CLS]"), to_id("[SEP]"), to_id("[PAD]")) == (cls, sep, tokenizer.pad_id)
    passages = tokenizer.passages([Passage("1", "river xx", "Stone"), Passage("2", "river")])
    assert passages[0].tolist() == [cls, stone, sep, river, x, x2, sep]
    assert passages[1].tolist() == [cls, river, sep]
    assert tokenizer.queries(["stone river"])[0].tolist() == [cls, stone, river, sep]


def test_truncation_report(encoder: Path) -> None:
    tokenizer = TextTokenizer.load(encoder, query_length=5, passage_length=10)
    cut = Truncation("queries", 5)
    found = tokenizer.queries(["river " * 8, "river", "stone " * 3, "river " * 4], cut=cut)  # 10, 3, 5 and 6 tokens
    assert found.lengths.tolist() == [5, 3, 5, 5]
    assert str(cut) == "4 queries: 50.0% cut at 5 tokens, 25.0% of tokens lost"
    tokenizer.queries(["river"] * 996, cut=cut)
    assert str(cut).startswith("1,000 queries: 0.2% cut")
    assert str(Truncation("passages", 10)) == "0 passages: 0.0% cut at 10 tokens, 0.0% of tokens lost"


def test_the_digest_is_of_the_rules(encoder: Path, tmp_path: Path) -> None:
    same, other = write_encoder(tmp_path / "same"), write_encoder(tmp_path / "other")
    tokenizer_json = read_json(other / "tokenizer.json")
    tokenizer_json["normalizer"]["lowercase"] = False
    write_json(other / "tokenizer.json", tokenizer_json)
    first, second, third = (TextTokenizer.load(d, 8, 8).digest for d in (encoder, same, other))
    assert first == second != third
    assert TextTokenizer.load(encoder, 16, 24).digest == first  # lengths are in the contract on their own


@pytest.mark.parametrize(("lengths", "key"), [((2, 8), "query_length is 2"), ((8, 0), "passage_length is 0")])
def test_a_length_that_holds_no_token(lengths: tuple[int, int], key: str, encoder: Path) -> None:
    with pytest.raises(ValueError, match=rf"tokens\.{key}.*at least 3"):
        TextTokenizer.load(encoder, *lengths)


def test_a_folder_without_tokenizer(tmp_path: Path, encoder: Path) -> None:
    (tmp_path / "config.json").write_bytes((encoder / "config.json").read_bytes())
    with pytest.raises(ValueError, match=f"{tmp_path.name} has no tokenizer"):
        TextTokenizer.load(tmp_path, 8, 8)


def test_a_tokenizer_without_an_end(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path)
    settings = read_json(folder / "tokenizer_config.json")
    del settings["sep_token"]
    write_json(folder / "tokenizer_config.json", settings)
    with pytest.raises(ValueError, match=r"lacks \[SEP\].*'sep': None"):
        TextTokenizer.load(folder, 8, 8)


def test_t5_has_no_cls_and_joins_with_its_end_of_text(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(write_t5(tmp_path), 32, 32)
    to_id = tokenizer.backend.token_to_id
    river, stone, end = (to_id(piece) for piece in ("▁river", "▁stone", "</s>"))
    passages = tokenizer.passages([Passage("1", "river stone", "stone"), Passage("2", "river")])
    assert passages[0].tolist() == [stone, end, river, stone, end]
    assert passages[1].tolist() == [river, end]
    assert tokenizer.queries(["stone"])[0].tolist() == [stone, end]
    assert tokenizer.pad_id == 0
    assert tokenizer.markers == "title [SEP] text [SEP]"
