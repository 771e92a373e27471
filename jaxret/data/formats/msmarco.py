"""MS MARCO's files, and those of RocketQA's MS MARCO, which I3 and MLR use: tables between tabs, without header and
without quoting.

Texts of collection.tsv and of the triples that were encoded twice ("cafÃ©") are not repaired. ir_datasets repairs them,
so its texts differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxret.data.errors import Location, Policy
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.file_sample import FileSample, holds_for_most, is_number, is_text
from jaxret.data.formats.format import DataFile, Format, IdExample, group_ids, has_keys
from jaxret.data.formats.tables import is_header, tab_rows
from jaxret.data.formats.text_rows import TextRow, group_by_query
from jaxret.data.formats.texts import record_id, record_ids, require_new_id, unique_queries
from jaxret.data.formats.trec import RunLine, checked_line, is_integer
from jaxret.data.lines import Digest
from jaxret.data.record_checks import check_passage, check_query, normalize_question, require_id, require_key, shorten
from jaxret.data.records import Example, Passage, Query, Record

QUERY_ID, POSITIVES, NEGATIVES = "qid", "pos", "neg"
_GRADES = 4  # highest usual grade of qrels; a higher number is a rank or an id
_ANY_GRADE = 100  # in a sample of `_ENOUGH_ROWS`, a column whose numbers are mostly not above this has no passage ids
_ENOUGH_ROWS = 10
_IDS = re.compile(r"[^\s,]+(,[^\s,]+)*")  # ids between commas


def read_collection(file: DataFile, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Location, Passage]]:
    """Yield (location, passage) of collection.tsv: id, text. Raises DataError for RocketQA's file of titles, which has
    the same columns."""
    if file.path.name.startswith("para.title."):
        problem = "this file has the titles of the passages of RocketQA's para.txt, and no texts"
        raise Location(file.path).error("titles", problem, "join the two files (docs/data.md has the command)")
    rows = tab_rows(file.path, ("passage id", "text"), policy, digest)
    return policy.parse_records(rows, lambda row, location: check_passage(Passage(*row), location, policy))


def read_tab_queries(file: DataFile, policy: Policy) -> list[Query]:
    """Return the queries of queries.*.tsv: id, text."""

    def parse(row: list[str], location: Location) -> Query:
        return check_query(Query(row[0], normalize_question(row[1])), location)

    return unique_queries(tab_rows(file.path, ("query id", "text"), policy), policy, parse)


def read_text_triples(file: DataFile, policy: Policy) -> Iterator[tuple[Location, Example]]:
    """Yield one example for each query of triples.train.small.tsv: query, text of a positive, text of a negative."""
    rows = tab_rows(file.path, ("query", "positive", "negative"), policy)
    text_rows = (
        TextRow(location, query, [(positive, None)], [(negative, None)])
        for location, (query, positive, negative) in rows
    )
    return group_by_query(text_rows, policy)


def read_id_triples(file: DataFile, policy: Policy) -> Iterator[tuple[Location, IdExample]]:
    """Yield one example for each query of qidpidtriples.*.tsv, whose columns are the ids of query, positive and
    negative."""
    return group_ids(tab_rows(file.path, ("query id", "positive id", "negative id"), policy))


def read_hard_negatives(file: DataFile, policy: Policy) -> Iterator[tuple[Location, IdExample]]:
    """Yield the examples of sentence-transformers' msmarco-hard-negatives, which has a list of negatives for each of
    several systems. An example has one list: the first negative of every system, the second of every system, ...,
    without repetition."""

    def parse(record: Record, location: Location) -> IdExample:
        query = record_id(record, QUERY_ID, location)
        systems = require_key(record, NEGATIVES, dict, location)
        lists = [record_ids(systems, name, location) for name in systems]
        depth = max(map(len, lists), default=0)
        negatives = dict.fromkeys(ids[i] for i in range(depth) for ids in lists if i < len(ids))
        return IdExample(query, None, record_ids(record, POSITIVES, location), tuple(negatives))

    return policy.parse_records(read_records(file, policy), parse)


def read_candidate_passages(
    file: DataFile, policy: Policy, digest: Digest | None = None
) -> Iterator[tuple[Location, Passage]]:
    """Yield the passages of top1000.* without repetition. The columns are query id, passage id, query, passage."""
    first: dict[str, tuple[int, Location]] = {}

    def parse(row: list[str], location: Location) -> Passage | None:
        passage = check_passage(Passage(row[1], row[3]), location, policy)
        return passage if _is_first(row[1], row[3], "passage", location, first) else None

    rows = tab_rows(file.path, _CANDIDATES, policy, digest)
    return ((location, passage) for location, passage in policy.parse_records(rows, parse) if passage)


def read_candidate_queries(file: DataFile, policy: Policy) -> list[Query]:
    """Return the queries of top1000.* without repetition."""
    first: dict[str, tuple[int, Location]] = {}

    def parse(row: list[str], location: Location) -> Query | None:
        query = check_query(Query(row[0], normalize_question(row[2])), location)
        return query if _is_first(row[0], row[2], "query", location, first) else None

    return [query for _, query in policy.parse_records(tab_rows(file.path, _CANDIDATES, policy), parse) if query]


_CANDIDATES = ("query id", "passage id", "query", "passage")


def _is_first(key: str, text: str, kind: str, location: Location, first: dict[str, tuple[int, Location]]) -> bool:
    """Return whether an id occurs for the first time. Raises DataError if it occurred with another text. `first`, id ->
    (hash of the text, location), is updated."""
    text_hash, earlier = first.setdefault(key, (hash(text), location))
    if text_hash != hash(text):
        problem = f"{kind} {key!r} has another text than on line {earlier.line}"
        raise location.error("duplicate id", problem, "give different texts different ids")
    return earlier is location


def read_ranks(file: DataFile, policy: Policy) -> Iterator[RunLine]:
    """Yield the lines of a run with three columns: query id, passage id, rank. The score is 1 / rank."""

    def parse(row: list[str], location: Location) -> RunLine:
        query, passage, rank = row
        if not is_integer(rank) or int(rank) < 1:
            raise location.error("bad rank", f"rank {shorten(rank)} is not a whole number above 0", "ranks start at 1")
        return checked_line(location, query, passage, int(rank), 1 / int(rank))

    rows = tab_rows(file.path, ("query id", "passage id", "rank"), policy)
    return (line for _, line in policy.parse_records(rows, parse))


def read_id_lists(file: DataFile, policy: Policy) -> Iterator[RunLine]:
    """Yield the lines of rankings from train.negatives.tsv: query id, ids of passages between commas. The score is
    1 / rank. Raises DataError for a line of another form."""
    first: dict[str, Location] = {}

    def check(row: list[str], location: Location) -> list[str]:
        require_new_id(require_id(row[0], "query id", location), "query id", location, first)
        if not _IDS.fullmatch(row[1]):
            remedy = "write ids between commas, without spaces: 12,7,34"
            raise location.error("bad ids", f"the second column is not a list of ids: {row[1][:60]!r}", remedy)
        return row

    rows = tab_rows(file.path, ("query id", "passage ids between commas"), policy)
    for location, (query, ids) in policy.parse_records(rows, check):
        for rank, passage in enumerate(ids.split(","), 1):
            yield RunLine(location, query, passage, rank, 1 / rank)


def read_titled_collection(
    file: DataFile, policy: Policy, digest: Digest | None = None
) -> Iterator[tuple[Location, Passage]]:
    """Yield (location, passage) of collection.splitTitle.tsv: id, title, text, without header and quoting."""

    def parse(row: list[str], location: Location) -> Passage:
        key, title, text = row
        return check_passage(Passage(key, text, title), location, policy)

    return policy.parse_records(tab_rows(file.path, ("passage id", "title", "text"), policy, digest), parse)


# Detection


def _is_one_word(row: list[str], *columns: int) -> bool:
    return all(len(row[column].split()) == 1 for column in columns)


def _is_texts(sample: FileSample) -> bool:
    return (
        sample.container == "table"
        and sample.columns == 2
        and holds_for_most(sample.rows, lambda row: _is_one_word(row, 0))
        and not holds_for_most(sample.rows, lambda row: _looks_like_id(row[1]))
    )


def _looks_like_id(field: str) -> bool:
    """Return whether a field is one word with a digit. A table with two columns of such fields has pairs of ids, and no
    texts."""
    return len(field.split()) == 1 and any(character.isdigit() for character in field)


def _looks_like_ranks(sample: FileSample) -> bool:
    """Return whether a table has three columns, and the third has 1, 2, 3, ... for each query, up to a number that is
    too large for a grade."""
    if sample.columns != 3 or not sample.rows or not all(is_integer(row[2]) for row in sample.rows):
        return False
    ranks: dict[str, list[int]] = {}
    for row in sample.rows:
        ranks.setdefault(row[0], []).append(int(row[2]))
    return (
        all(sorted(r) == list(range(1, len(r) + 1)) for r in ranks.values()) and max(map(max, ranks.values())) > _GRADES
    )


def _is_named(sample: FileSample) -> bool:
    if sample.columns != 3 or not holds_for_most(sample.rows, lambda row: _is_one_word(row, 0, 1, 2)):
        return False
    if sample.lines[0].startswith("id\t"):  # the header of DPR's psgs.tsv
        return False
    if holds_for_most(sample.rows, lambda row: is_text(row[1]) or is_text(row[2])):
        return False
    highest = _ANY_GRADE if len(sample.rows) >= _ENOUGH_ROWS else _GRADES
    if holds_for_most(sample.rows, lambda row: is_integer(row[2]) and int(row[2]) <= highest):
        return False
    return not _are_scores(sample) and not _are_labels(sample)


def _are_scores(sample: FileSample) -> bool:
    """Return whether most fields of the third column are numbers, and some have decimals."""
    numbers = [row[2] for row in sample.rows if is_number(row[2])]
    return 2 * len(numbers) >= len(sample.rows) and not all(map(is_integer, numbers))


def _are_labels(sample: FileSample) -> bool:
    """Return whether the third column repeats a few words. They are labels, because one passage is not the negative of
    most queries."""
    several = 4  # fewer lines do not show whether words repeat
    return len(sample.rows) >= several and len({row[2] for row in sample.rows}) <= max(
        2, len(sample.rows) // _ENOUGH_ROWS
    )


def _is_triples(sample: FileSample) -> bool:
    """Return whether the rows are triples of texts, not pairs of texts with a score or a label."""
    return (
        sample.columns == 3
        and holds_for_most(sample.rows, lambda row: len(row[0].split()) > 1 and bool(row[1] and row[2]))
        and not _are_scores(sample)
        and not holds_for_most(sample.rows, lambda row: is_integer(row[2]))
        and not (_are_labels(sample) and holds_for_most(sample.rows, lambda row: _is_one_word(row, 2)))
    )


def _is_candidates(sample: FileSample) -> bool:
    """Return whether the rows are candidates, not documents, whose second column is a URL."""
    return sample.columns == 4 and holds_for_most(
        sample.rows, lambda row: _is_one_word(row, 0, 1) and "://" not in row[1] and len(row[3].split()) > 1
    )


def _is_negatives(sample: FileSample) -> bool:
    keys = has_keys(QUERY_ID, POSITIVES, NEGATIVES)
    return keys(sample) and isinstance(sample.records[0].get(NEGATIVES), dict)


def _is_id_lists(sample: FileSample) -> bool:
    """Return whether a table has two columns, and the second has several ids between commas in most lines."""
    if sample.container != "table" or sample.columns != 2:
        return False
    return holds_for_most(
        sample.rows, lambda row: _is_one_word(row, 0) and "," in row[1] and bool(_IDS.fullmatch(row[1].rstrip("\r")))
    )


def _is_titled(sample: FileSample) -> bool:
    """Return whether a table has no header line and three columns: an id, a shorter text, a longer text."""
    if sample.container != "table" or sample.columns != 3 or is_header(sample.lines[0].split("\t")):
        return False
    if not holds_for_most(sample.rows, lambda row: _is_one_word(row, 0) and len(row[2].split()) > 1):
        return False
    title, text = (sum(len(row[column]) for row in sample.rows) for column in (1, 2))
    return text > title


FORMATS = (
    Format(
        name="msmarco.run",
        title="MS MARCO run",
        description="three columns between tabs: query id, passage id, rank from 1",
        matches=_looks_like_ranks,
        columns=(3,),
        without_scores=True,
        rankings=read_ranks,
    ),
    Format(
        name="rocketqa.negatives",
        title="RocketQA negatives",
        description="two columns between tabs: query id, ids of passages between commas",
        matches=_is_id_lists,
        columns=(2,),
        without_scores=True,
        rankings=read_id_lists,
    ),
    Format(
        name="msmarco.named",
        title="MS MARCO triples of ids",
        description="three columns between tabs: ids of query, positive, negative",
        matches=_is_named,
        columns=(3,),
        id_examples=read_id_triples,
    ),
    Format(
        name="msmarco.triples",
        title="MS MARCO triples of texts",
        description="three columns between tabs: query, positive, negative",
        matches=_is_triples,
        columns=(3,),
        without_query_ids=True,
        examples=read_text_triples,
    ),
    Format(
        name="msmarco.candidates",
        title="MS MARCO candidates (top1000)",
        description="four columns between tabs: query id, passage id, query, passage",
        matches=_is_candidates,
        columns=(4,),
        passages=read_candidate_passages,
        queries=read_candidate_queries,
    ),
    Format(
        name="msmarco.negatives",
        title="MS MARCO hard negatives of sentence-transformers",
        description=f'JSON records with {QUERY_ID}, {POSITIVES} (ids), {NEGATIVES} ({{"system": ids}})',
        matches=_is_negatives,
        keys=(QUERY_ID, POSITIVES, NEGATIVES),
        id_examples=read_hard_negatives,
    ),
    Format(
        name="msmarco.texts",
        title="MS MARCO collection or queries",
        titles={"passages": "MS MARCO collection", "queries": "MS MARCO queries"},
        description="two columns between tabs: id, text",
        matches=_is_texts,
        columns=(2,),
        passages=read_collection,
        queries=read_tab_queries,
    ),
    Format(
        name="rocketqa.passages",
        title="MS MARCO collection with titles",
        description="three columns between tabs, without header and quotes: id, title, text, which is the longer one",
        matches=_is_titled,
        columns=(3,),
        passages=read_titled_collection,
    ),
)
