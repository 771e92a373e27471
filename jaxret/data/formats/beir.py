"""BEIR folders: corpus.jsonl, queries.jsonl, qrels/<split>.tsv, and answers.jsonl where there are answer strings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxret.data.files import (
    DataError,
    PathLike,
    Policy,
    Where,
    check_passage,
    check_query,
    find_file,
    read_json_lines,
    require_id,
    require_key,
    require_strings,
    write_text,
)
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.format import Format, has
from jaxret.data.formats.texts import id_of, passages_by, queries_by, refuse_duplicate
from jaxret.data.formats.trec import RunLine, consistent, known, refuse_unknown
from jaxret.data.records import Example, Judgement, Passage, Query

QRELS_HEADER = "query-id\tcorpus-id\tscore"


passages = passages_by("_id", numbers=False)
_texts = queries_by("_id", numbers=False)


def queries(path: Path, policy: Policy) -> list[Query]:
    """The queries of queries.jsonl; answers.jsonl beside it fills their answers."""
    found = {query.id: query for query in _texts(path, policy)}
    named_so = path.name.startswith("queries.jsonl")
    answers_path = find_file(path.parent, "answers.jsonl") if named_so else None
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


def judgements_by(query: str, passage: str, score: str) -> Callable[[Path, Policy], Iterator[tuple[Where, Judgement]]]:
    """A reader of judgements by the names of their keys; a score may be written 1.0, or as true or
    false, and in CSV is a string."""

    def every(path: Path, policy: Policy) -> Iterator[tuple[Where, Judgement]]:
        for where, record in read_records(path, policy):
            try:
                grade = _grade(record.get(score), where)
                query_id, passage_id = (id_of(record, key, where) for key in (query, passage))
                require_id(query_id, "query id", where)
                yield where, Judgement(query_id, require_id(passage_id, "passage id", where), grade)
            except DataError as error:
                policy.reject(error)

    return lambda path, policy: consistent(every(path, policy), policy)


def _grade(value: Any, where: Where) -> int:
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):
        return int(str(value).lower() == "true")
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.0*)?", value.strip()):
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int):
        remedy = "a judgement's score is a whole number, above 0 if relevant"
        raise where.error("bad score", f"score {value!r} is not an integer", remedy)
    return value


def examples(
    queries: Iterable[Query],
    judged: Iterable[tuple[Where, Judgement]],
    passages: Iterable[Passage],
    run: Mapping[str, Sequence[RunLine]] | None,
    policy: Policy,
) -> list[Example]:
    """One example for each query with a relevant passage, see `read_examples`; keeps only passages that are named."""
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
        Example(by_id[query_id], tuple(positives.values()), tuple(negatives.get(query_id, ())))
        for query_id, positives in relevant.items()
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


FORMATS = (
    Format(
        name="beir.texts",
        title="BEIR corpus or queries",
        titles={"passages": "BEIR corpus", "queries": "BEIR queries"},
        looks="JSON records with _id, text, and perhaps title",
        fits=has("_id", "text"),
        keys=("_id", "text", "title", "answers"),
        passages=passages,
        queries=queries,
    ),
    Format(
        name="beir.qrels",
        title="qrels of the Hugging Face hub",
        looks="JSON records with query-id, corpus-id, score",
        fits=has("query-id", "corpus-id"),
        keys=("query-id", "corpus-id", "score"),
        judgements=judgements_by("query-id", "corpus-id", "score"),
    ),
)
