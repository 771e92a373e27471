"""Join training examples by ids with the texts of a corpus and of queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxret.data.errors import Location, Policy
from jaxret.data.formats.format import IdExample
from jaxret.data.formats.trec import known_passages, require_known_id
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

    def parse(record: IdExample, location: Location) -> Example:
        if record.query is None:
            require_known_id(record.query_id, "query", queries, location)
        negative_ids = [key for key in record.negatives if key not in record.positives]
        positives, negatives = (
            tuple(passage for _, passage in known_passages([(location, key) for key in keys], corpus, policy))
            for keys in (record.positives, negative_ids)
        )
        return Example(record.query or queries[record.query_id], positives, negatives)

    return [example for _, example in policy.parse_records(records, parse) if example.positives]
