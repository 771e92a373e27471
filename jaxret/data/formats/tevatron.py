"""Tevatron's records: training records with texts (its first form) or with ids (since 2.0), corpus, queries.

jaxret adds two keys to the first form, which Tevatron ignores. A passage may have a `score`. A record may have
`"every_positive": false`: then only its first positive is a target, as in DPR's records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jaxret.data.errors import Location, Policy
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.file_sample import FileSample
from jaxret.data.formats.format import DataFile, Format, IdExample, has_keys, record_format
from jaxret.data.formats.shared_passages import ScoredPassages, SharedPassages, make_example, no_positive_error
from jaxret.data.formats.texts import (
    parse_passage,
    parse_query,
    passage_format,
    query_format,
    record_id,
    record_ids,
    record_list,
)
from jaxret.data.record_checks import finite_number, require_object, shorten
from jaxret.data.records import Example, Passage, Record

QUERY_ID, QUERY, QUERY_TEXT = "query_id", "query", "query_text"
POSITIVES, NEGATIVES, EVERY_POSITIVE = "positive_passages", "negative_passages", "every_positive"
POSITIVE_IDS, NEGATIVE_IDS = "positive_document_ids", "negative_document_ids"
PASSAGE_ID, SCORE = "docid", "score"


def read_tevatron_examples(file: DataFile, policy: Policy) -> Iterator[tuple[Location, Example]]:
    """Yield one example for each record with positive_passages and negative_passages, which may be empty."""
    pool = SharedPassages(policy)
    return policy.parse_records(
        read_records(file, policy), lambda record, location: parse_tevatron_example(record, location, pool)
    )


def parse_tevatron_example(record: Record, location: Location, pool: SharedPassages) -> Example:
    """Return the example of one record. Raises DataError for a record of another form."""

    def parse(value: Any, location: Location) -> Passage:
        return parse_passage(require_object(value, location), location, pool.policy, PASSAGE_ID)

    def side(key: str) -> ScoredPassages:
        values = record_list(record, key, location)
        return pool.parse_scored(((value, _score(value, location)) for value in values), key, location, parse)

    query = parse_query(record, location, QUERY_ID, QUERY)
    positives = side(POSITIVES)
    if not positives:
        raise no_positive_error(location, POSITIVES)
    return make_example(query, positives, side(NEGATIVES))


def _score(value: Any, location: Location) -> float | None:
    score = value.get(SCORE) if isinstance(value, dict) else None
    if score is None:
        return None
    if isinstance(score, str) or (number := finite_number(score)) is None:
        raise location.error("bad score", f"a passage's score is {shorten(score)}", "a score is a finite number")
    return number


def read_tevatron_id_examples(file: DataFile, policy: Policy) -> Iterator[tuple[Location, IdExample]]:
    """Yield one example for each record with positive_document_ids and negative_document_ids. If query_text is null,
    the text of the query is in another file."""
    return policy.parse_records(read_records(file, policy), _parse_id_example)


def _parse_id_example(record: Record, location: Location) -> IdExample:
    query_id = record_id(record, QUERY_ID, location)
    query = None if record.get(QUERY_TEXT) is None else parse_query(record, location, QUERY_ID, QUERY_TEXT)
    positives = record_ids(record, POSITIVE_IDS, location)
    if not positives:
        raise no_positive_error(location, POSITIVE_IDS)
    return IdExample(query_id, query, positives, record_ids(record, NEGATIVE_IDS, location))


def _has_texts(every_positive: bool) -> Callable[[FileSample], bool]:
    keys = has_keys(QUERY, POSITIVES)

    def fits(sample: FileSample) -> bool:
        return keys(sample) and sample.records[0].get(EVERY_POSITIVE, True) == every_positive

    return fits


_TEXT_KEYS = (QUERY_ID, QUERY, "instruction", "answers", POSITIVES, NEGATIVES, EVERY_POSITIVE)
FORMATS = (
    Format(
        name="tevatron.examples",
        title="Tevatron training records",
        description=f"JSON records with {QUERY_ID}, {QUERY}, {POSITIVES}, {NEGATIVES}",
        matches=_has_texts(True),
        keys=_TEXT_KEYS,
        examples=read_tevatron_examples,
    ),
    Format(
        name="tevatron.first",
        title="Tevatron training records, whose first positive is the target",
        description=f"as tevatron.examples, with {EVERY_POSITIVE}: false",
        matches=_has_texts(False),
        keys=_TEXT_KEYS,
        every_positive=False,
        examples=read_tevatron_examples,
    ),
    record_format(
        "tevatron.named",
        "Tevatron training records by ids",
        (QUERY_ID, POSITIVE_IDS),
        optional_keys=(NEGATIVE_IDS, QUERY_TEXT, "answers", "instruction"),
        id_examples=read_tevatron_id_examples,
    ),
    passage_format("tevatron.corpus", "Tevatron corpus", PASSAGE_ID),
    query_format("tevatron.queries", "Tevatron queries", QUERY_ID, QUERY),
)
