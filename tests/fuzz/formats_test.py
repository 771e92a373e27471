"""Files of every format that jaxret writes: they give the same records, and a damaged copy gives records or an error
that names the file, but no other exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from jaxret.data.errors import DataError, Policy
from jaxret.data.formats import Corpus, JudgementSource, QuerySource, RankingSource, TrainingSource
from jaxret.data.formats.detect import FORMATS
from jaxret.data.formats.format import ROLES
from jaxret.data.formats.writers import WRITERS
from jaxret.data.records import Example, Judgement, Passage, Query
from tests.fuzz.refusal import refusal

READERS: dict[str, Callable[[str], Any]] = {
    "passages": lambda source: list(Corpus.open(source).read(Policy())),
    "queries": lambda source: QuerySource.open(source).read(),
    "judgements": lambda source: JudgementSource.open(source).read(),
    "examples": lambda source: TrainingSource.open(source).read(targets=False),
    "rankings": lambda source: RankingSource.open(source).read(),
}
CASES = [(name, role) for name, writers in WRITERS.items() for role in writers]
# Formats whose examples have only ids: their texts are in other files.
OF_IDS = ("msmarco.named", "msmarco.negatives", "tevatron.named")

characters = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\u2028\u2029\x85")
texts = st.text(characters, min_size=1, max_size=40).map(str.strip).filter(bool)
ids = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=12)
grades = st.integers(0, 3)


@st.composite
def records(draw: st.DrawFn, role: str) -> Any:
    """Draw records of a role with different ids, as `READERS` return them."""
    names = draw(st.lists(ids, min_size=1, max_size=5, unique=True))
    if role == "passages":
        return [Passage(name, draw(texts), draw(st.just("") | texts)) for name in names]
    if role == "queries":
        return [Query(name, draw(texts), tuple(draw(st.lists(texts, max_size=2)))) for name in names]
    if role == "judgements":
        return [
            Judgement(name, other, draw(grades))
            for name in names
            for other in draw(st.sets(ids, min_size=1, max_size=3))
        ]
    if role == "rankings":
        scores = st.floats(-1e6, 1e6, width=32)
        return {
            name: sorted(
                ((passage, draw(scores)) for passage in draw(st.sets(ids, min_size=1, max_size=4))),
                key=lambda pair: -pair[1],
            )
            for name in names
        }
    passages = draw(
        st.lists(st.builds(Passage, ids, texts, st.just("")), min_size=2, max_size=4, unique_by=lambda p: p.id)
    )
    assume(len({p.text for p in passages}) == len(passages))
    questions = draw(st.lists(texts, min_size=len(names), max_size=len(names), unique=True))
    pairs = zip(names, questions, strict=True)
    return [Example(Query(name, text), tuple(passages[:1]), tuple(passages[1:])) for name, text in pairs]


def written(path: Path, name: str, role: str, values: Any) -> bool:
    """Write records; return whether the format holds all their fields. A format may refuse records."""
    try:
        return not +WRITERS[name][role](path, values)
    except DataError:
        assume(False)
        return False


def comparable(values: Any, role: str) -> Any:
    """Return records without what a format may change: ids of queries that are rows, the order of judgements."""
    if role == "judgements":
        return sorted((j.query_id, j.passage_id, j.relevance) for j in values)
    if role == "rankings":
        return {query: [passage for passage, _ in ranking] for query, ranking in values.items()}
    if role == "examples":
        return [(e.query.text, [p.text for p in e.positives], [p.text for p in e.negatives]) for e in values]
    return values


@pytest.mark.table
@pytest.mark.parametrize(("name", "role"), CASES)
@hypothesis.given(data=st.data())
def test_records_round_trip(
    name: str, role: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    values = data.draw(records(role))
    path = tmp_path_factory.mktemp("written") / "file"
    whole = written(path, name, role, values)
    if name in OF_IDS:
        return
    back = READERS[role](f"{name}:{path}")
    assert len(back) == len(values)
    if whole:
        assert comparable(back, role) == comparable(values, role)


@st.composite
def damage(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw a content with a few bytes flipped, cut, inserted or repeated."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(["flip", "cut", "insert", "repeat", "drop"])):
            case "flip" if place < len(content):
                content = content[:place] + bytes([content[place] ^ draw(st.integers(1, 255))]) + content[place + 1 :]
            case "cut":
                content = content[:place]
            case "insert":
                content = content[:place] + draw(st.binary(max_size=8) | st.sampled_from(INSERTED)) + content[place:]
            case "repeat":
                content = content[:place] + content[max(0, place - 30) :]
            case "drop":
                content = content[:place] + content[place + draw(st.integers(1, 30)) :]
    return content


INSERTED = [
    b"\x00",
    b"\xff\xfe",
    b"\n",
    b"\t",
    b"\r",
    b'"',
    b"}",
    b"[[",
    b"NaN",
    b"1e999",
    b"9" * 30,
    b"\xef\xbb\xbf",
    b"null",
]


@pytest.mark.parametrize("forced", [True, False], ids=["forced", "detected"])
@pytest.mark.parametrize(("name", "role"), CASES)
@hypothesis.given(data=st.data())
def test_a_damaged_file_is_read_or_is_an_error(
    name: str, role: str, forced: bool, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "file.txt"
    written(path, name, role, data.draw(records(role)))
    path.write_bytes(data.draw(damage(path.read_bytes())))
    message = refusal(lambda: READERS[role](f"{name}:{path}" if forced else str(path)), DataError)
    assert message is None or str(path.parent) in message


PIECES = [
    "q1",
    "d1",
    "0",
    "1",
    "Q0",
    "0.5",
    "-1",
    "9" * 5000,
    "river stone",
    "[1, 2]",
    "{}",
    "null",
    '"',
    "x" * 300,
    " ",
    "",
]
KEYS = sorted({key for form in FORMATS for key in form.keys})
values = st.sampled_from(PIECES) | st.integers(-1, 2) | st.none() | st.lists(st.sampled_from(PIECES), max_size=2)
objects = st.dictionaries(st.sampled_from(KEYS), values | st.lists(st.dictionaries(st.sampled_from(KEYS), values)))
ANY_LINES = st.lists(st.sampled_from(PIECES), max_size=6).map("\t".join) | objects.map(json.dumps) | texts


@pytest.mark.table
@pytest.mark.parametrize(
    ("name", "role"), [(form.name, role) for form in FORMATS for role in ROLES if form.gives(role)]
)
@hypothesis.given(lines=st.lists(ANY_LINES, max_size=6), an_array=st.booleans())
def test_any_text_in_any_format_is_read_or_is_an_error(
    name: str, role: str, lines: list[str], an_array: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The formats include those that jaxret only reads."""
    path = tmp_path_factory.mktemp("any") / "file.txt"
    path.write_text(f"[{','.join(lines)}]" if an_array else "\n".join(lines))
    message = refusal(lambda: READERS[role](f"{name}:{path}"), DataError)
    assert message is None or str(path.parent) in message
