"""The texts of the passages that a search returns, or of its documents."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.chunks import document_id
from jaxret.data.records import Passage
from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.index.passages import Passages
from jaxret.index.source import encoded_source, open_source
from jaxret.search.documents import join_passages


@dataclass(frozen=True)
class PassageTexts:
    """Reads the texts of an encoded corpus by id, and opens its files when the first one is read.

    Reading raises the errors of `Passages`.
    """

    encoded_corpus: EncodedCorpus
    max_passage: bool  # whether ids are those of documents
    # The passages of each part of the corpus, the last part first; [] before the first text is read. A searcher of some
    # rows has the same list.
    _parts: list[Passages] = field(default_factory=list)
    _parts_with_metadata: list[Passages] = field(default_factory=list)  # in the order of the corpus

    @property
    def bytes_read(self) -> int:
        """Number of bytes of the corpus's files that were read so far to find texts."""
        return sum(passages.bytes_read for passages in self._parts)

    def read(self, ids: Collection[str]) -> dict[str, Passage]:
        """Return passages by their ids, or with `max_passage` documents (`join_passages`); only these texts are
        read."""
        if not self.max_passage:
            return self._read_passages(ids)
        return join_passages(self._read_passages, ids, self.encoded_corpus.deleted_ids)

    def of_rows(self, rows: np.ndarray) -> list[Passage]:
        """Return the passage of each row, also with `max_passage`. A passage without text was encoded under "keep"."""
        ids = self.encoded_corpus.ids(rows)
        by_id = self._read_passages(set(ids))
        return [by_id[key] for key in ids]

    def metadata_of_rows(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """Return the metadata of the passage of each row, also with `max_passage`: {} for a record without metadata.
        Their values and nesting are those of the record (`json_value`)."""
        if not self._parts_with_metadata:
            self._parts_with_metadata[:] = [Passages.of_shards(shards, True) for shards in self.encoded_corpus.shards]
        metadata: list[dict[str, Any]] = [{} for _ in rows]
        for number, places, part_rows in self.encoded_corpus.by_part(rows):
            ids = self.encoded_corpus.shards[number].ids(part_rows)
            records = self._parts_with_metadata[number].read_records(set(ids))
            for place, key in zip(places.tolist(), ids, strict=True):
                metadata[place] = records[key].fields if key in records else {}
        return metadata

    def missing_ids(self, ids: set[str]) -> set[str]:
        """Return the ids that no passage has, or with `max_passage`, that no document has."""
        if not self.max_passage:
            return self.encoded_corpus.missing_ids(ids)
        absent_ids = set(ids)
        for _, block in self.encoded_corpus.id_blocks():
            absent_ids.difference_update(map(document_id, block))
        return absent_ids

    def _read_passages(self, ids: Collection[str]) -> dict[str, Passage]:
        if not self._parts:
            self._parts[:] = [Passages.of_shards(shards) for shards in reversed(self.encoded_corpus.shards)]
        by_id: dict[str, Passage] = {}
        for passages in self._parts:  # an id may have been deleted and appended again, so the last part is used
            missing_ids = [key for key in ids if key not in by_id]
            by_id |= passages.read(missing_ids) if missing_ids else {}
        # A passage without text was encoded under "keep".
        return {key: by_id.get(key) or Passage(key, "") for key in ids}


def text_files(encoded_corpus: EncodedCorpus) -> list[Path]:
    """Return the files from which the texts of an encoded corpus are read, if they are recorded.

    Raises DataError if a folder that was encoded has no corpus any more.
    """
    sources = [encoded_source(shards.folder) for shards in encoded_corpus.shards]
    return [file for source in sources if source for file in open_source(source).files]
