"""DPR's files: psgs.tsv (passages), *.qa.csv (questions with answers) and biencoder JSON (training records).

Both tables are CSV with tabs: a field with a tab, a quote or a line end stands in double quotes, a quote inside is
doubled. They are read strictly, because a lenient reader takes one stray quote for the start of a field and swallows
the lines up to the next.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jaxret.data.files import (
    LINE_LIMIT,
    DataError,
    Digest,
    PathLike,
    Policy,
    Where,
    check_passage,
    check_query,
    decode,
    normalise_question,
    read_json_array,
    read_lines,
    require_key,
    require_object,
    require_strings,
    too_long,
    write_text,
)
from jaxret.data.records import Example, Judgement, Passage, Query

CORPUS_COLUMNS = ["id", "text", "title"]


# Tables


def _rows(path: PathLike, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Where, int, list[str]]]:
    """Yields (place of its first line, number, fields) of the rows of a tab-separated CSV file. Blank lines are no
    rows; those that cannot be read are, so that skipping one does not renumber the others."""
    csv.field_size_limit(2**31 - 1)  # default 131,072 characters, less than a long document; this is C's long
    count, size = 0, 0
    first: Where | None = None  # line of the row that is being read
    undecodable: list[DataError] = []

    def text() -> Iterator[str]:
        nonlocal first, size
        for where, line in read_lines(path, digest, blank=b"\r\n"):
            if first is None:
                if line[0] in b"\r\n" and not line.strip(b"\r\n"):
                    continue
                first = where
            size += len(line)
            if size > LINE_LIMIT:  # perhaps a quote that is never closed
                raise too_long(first, "row")
            try:
                yield decode(line, where)
            except DataError as error:
                undecodable.append(error)  # the row must reach its end before it can be rejected
                yield line.decode("utf-8", errors="replace")

    reader = csv.reader(text(), delimiter="\t", strict=True)
    while True:
        first, size = None, 0
        undecodable.clear()
        try:
            row = next(reader, None)
            where = first or Where(Path(path))
        except csv.Error as error:
            where = first or Where(Path(path))
            found = f"the row that begins here is not well-formed CSV ({error})"
            remedy = 'put a field with a tab, a quote or a line end in double quotes, and write " inside as ""'
            policy.reject(where.error("broken quoting", found, remedy))
            count += 1
            continue
        if row is None:
            return
        if undecodable:
            policy.reject(undecodable[0])
        elif row:
            yield where, count, row
        count += bool(row)


def _require_columns(row: list[str], columns: list[str], where: Where) -> None:
    if len(row) != len(columns):
        found = f"this row has {len(row)} columns, beginning {row[0][:40]!r}"
        remedy = f"{len(columns)} are expected, separated by tabs: {', '.join(columns)}"
        raise where.error("wrong columns", found, remedy)


def passages(path: Path, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Where, Passage]]:
    """Yields (place, passage) of psgs.tsv[.gz]: id, text, title, or as a header line orders these three.

    As in DPR, double quotes at either end of a text are dropped.
    """
    columns = CORPUS_COLUMNS
    for where, _, row in _rows(path, policy, digest):
        if where.line == 1 and (row[0] == "id" or sorted(row) == sorted(CORPUS_COLUMNS)):
            columns = _header(row, where)
            continue
        try:
            _require_columns(row, columns, where)
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
    for where, number, row in _rows(path, policy):
        try:
            _require_columns(row, ["question", "answers"], where)
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


@dataclass
class _Pool:
    """The passages of a biencoder file by id, so that records share them. One id with two texts is bad input."""

    policy: Policy
    known: dict[str, tuple[Passage, Where]] = field(default_factory=dict)

    def contexts(self, record: Mapping[str, Any], key: str, where: Where) -> tuple[Passage, ...]:
        """The passages of `record[key]` in order, each id once; an absent list is an empty one."""
        found: dict[str, Passage] = {}
        for number, value in enumerate(require_key(record, key, list, where) if key in record else []):
            place = Where(where.path, f"{where.line}, {key}[{number}]")
            try:
                passage = self._shared(_context(value, place, self.policy), place)
            except DataError as error:
                self.policy.reject(error)
                continue
            found.setdefault(passage.id, passage)
        return tuple(found.values())

    def _shared(self, passage: Passage, where: Where) -> Passage:
        known, first = self.known.setdefault(passage.id, (passage, where))
        if known != passage:
            found = f"passage id {passage.id!r} has another title or text than at {first.line}"
            raise where.error("duplicate id", found, "give different passages different ids")
        return known


def _context(value: Any, where: Where, policy: Policy) -> Passage:
    record = require_object(value, where)
    title = "" if record.get("title") is None else require_key(record, "title", str, where)
    text = require_key(record, "text", str, where)
    key = next((key for key in ("passage_id", "psg_id") if record.get(key) is not None), None)
    if key is None:  # older files have no ids: the content names the passage
        passage_id = hashlib.blake2b(f"{title}\0{text}".encode(), digest_size=12).hexdigest()
    elif type(record[key]) is int:
        passage_id = str(record[key])
    else:
        passage_id = require_key(record, key, str, where)
    return check_passage(Passage(passage_id, text, title), where, policy)


Parsed = TypeVar("Parsed")


def _records(path: Path, policy: Policy, parse: Callable[[dict[str, Any], Where, Query], Parsed]) -> Iterator[Parsed]:
    """Yields `parse(record, place, query)` for the good records of a biencoder file; query ids are record numbers."""
    for number, value in enumerate(read_json_array(path)):
        where = Where(path, f"record {number}")
        try:
            record = require_object(value, where)
            question = normalise_question(require_key(record, "question", str, where))
            answers = require_strings(record.get("answers", []), "the value of 'answers'", where)
            parsed = parse(record, where, check_query(Query(str(number), question, answers), where))
        except DataError as error:
            policy.reject(error)
            continue
        yield parsed


def record_queries(path: Path, policy: Policy) -> list[Query]:
    """The questions of a biencoder file; their ids are the record numbers from "0"."""
    return list(_records(path, policy, lambda record, where, query: query))


def examples(path: Path, policy: Policy) -> list[Example]:
    """One example a record: positive_ctxs, and hard_negative_ctxs or, if there are none, negative_ctxs.

    A passage is taken once, and a positive is never a negative.
    """
    pool = _Pool(policy)

    def parse(record: dict[str, Any], where: Where, query: Query) -> Example:
        positives = _positives(record, where, pool)
        hard = pool.contexts(record, "hard_negative_ctxs", where) or pool.contexts(record, "negative_ctxs", where)
        ids = {passage.id for passage in positives}
        return Example(query, positives, tuple(passage for passage in hard if passage.id not in ids))

    return list(_records(path, policy, parse))


def _positives(record: dict[str, Any], where: Where, pool: _Pool) -> tuple[Passage, ...]:
    require_key(record, "positive_ctxs", list, where)
    positives = pool.contexts(record, "positive_ctxs", where)
    if not positives:
        raise where.error("no positive", "'positive_ctxs' holds no passage", "add one, or leave the record out")
    return positives


def judgements(path: Path, policy: Policy) -> Iterator[tuple[Where, Judgement]]:
    """Yields (place, judgement): the positives of a biencoder file, relevance 1."""
    pool = _Pool(policy)

    def parse(record: dict[str, Any], where: Where, query: Query) -> list[tuple[Where, Judgement]]:
        positives = _positives(record, where, pool)
        return [(where, Judgement(query.id, passage.id, 1)) for passage in positives]

    for group in _records(path, policy, parse):
        yield from group


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
