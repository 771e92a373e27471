"""Tevatron's records: training with the texts in them (its first form) or by ids (since 2.0), corpus, queries.

Ours are two keys more of the first form, which Tevatron does not look at: a passage may have a `score`, and a record
may say `"every_positive": false`: its first positive alone is a target then, as in DPR's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxret.data.files import DataError, Policy, Where, require_object
from jaxret.data.formats.containers import Record, read_records
from jaxret.data.formats.format import Format, Named, has
from jaxret.data.formats.head import Head
from jaxret.data.formats.pool import Pool, Scored, make_example, no_positive
from jaxret.data.formats.texts import id_of, ids_of, list_of, passage_of, passages_by, queries_by, query_of
from jaxret.data.records import Example, Passage


def examples(path: Path, policy: Policy) -> Iterator[tuple[Where, Example]]:
    """One example a record: positive_passages, negative_passages (which may be empty)."""
    pool = Pool(policy)
    for where, record in read_records(path, policy):
        try:
            yield where, example_of(record, where, pool)
        except DataError as error:
            policy.reject(error)


def example_of(record: Record, where: Where, pool: Pool) -> Example:
    """The example of one record. Raises DataError if it is none."""

    def parse(value: Any, where: Where) -> Passage:
        return passage_of(require_object(value, where), where, pool.policy, "docid")

    def side(key: str) -> Scored:
        values = list_of(record, key, where)
        return pool.scored(((value, _score(value, where)) for value in values), key, where, parse)

    query = query_of(record, where, "query_id", "query")
    positives = side("positive_passages")
    if not positives:
        raise no_positive(where, "positive_passages")
    return make_example(query, positives, side("negative_passages"))


def _score(value: Any, where: Where) -> float | None:
    score = value.get("score") if isinstance(value, dict) else None
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        raise where.error("bad score", f"a passage's score is {score!r}", "a score is a finite number")
    return float(score)


def named(path: Path, policy: Policy) -> Iterator[tuple[Where, Named]]:
    """positive_document_ids, negative_document_ids; a query_text that is null is looked up."""
    for where, record in read_records(path, policy):
        try:
            query_id = id_of(record, "query_id", where)
            query = None if record.get("query_text") is None else query_of(record, where, "query_id", "query_text")
            positives = ids_of(record, "positive_document_ids", where)
            if not positives:
                raise no_positive(where, "positive_document_ids")
            yield where, Named(query_id, query, positives, ids_of(record, "negative_document_ids", where))
        except DataError as error:
            policy.reject(error)


def _fits(every_positive: bool) -> Callable[[Head], bool]:
    keys = has("query", "positive_passages")

    def fits(head: Head) -> bool:
        return keys(head) and head.records[0].get("every_positive", True) == every_positive

    return fits


KEYS = ("query_id", "query", "answers", "positive_passages", "negative_passages", "every_positive")
FORMATS = (
    Format(
        name="tevatron.examples",
        title="Tevatron training records",
        looks="JSON records with query_id, query, positive_passages, negative_passages",
        fits=_fits(True),
        keys=KEYS,
        examples=examples,
    ),
    Format(
        name="tevatron.first",
        title="Tevatron training records, whose first positive is the target",
        looks="as tevatron.examples, with every_positive: false",
        fits=_fits(False),
        keys=KEYS,
        every_positive=False,
        examples=examples,
    ),
    Format(
        name="tevatron.named",
        title="Tevatron training records by ids",
        looks="JSON records with query_id, query_text, positive_document_ids, negative_document_ids",
        fits=has("query_id", "positive_document_ids"),
        keys=("query_id", "query_text", "answers", "positive_document_ids", "negative_document_ids"),
        named=named,
    ),
    Format(
        name="tevatron.corpus",
        title="Tevatron corpus",
        looks="JSON records with docid, text, and perhaps title",
        fits=has("docid", "text"),
        keys=("docid", "title", "text"),
        passages=passages_by("docid"),
    ),
    Format(
        name="tevatron.queries",
        title="Tevatron queries",
        looks="JSON records with query_id, query",
        fits=has("query_id", "query"),
        keys=("query_id", "query", "answers"),
        queries=queries_by("query_id", "query"),
    ),
)
