"""Files of RocketQA's MS MARCO, which I3 and MLR use: negatives by ids, and the collection with titles."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxret.data.errors import Location, Policy
from jaxret.data.formats.file_sample import FileSample
from jaxret.data.formats.format import DataFile, Format
from jaxret.data.formats.msmarco import holds_for_most, is_one_word
from jaxret.data.formats.tables import is_header, tab_rows
from jaxret.data.formats.texts import require_new_id
from jaxret.data.formats.trec import RunLine
from jaxret.data.lines import Digest
from jaxret.data.record_checks import check_passage, require_id
from jaxret.data.records import Passage

_IDS = re.compile(r"[^\s,]+(,[^\s,]+)*")


def read_id_lists(file: DataFile, policy: Policy) -> Iterator[RunLine]:
    """Yield the lines of rankings from train.negatives.tsv: query id, ids of passages between commas. The score is
    1 / rank. Raises DataError for a line of another form."""
    first: dict[str, Location] = {}

    def check(row: list[str], location: Location) -> list[str]:
        require_new_id(require_id(row[0], "query id", location), "query id", location, first)
        if not _IDS.fullmatch(row[1]):
            remedy = "write ids between commas, without spaces: 12,7,34"
            raise location.error("bad ids", f"the second column is not a list of ids: {row[1][:60]!r}", remedy)
        return row

    rows = tab_rows(file.path, ("query id", "passage ids between commas"), policy)
    for location, (query, ids) in policy.parse_records(rows, check):
        for rank, passage in enumerate(ids.split(","), 1):
            yield RunLine(location, query, passage, rank, 1 / rank)


def read_titled_collection(
    file: DataFile, policy: Policy, digest: Digest | None = None
) -> Iterator[tuple[Location, Passage]]:
    """Yield (location, passage) of collection.splitTitle.tsv: id, title, text, without header and quoting."""

    def parse(row: list[str], location: Location) -> Passage:
        key, title, text = row
        return check_passage(Passage(key, text, title), location, policy)

    return policy.parse_records(tab_rows(file.path, ("passage id", "title", "text"), policy, digest), parse)


def _is_id_lists(sample: FileSample) -> bool:
    """Return whether a table has two columns, and the second has several ids between commas in most lines."""
    if sample.container != "table" or sample.columns != 2:
        return False
    return holds_for_most(
        sample.rows, lambda row: is_one_word(row, 0) and "," in row[1] and bool(_IDS.fullmatch(row[1].rstrip("\r")))
    )


def _is_titled(sample: FileSample) -> bool:
    """Return whether a table has no header line and three columns: an id, a shorter text, a longer text."""
    if sample.container != "table" or sample.columns != 3 or is_header(sample.lines[0].split("\t")):
        return False
    if not holds_for_most(sample.rows, lambda row: is_one_word(row, 0) and len(row[2].split()) > 1):
        return False
    title, text = (sum(len(row[column]) for row in sample.rows) for column in (1, 2))
    return text > title


FORMATS = (
    Format(
        name="rocketqa.negatives",
        title="RocketQA negatives",
        description="two columns between tabs: query id, ids of passages between commas",
        matches=_is_id_lists,
        columns=(2,),
        without_scores=True,
        rankings=read_id_lists,
    ),
    Format(
        name="rocketqa.passages",
        title="MS MARCO collection with titles",
        description="three columns between tabs, without header and quotes: id, title, text, which is the longer one",
        matches=_is_titled,
        columns=(3,),
        passages=read_titled_collection,
    ),
)
