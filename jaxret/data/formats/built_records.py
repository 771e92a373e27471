"""Training records of data sets that `data build` makes (`build_data_set.py`): a query, and the rows of its passages.

`BuiltExamples` holds no example. It makes an example on request, from records that it reads from disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from jaxret.data.errors import Location, Policy
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.file_sample import FileSample
from jaxret.data.formats.format import DataFile, Format, has_keys
from jaxret.data.formats.texts import parse_passage, parse_query, record_list
from jaxret.data.libraries.named import NamedSet, Table, is_named
from jaxret.data.libraries.open_sets import open_named_set, open_table
from jaxret.data.record_checks import check_query
from jaxret.data.records import Example, Passage, Record

PASSAGES, OTHER_PASSAGES = "passages", "other_passages"  # the corpus; texts that only training records have
WHOLE_SPLIT = "full"  # the only split of both tables ("all" has another meaning in TFDS)
_BLOCK = 4096  # passages read at a time
FEATURES: dict[str, Any] = {
    "query_id": str,
    "query": str,
    "answers": [str],
    "instruction": str,  # "": none
    "positives": [int],  # rows of the corpus from 0 up, rows of the other passages from -1 down
    "negatives": [int],
    "positive_scores": [float],
    "negative_scores": [float],
    "every_positive": bool,  # see Format
}


class _Passages:
    """Reader of a set's passages by row."""

    def __init__(self, named_set: NamedSet) -> None:
        self._tables: dict[bool, Table] = {
            name == OTHER_PASSAGES: named_set.open(name, WHOLE_SPLIT)
            for name in (PASSAGES, OTHER_PASSAGES)
            if name in named_set.tables
        }
        self._path = named_set.root

    def read(self, rows: Sequence[int]) -> dict[int, Passage]:
        """Return the passages of some rows, by row. Each row is read once."""
        passages: dict[int, Passage] = {}
        for is_other, table in self._tables.items():
            table_rows = sorted({row for row in rows if (row < 0) == is_other})
            for start in range(0, len(table_rows), _BLOCK):
                block = table_rows[start : start + _BLOCK]
                assert table.rows_at is not None
                for row, record in zip(block, table.rows_at([~row if is_other else row for row in block])):
                    location = Location(self._path / (OTHER_PASSAGES if is_other else PASSAGES), f"row {row}")
                    passages[row] = parse_passage(record, location, Policy(), "_id")
        return passages


def read_built_examples(file: DataFile, policy: Policy) -> Iterator[tuple[Location, Example]]:
    """Yield one example for each record. Each passage is read once, and examples share it. Raises DataError for a file,
    because these records are tables of a named set."""
    if not is_named(file.path):
        raise Location(file.path).error(
            "no table", "this is a file, not a table of a built set", "give the folder that jaxret data build wrote"
        )
    entries = policy.parse_records(
        read_records(file, policy), lambda record, location: (record, _passage_rows(record, location))
    )
    records = list(entries)
    texts = _Passages(open_named_set(file.path)).read(
        [row for _, (_, rows) in records for side in rows for row in side]
    )
    for location, (record, rows) in records:
        yield location, _example(record, rows, texts, location)


def _passage_rows(record: Record, location: Location) -> list[list[int]]:
    return [record_list(record, key, location) for key in ("positives", "negatives")]


def _example(record: Record, rows: list[list[int]], texts: dict[int, Passage], location: Location) -> Example:
    query = check_query(parse_query(record, location, "query_id", "query"), location)
    positives, negatives = (tuple(texts[row] for row in side) for side in rows)
    scores = [tuple(record_list(record, f"{side}_scores", location)) for side in ("positive", "negative")]
    return Example(query, positives, negatives, scores[0], scores[1])


class BuiltExamples(Sequence[Example]):
    """The training records of a split of a built set, read on request. `path` is the path of their table, such as
    tfds:/data/scifact/examples/train. Raises DataError if this table does not exist."""

    def __init__(self, path: Path) -> None:
        self.path, self._passages = path, _Passages(open_named_set(path))
        source = open_table(path)
        assert source.rows_at is not None
        self._rows_at, self._count = source.rows_at, source.count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, rows: int) -> Example: ...
    @overload
    def __getitem__(self, rows: slice) -> list[Example]: ...
    def __getitem__(self, rows: int | slice) -> Example | list[Example]:
        numbers = range(self._count)[rows]
        if isinstance(numbers, int):
            return self._read_examples([numbers])[0]
        return self._read_examples(numbers)

    def _read_examples(self, numbers: Sequence[int]) -> list[Example]:
        records = [
            (Location(self.path, f"row {number}"), record) for number, record in zip(numbers, self._rows_at(numbers))
        ]
        rows = [_passage_rows(record, location) for location, record in records]
        texts = self._passages.read([row for sides in rows for side in sides for row in side])
        return [_example(record, sides, texts, location) for (location, record), sides in zip(records, rows)]


def _is_built_record(every_positive: bool) -> Any:
    keys = has_keys("query_id", "positives", "negatives", "every_positive")

    def fits(sample: FileSample) -> bool:
        return sample.container == "rows" and keys(sample) and sample.records[0]["every_positive"] == every_positive

    return fits


FORMATS = (
    Format(
        name="built.examples",
        title="training records of a built set",
        description="a table of `data build`, with query_id, query, positives, negatives (rows of its passages)",
        matches=_is_built_record(True),
        keys=tuple(FEATURES),
        examples=read_built_examples,
    ),
    Format(
        name="built.records",
        title="training records of a built set, whose first positive is the target",
        description="as built.examples",
        matches=_is_built_record(False),
        keys=tuple(FEATURES),
        every_positive=False,
        examples=read_built_examples,
    ),
)
