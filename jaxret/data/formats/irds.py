"""Records as ir_datasets has them, and as its `export --format jsonl` writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxret.data.files import DataError, Policy, Where
from jaxret.data.formats.beir import judgements_by
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.format import Format, Named, has
from jaxret.data.formats.sentence_transformers import number_of
from jaxret.data.formats.texts import id_of, passages_by
from jaxret.data.formats.trec import RunLine


def pairs(path: Path, policy: Policy) -> Iterator[tuple[Where, Named]]:
    """query_id, doc_id_a, doc_id_b: a positive and a negative; one for each query, in the order in which they come."""
    found: dict[str, tuple[Where, dict[str, None], dict[str, None]]] = {}
    for where, record in read_records(path, policy):
        try:
            query, positive, negative = (id_of(record, key, where) for key in ("query_id", "doc_id_a", "doc_id_b"))
        except DataError as error:
            policy.reject(error)
            continue
        _, positives, negatives = found.setdefault(query, (where, {}, {}))
        positives[positive] = negatives[negative] = None
    for query, (where, positives, negatives) in found.items():
        yield where, Named(query, None, tuple(positives), tuple(negatives))


def scored(path: Path, policy: Policy) -> Iterator[RunLine]:
    """query_id, doc_id, score as rankings, best first."""
    found: dict[str, list[tuple[float, str, Where]]] = {}
    for where, record in read_records(path, policy):
        try:
            query, document = (id_of(record, key, where) for key in ("query_id", "doc_id"))
            found.setdefault(query, []).append((number_of(record.get("score"), "score", where), document, where))
        except DataError as error:
            policy.reject(error)
    for query, scores in found.items():
        best = sorted(scores, key=lambda one: -one[0])
        for rank, (score, document, where) in enumerate(best, 1):
            yield RunLine(where, query, document, rank, score)


FORMATS = (
    Format(
        name="irds.docs",
        title="documents of ir_datasets",
        looks="JSON records with doc_id, text, and perhaps title",
        fits=has("doc_id", "text"),
        keys=("doc_id", "text", "title"),
        passages=passages_by("doc_id"),
    ),
    Format(
        name="irds.qrels",
        title="qrels of ir_datasets",
        looks="JSON records with query_id, doc_id, relevance",
        fits=has("query_id", "doc_id", "relevance"),
        keys=("query_id", "doc_id", "relevance"),
        judgements=judgements_by("query_id", "doc_id", "relevance"),
    ),
    Format(
        name="irds.pairs",
        title="pairs of documents of ir_datasets",
        looks="JSON records with query_id, doc_id_a (relevant), doc_id_b",
        fits=has("query_id", "doc_id_a", "doc_id_b"),
        keys=("query_id", "doc_id_a", "doc_id_b"),
        named=pairs,
    ),
    Format(
        name="irds.scores",
        title="scored documents of ir_datasets",
        looks="JSON records with query_id, doc_id, score",
        fits=has("query_id", "doc_id", "score"),
        keys=("query_id", "doc_id", "score"),
        rankings=scored,
    ),
)
