"""FlagEmbedding's training records: a query, texts of positives and negatives, perhaps a teacher's scores of both.

Its `prompt` (an instruction of the record's own) and `type` are not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from jaxret.data.files import DataError, Policy, Where, check_passage, check_query, normalise_question, require_key
from jaxret.data.formats.containers import Record, read_records
from jaxret.data.formats.format import Format, own_id, text_id
from jaxret.data.formats.head import Head
from jaxret.data.formats.pool import Pool, Scored, make_example, no_positive
from jaxret.data.formats.texts import list_of
from jaxret.data.records import Example, Passage, Query


def examples(path: Path, policy: Policy) -> Iterator[tuple[Where, Example]]:
    """One example a record; ids of queries are the records' numbers, ids of passages are made of their texts."""
    pool = Pool(policy)

    def parse(value: object, where: Where) -> Passage:
        if not isinstance(value, str):
            raise where.error("wrong type", f"this is {value!r:.60}", "a text is expected")
        return check_passage(Passage(text_id(value), value), where, policy)

    def side(record: Record, key: str, where: Where) -> Scored:
        texts = list_of(record, key, where)
        return pool.scored(zip(texts, scores_of(record, f"{key}_scores", len(texts), where)), key, where, parse)

    for where, record in read_records(path, policy):
        try:
            question = normalise_question(require_key(record, "query", str, where))
            query = check_query(Query(own_id(where), question), where)
            positives = side(record, "pos", where)
            if not positives:
                raise no_positive(where, "pos")
            yield where, make_example(query, positives, side(record, "neg", where))
        except DataError as error:
            policy.reject(error)


def scores_of(record: Record, key: str, count: int, where: Where) -> list[float] | list[None]:
    """A list of so many finite numbers; None for each if there is no such key."""
    scores = list_of(record, key, where)
    if not scores:
        return [None] * count
    if len(scores) != count:
        found = f"{key!r} has {len(scores)} scores for {count} texts"
        raise where.error("wrong number of scores", found, "write one for each, or leave the key out")
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
            raise where.error("bad score", f"{key!r} holds {score!r}", "a score is a finite number")
    return [float(score) for score in scores]


def _fits(head: Head) -> bool:
    return any(isinstance(record.get("query"), str) and isinstance(record.get("pos"), list) for record in head.records)


FORMATS = (
    Format(
        name="flag.examples",
        title="FlagEmbedding training records",
        looks="JSON records with query, pos, neg (lists of texts), and perhaps pos_scores, neg_scores",
        fits=_fits,
        keys=("query", "pos", "neg", "pos_scores", "neg_scores"),
        examples=examples,
    ),
)
