"""Our token ids against those of the Hugging Face tokenizer, from stored outputs (tests/goldens/minilm)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.records import Passage
from jaxret.data.tokens.tokenizer import TextTokenizer, Truncation
from jaxret.storage.atomic import read_json
from jaxret.types import Ragged

GOLDEN = read_json(Path(__file__).parents[2] / "goldens" / "minilm" / "tokens.json")
ROWS: list[dict[str, Any]] = GOLDEN["passages"]
PASSAGES = [Passage(str(i), row["text"], row["title"]) for i, row in enumerate(ROWS)]
LIMIT: int = GOLDEN["limit"]
CLS, SEP = GOLDEN["special"]["cls"], GOLDEN["special"]["sep"]
UNLIMITED = 10_000  # more than any golden passage has


def load(directory: Path, length: int = UNLIMITED) -> TextTokenizer:
    return TextTokenizer.load(directory, query_length=length, passage_length=length)


def lists(ragged: Ragged) -> list[list[int]]:
    return [ragged[row].tolist() for row in range(len(ragged))]


def whole(row: dict[str, Any]) -> list[int]:
    """Return all ids of a golden passage; an empty title has no [SEP]."""
    return row["pair"] if row["title"] else row["single"]


def test_special_ids(minilm_dir: Path) -> None:
    tokenizer = load(minilm_dir)
    assert {"cls": tokenizer.cls_id, "sep": tokenizer.sep_id, "pad": tokenizer.pad_id} == GOLDEN["special"]


def test_passages_have_the_ids_of_the_pair(minilm_dir: Path) -> None:
    actual = load(minilm_dir).passages(PASSAGES)
    assert actual.flat.dtype == np.int32
    assert lists(actual) == [whole(row) for row in ROWS]
    # MiniLM's tokenizer.json cuts and pads at 128 ids: more ids show that both are switched off.
    assert actual.lengths.max() > 128
    assert actual.lengths.min() == 2


def test_control_the_title_matters(minilm_dir: Path) -> None:
    untitled = load(minilm_dir).passages([Passage(p.id, p.text) for p in PASSAGES])
    same = [ids == whole(row) for ids, row in zip(lists(untitled), ROWS, strict=True)]
    assert same == [not row["title"] for row in ROWS]


def test_queries_have_the_ids_of_the_text_alone(minilm_dir: Path) -> None:
    assert lists(load(minilm_dir).queries(row["text"] for row in ROWS)) == [row["single"] for row in ROWS]


def test_a_long_passage_is_cut_like_the_joined_string(minilm_dir: Path) -> None:
    titled = [(passage, row) for passage, row in zip(PASSAGES, ROWS, strict=True) if passage.title]
    actual = lists(load(minilm_dir, LIMIT).passages(passage for passage, _ in titled))
    assert actual == [row["cut_joined"] for _, row in titled]
    assert any(ids != row["cut_pair"] for ids, (_, row) in zip(actual, titled, strict=True))  # control: another rule


@pytest.mark.parametrize("limit", [3, 8, LIMIT, 200])
def test_long_texts_are_cut_on_the_right_and_counted(minilm_dir: Path, limit: int) -> None:
    tokenizer = load(minilm_dir, limit)
    count = Truncation("passages", limit)
    actual = lists(tokenizer.passages(PASSAGES, truncation=count))
    complete = [whole(row) for row in ROWS]
    for ids, full in zip(actual, complete, strict=True):
        assert ids == (full if len(full) <= limit else [*full[: limit - 1], SEP])
        assert ids[0] == CLS
    lengths = np.array([len(full) for full in complete])
    assert (count.texts, count.tokens) == (len(ROWS), lengths.sum())
    assert count.cut == (lengths > limit).sum() > 0
    assert count.lost == np.maximum(lengths - limit, 0).sum()
    assert f"cut at {limit} tokens" in str(count)


def test_ids_do_not_depend_on_the_batch(minilm_dir: Path) -> None:
    copies = 300  # more texts than one call of the tokenizer gets
    assert copies * len(PASSAGES) > 2048
    tokenizer = load(minilm_dir, LIMIT)
    alone = [lists(tokenizer.passages([passage]))[0] for passage in PASSAGES]
    assert lists(tokenizer.passages(PASSAGES * copies)) == alone * copies
