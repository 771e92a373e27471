"""Training records of the sets that `data build` makes (`build.py`): a query, and its passages by their rows.

An example is made when it is asked for, of a few records read in place: `BuiltExamples` holds none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from jaxret.data.files import DataError, Policy, Where, check_query
from jaxret.data.formats.containers import Record, read_records
from jaxret.data.formats.format import Format, has
from jaxret.data.formats.head import Head
from jaxret.data.formats.texts import list_of, passage_of, query_of
from jaxret.data.libraries.named import NamedSet, Table, opened, table
from jaxret.data.records import Example, Passage

PASSAGES, OTHERS = "passages", "other_passages"  # the corpus; texts that only training records have
ALL = "full"  # the split of both ("all" is a word of TFDS)
_BLOCK = 4096  # passages read at a time
FEATURES: dict[str, Any] = {
    "query_id": str,
    "query": str,
    "answers": [str],
    "positives": [int],  # rows of the corpus, and, from -1 down, of the other passages
    "negatives": [int],
    "positive_scores": [float],
    "negative_scores": [float],
    "every_positive": bool,  # see Format
}


class _Passages:
    """The passages of a set, by row."""

    def __init__(self, found: NamedSet) -> None:
        self._tables: dict[bool, Table] = {
            name == OTHERS: found.open(name, ALL) for name in (PASSAGES, OTHERS) if name in found.tables
        }
        self._path = found.root

    def read(self, rows: Sequence[int]) -> dict[int, Passage]:
        """Those of some rows, each read once."""
        found: dict[int, Passage] = {}
        for others, source in self._tables.items():
            mine = sorted({row for row in rows if (row < 0) == others})
            for start in range(0, len(mine), _BLOCK):
                block = mine[start : start + _BLOCK]
                assert source.at is not None
                for row, record in zip(block, source.at([~row if others else row for row in block])):
                    where = Where(self._path / (OTHERS if others else PASSAGES), f"row {row}")
                    found[row] = passage_of(record, where, Policy(), "_id")
        return found


def examples(path: Path, policy: Policy) -> Iterator[tuple[Where, Example]]:
    """One example a record; each passage is read once, and shared."""
    records = []
    for where, record in read_records(path, policy):
        try:
            records.append((where, record, _rows(record, where)))
        except DataError as error:
            policy.reject(error)
    texts = _Passages(opened(path)).read([row for _, _, rows in records for side in rows for row in side])
    for where, record, rows in records:
        yield where, _example(record, rows, texts, where)


def _rows(record: Record, where: Where) -> list[list[int]]:
    return [list_of(record, key, where) for key in ("positives", "negatives")]


def _example(record: Record, rows: list[list[int]], texts: dict[int, Passage], where: Where) -> Example:
    query = check_query(query_of(record, where, "query_id", "query"), where)
    positives, negatives = (tuple(texts[row] for row in side) for side in rows)
    scores = [tuple(list_of(record, f"{side}_scores", where)) for side in ("positive", "negative")]
    return Example(query, positives, negatives, scores[0], scores[1])


class BuiltExamples(Sequence[Example]):
    """The training records of a split of a built set, read when they are asked for: `path` is that of the table, as
    tfds:/data/scifact/examples/train. Raises DataError if there is none."""

    def __init__(self, path: Path) -> None:
        self.path, self._passages = path, _Passages(opened(path))
        found = table(path)
        assert found.at is not None
        self._at, self._count = found.at, found.count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Example: ...
    @overload
    def __getitem__(self, place: slice) -> list[Example]: ...
    def __getitem__(self, place: int | slice) -> Example | list[Example]:
        numbers = range(self._count)[place]
        if isinstance(numbers, int):
            return self._read([numbers])[0]
        return self._read(numbers)

    def _read(self, numbers: Sequence[int]) -> list[Example]:
        records = [(Where(self.path, f"row {number}"), record) for number, record in zip(numbers, self._at(numbers))]
        rows = [_rows(record, where) for where, record in records]
        texts = self._passages.read([row for sides in rows for side in sides for row in side])
        return [_example(record, mine, texts, where) for (where, record), mine in zip(records, rows)]


def _fits(every_positive: bool) -> Any:
    keys = has("query_id", "positives", "negatives", "every_positive")

    def fits(head: Head) -> bool:
        return head.container == "rows" and keys(head) and head.records[0]["every_positive"] == every_positive

    return fits


FORMATS = (
    Format(
        name="built.examples",
        title="training records of a built set",
        looks="a table of `data build`, with query_id, query, positives, negatives (rows of its passages)",
        fits=_fits(True),
        keys=tuple(FEATURES),
        examples=examples,
    ),
    Format(
        name="built.records",
        title="training records of a built set, whose first positive is the target",
        looks="as built.examples",
        fits=_fits(False),
        keys=tuple(FEATURES),
        every_positive=False,
        examples=examples,
    ),
)
