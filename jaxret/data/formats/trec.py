"""TREC files: judgements (qrels, also with BEIR's three columns) and runs (also Tevatron's with three columns)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

import numpy as np

from jaxret.data.errors import DataError, Location, Policy
from jaxret.data.formats.file_sample import FileSample, holds_for_most, is_number
from jaxret.data.formats.format import DataFile, Format
from jaxret.data.formats.tables import tab_rows, text_lines
from jaxret.data.lines import PathLike, write_text
from jaxret.data.record_checks import finite_number, require_grade, require_id, shorten
from jaxret.data.records import Judgement, Passage

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")  # an integer of 64 bits; Python raises an error for 4,301 digits
_SCORE_HEADERS = ("score", "relevance", "rel", "label")


def is_integer(text: str) -> bool:
    """Return whether a text is an integer of at most 18 digits, with or without a sign."""
    return bool(_INTEGER.fullmatch(text.strip()))


def read_qrels(file: DataFile, policy: Policy) -> Iterator[tuple[Location, Judgement]]:
    """Yield (location, judgement) of a qrels file. Its lines are "query TAB passage TAB score", with or without a
    header line, or TREC's "query 0 passage score"."""

    lines = (
        (location, line)
        for location, line in text_lines(file.path, policy)
        if location.line != 1 or line.split()[-1].lower() not in _SCORE_HEADERS
    )
    return reject_contradictions(policy.parse_records(lines, _parse_judgement), policy)


def reject_contradictions(
    judgements: Iterable[tuple[Location, Judgement]], policy: Policy
) -> Iterator[tuple[Location, Judgement]]:
    """Yield the judgements without repetitions. Two grades for the same query and passage are an error."""
    grades: dict[tuple[str, str], tuple[int, Location]] = {}
    for location, judgement in judgements:
        pair = judgement.query_id, judgement.passage_id
        relevance, first = grades.setdefault(pair, (judgement.relevance, location))
        if relevance != judgement.relevance:
            earlier = f"on line {first.line}" if isinstance(first.line, int) else f"at {first.line}"
            problem = f"score {judgement.relevance} for {pair} contradicts score {relevance} {earlier}"
            policy.reject(location.error("contradicting judgement", problem, "keep one of the two lines"))
        elif first is location:
            yield location, judgement


def _parse_judgement(line: str, location: Location) -> Judgement:
    columns, words = line.split("\t"), line.split()
    if len(columns) == 3:
        query_id, passage_id, score = columns
    elif len(words) == 4:
        query_id, _, passage_id, score = words
    else:
        problem = f"this line has {len(columns)} columns between tabs and {len(words)} words: {line[:60]!r}"
        raise location.error("wrong columns", problem, 'write "query TAB passage TAB score" or "query 0 passage score"')
    if not is_integer(score):
        problem = f"score {shorten(score)} is not an integer"
        raise location.error("bad score", problem, "a judgement's score is a whole number, above 0 if relevant")
    return Judgement(
        require_id(query_id, "query id", location),
        require_id(passage_id, "passage id", location),
        require_grade(int(score), location),
    )


def reject_unknown_ids(
    judgements: Iterable[tuple[Location, Judgement]],
    query_ids: Collection[str] | None,
    passage_ids: Collection[str] | None,
    policy: Policy,
) -> Iterator[tuple[Location, Judgement]]:
    """Yield the judgements whose ids are valid. Other ids are errors.

    Args:
        judgements: judgements with their locations.
        query_ids: valid ids of queries; None: any.
        passage_ids: valid ids of passages; None: any.
        policy: what to do with a bad judgement.
    """

    def check(judgement: Judgement, location: Location) -> Judgement:
        require_known_id(judgement.query_id, "query", query_ids, location)
        require_known_id(judgement.passage_id, "passage", passage_ids, location)
        return judgement

    return policy.parse_records(judgements, check)


