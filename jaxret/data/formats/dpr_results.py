"""What DPR's retriever writes, also as Pyserini converts it: for each question what was found, with its text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxret.data.files import (
    DataError,
    Digest,
    PathLike,
    Policy,
    Where,
    require_key,
    require_object,
    write_text,
)
from jaxret.data.formats.containers import Record
from jaxret.data.formats.dpr import context_of, question_records, record_queries
from jaxret.data.formats.format import Format, feed, has, value_of
from jaxret.data.formats.pool import Pool
from jaxret.data.formats.trec import RunLine
from jaxret.data.records import Passage, Query


def _retrieved(
    path: Path, policy: Policy
) -> Iterator[tuple[Where, tuple[Query, list[tuple[Where, Passage | str, float]]]]]:
    """(query, what was found for it: passage, or only its id, and score), best first as the file has it."""

    def parse(record: Record, where: Where, query: Query) -> tuple[Query, list[tuple[Where, Passage | str, float]]]:
        key = "ctxs" if "ctxs" in record else "contexts"
        found = []
        for number, value in enumerate(require_key(record, key, list, where)):
            place = Where(path, f"{where.line}, {key}[{number}]")
            try:
                context = require_object(value, place)
                found.append((place, _found(context, place, policy), _score(context.get("score"), place)))
            except DataError as error:
                policy.reject(error)
        return query, found

    return question_records(path, policy, parse)


def _found(context: Record, where: Where, policy: Policy) -> Passage | str:
    keys = ("id", "docid", "passage_id")
    if context.get("text") is not None:
        return context_of(context, where, policy, keys)
    return str(require_key(context, value_of(context, keys), str, where))


def _score(value: Any, where: Where) -> float:
    """A number, or one in a string, as DPR writes it."""
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise where.error("bad score", f"score {value!r} is not a finite number", "write a decimal number")
    return score


def result_passages(path: Path, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Where, Passage]]:
    """The passages that were retrieved, each once; those of which the file has the text."""
    pool = Pool(policy)
    for _, (_, found) in _retrieved(path, policy):
        for where, passage, _ in found:
            if isinstance(passage, Passage) and passage.id not in pool.known:
                yield where, pool.shared(passage, where)
    if digest is not None:
        feed(path, digest)


def run_lines(path: Path, policy: Policy) -> Iterator[RunLine]:
    """What was retrieved for each query number, ranked as the file has it."""
    for _, (query, found) in _retrieved(path, policy):
        for rank, (where, one, score) in enumerate(found, 1):
            yield RunLine(where, query.id, one.id if isinstance(one, Passage) else one, rank, score, query.text)


def write_results(path: PathLike, results: Iterable[tuple[Query, Iterable[tuple[Passage, float, bool]]]]) -> None:
    """Writes what DPR's retriever does, a question a line: for each the passages, best first, their scores (strings,
    as there) and whether the text has an answer. The format has no query ids: they are read back as "0", "1", ..."""
    with write_text(path) as file:
        for number, (query, found) in enumerate(results):
            contexts = [
                {"id": one.id, "title": one.title, "text": one.text, "score": str(score), "has_answer": right}
                for one, score, right in found
            ]
            record = {"question": query.text, "answers": list(query.answers), "ctxs": contexts}
            file.write(f"{',' if number else '['}\n{json.dumps(record, ensure_ascii=False)}")
        file.write("\n]\n")


FORMATS = (
    Format(
        name="dpr.results",
        title="DPR retrieval results",
        looks="JSON records with question, answers, ctxs (or contexts, as Pyserini writes them)",
        fits=lambda head: has("question", "ctxs")(head) or has("question", "contexts")(head),
        keys=("question", "answers", "ctxs", "contexts"),
        passages=result_passages,
        queries=record_queries,
        rankings=run_lines,
    ),
)
