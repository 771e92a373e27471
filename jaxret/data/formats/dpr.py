"""DPR's files: psgs.tsv (passages), *.qa.csv (questions with answers) and biencoder JSON (training records).

Both tables are CSV with tabs: a field with a tab, a quote or a line end stands in double quotes, a quote inside is
doubled.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from jaxret.data.files import (
    DataError,
    Digest,
    PathLike,
    Policy,
    Where,
    check_passage,
    check_query,
    normalise_question,
    require_key,
    require_object,
    require_strings,
    write_text,
)
from jaxret.data.formats.containers import Record, read_records
from jaxret.data.formats.format import Format, has, own_id, text_id, value_of
from jaxret.data.formats.head import Head
from jaxret.data.formats.pool import Pool, Scored, make_example, no_positive
from jaxret.data.formats.tables import csv_rows, require_columns
from jaxret.data.records import Example, Passage, Query

CORPUS_COLUMNS = ["id", "text", "title"]


# Tables


def passages(path: Path, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Where, Passage]]:
    """Yields (place, passage) of psgs.tsv[.gz]: id, text, title, or as a header line orders these three.

    As in DPR, double quotes at either end of a text are dropped.
    """
    columns = CORPUS_COLUMNS
    for where, _, row in csv_rows(path, policy, digest):
        if where.line == 1 and (row[0] == "id" or sorted(row) == sorted(CORPUS_COLUMNS)):
            columns = _header(row, where)
            continue
        try:
            require_columns(row, columns, where)
            record = dict(zip(columns, row))
            passage = check_passage(Passage(record["id"], record["text"].strip('"'), record["title"]), where, policy)
        except DataError as error:
            policy.reject(error)
            continue
        yield where, passage


def _header(row: list[str], where: Where) -> list[str]:
    if sorted(row) != sorted(CORPUS_COLUMNS):
        found = f"the header line names the columns {', '.join(row)}"
        raise where.error("wrong columns", found, f"name them {', '.join(CORPUS_COLUMNS)}")
    return row


def table_queries(path: Path, policy: Policy) -> list[Query]:
    """The queries of *.qa.csv[.gz]: question, Python list of answer strings. Ids are row numbers from "0"."""
    found = []
    for where, number, row in csv_rows(path, policy):
        try:
            require_columns(row, ["question", "answers"], where)
            answers = require_strings(_literal(row[1], where), "the answer column", where)
            found.append(check_query(Query(str(number), normalise_question(row[0]), answers), where))
        except DataError as error:
            policy.reject(error)
    return found


def _literal(text: str, where: Where) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # answers may be patterns: '\d' warns, and means what is written
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        found = f"the answer column is not a Python list: {text[:60]!r}"
        raise where.error("broken answers", found, "write it as ['first answer', 'second answer']") from error


# Training records


def context_of(value: Any, where: Where, policy: Policy, keys: Iterable[str] = ("passage_id", "psg_id")) -> Passage:
    record = require_object(value, where)
    title = "" if record.get("title") is None else require_key(record, "title", str, where)
    text = require_key(record, "text", str, where)
    key = value_of(record, keys)
    if record.get(key) is None:  # older files have no ids: the content names the passage
        passage_id = text_id(text, title)
    elif type(record[key]) is int:
        passage_id = str(record[key])
    else:
        passage_id = require_key(record, key, str, where)
    return check_passage(Passage(passage_id, text, title), where, policy)


Parsed = TypeVar("Parsed")


def question_records(
    path: Path, policy: Policy, parse: Callable[[Record, Where, Query], Parsed]
) -> Iterator[tuple[Where, Parsed]]:
    """Yields (place, `parse(record, place, query)`) for the good records; a query's id is the number of its record."""
    for where, record in read_records(path, policy):
        try:
            question = normalise_question(require_key(record, "question", str, where))
            answers = require_strings(record.get("answers", []), "the value of 'answers'", where)
            parsed = parse(record, where, check_query(Query(own_id(where), question, answers), where))
        except DataError as error:
            policy.reject(error)
            continue
        yield where, parsed


def record_queries(path: Path, policy: Policy) -> list[Query]:
    """The questions of biencoder or result JSON; their ids are the numbers of their records, from "0"."""
    return [query for _, query in question_records(path, policy, lambda record, where, query: query)]


