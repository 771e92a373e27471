"""Training files that are rows of texts: a query, a positive, perhaps negatives; the same query in many rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxret.data.files import DataError, Policy, Where, check_passage, check_query, normalise_question
from jaxret.data.formats.format import own_id, text_id
from jaxret.data.formats.pool import Scored, make_example
from jaxret.data.records import Example, Passage, Query


class Row(NamedTuple):
    """Texts of one row, each with a teacher's score or None. `alone`: its scores are comparable with no other row's."""

    where: Where
    query: str
    positives: list[tuple[str, float | None]]
    negatives: list[tuple[str, float | None]]
    alone: bool = False


@dataclass
class _Group:
    where: Where
    query: Query
    positives: Scored = field(default_factory=dict)
    negatives: Scored = field(default_factory=dict)


def grouped(rows: Iterable[Row], policy: Policy) -> Iterator[tuple[Where, Example]]:
    """One example a query, in the order in which queries come first; its id is the number of that row. Texts are held
    once, under an id that is made of them. A query that has no positive in any row gives no example."""
    known: dict[str, Passage] = {}
    groups: dict[str, _Group] = {}

    def passage(text: str, where: Where) -> Passage:
        key = text_id(text)
        if key not in known:
            known[key] = check_passage(Passage(key, text), where, policy)
        return known[key]

    for row in rows:
        try:
            query = check_query(Query(own_id(row.where), normalise_question(row.query)), row.where)
            sides = [[(passage(text, row.where), score) for text, score in side] for side in row[2:4]]
        except DataError as error:
            policy.reject(error)
            continue
        positives = "".join(f"\0{found.id}" for found, _ in sides[0]) if row.alone else ""
        group = groups.setdefault(query.text + positives, _Group(row.where, query))
        for side, found in zip((group.positives, group.negatives), sides):
            for one, score in found:
                if side.setdefault(one.id, (one, score))[1] is None:  # another row may have it
                    side[one.id] = (one, score)
    for group in groups.values():
        if group.positives:
            yield group.where, make_example(group.query, group.positives, group.negatives)
        else:
            policy.note("queries without a positive, which give no example", group.where)
