"""BEIR folders: corpus.jsonl, queries.jsonl, qrels/<split>.tsv, and answers.jsonl where there are answer strings."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxret.data.files import (
    DataError,
    Digest,
    PathLike,
    Policy,
    Where,
    check_passage,
    check_query,
    find_file,
    normalise_question,
    read_json_lines,
    require_file,
    require_id,
    require_key,
    require_strings,
    write_text,
)
from jaxret.data.formats.trec import RunLine, known, refuse_unknown
from jaxret.data.records import Example, Judgement, Passage, Query

QRELS_HEADER = "query-id\tcorpus-id\tscore"


def passages(path: Path, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Where, Passage]]:
    """Yields (place, passage) of corpus.jsonl[.gz]; a title that is absent or null is an empty one."""
    for where, record in read_json_lines(path, policy, digest):
        try:
            title = "" if record.get("title") is None else require_key(record, "title", str, where)
            text = require_key(record, "text", str, where)
            passage = check_passage(Passage(require_key(record, "_id", str, where), text, title), where, policy)
        except DataError as error:
            policy.reject(error)
            continue
        yield where, passage


def queries(path: Path, policy: Policy) -> list[Query]:
    """The queries of a queries.jsonl[.gz], or of a folder; a folder's answers.jsonl[.gz] fills their answers."""
    folder = path if path.is_dir() else None
    if folder is not None:
        path = require_file(folder, "queries.jsonl")
    found: dict[str, Query] = {}
    lines: dict[str, Where] = {}
    for where, record in read_json_lines(path, policy):
        try:
            text = normalise_question(require_key(record, "text", str, where))
            query = check_query(Query(require_key(record, "_id", str, where), text), where)
            refuse_duplicate(query.id, "query id", where, lines)
        except DataError as error:
            policy.reject(error)
            continue
        found[query.id] = query
    answers_path = folder and find_file(folder, "answers.jsonl")
    if answers_path:
        for query_id, answers in _answers(answers_path, policy, found):
            found[query_id] = Query(query_id, found[query_id].text, answers)
    return list(found.values())


def _answers(path: Path, policy: Policy, by_id: Mapping[str, Query]) -> Iterator[tuple[str, tuple[str, ...]]]:
    lines: dict[str, Where] = {}
    for where, record in read_json_lines(path, policy):
        try:
            query_id = require_key(record, "_id", str, where)
            answers = require_strings(require_key(record, "answers", list, where), "the value of 'answers'", where)
            if query_id not in by_id:
                found = f"these answers are for query {query_id!r}, which queries.jsonl does not have"
                raise where.error("unknown query id", found, "correct the id or remove the line")
            refuse_duplicate(query_id, "query id", where, lines)
        except DataError as error:
            policy.reject(error)
            continue
        yield query_id, answers


def refuse_duplicate(key: str, what: str, where: Where, first: dict[str, Where]) -> None:
    """Raises if `key` is in `first` (key -> where it was seen), else notes it there."""
    if key in first:
        raise duplicate_error(key, what, where, first[key])
    first[key] = where


def duplicate_error(key: str, what: str, where: Where, first: Where) -> DataError:
    found = f"{what} {key!r} was used before, on line {first.line}"
    return where.error("duplicate id", found, "ids must be unique: rename or remove one")


def examples(
    queries: Iterable[Query],
    judged: Iterable[tuple[Where, Judgement]],
    passages: Iterable[Passage],
    run: Mapping[str, Sequence[RunLine]] | None,
    policy: Policy,
) -> list[Example]:
    """One example for each relevant judgement, see `formats.read_examples`; keeps only passages that are named."""
    by_id = {query.id: query for query in queries}
    judged = list(known(judged, by_id, None, policy))
    asked = {judgement.query_id for _, judgement in judged if judgement.relevance > 0}
    run_lines = {query_id: lines for query_id, lines in (run or {}).items() if query_id in asked}
    named = {judgement.passage_id for _, judgement in judged}
    named.update(line.passage_id for lines in run_lines.values() for line in lines)
    corpus = {passage.id: passage for passage in passages if passage.id in named}

    relevant: dict[str, dict[str, Passage]] = {}
    negatives: dict[str, list[Passage]] = {}
    for _, judgement in known(judged, None, corpus, policy):
        passage = corpus[judgement.passage_id]
        if judgement.relevance > 0:
            relevant.setdefault(judgement.query_id, {})[passage.id] = passage
        elif run is None:
            negatives.setdefault(judgement.query_id, []).append(passage)
    for query_id, positives in relevant.items():
        if query_id in run_lines:
            negatives[query_id] = list(_retrieved(run_lines[query_id], positives, corpus, policy))
    return [
        Example(by_id[query_id], (target, *(other for other in positives.values() if other is not target)), found)
        for query_id, positives in relevant.items()
        for found in [tuple(negatives.get(query_id, ()))]  # one tuple for all examples of the query
        for target in positives.values()
    ]


def _retrieved(
    lines: Iterable[RunLine], relevant: Collection[str], corpus: Mapping[str, Passage], policy: Policy
) -> Iterator[Passage]:
    """The passages of a ranking that are not relevant, in rank order."""
    for line in lines:
        try:
            refuse_unknown(line.passage_id, "passage", corpus, line.where)
        except DataError as error:
            policy.reject(error)
            continue
        if line.passage_id not in relevant:
            yield corpus[line.passage_id]


def write_beir(
    folder: PathLike,
    passages: Iterable[Passage],
    queries: Iterable[Query],
    judgements: Mapping[str, Iterable[Judgement]],
) -> None:
    """Writes a BEIR folder; `judgements` maps a split to its judgements. Refuses records that a reader would
    refuse, but does not look for duplicate ids.

    Reading gives the same records back, but for U+2019 in queries, which readers turn into an apostrophe.
    """
    folder = Path(folder)
    with write_text(folder / "corpus.jsonl") as file:
        for number, passage in enumerate(passages, 1):
            check_passage(passage, Where(folder / "corpus.jsonl", number))
            _write_object(file, {"_id": passage.id, "title": passage.title, "text": passage.text})
    queries = list(queries)
    with write_text(folder / "queries.jsonl") as file:
        for number, query in enumerate(queries, 1):
            check_query(query, Where(folder / "queries.jsonl", number))
            _write_object(file, {"_id": query.id, "text": query.text})
    # An older answers.jsonl must not outlive its queries, so it is replaced even by an empty one.
    if any(query.answers for query in queries) or (folder / "answers.jsonl").exists():
        with write_text(folder / "answers.jsonl") as file:
            for query in queries:
                if query.answers:
                    _write_object(file, {"_id": query.id, "answers": list(query.answers)})
    for split, lines in judgements.items():
        path = folder / "qrels" / f"{split}.tsv"
        with write_text(path) as file:
            file.write(f"{QRELS_HEADER}\n")
            for number, judgement in enumerate(lines, 2):  # line 1 is the header
                require_id(judgement.query_id, "query id", Where(path, number))
                require_id(judgement.passage_id, "passage id", Where(path, number))
                file.write(f"{judgement.query_id}\t{judgement.passage_id}\t{judgement.relevance}\n")


def _write_object(file: Any, record: Mapping[str, Any]) -> None:
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
