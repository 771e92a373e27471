"""Results of DPR's retriever, or of Pyserini: for each question the retrieved passages with their text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jaxret.data.errors import Location, Policy
from jaxret.data.formats.dpr import ANSWERS, QUESTION, parse_dpr_passage, read_question_queries, read_question_records
from jaxret.data.formats.format import DataFile, Format, distinct_passages, first_present_key, has_keys
from jaxret.data.formats.trec import RunLine, parse_score
from jaxret.data.formats.writing import write_json_array
from jaxret.data.lines import Digest, PathLike
from jaxret.data.record_checks import require_key, require_object
from jaxret.data.records import Passage, Query, Record

CONTEXTS = ("ctxs", "contexts")  # DPR's key, and Pyserini's key
_PASSAGE_IDS = ("id", "docid", "passage_id")
_SCORE = "score"


def _read_contexts(
    file: DataFile, policy: Policy
) -> Iterator[tuple[Location, tuple[Query, list[tuple[Location, Passage | str, float]]]]]:
    """Yield (location, (query, its retrieved contexts)) in the file's order. A context is (location, passage, score);
    the id stands in place of a passage whose text the file does not have."""

    def parse(
        record: Record, location: Location, query: Query
    ) -> tuple[Query, list[tuple[Location, Passage | str, float]]]:
        key = next((key for key in CONTEXTS if key in record), CONTEXTS[-1])
        values = enumerate(require_key(record, key, list, location))
        contexts = ((Location(file.path, f"{location.line}, {key}[{number}]"), value) for number, value in values)
        return query, [context for _, context in policy.parse_records(contexts, parse_context)]

    def parse_context(value: Any, location: Location) -> tuple[Location, Passage | str, float]:
        context = require_object(value, location)
        return location, _passage_or_id(context, location, policy), parse_score(context.get(_SCORE), location)

    return read_question_records(file, policy, parse)


def _passage_or_id(context: Record, location: Location, policy: Policy) -> Passage | str:
    if context.get("text") is not None:
        return parse_dpr_passage(context, location, policy, _PASSAGE_IDS)
    return str(require_key(context, first_present_key(context, _PASSAGE_IDS), str, location))


def read_result_passages(
    file: DataFile, policy: Policy, digest: Digest | None = None
) -> Iterator[tuple[Location, Passage]]:
    """Yield the retrieved passages whose text the file has, without repetition."""
    contexts = (context for _, (_, contexts) in _read_contexts(file, policy) for context in contexts)
    passages = ((location, passage) for location, passage, _ in contexts if isinstance(passage, Passage))
    return distinct_passages(passages, file.path, digest)


def read_result_lines(file: DataFile, policy: Policy) -> Iterator[RunLine]:
    """Yield the passages retrieved for each question, ranked in the file's order."""
    for _, (query, contexts) in _read_contexts(file, policy):
        for rank, (location, passage, score) in enumerate(contexts, 1):
            passage_id = passage.id if isinstance(passage, Passage) else passage
            yield RunLine(location, query.id, passage_id, rank, score, query.text)


def write_retrieval_results(
    path: PathLike, results: Iterable[tuple[Query, Iterable[tuple[Passage, float, bool]]]]
) -> None:
    """Write results in the form of DPR's retriever, a question on each line: its passages, best first, with scores (as
    strings) and whether the text has an answer. The format has no query ids: readers give the queries the ids "0", "1",
    ...
    """

    def records() -> Iterator[Record]:
        for query, passages in results:
            contexts = [
                {
                    _PASSAGE_IDS[0]: passage.id,
                    "title": passage.title,
                    "text": passage.text,
                    _SCORE: str(score),
                    "has_answer": has_answer,
                }
                for passage, score, has_answer in passages
            ]
            yield {QUESTION: query.text, ANSWERS: list(query.answers), CONTEXTS[0]: contexts}

    write_json_array(path, records())


FORMATS = (
    Format(
        name="dpr.results",
        title="DPR retrieval results",
        description=f"JSON records with {QUESTION}, {ANSWERS}, {' (or, as Pyserini writes it, '.join(CONTEXTS)})",
        matches=lambda sample: any(has_keys(QUESTION, key)(sample) for key in CONTEXTS),
        keys=(QUESTION, ANSWERS, *CONTEXTS),
        without_query_ids=True,
        passages=read_result_passages,
        queries=read_question_queries,
        rankings=read_result_lines,
    ),
)
