"""The metadata of passages in the records of a corpus: what a record has beside id, title and text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxret.data.errors import DataError, Policy
from jaxret.data.formats.containers import read_records
from jaxret.data.formats.format import DataFile
from jaxret.data.records import Passage

# Containers whose records have names for their fields.
_RECORDS = ("lines", "array", "object", "csv", "parquet", "rows")
_LONGEST_LIST = 32  # elements; a longer list with floats is a vector
_MOST_LEVELS = 100  # of objects and lists; for each level, functions call themselves, which Python limits


class PassageRecord(NamedTuple):
    """A passage and its metadata, whose values are those of JSON (`json_value`)."""

    passage: Passage
    metadata: Mapping[str, Any]  # the record's `metadata` (BEIR)
    extra: Mapping[str, Any]  # the record's keys that its format does not know

    @property
    def fields(self) -> dict[str, Any]:
        """All metadata in one object. If a key is in both, `metadata` counts."""
        return {**self.extra, **self.metadata}


class EmptyPassagesPolicy(Policy):
    """Leaves bad records out, except passages without title and text."""

    def reject_empty(self, error: DataError) -> None:
        pass


def has_metadata(source: DataFile) -> bool:
    """Return whether the passages of a file are records with names for their fields."""
    return source.format.passages is not None and source.container in _RECORDS


def read_passage_records(source: DataFile, policy: Policy) -> Iterator[PassageRecord]:
    """Yield the passages of a file with their metadata; nothing without `has_metadata`."""
    if source.format.passages is None or not has_metadata(source):
        return
    usual_keys = {*source.format.keys, "title", "metadata"}
    passages = source.format.passages(source, policy, None)
    location, passage = next(passages, (None, None))
    for record_location, record in read_records(source, Policy("skip")):
        if passage is None or record_location != location:
            continue  # a record that is not a passage
        metadata = record.get("metadata")
        extra = {key: value for key, value in record.items() if key not in usual_keys}
        yield PassageRecord(passage, json_value(metadata) if isinstance(metadata, dict) else {}, json_value(extra))
        location, passage = next(passages, (None, None))


def is_vector(value: Any) -> bool:
    """Return whether a value of a record is a vector, such as the output of another model, and not a list of values."""
    return (
        isinstance(value, list) and len(value) > _LONGEST_LIST and any(isinstance(element, float) for element in value)
    )


def json_value(value: Any, levels: int = _MOST_LEVELS) -> Any:
    """Return a value of a record as JSON can hold it. Dates and times are texts in ISO 8601; NaN, infinity, bytes, and
    objects and lists below the first `levels` are null; halves of surrogate pairs are "?"; values of other types, such
    as decimal numbers, are texts."""
    if isinstance(value, dict | list | tuple) and not levels:
        return None
    if isinstance(value, dict):
        return {json_value(str(key)): json_value(entry, levels - 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(element, levels - 1) for element in value]
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, bytes):
        return None
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
