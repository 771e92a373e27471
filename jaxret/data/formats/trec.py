"""TREC files: judgements (qrels, also with BEIR's three columns) and runs, also Tevatron's with three."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, SupportsFloat

import numpy as np

from jaxret.data.files import DataError, PathLike, Policy, Where, require_id, write_text
from jaxret.data.formats.format import Format
from jaxret.data.formats.head import Head
from jaxret.data.formats.tables import tab_rows, text_lines
from jaxret.data.records import Judgement

_INTEGER = re.compile(r"[+-]?[0-9]+")
_SCORE_HEADERS = ("score", "relevance", "rel", "label")


def is_integer(text: str) -> bool:
    return bool(_INTEGER.fullmatch(text.strip()))


def judgements(path: PathLike, policy: Policy) -> Iterator[tuple[Where, Judgement]]:
    """Yields (place, judgement) of a qrels file: "query TAB passage TAB score", with or without a header line, or
    TREC's "query 0 passage score"."""

    def every() -> Iterator[tuple[Where, Judgement]]:
        for where, line in text_lines(path, policy):
            if where.line == 1 and line.split()[-1].lower() in _SCORE_HEADERS:
                continue
            try:
                yield where, _parse_judgement(line, where)
            except DataError as error:
                policy.reject(error)

    return consistent(every(), policy)


def consistent(judgements: Iterable[tuple[Where, Judgement]], policy: Policy) -> Iterator[tuple[Where, Judgement]]:
    """A judgement that repeats an earlier one says nothing new and is dropped; one that contradicts it is bad input."""
    seen: dict[tuple[str, str], tuple[int, Where]] = {}
    for where, judgement in judgements:
        pair = judgement.query_id, judgement.passage_id
        relevance, first = seen.setdefault(pair, (judgement.relevance, where))
        if relevance != judgement.relevance:
            place = f"on line {first.line}" if isinstance(first.line, int) else f"at {first.line}"
            found = f"score {judgement.relevance} for {pair} contradicts score {relevance} {place}"
            policy.reject(where.error("contradicting judgement", found, "keep one of the two lines"))
        elif first is where:
            yield where, judgement


def _parse_judgement(line: str, where: Where) -> Judgement:
    columns, words = line.split("\t"), line.split()
    if len(columns) == 3:
        query_id, passage_id, score = columns
    elif len(words) == 4:
        query_id, _, passage_id, score = words
    else:
        found = f"this line has {len(columns)} columns between tabs and {len(words)} words: {line[:60]!r}"
        raise where.error("wrong columns", found, 'write "query TAB passage TAB score" or "query 0 passage score"')
    if not is_integer(score):
        found = f"score {score!r} is not an integer"
        raise where.error("bad score", found, "a judgement's score is a whole number, above 0 if relevant")
    return Judgement(require_id(query_id, "query id", where), require_id(passage_id, "passage id", where), int(score))


def known(
    judgements: Iterable[tuple[Where, Judgement]],
    query_ids: Collection[str] | None,
    passage_ids: Collection[str] | None,
    policy: Policy,
) -> Iterator[tuple[Where, Judgement]]:
    """Yields the judgements whose ids are among those given (None: any); others are bad input."""
    for where, judgement in judgements:
        try:
            refuse_unknown(judgement.query_id, "query", query_ids, where)
            refuse_unknown(judgement.passage_id, "passage", passage_ids, where)
        except DataError as error:
            policy.reject(error)
            continue
        yield where, judgement


def refuse_unknown(key: str, what: str, known: Collection[str] | None, where: Where) -> None:
    """Raises if `key` is not in `known`; None knows everything."""
    if known is not None and key not in known:
        remedy = "correct the id, remove the line, or use the files that belong together"
        raise where.error(f"unknown {what} id", f"there is no {what} with the id {key!r}", remedy)


class RunLine(NamedTuple):
    """One line of a run file, and where it stands."""

    where: Where
    query_id: str
    passage_id: str
    rank: int
    score: float
    query_text: str = ""  # where the format has it


def run_lines(path: PathLike, policy: Policy) -> Iterator[RunLine]:
    """Yields the lines "query Q0 passage rank score tag" of a run file, in the file's order."""
    for where, line in text_lines(path, policy):
        try:
            words = line.split()
            if len(words) != 6:
                found = f"this line has {len(words)} columns: {line[:60]!r}"
                raise where.error("wrong columns", found, 'a run has six: "query Q0 passage rank score tag"')
            query_id, _, passage_id, rank, score, _ = words
            if not _INTEGER.fullmatch(rank):
                raise where.error("bad rank", f"rank {rank!r} is not an integer", "ranks count from 1")
            yield RunLine(where, query_id, passage_id, int(rank), _parse_score(score, where))
        except DataError as error:
            policy.reject(error)


def _parse_score(score: str, where: Where) -> float:
    try:
        value = float(score)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise where.error("bad score", f"score {score!r} is not a finite number", "write a decimal number")
    return value


def scored_lines(path: PathLike, policy: Policy) -> Iterator[RunLine]:
    """Yields the lines "query TAB passage TAB score" of Tevatron's rankings; ranks are those of the file's order."""
    ranks: dict[str, int] = {}
    for where, (query_id, passage_id, score) in tab_rows(path, ("query id", "passage id", "score"), policy):
        try:
            value = _parse_score(score, where)
        except DataError as error:
            policy.reject(error)
            continue
        ranks[query_id] = ranks.get(query_id, 0) + 1
        yield RunLine(where, query_id, passage_id, ranks[query_id], value)


