"""BEIR folders: corpus.jsonl, queries.jsonl, qrels/<split>.tsv, and answers.jsonl where there are answer strings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxret.data.errors import Location, Policy
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.format import DataFile, Format, record_format
from jaxret.data.formats.texts import passage_reader, query_reader, record_id, require_new_id
from jaxret.data.formats.trec import RunLine, known_passages, reject_contradictions, reject_unknown_ids
from jaxret.data.lines import find_file, read_json_lines
from jaxret.data.record_checks import require_grade, require_id, require_key, require_strings, shorten
from jaxret.data.records import Example, Judgement, Passage, Query, Record

QRELS_KEYS = ("query-id", "corpus-id", "score")
QRELS_HEADER = "\t".join(QRELS_KEYS)


read_beir_passages = passage_reader("_id", numbers=False)
_texts = query_reader("_id", numbers=False)


def read_beir_queries(file: DataFile, policy: Policy) -> list[Query]:
    """Return the queries of queries.jsonl, with the answers of answers.jsonl next to it, if this file exists."""
    queries = {query.id: query for query in _texts(file, policy)}
    is_usual_name = file.path.name.startswith("queries.jsonl")
    answers_path = find_file(file.path.parent, "answers.jsonl") if is_usual_name else None
    if answers_path:
        for query_id, answers in _answers(answers_path, policy, queries):
            queries[query_id] = replace(queries[query_id], answers=answers)
    return list(queries.values())


def _answers(path: Path, policy: Policy, by_id: Mapping[str, Query]) -> Iterator[tuple[str, tuple[str, ...]]]:
    lines: dict[str, Location] = {}

    def parse(record: Record, location: Location) -> tuple[str, tuple[str, ...]]:
        query_id = require_key(record, "_id", str, location)
        answers = require_strings(require_key(record, "answers", list, location), "the value of 'answers'", location)
        if query_id not in by_id:
            problem = f"these answers are for query {query_id!r}, but queries.jsonl has no such query"
            raise location.error("unknown query id", problem, "correct the id or remove the line")
        require_new_id(query_id, "query id", location, lines)
        return query_id, answers

    return (entry for _, entry in policy.parse_records(read_json_lines(path, policy), parse))


def judgement_format(name: str, title: str, query: str, passage: str, score: str) -> Format:
    """Return a format of judgements with the keys of query id, passage id and score. A score may be 1, 1.0, true or
    false, in CSV as a string.

    Args:
        name: name in NAME:PATH, which forces the format.
        title: usual name, for messages.
        query: key of the query's id.
        passage: key of the passage's id.
        score: key of the score.
    """

    def parse(record: Record, location: Location) -> Judgement:
        grade = _grade(record.get(score), location)
        query_id, passage_id = (record_id(record, key, location) for key in (query, passage))
        require_id(query_id, "query id", location)
        return Judgement(query_id, require_id(passage_id, "passage id", location), grade)

    def read(file: DataFile, policy: Policy) -> Iterator[tuple[Location, Judgement]]:
        return reject_contradictions(policy.parse_records(read_records(file, policy), parse), policy)

    return record_format(name, title, (query, passage, score), judgements=read)


def _grade(value: Any, location: Location) -> int:
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):
        return int(str(value).lower() == "true")
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.0*)?", value.strip()):
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int):
        remedy = "a judgement's score is a whole number, above 0 if relevant"
        raise location.error("bad score", f"score {shorten(value)} is not an integer", remedy)
    return require_grade(value, location)


def examples_of_judgements(
    queries: Iterable[Query],
    judgements: Iterable[tuple[Location, Judgement]],
    passages: Iterable[Passage],
    run: Mapping[str, Sequence[RunLine]] | None,
    policy: Policy,
) -> list[Example]:
    """Make one example for each query with a relevant passage. Only passages of examples stay in memory.

    Args:
        queries: all queries.
        judgements: judgements with their locations; an unknown id is an error.
        passages: the passages of the corpus, read once.
        run: query id -> ranked lines. The passages in them that are not relevant become negatives. None: passages
            that are judged not relevant become negatives.
        policy: what to do with bad judgements and lines.
    """
    by_id = {query.id: query for query in queries}
    judgements = list(reject_unknown_ids(judgements, by_id, None, policy))
    relevant_queries = {judgement.query_id for _, judgement in judgements if judgement.relevance > 0}
    run_lines = {query_id: lines for query_id, lines in (run or {}).items() if query_id in relevant_queries}
    passage_ids = {judgement.passage_id for _, judgement in judgements}
    passage_ids.update(line.passage_id for lines in run_lines.values() for line in lines)
    corpus = {passage.id: passage for passage in passages if passage.id in passage_ids}

    relevant: dict[str, dict[str, Passage]] = {}
    negatives: dict[str, list[Passage]] = {}
    for _, judgement in reject_unknown_ids(judgements, None, corpus, policy):
        passage = corpus[judgement.passage_id]
        if judgement.relevance > 0:
            relevant.setdefault(judgement.query_id, {})[passage.id] = passage
        elif run is None:
            negatives.setdefault(judgement.query_id, []).append(passage)
    for query_id, positives in relevant.items():
        if query_id in run_lines:
            negatives[query_id] = list(_irrelevant_passages(run_lines[query_id], positives, corpus, policy))
    return [
        Example(by_id[query_id], tuple(positives.values()), tuple(negatives.get(query_id, ())))
        for query_id, positives in relevant.items()
    ]


def _irrelevant_passages(
    lines: Iterable[RunLine], relevant: Collection[str], corpus: Mapping[str, Passage], policy: Policy
) -> Iterator[Passage]:
    """Yield the passages of a ranking that are not relevant, in rank order."""
    for _, passage in known_passages(((line.location, line.passage_id) for line in lines), corpus, policy):
        if passage.id not in relevant:
            yield passage


FORMATS = (
    record_format(
        "beir.texts",
        "BEIR corpus or queries",
        ("_id", "text"),
        optional_keys=("title", "answers", "instruction"),
        titles={"passages": "BEIR corpus", "queries": "BEIR queries"},
        passages=read_beir_passages,
        queries=read_beir_queries,
    ),
    judgement_format("beir.qrels", "qrels of the Hugging Face hub", *QRELS_KEYS),
)
