"""sentence-transformers' training data: columns of texts (anchor, positive, negative, ...), optional label or scores.

The library uses the order of the columns; of their names it knows only label, labels, score and scores. This reader
recognizes usual names of columns. For other names, the format must be forced (st.tuples:PATH), and the order of the
columns is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxret.data.errors import Location, Policy
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.file_sample import FileSample
from jaxret.data.formats.flag_embedding import record_scores
from jaxret.data.formats.format import DataFile, Format, content_id, distinct_passages, id_from_location
from jaxret.data.formats.text_rows import TextRow, group_by_query
from jaxret.data.formats.trec import RunLine
from jaxret.data.lines import Digest
from jaxret.data.record_checks import (
    check_passage,
    check_query,
    finite_number,
    normalize_question,
    require_key,
    shorten,
)
from jaxret.data.records import Passage, Query, Record

LABELS = ("label", "labels", "score", "scores")
_ANCHOR = re.compile(r"anchor|query|question|sentence1|sentence_?A", re.IGNORECASE)
_POSITIVE = re.compile(r"positive|pos|answer|passage|document|sentence2|sentence_?B|context", re.IGNORECASE)
_NEGATIVE = re.compile(r"(hard_)?neg(ative)?(_?\d+)?", re.IGNORECASE)


def text_columns(record: Record, first: Sequence[str] = (), location: Location | None = None) -> list[str]:
    """Return the columns of texts in the order anchor, positive, negatives.

    If all names are known, they decide. Otherwise the order of `first`, the columns of the first record, decides.
    Raises DataError if another record has other columns.
    """
    texts = [key for key in record if key not in LABELS]
    if not _known(texts):
        if location and first and set(texts) != set(first):
            problem = f"this record has the columns {', '.join(map(repr, texts))}"
            raise location.error(
                "wrong columns", problem, f"all must have those of the first record, {', '.join(map(repr, first))}"
            )
        return list(first or texts)
    negatives = [key for key in texts if _NEGATIVE.fullmatch(key)]
    return [next(key for key in texts if name.fullmatch(key)) for name in (_ANCHOR, _POSITIVE)] + negatives


def _known(texts: list[str]) -> bool:
    counts = [sum(bool(name.fullmatch(key)) for key in texts) for name in (_ANCHOR, _POSITIVE, _NEGATIVE)]
    return counts[:2] == [1, 1] and sum(counts) == len(texts)


def _read_text_rows(file: DataFile, policy: Policy) -> Iterator[TextRow]:
    """Yield the rows of a file. Label 1 or 0 says that the second text is a positive or a negative. `scores` are the
    scores of the positive and the negatives. The `score` of a triplet is score(positive) - score(negative)."""
    first: list[str] = []

    def parse(record: Record, location: Location) -> TextRow:
        columns = text_columns(record, first, location)
        if not first:
            first.extend(key for key in record if key not in LABELS)
        return _text_row(record, columns, location)

    return (row for _, row in policy.parse_records(read_records(file, policy), parse))


def _text_row(record: Record, columns: list[str], location: Location) -> TextRow:
    if len(columns) < 2:
        problem = f"this record has the columns {', '.join(map(repr, record))}"
        raise location.error(
            "wrong columns", problem, "two or more columns of texts are expected: anchor, positive, negatives"
        )
    anchor, *texts = (require_key(record, key, str, location) for key in columns)
    labels = {key: record[key] for key in LABELS if record.get(key) is not None}
    if not labels:
        return TextRow(location, anchor, [(texts[0], None)], [(text, None) for text in texts[1:]])
    key, value = next(iter(labels.items()))
    if isinstance(value, list):
        scores = record_scores(record, key, len(texts), location)
        return TextRow(location, anchor, [(texts[0], scores[0])], list(zip(texts[1:], scores[1:])))
    number = parse_number(value, key, location)
    if len(texts) == 1:
        if number not in (0, 1):
            remedy = "1 means a positive, 0 a negative: give each pair one of them, because no loss uses a pair's score"
            raise location.error("bad label", f"{key!r} of a pair is {value!r}", remedy)
        pair: list[tuple[str, float | None]] = [(texts[0], None)]
        return TextRow(location, anchor, pair, []) if number > 0 else TextRow(location, anchor, [], pair)
    if len(texts) > 2:
        problem = f"{key!r} is one number for {len(texts)} texts"
        raise location.error("wrong number of scores", problem, f"write a list with the score of {columns[1]!r} first")
    return TextRow(location, anchor, [(texts[0], 0.0)], [(texts[1], -number)], scores_incomparable=True)


def parse_number(value: Any, key: str, location: Location) -> float:
    """Return a finite number, or a number in a string (as in CSV); true and false are 1 and 0. Raises DataError for
    another value."""
    if str(value).lower() in ("true", "false"):
        return float(str(value).lower() == "true")
    if (number := finite_number(value)) is None:
        raise location.error("bad score", f"the value of {key!r} is {shorten(value)}", "a finite number is expected")
    return number


# Pairs with a score: it says how similar two texts are, not which texts are relevant


def _pairs(file: DataFile, policy: Policy) -> Iterator[tuple[Location, tuple[Query, Passage, float]]]:
    queries: dict[str, Query] = {}

    def parse(record: Record, location: Location) -> tuple[Query, Passage, float]:
        columns, labels = text_columns(record), [key for key in LABELS if record.get(key) is not None]
        if len(columns) < 2 or not labels:
            problem = f"two texts and a score are expected, but the keys are {shorten(list(record))}"
            raise location.error("missing keys", problem, f"the score is called {' or '.join(LABELS)}")
        first, second = (require_key(record, key, str, location) for key in columns[:2])
        key, question = labels[0], normalize_question(first)
        query = queries.setdefault(question, check_query(Query(id_from_location(location), question), location))
        passage = check_passage(Passage(content_id(second), second), location, policy)
        return query, passage, parse_number(record[key], key, location)

    return policy.parse_records(read_records(file, policy), parse)


def read_pair_passages(
    file: DataFile, policy: Policy, digest: Digest | None = None
) -> Iterator[tuple[Location, Passage]]:
    """Yield the second texts of the pairs without repetition."""
    passages = ((location, passage) for location, (_, passage, _) in _pairs(file, policy))
    return distinct_passages(passages, file.path, digest)


def read_pair_queries(file: DataFile, policy: Policy) -> list[Query]:
    """Return the first texts of the pairs without repetition."""
    return list({query.id: query for _, (query, _, _) in _pairs(file, policy)}.values())


def read_pair_lines(file: DataFile, policy: Policy) -> Iterator[RunLine]:
    """Yield the lines of rankings, best first, from the scores of the pairs."""
    by_query: dict[Query, dict[str, tuple[Location, float]]] = {}
    for location, (query, passage, score) in _pairs(file, policy):
        by_query.setdefault(query, {}).setdefault(passage.id, (location, score))
    for query, scores in by_query.items():
        ranking = sorted(scores.items(), key=lambda item: -item[1][1])
        for rank, (passage_id, (location, score)) in enumerate(ranking, 1):
            yield RunLine(location, query.id, passage_id, rank, score, query.text)


# Detection


def _column_roles(sample: FileSample) -> str:
    """Return which columns of the first record are read as what, if the order decides."""
    columns = text_columns(sample.records[0]) if sample.records else []
    if _known(columns) or len(columns) < 2:
        return ""
    query, positive, *negatives = map(repr, columns)
    parts = [f"query {query}", f"positive {positive}"]
    if negatives:
        parts.append(f"negatives {', '.join(negatives)}")
    return ", ".join(parts)


def _is_scored(sample: FileSample) -> bool:
    """Return whether records have two texts and a number that is not always 0 or 1."""
    if not _is_tuples(sample) or len(text_columns(sample.records[0])) != 2:
        return False
    numbers = [record[key] for record in sample.records for key in LABELS if record.get(key) is not None]
    return bool(numbers) and not all(str(number).lower() in _BINARY for number in numbers)


_BINARY = ("0", "1", "0.0", "1.0", "true", "false")


def _is_tuples(sample: FileSample) -> bool:
    if not sample.records:
        return False
    texts = [key for key in sample.records[0] if key not in LABELS]
    return _known(texts) and all(isinstance(sample.records[0][key], str) for key in texts)


FORMATS = (
    Format(
        name="st.scored",
        title="sentence-transformers pairs with scores",
        description="records of two texts (as anchor, positive) and a score or label that is not only 0 and 1",
        matches=_is_scored,
        keys=("anchor", "positive", "score"),
        any_key=True,
        passages=read_pair_passages,
        queries=read_pair_queries,
        rankings=read_pair_lines,
    ),
    Format(
        name="st.tuples",
        title="sentence-transformers tuples",
        description="records of texts (as anchor, positive, negative_1, ...), and label 0 or 1, score or scores",
        matches=_is_tuples,
        keys=("anchor", "positive", "negative", *LABELS),
        any_key=True,
        without_query_ids=True,
        column_roles=_column_roles,
        examples=lambda file, policy: group_by_query(_read_text_rows(file, policy), policy),
    ),
)
