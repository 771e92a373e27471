"""Training examples that name ids: their texts are joined from a corpus and queries."""

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
    """Return the examples of ids with their texts. Only passages with such an id stay in memory.

    Args:
        records: examples by ids, with their locations. An unknown id is bad input; under a policy that skips, it leaves
            its example, and one without a positive then is left out.
        queries: query id -> query.
        passages: the corpus, read once.
    """
    passage_ids = {key for _, one in records for key in (*one.positives, *one.negatives)}
    corpus = {passage.id: passage for passage in passages if passage.id in passage_ids}
    examples = []
    for location, one in records:
        try:
            if one.query is None:
                require_known_id(one.query_id, "query", queries, location)
        except DataError as error:
            policy.reject(error)
            continue
        positives = _known_passages(one.positives, corpus, location, policy)
        negatives = _known_passages(
            [key for key in one.negatives if key not in one.positives], corpus, location, policy
        )
        if positives:
            examples.append(Example(one.query or queries[one.query_id], positives, negatives))
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
