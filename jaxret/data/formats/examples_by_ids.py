"""Join training examples by ids with the texts of a corpus and of queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxret.data.errors import DataError, Location, Policy
from jaxret.data.formats.format import IdExample
from jaxret.data.formats.trec import require_known_id
from jaxret.data.records import Example, Passage, Query


def join_texts(
    records: Sequence[tuple[Location, IdExample]],
    queries: Mapping[str, Query],
    passages: Iterable[Passage],
    policy: Policy,
) -> list[Example]:
    """Return the examples with their texts. Only passages of the examples stay in memory.

    Args:
        records: examples by ids, with their locations.
        queries: query id -> query.
        passages: the passages of the corpus, read once.
        policy: what to do with an unknown id. If it is skipped, the example is kept without this passage; an example
            without a positive is left out.
    """
    passage_ids = {key for _, record in records for key in (*record.positives, *record.negatives)}
    corpus = {passage.id: passage for passage in passages if passage.id in passage_ids}
    examples = []
    for location, record in records:
        try:
            if record.query is None:
                require_known_id(record.query_id, "query", queries, location)
        except DataError as error:
            policy.reject(error)
            continue
        positives = _known_passages(record.positives, corpus, location, policy)
        negatives = _known_passages(
            [key for key in record.negatives if key not in record.positives], corpus, location, policy
        )
        if positives:
            examples.append(Example(record.query or queries[record.query_id], positives, negatives))
    return examples


def _known_passages(
    keys: Iterable[str], corpus: Mapping[str, Passage], location: Location, policy: Policy
) -> tuple[Passage, ...]:
    passages = []
    for key in keys:
        try:
            require_known_id(key, "passage", corpus, location)
        except DataError as error:
            policy.reject(error)
            continue
        passages.append(corpus[key])
    return tuple(passages)