def require_known_id(key: str, kind: str, valid_ids: Collection[str] | None, location: Location) -> None:
    """Raise DataError if an id is not valid.

    Args:
        key: the id.
        kind: "query" or "passage", for the error.
        valid_ids: all valid ids; None: any.
        location: location of the id.
    """
    if valid_ids is not None and key not in valid_ids:
        remedy = "correct the id, remove the line, or use the files that belong together"
        raise location.error(f"unknown {kind} id", f"there is no {kind} with the id {key!r}", remedy)


def known_passages(
    ids: Iterable[tuple[Location, str]], corpus: Mapping[str, Passage], policy: Policy
) -> Iterator[tuple[Location, Passage]]:
    """Yield the passages with some ids. An id that the corpus does not have is an error."""

    def find(key: str, location: Location) -> Passage:
        require_known_id(key, "passage", corpus, location)
        return corpus[key]

    return policy.parse_records(ids, find)


class RunLine(NamedTuple):
    """One line of a run file, and its location."""

    location: Location
    query_id: str
    passage_id: str
    rank: int
    score: float
    query_text: str = ""  # text of the query; "" if the format has none


def read_trec_run(file: DataFile, policy: Policy) -> Iterator[RunLine]:
    """Yield the lines "query Q0 passage rank score tag" of a run file, in the file's order."""
    return (line for _, line in policy.parse_records(text_lines(file.path, policy), _parse_run_line))


def _parse_run_line(line: str, location: Location) -> RunLine:
    words = line.split()
    if len(words) != 6:
        problem = f"this line has {len(words)} columns: {line[:60]!r}"
        raise location.error("wrong columns", problem, 'a run has six: "query Q0 passage rank score tag"')
    query_id, _, passage_id, rank, score, _ = words
    if not _INTEGER.fullmatch(rank):
        raise location.error("bad rank", f"rank {shorten(rank)} is not an integer", "ranks count from 1")
    return checked_line(location, query_id, passage_id, int(rank), parse_score(score, location))


def checked_line(location: Location, query_id: str, passage_id: str, rank: int, score: float) -> RunLine:
    """Return the line of a ranking. Raises DataError for an id that is not one word.

    Args:
        location: location of the line.
        query_id: id of the query.
        passage_id: id of the passage.
        rank: rank of the passage, from 1.
        score: score of the passage.
    """
    require_id(query_id, "query id", location)
    require_id(passage_id, "passage id", location)
    return RunLine(location, query_id, passage_id, rank, score)


def parse_score(score: Any, location: Location) -> float:
    """Return a score, a number or a text. Raises DataError for another value."""
    if (value := finite_number(score)) is None:
        raise location.error("bad score", f"score {shorten(score)} is not a finite number", "write a decimal number")
    return value


def read_tevatron_run(file: DataFile, policy: Policy) -> Iterator[RunLine]:
    """Yield the lines "query TAB passage TAB score" of Tevatron's rankings. The file's order gives the ranks."""
    ranks: dict[str, int] = {}

    def parse(row: list[str], location: Location) -> RunLine:
        query_id, passage_id, score = row
        value = parse_score(score, location)
        ranks[query_id] = ranks.get(query_id, 0) + 1
        return checked_line(location, query_id, passage_id, ranks[query_id], value)

    rows = tab_rows(file.path, ("query id", "passage id", "score"), policy)
    return (line for _, line in policy.parse_records(rows, parse))


def rank_lines(lines: Iterable[RunLine], policy: Policy) -> dict[str, list[RunLine]]:
    """Return query id -> the lines of its ranking, in rank order. A passage that is retrieved twice is an error, and so
    is a score that grows with the rank: evaluation tools sort by score, so the file would mean two rankings.
    """
    by_query: dict[str, list[RunLine]] = {}
    for line in lines:
        by_query.setdefault(line.query_id, []).append(line)
    for query_id, query_lines in by_query.items():
        valid_lines: list[RunLine] = []
        first: dict[str, Location] = {}
        for line in sorted(query_lines, key=lambda line: line.rank):  # stable: equal ranks stay in the file's order
            try:
                _check_ranked(line, valid_lines[-1] if valid_lines else None, first)
            except DataError as error:
                policy.reject(error)
                continue
            valid_lines.append(line)
        by_query[query_id] = valid_lines
    return by_query


