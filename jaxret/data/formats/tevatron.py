"""Tevatron's records: training with the texts in them (its first form) or by ids (since 2.0), corpus, queries.

Ours are two keys more of the first form, which Tevatron ignores: a passage may have a `score`, and a record
may say `"every_positive": false`: then only its first positive is a target, as in DPR's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jaxret.data.errors import DataError, Location, Policy
from jaxret.data.formats.containers import Record, read_records
from jaxret.data.formats.file_sample import FileSample
from jaxret.data.formats.format import DataFile, Format, IdExample, has_keys, record_format
from jaxret.data.formats.shared_passages import ScoredPassages, SharedPassages, make_example, no_positive_error
from jaxret.data.formats.texts import (
    parse_passage,
    parse_query,
    passage_reader,
    query_reader,
    record_id,
    record_ids,
    record_list,
)
from jaxret.data.record_checks import finite_number, require_object, shorten
from jaxret.data.records import Example, Passage


def read_tevatron_examples(file: DataFile, policy: Policy) -> Iterator[tuple[Location, Example]]:
    """One example a record: positive_passages, negative_passages (which may be empty)."""
    pool = SharedPassages(policy)
    for location, record in read_records(file, policy):
        try:
            yield location, parse_tevatron_example(record, location, pool)
        except DataError as error:
            policy.reject(error)


def parse_tevatron_example(record: Record, location: Location, pool: SharedPassages) -> Example:
    """The example of one record. Raises DataError if it is none."""

    def parse(value: Any, location: Location) -> Passage:
        return parse_passage(require_object(value, location), location, pool.policy, "docid")

    def side(key: str) -> ScoredPassages:
        values = record_list(record, key, location)
        return pool.parse_scored(((value, _score(value, location)) for value in values), key, location, parse)

    query = parse_query(record, location, "query_id", "query")
    positives = side("positive_passages")
    if not positives:
        raise no_positive_error(location, "positive_passages")
    return make_example(query, positives, side("negative_passages"))


def _score(value: Any, location: Location) -> float | None:
    score = value.get("score") if isinstance(value, dict) else None
    if score is None:
        return None
    if isinstance(score, str) or (number := finite_number(score)) is None:
        raise location.error("bad score", f"a passage's score is {shorten(score)}", "a score is a finite number")
    return number


def read_tevatron_id_examples(file: DataFile, policy: Policy) -> Iterator[tuple[Location, IdExample]]:
    """positive_document_ids, negative_document_ids; a query_text that is null is looked up."""
    for location, record in read_records(file, policy):
        try:
            query_id = record_id(record, "query_id", location)
            query = (
                None if record.get("query_text") is None else parse_query(record, location, "query_id", "query_text")
            )
            positives = record_ids(record, "positive_document_ids", location)
            if not positives:
                raise no_positive_error(location, "positive_document_ids")
            yield location, IdExample(query_id, query, positives, record_ids(record, "negative_document_ids", location))
        except DataError as error:
            policy.reject(error)


def _fits(every_positive: bool) -> Callable[[FileSample], bool]:
    keys = has_keys("query", "positive_passages")

    def fits(sample: FileSample) -> bool:
        return keys(sample) and sample.records[0].get("every_positive", True) == every_positive

    return fits


KEYS = ("query_id", "query", "instruction", "answers", "positive_passages", "negative_passages", "every_positive")
FORMATS = (
    Format(
        name="tevatron.examples",
        title="Tevatron training records",
        description="JSON records with query_id, query, positive_passages, negative_passages",
        matches=_fits(True),
        keys=KEYS,
        examples=read_tevatron_examples,
    ),
    Format(
        name="tevatron.first",
        title="Tevatron training records, whose first positive is the target",
        description="as tevatron.examples, with every_positive: false",
        matches=_fits(False),
        keys=KEYS,
        every_positive=False,
        examples=read_tevatron_examples,
    ),
    Format(
        name="tevatron.named",
        title="Tevatron training records by ids",
        description="JSON records with query_id, query_text, positive_document_ids, negative_document_ids",
        matches=has_keys("query_id", "positive_document_ids"),
        keys=("query_id", "query_text", "answers", "positive_document_ids", "negative_document_ids"),
        id_examples=read_tevatron_id_examples,
    ),
    record_format(
        "tevatron.corpus",
        "Tevatron corpus",
        ("docid", "text"),
        optional_keys=("title",),
        passages=passage_reader("docid"),
    ),
    record_format(
        "tevatron.queries",
        "Tevatron queries",
        ("query_id", "query"),
        optional_keys=("answers", "instruction"),
        queries=query_reader("query_id", "query"),
    ),
)
