"""Examples by ids -> examples: the texts are those of a corpus and of queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxret.data.files import DataError, Policy, Where
from jaxret.data.formats.format import Named
from jaxret.data.formats.trec import refuse_unknown
from jaxret.data.records import Example, Passage, Query


def joined(
    named: Sequence[tuple[Where, Named]], queries: Mapping[str, Query], passages: Iterable[Passage], policy: Policy
) -> list[Example]:
    """Keeps only passages that are named. An id that there is not leaves its example under a policy that skips, and one
    without a positive then is left out."""
    wanted = {key for _, one in named for key in (*one.positives, *one.negatives)}
    corpus = {passage.id: passage for passage in passages if passage.id in wanted}
    examples = []
    for where, one in named:
        try:
            if one.query is None:
                refuse_unknown(one.query_id, "query", queries, where)
        except DataError as error:
            policy.reject(error)
            continue
        positives = _known(one.positives, corpus, where, policy)
        negatives = _known([key for key in one.negatives if key not in one.positives], corpus, where, policy)
        if positives:
            examples.append(Example(one.query or queries[one.query_id], positives, negatives))
    return examples


def _known(keys: Iterable[str], corpus: Mapping[str, Passage], where: Where, policy: Policy) -> tuple[Passage, ...]:
    found = []
    for key in keys:
        try:
            refuse_unknown(key, "passage", corpus, where)
        except DataError as error:
            policy.reject(error)
            continue
        found.append(corpus[key])
    return tuple(found)