def _check_ranked(line: RunLine, previous: RunLine | None, first: dict[str, Location]) -> None:
    if line.passage_id in first:
        problem = f"passage {line.passage_id!r} is retrieved twice for query {line.query_id!r}"
        remedy = f"keep one of the two (the first is on line {first[line.passage_id].line})"
        raise line.location.error("duplicate passage", problem, remedy)
    if previous is not None and line.score > previous.score:
        problem = f"rank {line.rank} has score {line.score!r}, above {previous.score!r} at rank {previous.rank}"
        raise line.location.error("rank against score", problem, "rank by descending score, one query at a time")
    first[line.passage_id] = line.location


def write_run(path: PathLike, rankings: Mapping[str, Sequence[tuple[str, SupportsFloat]]], tag: str) -> None:
    """Write a TREC run with ranks from 1. `rankings` have passages best first. A line that a reader would reject is
    an error.

    trec_eval ignores ranks. It reads scores as float32, and sorts by score and, for equal scores, by passage id. To
    keep the ranking, scores are written as strictly descending float32 numbers (`descending_scores`), with all their
    digits.
    """
    path = Path(path)
    with write_text(path) as file:
        number = 0
        require_id(tag, "the tag", Location(path))
        for query_id, ranking in rankings.items():
            previous = None
            first: dict[str, Location] = {}
            file_scores = descending_scores([float(score) for _, score in ranking])
            for rank, ((passage_id, score), file_score) in enumerate(zip(ranking, file_scores), 1):
                number += 1
                location = Location(path, number)
                line = checked_line(location, query_id, passage_id, rank, parse_score(repr(float(score)), location))
                _check_ranked(line, previous, first)
                parse_score(repr(file_score), location)  # raises an error for a score that float32 cannot hold
                file.write(f"{query_id} Q0 {passage_id} {rank} {file_score!r} {tag}\n")
                previous = line


def descending_scores(scores: Sequence[float]) -> list[float]:
    """Return strictly descending float32 scores. A score that is not below the score before it becomes the next smaller
    float32 below that."""
    with np.errstate(over="ignore"):
        bits = np.asarray(scores, np.float32).view(np.int32).astype(np.int64)
    steps = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # neighbouring floats are neighbouring integers
    offsets = np.arange(len(steps))
    steps = np.minimum.accumulate(steps + offsets) - offsets
    bits = np.where(steps < 0, -steps | 0x80000000, steps)
    return bits.astype(np.uint32).view(np.float32).tolist()


def _is_qrels(sample: FileSample) -> bool:
    """Return whether most lines have four words, the second 0 or Q0 and the last a number, or BEIR's three columns, the
    last a grade."""
    if sample.container != "table":
        return False
    if sample.columns == 3:
        header = sample.lines[0].split()[-1].lower() in _SCORE_HEADERS
        return header or holds_for_most(sample.rows, lambda row: is_integer(row[2]) and int(row[2]) <= 4)
    return holds_for_most(sample.words, lambda row: len(row) == 4 and row[1] in ("0", "Q0") and is_number(row[3]))


def _is_run(sample: FileSample) -> bool:
    return holds_for_most(sample.words, lambda row: len(row) == 6 and row[1].upper() == "Q0")


def _is_scored(sample: FileSample) -> bool:
    return sample.columns == 3 and holds_for_most(
        sample.rows, lambda row: bool(re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", row[2]))
    )


FORMATS = (
    Format(
        name="trec.run",
        title="TREC run",
        description="six words: query id, Q0, passage id, rank, score, tag",
        matches=_is_run,
        columns=(6, 1),
        rankings=read_trec_run,
    ),
    Format(
        name="tevatron.run",
        title="Tevatron ranking",
        description="three columns between tabs: query id, passage id, score with a decimal point",
        matches=_is_scored,
        columns=(3,),
        rankings=read_tevatron_run,
    ),
    Format(
        name="trec.qrels",
        title="qrels",
        description="four words: query id, 0, passage id, grade; or query id TAB passage id TAB grade (BEIR)",
        matches=_is_qrels,
        columns=(3, 4),
        judgements=read_qrels,
    ),
)
