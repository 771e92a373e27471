"""DPR's files: psgs.tsv (passages), *.qa.csv (questions with answers) and biencoder JSON (training records).

Both tables are CSV with tabs: a field with a tab, a quote or a line end is in double quotes, and a quote inside the
field is doubled.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from jaxret.data.errors import DataError, Location, Policy, Value
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.file_sample import FileSample, is_number, is_text
from jaxret.data.formats.format import DataFile, Format, content_id, first_present_key, id_from_location, record_format
from jaxret.data.formats.shared_passages import ScoredPassages, SharedPassages, make_example, no_positive_error
from jaxret.data.formats.tables import csv_rows, is_header, require_columns
from jaxret.data.lines import Digest
from jaxret.data.record_checks import (
    check_passage,
    check_query,
    normalize_question,
    require_key,
    require_object,
    require_strings,
)
from jaxret.data.records import Example, Passage, Query, Record

CORPUS_COLUMNS = ["id", "text", "title"]
QUESTION, ANSWERS = "question", "answers"
POSITIVES, HARD_NEGATIVES, NEGATIVES = "positive_ctxs", "hard_negative_ctxs", "negative_ctxs"
PASSAGE_IDS = ("passage_id", "psg_id")  # older files have the second key
# Relation in a file name of EntityQuestions, which have a file for each of 24 relations (P17.test.json).
_RELATION = re.compile(r"(P\d+)\.")


# Tables


def read_dpr_passages(
    file: DataFile, policy: Policy, digest: Digest | None = None
) -> Iterator[tuple[Location, Passage]]:
    """Yield (location, passage) of psgs.tsv[.gz]: id, text, title, or the order of a header line.

    Double quotes at both ends of a text are dropped, as in DPR.
    """
    columns = CORPUS_COLUMNS
    for location, _, row in csv_rows(file.path, policy, digest):
        if location.line == 1 and (row[0] == "id" or is_header(row)):
            columns = _header(row, location)
            continue
        try:
            require_columns(row, columns, location)
            record = dict(zip(columns, row))
            passage = check_passage(Passage(record["id"], record["text"].strip('"'), record["title"]), location, policy)
        except DataError as error:
            policy.reject(error)
            continue
        yield location, passage


def _header(row: list[str], location: Location) -> list[str]:
    if sorted(row) != sorted(CORPUS_COLUMNS):
        problem = f"the header line names the columns {', '.join(row)}"
        raise location.error("wrong columns", problem, f"name them {', '.join(CORPUS_COLUMNS)}")
    return row


def read_qa_queries(file: DataFile, policy: Policy) -> list[Query]:
    """Return the queries of *.qa.csv[.gz]: question, Python list of answer strings. Ids are row numbers from "0"."""
    queries = []
    for location, number, row in csv_rows(file.path, policy):
        try:
            require_columns(row, [QUESTION, ANSWERS], location)
            answers = require_strings(_literal(row[1], location), "the answer column", location)
            queries.append(check_query(Query(str(number), normalize_question(row[0]), answers), location))
        except DataError as error:
            policy.reject(error)
    return queries


def _literal(text: str, location: Location) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # answers may be patterns; Python warns of '\d' and reads it unchanged
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        problem = f"the answer column is not a Python list: {text[:60]!r}"
        raise location.error("broken answers", problem, "write it as ['first answer', 'second answer']") from error


# Training records


def parse_dpr_passage(value: Any, location: Location, policy: Policy, keys: Iterable[str] = PASSAGE_IDS) -> Passage:
    """Return the passage of a DPR record. A missing or null title is empty. A record without an id gets a hash of its
    content as its id.

    Args:
        value: JSON value of the passage.
        location: location of the record, for errors.
        policy: what to do with an empty passage.
        keys: keys that may hold the id; the first one that the record has is used.

    Raises:
        DataError: the value is not an object, or it lacks a text, or its id is neither a string nor an integer.
    """
    record = require_object(value, location)
    title = "" if record.get("title") is None else require_key(record, "title", str, location)
    text = require_key(record, "text", str, location)
    key = first_present_key(record, keys)
    if record.get(key) is None:  # older files have no ids: the id is a hash of the content
        passage_id = content_id(text, title)
    elif type(record[key]) is int:
        passage_id = str(record[key])
    else:
        passage_id = require_key(record, key, str, location)
    return check_passage(Passage(passage_id, text, title), location, policy)


def read_question_records(
    file: DataFile, policy: Policy, parse: Callable[[Record, Location, Query], Value]
) -> Iterator[tuple[Location, Value]]:
    """Yield (location, `parse(record, location, query)`) for the valid records. A query's id is the number of its
    record."""

    def parse_record(record: Record, location: Location) -> Value:
        question = normalize_question(require_key(record, QUESTION, str, location))
        answers = require_strings(record.get(ANSWERS, []), f"the value of '{ANSWERS}'", location)
        return parse(record, location, check_query(Query(id_from_location(location), question, answers), location))

    return policy.parse_records(read_records(file, policy), parse_record)


def read_question_queries(file: DataFile, policy: Policy) -> list[Query]:
    """Return the questions of biencoder or result JSON. Their ids are the numbers of their records, from "0"."""
    return [query for _, query in read_question_records(file, policy, lambda record, location, query: query)]


def read_relation_queries(file: DataFile, policy: Policy) -> list[Query]:
    """Return the questions of a file. An id has the file's relation and the record's number from 0: "P17-0"."""
    relation = _RELATION.match(file.path.name)
    queries = read_question_queries(file, policy)
    return [replace(query, id=f"{relation[1]}-{query.id}") for query in queries] if relation else queries


def read_dpr_examples(file: DataFile, policy: Policy) -> Iterator[tuple[Location, Example]]:
    """Yield one example for each record: positive_ctxs, and hard_negative_ctxs or, if these are empty, negative_ctxs.

    A passage is taken once, and a positive is never a negative. Scores of contexts are not read: they come from a first
    retrieval (1000 for a gold passage), not from a teacher.
    """
    pool = SharedPassages(policy)

    def contexts(record: Record, key: str, location: Location) -> ScoredPassages:
        values = ((value, None) for value in (require_key(record, key, list, location) if key in record else []))
        return pool.parse_scored(values, key, location, lambda value, place: parse_dpr_passage(value, place, policy))

    def parse(record: Record, location: Location, query: Query) -> Example:
        require_key(record, POSITIVES, list, location)
        positives = contexts(record, POSITIVES, location)
        if not positives:
            raise no_positive_error(location, POSITIVES)
        hard = contexts(record, HARD_NEGATIVES, location) or contexts(record, NEGATIVES, location)
        return make_example(query, positives, hard)

    return read_question_records(file, policy, parse)


# Detection


def _is_table_of_questions(sample: FileSample) -> bool:
    return sample.columns == 2 and any(row[1].lstrip('"').startswith("[") and "]" in row[1] for row in sample.rows)


def _has_texts(sample: FileSample) -> bool:
    """Return whether at least half of the rows have a text in the second or third column, and not all rows have a
    number in the third."""
    texts = sum(is_text(row[1]) or is_text(row[2]) for row in sample.rows)
    numbers = sum(bool(is_number(row[2])) for row in sample.rows)
    return 2 * texts >= len(sample.rows) > numbers


def _is_corpus(sample: FileSample) -> bool:
    if sample.container != "table":
        return False
    first = sample.lines[0].rstrip("\r").split("\t")
    if first[0] == "id" or (is_header(first) and len(first) == 3):  # the reader reports wrong names
        return first[0] == "id" or "text" in first
    if sample.columns != 3 or not all(len(row[0].split()) == 1 for row in sample.rows):
        return False
    if not _has_texts(sample):  # single words: judgements, a run or triples
        return False
    text, title = (sum(len(row[column]) for row in sample.rows) for column in (1, 2))
    # Otherwise the columns are id, title, text (`msmarco.py`), and the texts have several words.
    return text >= title or (len(sample.rows) < 10 and not any(len(row[2].split()) > 1 for row in sample.rows))


FORMATS = (
    record_format(
        "dpr.examples",
        "DPR training records",
        (QUESTION, POSITIVES),
        optional_keys=(HARD_NEGATIVES, NEGATIVES, ANSWERS),
        every_positive=False,
        without_query_ids=True,
        queries=read_question_queries,
        examples=read_dpr_examples,
    ),
    Format(
        name="dpr.queries",
        title="DPR questions (qa.csv)",
        description="two columns between tabs: question, a Python list of answers",
        matches=_is_table_of_questions,
        columns=(2,),
        without_query_ids=True,
        queries=read_qa_queries,
    ),
    Format(
        name="dpr.passages",
        title="DPR passages (psgs.tsv)",
        description="three columns between tabs, with CSV's quotes: id, text, title, or as a header line orders them",
        matches=_is_corpus,
        columns=(3,),
        passages=read_dpr_passages,
    ),
    record_format(
        "entity.questions",
        "EntityQuestions",
        (QUESTION, ANSWERS),
        queries=read_relation_queries,
        without_query_ids=True,
    ),
)
