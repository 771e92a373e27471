"""Records of ir_datasets, also from files that its `export --format jsonl` writes."""

from __future__ import annotations

from collections.abc import Iterator

from jaxret.data.errors import Location, Policy
from jaxret.data.formats.beir import judgement_format
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.format import DataFile, IdExample, group_ids, record_format
from jaxret.data.formats.sentence_transformers_records import parse_number
from jaxret.data.formats.texts import passage_format, record_id
from jaxret.data.formats.trec import RunLine
from jaxret.data.records import Record

_PAIR_KEYS = ("query_id", "doc_id_a", "doc_id_b")
_SCORE_KEYS = ("query_id", "doc_id", "score")


def read_document_pairs(file: DataFile, policy: Policy) -> Iterator[tuple[Location, IdExample]]:
    """Yield one example for each query of records with query_id, doc_id_a (a positive) and doc_id_b (a negative)."""

    def parse(record: Record, location: Location) -> list[str]:
        return [record_id(record, key, location) for key in _PAIR_KEYS]

    return group_ids(policy.parse_records(read_records(file, policy), parse))


def read_scored_documents(file: DataFile, policy: Policy) -> Iterator[RunLine]:
    """Yield the lines of rankings, best first, from records with query_id, doc_id and score."""
    by_query: dict[str, list[tuple[float, str, Location]]] = {}

    def parse(record: Record, location: Location) -> tuple[str, str, float]:
        query, document = (record_id(record, key, location) for key in _SCORE_KEYS[:2])
        return query, document, parse_number(record.get(_SCORE_KEYS[2]), _SCORE_KEYS[2], location)

    for location, (query, document, score) in policy.parse_records(read_records(file, policy), parse):
        by_query.setdefault(query, []).append((score, document, location))
    for query, scores in by_query.items():
        ranking = sorted(scores, key=lambda entry: -entry[0])
        for rank, (score, document, location) in enumerate(ranking, 1):
            yield RunLine(location, query, document, rank, score)


FORMATS = (
    passage_format("irds.docs", "documents of ir_datasets", "doc_id"),
    judgement_format("irds.qrels", "qrels of ir_datasets", "query_id", "doc_id", "relevance"),
    record_format(
        "irds.pairs",
        "pairs of documents of ir_datasets",
        _PAIR_KEYS,
        id_examples=read_document_pairs,
    ),
    record_format(
        "irds.scores",
        "scored documents of ir_datasets",
        _SCORE_KEYS,
        rankings=read_scored_documents,
    ),
)
