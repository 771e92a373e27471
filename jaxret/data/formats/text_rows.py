"""Group the rows of training files by query. A row has a query, a positive and optional negatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxret.data.errors import DataError, Location, Policy
from jaxret.data.formats.format import content_id, id_from_location
from jaxret.data.formats.shared_passages import ScoredPassages, make_example
from jaxret.data.record_checks import check_passage, check_query, normalize_question
from jaxret.data.records import Example, Passage, Query


class TextRow(NamedTuple):
    """Texts of one row."""

    location: Location
    query: str
    # texts of positives and negatives, each with a teacher's score or None
    positives: list[tuple[str, float | None]]
    negatives: list[tuple[str, float | None]]
    scores_incomparable: bool = False  # whether its scores cannot be compared with the scores of other rows


@dataclass
class _Group:
    location: Location
    query: Query
    positives: ScoredPassages = field(default_factory=dict)
    negatives: ScoredPassages = field(default_factory=dict)


def group_by_query(rows: Iterable[TextRow], policy: Policy) -> Iterator[tuple[Location, Example]]:
    """Yield one example for each query, in the order of the queries' first rows.

    The id of a query is the number of its first row. Equal texts are stored once; the id of a text is computed from it.
    A query that has no positive in any row gives no example.
    """
    passages: dict[str, Passage] = {}
    groups: dict[str, _Group] = {}

    def passage(text: str, location: Location) -> Passage:
        key = content_id(text)
        if key not in passages:
            passages[key] = check_passage(Passage(key, text), location, policy)
        return passages[key]

    for row in rows:
        try:
            query = check_query(Query(id_from_location(row.location), normalize_question(row.query)), row.location)
            sides = [[(passage(text, row.location), score) for text, score in side] for side in row[2:4]]
        except DataError as error:
            policy.reject(error)
            continue
        positives = "".join(f"\0{texts.id}" for texts, _ in sides[0]) if row.scores_incomparable else ""
        group = groups.setdefault(query.text + positives, _Group(row.location, query))
        for side, texts in zip((group.positives, group.negatives), sides):
            for text, score in texts:
                if side.setdefault(text.id, (text, score))[1] is None:  # this row may have the missing score
                    side[text.id] = (text, score)
    for group in groups.values():
        if group.positives:
            yield group.location, make_example(group.query, group.positives, group.negatives)
        else:
            policy.note("queries without a positive, which give no example", group.location)
