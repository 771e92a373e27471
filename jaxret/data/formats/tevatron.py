"""Tevatron's records: training with the texts in them (its first form) or by ids (since 2.0), corpus, queries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxret.data.files import DataError, Policy, Where, require_object
from jaxret.data.formats.containers import Record, read_records
from jaxret.data.formats.format import Format, Named, has
from jaxret.data.formats.pool import Pool, Scored, make_example, no_positive
from jaxret.data.formats.texts import id_of, ids_of, list_of, passage_of, passages_by, queries_by, query_of
from jaxret.data.records import Example, Passage


def examples(path: Path, policy: Policy) -> Iterator[tuple[Where, Example]]:
    """One example a record: positive_passages, negative_passages (which may be empty)."""
    pool = Pool(policy)

    def parse(value: Any, where: Where) -> Passage:
        return passage_of(require_object(value, where), where, policy, "docid")

    def side(record: Record, key: str, where: Where) -> Scored:
        return pool.read(list_of(record, key, where), key, where, parse)

    for where, record in read_records(path, policy):
        try:
            query = query_of(record, where, "query_id", "query")
            positives = side(record, "positive_passages", where)
            if not positives:
                raise no_positive(where, "positive_passages")
            yield where, make_example(query, positives, side(record, "negative_passages", where))
        except DataError as error:
            policy.reject(error)


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


FORMATS = (
    Format(
        name="tevatron.examples",
        title="Tevatron training records",
        looks="JSON records with query_id, query, positive_passages, negative_passages",
        fits=has("query", "positive_passages"),
        keys=("query_id", "query", "answers", "positive_passages", "negative_passages"),
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
