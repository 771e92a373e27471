"""Metadata of passages for filters: fields of a corpus's records other than id, title and text.

<part>/metadata/manifest.json    written last: the fields, the digest of the texts, digests of the columns
                N.values.*.npy   the values of field N, sorted
                N.rows.*.npy     the rows that have each value, ascending

Fields are the keys of a record's `metadata` (BEIR), and keys that the record's format does not know. Keys of nested
objects are joined by dots. A list has several values. Numbers, true and false are written as in JSON, dates and times
as in ISO 8601. Null, NaN, empty texts, texts of more than 256 characters and vectors (lists of more than 32 numbers
with a float among them) are not values. The first search with a filter makes these files from the corpus.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxret.data.formats import hash_id
from jaxret.data.tokens.store import ColumnWriter, Strings, StringsBuilder
from jaxret.index.encoded_corpus import EncodedCorpus, corpus_of
from jaxret.index.passage_records import EmptyPassagesPolicy, is_vector, read_passage_records
from jaxret.index.passages import unchanged_corpus
from jaxret.index.shard_set import ShardSet
from jaxret.index.shards import ShardError
from jaxret.storage.atomic import read_with_digest, sha256_file, with_digest, write_json
from jaxret.storage.mapped_array import map_array
from jaxret.types import Ragged

_LONGEST_VALUE = 256  # characters; a longer value is a text, not a category


class Field(NamedTuple):
    """The values of a field, and the rows that have them."""

    values: Strings  # sorted
    rows: Ragged  # rows of each value, int64 ascending

    def places(self, value: str) -> range:
        """Return the number of `value` among the values, in a range of one; an empty range if it is not a value."""
        place = bisect_left(self.values, value)
        return range(place, place + (place < len(self.values) and self.values[place] == value))


def frequent_values(encoded_corpus: EncodedCorpus, count: int) -> dict[str, list[tuple[str, int]]]:
    """Return field -> its `count` most frequent values with the number of their passages, the most frequent first.
    Raises the errors of `read_fields`."""
    counts: dict[str, Counter[str]] = {}
    for shards, first in zip(encoded_corpus.shards, encoded_corpus.firsts, strict=False):
        remaining = np.ones(shards.total_rows, bool)
        if encoded_corpus.selection is not None:
            remaining[:] = np.isin(np.arange(first, first + shards.total_rows), encoded_corpus.selection)
        for name, field in read_fields(shards).items():
            passages = np.diff(np.concatenate([[0], np.cumsum(remaining[field.rows.flat])])[field.rows.offsets])
            places = np.argsort(-passages, kind="stable")
            # A field may have millions of values. A value that is rare in one part may be frequent in the whole corpus.
            if len(encoded_corpus.shards) == 1:
                places = places[:count]
            numbers = {field.values[place]: int(passages[place]) for place in places.tolist() if passages[place]}
            counts.setdefault(name, Counter()).update(numbers)
    return {
        name: sorted(values.items(), key=lambda item: (-item[1], item[0]))[:count]
        for name, values in sorted(counts.items())
    }


def read_fields(shards: ShardSet) -> dict[str, Field]:
    """Return the fields of a part by name, memory-mapped. Make their files if they do not exist, are damaged, or belong
    to other texts. Raises ShardError if the folder changes during the call."""
    folder, sha256 = shards.folder / "metadata", corpus_of(shards).get("sha256")
    fields = _stored_fields(folder, sha256)
    if fields is None:
        _make_fields(shards, folder, sha256)
        fields = _stored_fields(folder, sha256)
    if fields is None:
        raise ShardError(f"{folder} changed while it was made; search again")
    return fields


def _stored_fields(folder: Path, sha256: Any) -> dict[str, Field] | None:
    try:
        manifest = read_with_digest(folder / "manifest.json")
        if manifest["corpus"] != sha256:
            return None
        columns = {}
        for name, entry in manifest["columns"].items():
            path = folder / f"{name}.npy"
            if path.stat().st_size != entry["bytes"] or sha256_file(path) != entry["sha256"]:
                return None
            columns[name] = np.asarray(map_array(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # `read_fields` makes the files again

    def ragged(name: str) -> Ragged:
        return Ragged(columns[f"{name}.flat"], columns[f"{name}.offsets"])

    return {
        name: Field(Strings(ragged(f"{n}.values")), ragged(f"{n}.rows")) for n, name in enumerate(manifest["fields"])
    }


def _make_fields(shards: ShardSet, folder: Path, sha256: Any) -> None:
    names: list[str] = []
    writer = ColumnWriter(folder)
    for name, (values, codes, rows) in sorted(_collect(shards).items()):
        sorted_values = sorted(values)
        place_of_code = np.empty(len(values), np.int64)  # code of a value -> its place in the sorted values
        place_of_code[[values[value] for value in sorted_values]] = np.arange(len(values))
        places, rows_of_codes = place_of_code[np.asarray(codes)], np.asarray(rows)
        order = np.lexsort((rows_of_codes, places))
        offsets = np.searchsorted(places[order], np.arange(len(values) + 1))
        writer.strings(f"{len(names)}.values", StringsBuilder(sorted_values).strings())
        writer.ragged(f"{len(names)}.rows", [Ragged(rows_of_codes[order], offsets)], np.int64)
        names.append(name)
    write_json(folder / "manifest.json", with_digest({"corpus": sha256, "fields": names, "columns": writer.columns}))


def _collect(shards: ShardSet) -> dict[str, tuple[dict[str, int], array[int], array[int]]]:
    """Return field -> (value -> its code, codes, rows): the n-th row has the value with the n-th code."""
    blocks = (np.arange(shard.start, shard.stop) for shard in shards.shards)
    ids = StringsBuilder(key for block in blocks for key in shards.ids(block)).strings()
    hashes = np.fromiter((hash_id(key) for key in ids), np.uint64, len(ids))
    order = np.argsort(hashes, kind="stable")
    sorted_hashes, visited_rows = hashes[order], np.zeros(len(ids), bool)
    fields: dict[str, tuple[dict[str, int], array[int], array[int]]] = {}
    empty_passages: list[tuple[str, list[tuple[str, str]]]] = []

    def add(key: str, record: list[tuple[str, str]]) -> None:
        begin, end = (int(np.searchsorted(sorted_hashes, np.uint64(hash_id(key)), side)) for side in ("left", "right"))
        row = next((int(row) for row in order[begin:end] if ids[int(row)] == key), -1)
        if row < 0 or visited_rows[row]:
            return  # the record was skipped when the corpus was encoded
        visited_rows[row] = True
        for name, value in dict.fromkeys(record):
            values, codes, rows = fields.setdefault(name, ({}, array("q"), array("q")))
            codes.append(values.setdefault(value, len(values)))
            rows.append(row)

    file = unchanged_corpus(shards.folder).file
    for passage, metadata, extra in read_passage_records(file, EmptyPassagesPolicy("skip")):
        record = [*_pairs("", metadata), *_pairs("", extra)]
        if passage.text.strip() or passage.title.strip():
            add(passage.id, record)
        else:
            empty_passages.append((passage.id, record))
    for key, record in empty_passages:  # if no passage with a text has the id, it was encoded under "keep"
        add(key, record)
    return fields


def _pairs(prefix: str, record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (field, value) of the entries of an object."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _pairs(f"{prefix}{key}.", value)
            continue
        if is_vector(value):
            continue
        for element in value if isinstance(value, list) else [value]:
            if element is None or isinstance(element, (dict, list)):
                continue
            text = element if isinstance(element, str) else json.dumps(element)
            if 0 < len(text) <= _LONGEST_VALUE:
                yield f"{prefix}{key}", text
