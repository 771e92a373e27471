"""MS MARCO's files: tables between tabs, without header and without quoting.

The text of collection.tsv and of the triples is taken as it is, also where it was encoded twice ("cafÃ©"); ir_datasets
repairs it, so its texts differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxret.data.files import (
    DataError,
    Digest,
    Policy,
    Where,
    check_passage,
    check_query,
    normalise_question,
    require_key,
    write_text,
)
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.format import Format, Named, has
from jaxret.data.formats.grouped import Row, grouped
from jaxret.data.formats.head import Head
from jaxret.data.formats.tables import tab_rows
from jaxret.data.formats.texts import id_of, ids_of, refuse_duplicate
from jaxret.data.formats.trec import RunLine, is_integer
from jaxret.data.records import Example, Passage, Query

_GRADES = 4  # of qrels, as a rule; what is higher is a rank, or an id
_ANY_GRADE = 100  # what is not higher in most lines is no id of a passage, where there are lines enough to tell
_TELLING = 10


def passages(path: Path, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Where, Passage]]:
    """Yields (place, passage) of collection.tsv: id, text."""
    for where, (key, text) in tab_rows(path, ("passage id", "text"), policy, digest):
        try:
            yield where, check_passage(Passage(key, text), where, policy)
        except DataError as error:
            policy.reject(error)


def queries(path: Path, policy: Policy) -> list[Query]:
    """The queries of queries.*.tsv: id, text."""
    found: list[Query] = []
    first: dict[str, Where] = {}
    for where, (key, text) in tab_rows(path, ("query id", "text"), policy):
        try:
            query = check_query(Query(key, normalise_question(text)), where)
            refuse_duplicate(query.id, "query id", where, first)
        except DataError as error:
            policy.reject(error)
            continue
        found.append(query)
    return found


def triples(path: Path, policy: Policy) -> Iterator[tuple[Where, Example]]:
    """Examples of triples.train.small.tsv: query, text of a positive, text of a negative; one for each query."""
    rows = tab_rows(path, ("query", "positive", "negative"), policy)
    read = (Row(where, query, [(positive, None)], [(negative, None)]) for where, (query, positive, negative) in rows)
    return grouped(read, policy)


def named_triples(path: Path, policy: Policy) -> Iterator[tuple[Where, Named]]:
    """Of qidpidtriples.*.tsv: query, positive and negative by id; one for each query, in the order in which they
    come."""
    first: dict[str, Where] = {}
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for where, (query, positive, negative) in tab_rows(path, ("query id", "positive id", "negative id"), policy):
        first.setdefault(query, where)
        positives, negatives = found.setdefault(query, ({}, {}))
        positives[positive] = negatives[negative] = None
    for query, (positives, negatives) in found.items():
        yield first[query], Named(query, None, tuple(positives), tuple(negatives))


def hard_negatives(path: Path, policy: Policy) -> Iterator[tuple[Where, Named]]:
    """Of sentence-transformers' msmarco-hard-negatives: negatives by the system that found them, here one list of each
    once: the first of every system, the second of every system, ..."""
    for where, record in read_records(path, policy):
        try:
            query = id_of(record, "qid", where)
            systems = require_key(record, "neg", dict, where)
            lists = [ids_of(systems, name, where) for name in systems]
            positives = ids_of(record, "pos", where)
        except DataError as error:
            policy.reject(error)
            continue
        depth = max(map(len, lists), default=0)
        negatives = dict.fromkeys(found[i] for i in range(depth) for found in lists if i < len(found))
        yield where, Named(query, None, positives, tuple(negatives))


def candidate_passages(path: Path, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Where, Passage]]:
    """The passages of top1000.*: query id, passage id, query, passage; each once."""
    first: dict[str, Where] = {}
    texts: dict[str, int] = {}
    for where, (_, key, _, text) in tab_rows(path, _CANDIDATES, policy, digest):
        try:
            passage = check_passage(Passage(key, text), where, policy)
            if _same(key, text, "passage", where, first, texts):
                continue
        except DataError as error:
            policy.reject(error)
            continue
        yield where, passage


def candidate_queries(path: Path, policy: Policy) -> list[Query]:
    """The queries of top1000.*, each once."""
    found: list[Query] = []
    first: dict[str, Where] = {}
    texts: dict[str, int] = {}
    for where, (key, _, text, _) in tab_rows(path, _CANDIDATES, policy):
        try:
            query = check_query(Query(key, normalise_question(text)), where)
            if not _same(key, text, "query", where, first, texts):
                found.append(query)
        except DataError as error:
            policy.reject(error)
    return found


_CANDIDATES = ("query id", "passage id", "query", "passage")


def _same(key: str, text: str, what: str, where: Where, first: dict[str, Where], texts: dict[str, int]) -> bool:
    """Whether the id was met before, with this text; with another one that is an error."""
    if key in first and texts[key] != hash(text):
        found = f"{what} {key!r} has another text than on line {first[key].line}"
        raise where.error("duplicate id", found, "give different texts different ids")
    met = key in first
    first.setdefault(key, where)
    texts.setdefault(key, hash(text))
    return met


def run_lines(path: Path, policy: Policy) -> Iterator[RunLine]:
    """Yields the lines of a run with three columns: query id, passage id, rank. The score is 1 / rank."""
    for where, (query, passage, rank) in tab_rows(path, ("query id", "passage id", "rank"), policy):
        if not is_integer(rank) or int(rank) < 1:
            policy.reject(where.error("bad rank", f"rank {rank!r} is no whole number from 1", "ranks count from 1"))
            continue
        yield RunLine(where, query, passage, int(rank), 1 / int(rank))


# What files look like


def one_word(row: list[str], *places: int) -> bool:
    return all(len(row[place].split()) == 1 for place in places)


def mostly(rows: list[list[str]], test: Callable[[list[str]], bool]) -> bool:
    """Of most rows: a bad one does not change what a file is."""
    return bool(rows) and 2 * sum(map(test, rows)) >= len(rows)


def _is_texts(head: Head) -> bool:
    return head.container == "table" and head.columns == 2 and mostly(head.rows, lambda row: one_word(row, 0))


def is_run(head: Head) -> bool:
    """Three columns, the third 1, 2, 3, ... for each query, further than grades go."""
    if head.columns != 3 or not head.rows or not all(is_integer(row[2]) for row in head.rows):
        return False
    ranks: dict[str, list[int]] = {}
    for row in head.rows:
        ranks.setdefault(row[0], []).append(int(row[2]))
    return (
        all(sorted(r) == list(range(1, len(r) + 1)) for r in ranks.values()) and max(map(max, ranks.values())) > _GRADES
    )


def _is_named(head: Head) -> bool:
    if head.columns != 3 or not mostly(head.rows, lambda row: one_word(row, 0, 1, 2)):
        return False
    if head.lines[0].startswith("id\t"):  # the header of DPR's psgs.tsv
        return False
    highest = _ANY_GRADE if len(head.rows) >= _TELLING else _GRADES
    return not mostly(head.rows, lambda row: is_integer(row[2]) and int(row[2]) <= highest)


def _is_triples(head: Head) -> bool:
    return head.columns == 3 and mostly(head.rows, lambda row: len(row[0].split()) > 1 and bool(row[1] and row[2]))


def _is_candidates(head: Head) -> bool:
    """Not the documents, whose second column is an address."""
    return head.columns == 4 and mostly(
        head.rows, lambda row: one_word(row, 0, 1) and "://" not in row[1] and len(row[3].split()) > 1
    )


# Writing


def write_texts(path: Path, rows: Iterable[tuple[str, str]]) -> int:
    """Writes id TAB text; tabs and line ends inside become blanks. How many texts had some."""
    changed = 0
    with write_text(path) as file:
        for key, text in rows:
            flat = one_line(text)
            changed += flat != text
            file.write(f"{key}\t{flat}\n")
    return changed


def one_line(text: str) -> str:
    """The text with a blank for each tab and line end, which would end the field."""
    return text.translate({9: " ", 10: " ", 13: " "})


FORMATS = (
    Format(
        name="msmarco.run",
        title="MS MARCO run",
        looks="three columns between tabs: query id, passage id, rank from 1",
        fits=is_run,
        columns=(3,),
        ranks_alone=True,
        rankings=run_lines,
    ),
    Format(
        name="msmarco.named",
        title="MS MARCO triples of ids",
        looks="three columns between tabs: ids of query, positive, negative",
        fits=_is_named,
        columns=(3,),
        named=named_triples,
    ),
    Format(
        name="msmarco.triples",
        title="MS MARCO triples of texts",
        looks="three columns between tabs: query, positive, negative",
        fits=_is_triples,
        columns=(3,),
        examples=triples,
    ),
    Format(
        name="msmarco.candidates",
        title="MS MARCO candidates (top1000)",
        looks="four columns between tabs: query id, passage id, query, passage",
        fits=_is_candidates,
        columns=(4,),
        passages=candidate_passages,
        queries=candidate_queries,
    ),
    Format(
        name="msmarco.negatives",
        title="MS MARCO hard negatives of sentence-transformers",
        looks='JSON records with qid, pos (ids), neg ({"system": ids})',
        fits=lambda head: has("qid", "pos", "neg")(head) and isinstance(head.records[0].get("neg"), dict),
        keys=("qid", "pos", "neg"),
        named=hard_negatives,
    ),
    Format(
        name="msmarco.texts",
        title="MS MARCO collection or queries",
        titles={"passages": "MS MARCO collection", "queries": "MS MARCO queries"},
        looks="two columns between tabs: id, text",
        fits=_is_texts,
        columns=(2,),
        passages=passages,
        queries=queries,
    ),
)
