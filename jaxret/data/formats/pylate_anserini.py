"""Small formats of other projects: PyLate's distillation data, Anserini's corpora and topics."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from jaxret.data.errors import Location, Policy
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.flag_embedding import record_scores
from jaxret.data.formats.format import DataFile, record_format
from jaxret.data.formats.texts import passage_format, query_format, record_id, record_ids, record_list
from jaxret.data.formats.trec import RunLine, reject_contradictions
from jaxret.data.record_checks import require_grade
from jaxret.data.records import Judgement, Record

QUERY_ID, DOCUMENT_IDS, SCORES = "query_id", "document_ids", "scores"
LABEL_KEYS = (QUERY_ID, "doc_ids", "labels")


def read_scored_lists(file: DataFile, policy: Policy) -> Iterator[RunLine]:
    """Yield the lines of rankings, best first, from PyLate's records with query_id, document_ids and scores. Lists may
    be Python literals in strings. The file does not say which documents are relevant. Raises DataError for a record of
    another form."""
    for _, lines in policy.parse_records(read_records(file, policy), _parse_scored_list):
        yield from lines


def _parse_scored_list(record: Record, location: Location) -> list[RunLine]:
    lists = {key: _list(record.get(key), key, location) for key in (DOCUMENT_IDS, SCORES)}
    query_id, documents = record_id(record, QUERY_ID, location), record_ids(lists, DOCUMENT_IDS, location)
    scores = record_scores(lists, SCORES, len(lists[DOCUMENT_IDS]), location)
    if len(documents) != len(scores) or not all(score is not None for score in scores):
        problem = f"{len(documents)} different documents have {len(lists[SCORES])} scores"
        raise location.error("wrong number of scores", problem, "write each document once, with a score")
    ranking = enumerate(sorted(zip(documents, scores), key=lambda entry: -(entry[1] or 0.0)), 1)
    return [RunLine(location, query_id, document, rank, score or 0.0) for rank, (document, score) in ranking]


def _list(value: Any, key: str, location: Location) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        problem = f"the value of {key!r} is not a list: {value[:60]!r}"
        raise location.error("wrong type", problem, "write a list, or a Python list in a string") from error


def _labels(file: DataFile, policy: Policy) -> Iterator[tuple[Location, Judgement]]:
    query, ids, labels_key = LABEL_KEYS

    def parse(record: Record, location: Location) -> list[Judgement]:
        query_id, documents = record_id(record, query, location), record_list(record, ids, location)
        record_ids(record, ids, location)  # for its errors: `documents` keeps repeated ids
        grades = record_scores(record, labels_key, len(documents), location)
        if any(grade is None or grade != int(grade) for grade in grades):
            raise location.error(
                "bad score", "a label is not an integer", "a label is a whole number, above 0 if relevant"
            )
        labels = [require_grade(int(grade or 0), location) for grade in grades]
        return [Judgement(query_id, str(document), label) for document, label in zip(documents, labels)]

    for location, judgements in policy.parse_records(read_records(file, policy), parse):
        for number, judgement in enumerate(judgements):
            yield Location(location.path, f"{location.line}, {ids}[{number}]"), judgement


FORMATS = (
    record_format(
        "pylate.scores",
        "PyLate distillation records",
        (QUERY_ID, DOCUMENT_IDS, SCORES),
        rankings=read_scored_lists,
    ),
    record_format(
        "st.labels",
        "sentence-transformers lists by ids",
        LABEL_KEYS,
        judgements=lambda file, policy: reject_contradictions(_labels(file, policy), policy),
    ),
    passage_format("pylate.documents", "PyLate documents", "document_id"),
    query_format("pylate.queries", "queries of PyLate or ir_datasets", QUERY_ID),
    passage_format("anserini.corpus", "Anserini corpus", "id", "contents"),
    query_format("anserini.topics", "Anserini topics", "qid", "query"),
)
