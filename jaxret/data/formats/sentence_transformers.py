"""sentence-transformers' training data: columns of texts (anchor, positive, negative, ...), perhaps a label or scores.

The library goes by the order of the columns, never by their names, but for label, labels, score and scores. Here
columns whose names are known go by their names; with others the format must be forced (st.tuples:PATH), and the order
counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxret.data.files import (
    DataError,
    Digest,
    Policy,
    Where,
    check_passage,
    check_query,
    normalise_question,
    require_key,
)
from jaxret.data.formats.containers import Record, read_records
from jaxret.data.formats.flag_embedding import scores_of
from jaxret.data.formats.format import Format, feed, own_id, text_id
from jaxret.data.formats.grouped import Row, grouped
from jaxret.data.formats.head import Head
from jaxret.data.formats.trec import RunLine
from jaxret.data.records import Example, Passage, Query

LABELS = ("label", "labels", "score", "scores")
_ANCHOR = re.compile(r"anchor|query|question|sentence1|sentence_?A", re.IGNORECASE)
_POSITIVE = re.compile(r"positive|pos|answer|passage|document|sentence2|sentence_?B|context", re.IGNORECASE)
_NEGATIVE = re.compile(r"(hard_)?neg(ative)?(_?\d+)?", re.IGNORECASE)


def columns_of(record: Record, first: Sequence[str] = (), where: Where | None = None) -> list[str]:
    """The columns of texts: anchor, positive, negatives; by name where all are known, else in the order of the first
    record, whose columns the others must have. Raises DataError if they do not."""
    texts = [key for key in record if key not in LABELS]
    if not _known(texts):
        if where and first and set(texts) != set(first):
            found = f"this record has the columns {', '.join(map(repr, texts))}"
            raise where.error("wrong columns", found, f"the first one has {', '.join(map(repr, first))}; so must all")
        return list(first or texts)
    rest = [key for key in texts if _NEGATIVE.fullmatch(key)]
    return [next(key for key in texts if name.fullmatch(key)) for name in (_ANCHOR, _POSITIVE)] + rest


def _known(texts: list[str]) -> bool:
    counts = [sum(bool(name.fullmatch(key)) for key in texts) for name in (_ANCHOR, _POSITIVE, _NEGATIVE)]
    return counts[:2] == [1, 1] and sum(counts) == len(texts)


def examples(path: Path, policy: Policy) -> Iterator[tuple[Where, Example]]:
    """One example a query, of all rows that have it. label 1 and 0: the second text is a positive or a negative;
    scores: of the positive and the negatives; score of a triplet: its margin, score(positive) - score(negative)."""
    return grouped(_rows(path, policy), policy)


def _rows(path: Path, policy: Policy) -> Iterator[Row]:
    first: list[str] = []
    for where, record in read_records(path, policy):
        try:
            columns = columns_of(record, first, where)
            first = first or [key for key in record if key not in LABELS]
            yield _row(record, columns, where)
        except DataError as error:
            policy.reject(error)


def _row(record: Record, columns: list[str], where: Where) -> Row:
    if len(columns) < 2:
        found = f"this record has the columns {', '.join(map(repr, record))}"
        raise where.error(
            "wrong columns", found, "two or more columns of texts are expected: anchor, positive, negatives"
        )
    anchor, *texts = (require_key(record, key, str, where) for key in columns)
    labels = {key: record[key] for key in LABELS if record.get(key) is not None}
    if not labels:
        return Row(where, anchor, [(texts[0], None)], [(text, None) for text in texts[1:]])
    key, value = next(iter(labels.items()))
    if isinstance(value, list):
        scores = scores_of(record, key, len(texts), where)
        return Row(where, anchor, [(texts[0], scores[0])], list(zip(texts[1:], scores[1:])))
    number = number_of(value, key, where)
    if len(texts) == 1:
        if number not in (0, 1):
            remedy = "1 is a positive, 0 a negative; pairs with scores are read as st.scored:PATH"
            raise where.error("bad label", f"{key!r} of a pair is {value!r}", remedy)
        pair: list[tuple[str, float | None]] = [(texts[0], None)]
        return Row(where, anchor, pair, []) if number > 0 else Row(where, anchor, [], pair)
    if len(texts) > 2:
        found = f"{key!r} is one number for {len(texts)} texts"
        raise where.error("wrong number of scores", found, f"write a list, the score of {columns[1]!r} first")
    return Row(where, anchor, [(texts[0], 0.0)], [(texts[1], -number)], alone=True)


def number_of(value: Any, key: str, where: Where) -> float:
    """A finite number, in CSV also one in a string; true and false are 1 and 0."""
    if str(value).lower() in ("true", "false"):
        return float(str(value).lower() == "true")
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise where.error("bad score", f"the value of {key!r} is {value!r}", "a finite number is expected")
    return number


# Pairs with a score: how near two texts are, not which are relevant


def _pairs(path: Path, policy: Policy) -> Iterator[tuple[Where, Query, Passage, float]]:
    queries: dict[str, Query] = {}
    for where, record in read_records(path, policy):
        try:
            first, second, *_ = (require_key(record, key, str, where) for key in columns_of(record))
            key = next(key for key in LABELS if record.get(key) is not None)
            question = normalise_question(first)
            query = queries.setdefault(question, check_query(Query(own_id(where), question), where))
            passage = check_passage(Passage(text_id(second), second), where, policy)
            yield where, query, passage, number_of(record[key], key, where)
        except DataError as error:
            policy.reject(error)


def pair_passages(path: Path, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Where, Passage]]:
    """The second texts, each once."""
    seen: set[str] = set()
    for where, _, passage, _ in _pairs(path, policy):
        if passage.id not in seen:
            seen.add(passage.id)
            yield where, passage
    if digest is not None:
        feed(path, digest)


def pair_queries(path: Path, policy: Policy) -> list[Query]:
    """The first texts, each once."""
    return list({query.id: query for _, query, _, _ in _pairs(path, policy)}.values())


def pair_lines(path: Path, policy: Policy) -> Iterator[RunLine]:
    """The scores as rankings, best first."""
    found: dict[Query, dict[str, tuple[Where, float]]] = {}
    for where, query, passage, score in _pairs(path, policy):
        found.setdefault(query, {}).setdefault(passage.id, (where, score))
    for query, scores in found.items():
        best = sorted(scores.items(), key=lambda item: -item[1][1])
        for rank, (passage_id, (where, score)) in enumerate(best, 1):
            yield RunLine(where, query.id, passage_id, rank, score, query.text)


# What files look like


def _is_scored(head: Head) -> bool:
    """Two texts and one number, other than 0 and 1."""
    if not _is_tuples(head) or len(columns_of(head.records[0])) != 2:
        return False
    numbers = [record[key] for record in head.records for key in LABELS if record.get(key) is not None]
    return bool(numbers) and not all(str(number).lower() in _BINARY for number in numbers)


_BINARY = ("0", "1", "0.0", "1.0", "true", "false")


def _is_tuples(head: Head) -> bool:
    if not head.records:
        return False
    texts = [key for key in head.records[0] if key not in LABELS]
    return _known(texts) and all(isinstance(head.records[0][key], str) for key in texts)


FORMATS = (
    Format(
        name="st.scored",
        title="sentence-transformers pairs with scores",
        looks="records of two texts (as anchor, positive) and a score or label that is not only 0 and 1",
        fits=_is_scored,
        keys=("anchor", "positive", "score"),
        any_key=True,
        passages=pair_passages,
        queries=pair_queries,
        rankings=pair_lines,
    ),
    Format(
        name="st.tuples",
        title="sentence-transformers tuples",
        looks="records of texts (as anchor, positive, negative_1, ...), perhaps with label 0 or 1, score or scores",
        fits=_is_tuples,
        keys=("anchor", "positive", "negative", *LABELS),
        any_key=True,
        examples=examples,
    ),
)