def examples(path: Path, policy: Policy) -> Iterator[tuple[Where, Example]]:
    """One example a record: positive_ctxs, and hard_negative_ctxs or, if there are none, negative_ctxs.

    A passage is taken once, and a positive is never a negative. Scores of contexts are those of a first retrieval (1000
    for a gold passage), of no teacher: they are not read.
    """
    pool = Pool(policy)

    def contexts(record: Record, key: str, where: Where) -> Scored:
        values = require_key(record, key, list, where) if key in record else []
        return pool.read(values, key, where, lambda value, place: context_of(value, place, policy))

    def parse(record: Record, where: Where, query: Query) -> Example:
        require_key(record, "positive_ctxs", list, where)
        positives = contexts(record, "positive_ctxs", where)
        if not positives:
            raise no_positive(where, "positive_ctxs")
        hard = contexts(record, "hard_negative_ctxs", where) or contexts(record, "negative_ctxs", where)
        return make_example(query, positives, hard)

    return question_records(path, policy, parse)


# Writing


def _quoted(text: str) -> str:
    # The csv module writes a bare "\r" without quotes before Python 3.13, and then cannot read it back.
    return '"' + text.replace('"', '""') + '"' if any(sign in text for sign in '"\t\r\n') else text


def write_dpr_corpus(path: PathLike, passages: Iterable[Passage]) -> None:
    """Writes psgs.tsv[.gz]. All text survives but for double quotes at the ends of it, which DPR's readers drop."""
    path = Path(path)
    with write_text(path) as file:
        file.write("\t".join(CORPUS_COLUMNS) + "\n")
        for number, passage in enumerate(passages, 1):
            check_passage(passage, Where(path, f"passage {number}"))
            file.write(f"{passage.id}\t{_quoted(passage.text)}\t{_quoted(passage.title)}\n")


def write_dpr_queries(path: PathLike, queries: Iterable[Query]) -> None:
    """Writes *.qa.csv[.gz]. The format has no ids: on reading, the n-th query's id is n, counted from "0"."""
    path = Path(path)
    with write_text(path) as file:
        for number, query in enumerate(queries):
            check_query(query, Where(path, f"query {number}"))
            file.write(f"{_quoted(query.text)}\t{_quoted(repr(list(query.answers)))}\n")


def write_dpr_examples(path: PathLike, examples: Iterable[Example]) -> None:
    """Writes biencoder JSON[.gz], a record a line. The format has no query ids: they are read back as "0", "1", ..."""
    path = Path(path)
    with write_text(path) as file:
        file.write("[")
        for number, example in enumerate(examples):
            where = Where(path, f"record {number}")
            record = {
                "question": check_query(example.query, where).text,
                "answers": list(example.query.answers),
                "positive_ctxs": [_context_record(passage, where) for passage in example.positives],
                "negative_ctxs": [],
                "hard_negative_ctxs": [_context_record(passage, where) for passage in example.negatives],
            }
            file.write(("," if number else "") + "\n" + json.dumps(record, ensure_ascii=False))
        file.write("\n]\n")


def _context_record(passage: Passage, where: Where) -> dict[str, str]:
    check_passage(passage, where)
    return {"title": passage.title, "text": passage.text, "passage_id": passage.id}


def _is_table_of_questions(head: Head) -> bool:
    return head.columns == 2 and any(row[1].lstrip('"').startswith("[") and "]" in row[1] for row in head.rows)


def _is_corpus(head: Head) -> bool:
    if head.container != "table":
        return False
    first = head.lines[0].split("\t")
    if first[0] == "id" or sorted(first) == sorted(CORPUS_COLUMNS):
        return True
    if head.columns != 3 or not all(len(row[0].split()) == 1 for row in head.rows):
        return False
    text, title = (sum(len(row[place]) for row in head.rows) for place in (1, 2))
    return text > title or len(head.rows) < 10  # else another order, which a header line would say


FORMATS = (
    Format(
        name="dpr.examples",
        title="DPR training records",
        looks="JSON records with question, positive_ctxs, hard_negative_ctxs",
        fits=has("question", "positive_ctxs"),
        keys=("question", "answers", "positive_ctxs", "hard_negative_ctxs", "negative_ctxs"),
        every_positive=False,
        queries=record_queries,
        examples=examples,
    ),
    Format(
        name="dpr.queries",
        title="DPR questions (qa.csv)",
        looks="two columns between tabs: question, a Python list of answers",
        fits=_is_table_of_questions,
        columns=(2,),
        queries=table_queries,
    ),
    Format(
        name="dpr.passages",
        title="DPR passages (psgs.tsv)",
        looks="three columns between tabs, with CSV's quotes: id, text, title, or as a header line orders them",
        fits=_is_corpus,
        columns=(3,),
        passages=passages,
    ),
)
