"""Small formats of neighbours: PyLate's distillation data, Anserini's corpora and topics."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxret.data.files import DataError, Policy, Where
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.flag_embedding import scores_of
from jaxret.data.formats.format import Format, has
from jaxret.data.formats.texts import id_of, ids_of, list_of, passages_by, queries_by
from jaxret.data.formats.trec import RunLine, consistent
from jaxret.data.records import Judgement


def scored_lists(path: Path, policy: Policy) -> Iterator[RunLine]:
    """PyLate's query_id, document_ids, scores as a ranking, best first. Lists may be strings of Python's literals.
    Which documents are relevant the file does not say."""
    for where, record in read_records(path, policy):
        try:
            lists = {key: _list(record.get(key), key, where) for key in ("document_ids", "scores")}
            query_id, documents = id_of(record, "query_id", where), ids_of(lists, "document_ids", where)
            scores = scores_of(lists, "scores", len(lists["document_ids"]), where)
            if len(documents) != len(scores) or not all(score is not None for score in scores):
                found = f"{len(documents)} different documents have {len(lists['scores'])} scores"
                raise where.error("wrong number of scores", found, "write each document once, with a score")
        except DataError as error:
            policy.reject(error)
            continue
        best = sorted(zip(documents, scores), key=lambda both: -(both[1] or 0.0))
        for rank, (document, score) in enumerate(best, 1):
            yield RunLine(where, query_id, document, rank, score or 0.0)


def _list(value: Any, key: str, where: Where) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        found = f"the value of {key!r} is not a list: {value[:60]!r}"
        raise where.error("wrong type", found, "write a list, or a Python list in a string") from error


def labels(path: Path, policy: Policy) -> Iterator[tuple[Where, Judgement]]:
    """query_id, doc_ids, labels: sentence-transformers' lists, by ids."""
    return consistent(_labels(path, policy), policy)


def _labels(path: Path, policy: Policy) -> Iterator[tuple[Where, Judgement]]:
    for where, record in read_records(path, policy):
        try:
            query_id, documents = id_of(record, "query_id", where), list_of(record, "doc_ids", where)
            ids_of(record, "doc_ids", where)  # for what is wrong with one
            grades = scores_of(record, "labels", len(documents), where)
            if any(grade is None or grade != int(grade) for grade in grades):
                raise where.error(
                    "bad score", "a label is not an integer", "a label is a whole number, above 0 if relevant"
                )
        except DataError as error:
            policy.reject(error)
            continue
        for number, (document, grade) in enumerate(zip(documents, grades)):
            place = Where(where.path, f"{where.line}, doc_ids[{number}]")
            yield place, Judgement(query_id, str(document), int(grade or 0))


FORMATS = (
    Format(
        name="pylate.scores",
        title="PyLate distillation records",
        looks="JSON records with query_id, document_ids, scores",
        fits=has("query_id", "document_ids", "scores"),
        keys=("query_id", "document_ids", "scores"),
        rankings=scored_lists,
    ),
    Format(
        name="st.labels",
        title="sentence-transformers lists by ids",
        looks="JSON records with query_id, doc_ids, labels",
        fits=has("query_id", "doc_ids", "labels"),
        keys=("query_id", "doc_ids", "labels"),
        judgements=labels,
    ),
    Format(
        name="pylate.documents",
        title="PyLate documents",
        looks="JSON records with document_id, text",
        fits=has("document_id", "text"),
        keys=("document_id", "text", "title"),
        passages=passages_by("document_id"),
    ),
    Format(
        name="pylate.queries",
        title="queries of PyLate or ir_datasets",
        looks="JSON records with query_id, text",
        fits=has("query_id", "text"),
        keys=("query_id", "text", "answers"),
        queries=queries_by("query_id"),
    ),
    Format(
        name="anserini.corpus",
        title="Anserini corpus",
        looks="JSON records with id, contents",
        fits=has("id", "contents"),
        keys=("id", "contents", "title"),
        passages=passages_by("id", "contents"),
    ),
    Format(
        name="anserini.topics",
        title="Anserini topics",
        looks="JSON records with qid, query",
        fits=has("qid", "query"),
        keys=("qid", "query", "answers"),
        queries=queries_by("qid", "query"),
    ),
)