def ranked(lines: Iterable[RunLine], policy: Policy) -> dict[str, list[RunLine]]:
    """A run by query, each in rank order. A passage retrieved twice, or a score that grows with the rank (evaluation
    tools sort by score, so the file would mean two rankings), is bad input.
    """
    by_query: dict[str, list[RunLine]] = {}
    for line in lines:
        by_query.setdefault(line.query_id, []).append(line)
    for query_id, found in by_query.items():
        kept: list[RunLine] = []
        first: dict[str, Where] = {}
        for line in sorted(found, key=lambda line: line.rank):  # stable: equal ranks stay in the file's order
            try:
                _check_ranked(line, kept[-1] if kept else None, first)
            except DataError as error:
                policy.reject(error)
                continue
            kept.append(line)
        by_query[query_id] = kept
    return by_query


def _check_ranked(line: RunLine, previous: RunLine | None, first: dict[str, Where]) -> None:
    if line.passage_id in first:
        found = f"passage {line.passage_id!r} is retrieved twice for query {line.query_id!r}"
        remedy = f"keep one of the two (the first is on line {first[line.passage_id].line})"
        raise line.where.error("duplicate passage", found, remedy)
    if previous is not None and line.score > previous.score:
        found = f"rank {line.rank} has score {line.score!r}, above {previous.score!r} at rank {previous.rank}"
        raise line.where.error("rank against score", found, "rank by descending score, one query at a time")
    first[line.passage_id] = line.where


def write_run(path: PathLike, rankings: Mapping[str, Sequence[tuple[str, SupportsFloat]]], tag: str) -> None:
    """Writes a TREC run, ranks from 1. `rankings` hold passages best first; what `read_run` would refuse is refused.

    trec_eval ignores ranks: it reads scores as float32, sorts by them, and equal ones by passage id. So that it sees
    the ranking given, scores are written as float32, and one that is not below the one before it is lowered to the
    next float32 below that. Others are written so that float32 and float64 read them back exactly.
    """
    path = Path(path)
    with write_text(path) as file:
        number = 0
        require_id(tag, "the tag", Where(path))
        for query_id, ranking in rankings.items():
            previous = None
            first: dict[str, Where] = {}
            written = _descending([float(score) for _, score in ranking])
            for rank, ((passage_id, score), lowered) in enumerate(zip(ranking, written), 1):
                number += 1
                where = Where(path, number)
                require_id(query_id, "query id", where)
                require_id(passage_id, "passage id", where)
                line = RunLine(where, query_id, passage_id, rank, _parse_score(repr(float(score)), where))
                _check_ranked(line, previous, first)
                _parse_score(repr(lowered), where)  # beyond float32
                file.write(f"{query_id} Q0 {passage_id} {rank} {lowered!r} {tag}\n")
                previous = line


def _descending(scores: Sequence[float]) -> list[float]:
    """float32 values, each the score or, if that is not below the one before, the next value below the one before."""
    with np.errstate(over="ignore"):
        bits = np.asarray(scores, np.float32).view(np.int32).astype(np.int64)
    steps = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # neighbouring floats are neighbouring integers
    places = np.arange(len(steps))
    steps = np.minimum.accumulate(steps + places) - places
    bits = np.where(steps < 0, -steps | 0x80000000, steps)
    return bits.astype(np.uint32).view(np.float32).tolist()


def _is_qrels(head: Head) -> bool:
    """Four words, the second 0 or Q0, the last a whole number; or BEIR's three columns, the last one a grade."""
    if head.container != "table":
        return False
    if head.columns == 3:
        header = head.lines[0].split()[-1].lower() in _SCORE_HEADERS
        return header or _most(head.rows, lambda row: is_integer(row[2]) and int(row[2]) <= 4)
    return _most(head.words, lambda row: len(row) == 4 and row[1] in ("0", "Q0") and is_integer(row[3]))


def _is_run(head: Head) -> bool:
    return _most(head.words, lambda row: len(row) == 6 and row[1].upper() == "Q0" and is_integer(row[3]))


def _is_scored(head: Head) -> bool:
    return head.columns == 3 and _most(head.rows, lambda row: bool(re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", row[2])))


def _most(rows: Sequence[Sequence[str]], test: Callable[[Sequence[str]], bool]) -> bool:
    return bool(rows) and 2 * sum(map(test, rows)) >= len(rows)


FORMATS = (
    Format(
        name="trec.run",
        title="TREC run",
        looks="six words: query id, Q0, passage id, rank, score, tag",
        fits=_is_run,
        columns=(6, 1),
        rankings=run_lines,
    ),
    Format(
        name="tevatron.run",
        title="Tevatron ranking",
        looks="three columns between tabs: query id, passage id, score with a decimal point",
        fits=_is_scored,
        columns=(3,),
        rankings=scored_lines,
    ),
    Format(
        name="trec.qrels",
        title="qrels",
        looks="four words: query id, 0, passage id, grade; or query id TAB passage id TAB grade (BEIR)",
        fits=_is_qrels,
        columns=(3, 4),
        judgements=judgements,
    ),
)
