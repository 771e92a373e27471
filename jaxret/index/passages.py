"""The text of passages whose vectors were encoded, read by position from the corpus's file."""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from jaxret.data.compression import detect_compression
from jaxret.data.errors import DataError
from jaxret.data.formats import Corpus, Policy, hash_id, source_exists
from jaxret.data.formats.detect import FORMATS_BY_NAME
from jaxret.data.formats.format import DataFile
from jaxret.data.lines import missing_file_error
from jaxret.data.records import Passage
from jaxret.index.passage_records import EmptyPassagesPolicy, PassageRecord, has_metadata, read_passage_records
from jaxret.index.shard_set import ShardSet
from jaxret.index.shards import ShardError, read_shard_json
from jaxret.index.source import open_source
from jaxret.runs.mismatch import ContractError, require_equal
from jaxret.storage.atomic import StorageError, atomic_write, sha256_file, with_digest, write_json
from jaxret.storage.file_state import FileState, file_state
from jaxret.storage.mapped_array import map_array
from jaxret.storage.temporary import TemporaryFolder

_BLOCK = 2**24  # bytes of a file that are searched for line ends at a time


class PassageOffsets(NamedTuple):
    """The positions of the passages in a file, 24 bytes for each, sorted by the hash of their ids."""

    hashes: np.ndarray  # hashes of ids, uint64 [N]
    starts: np.ndarray  # first byte of each passage, uint64 [N]
    ends: np.ndarray  # byte after each passage, uint64 [N]
    head: int  # bytes of a header before the first passage


class Passages:
    """Reader of the passages that were encoded into `folder`. It reads only the lines of requested passages.

    The first read makes an index next to the shards, `passages.npy`. If the passages of a corpus are not lines of a
    plain file (compressed, parquet, a JSON array, training records), it is first copied to `passages.jsonl`. If the
    folder cannot be written, the index is in memory, and a corpus that needs a copy is read from the start each time.
    A reader with metadata makes another copy, `records.jsonl`, because `passages.jsonl` has only texts.

    Opening and each read raise FileNotFoundError if the corpus was moved, ContractError if it was changed, DataError if
    it is no longer a corpus, and ShardError if corpus.json is missing or damaged.
    """

    def __init__(self, folder: Path, corpus: Corpus | None = None, sha256: str = "", metadata: bool = False) -> None:
        """Verify the corpus of a folder.

        Args:
            folder: folder of the vectors.
            corpus: the corpus that was encoded, if the caller has opened it.
            sha256: digest of the texts of vectors that the caller has opened, because the folder may be encoded again.
            metadata: whether the records are read with their metadata.
        """
        self.folder, self._sha256 = folder, sha256
        self._open_corpus(trusted=True, corpus=corpus)
        self._file = self.corpus.file  # the file whose lines are read: the corpus, or its copy
        self._is_copy = (
            not self._file.in_lines or self._file.format.passages is None or bool(detect_compression(self._file.path))
        )
        self._metadata, self._name = metadata, "records" if metadata and self._is_copy else "passages"
        if self._is_copy:
            self._file = DataFile(folder / f"{self._name}.jsonl", FORMATS_BY_NAME["beir.texts"], "lines")
        self.bytes_read = 0  # bytes of the corpus or its copy that were read at positions from the index
        self._folder: TemporaryFolder | None = None  # folder of the lines that were read last
        self._lock = Lock()  # threads may share this object, which has one temporary folder
        # The states of changed files and the error that they caused, so that they are verified once
        self._refusal: tuple[dict[Path, FileState], ContractError] | None = None

    @classmethod
    def of_shards(cls, shards: ShardSet, metadata: bool = False) -> Passages:
        """Open the texts of the vectors in shards. Raises ContractError if the folder was encoded again since they were
        opened, with other texts."""
        return cls(shards.folder, sha256=shards.fingerprint["corpus"]["sha256"], metadata=metadata)

    def _open_corpus(self, trusted: bool, corpus: Corpus | None = None) -> None:
        """Verify the corpus, and keep it with the states that its files had before the verification."""
        self.corpus, self._states = _verified_corpus(self.folder, trusted, corpus, self._sha256)
        self._index: PassageOffsets | None = None

    def _current_states(self) -> dict[Path, FileState]:
        return _states_of(self._states)

    def read(self, ids: Collection[str]) -> dict[str, Passage]:
        """Return the passages with these ids that exist and have a text, by id. One thread reads at a time."""
        return {key: record.passage for key, record in self.read_records(ids).items()}

    def read_records(self, ids: Collection[str]) -> dict[str, PassageRecord]:
        """Return the records of passages by id. With `metadata`, also those without a text are returned; without it, a
        record has only its passage."""
        with self._lock:
            while True:
                self._require_unchanged()
                records = self._read_passages(ids)
                if self._current_states() == self._states:  # otherwise the files changed while they were read
                    return records

    def _require_unchanged(self) -> None:
        """Open the corpus again if its files were replaced. Raise ContractError if they have other passages."""
        states = self._current_states()
        if states == self._states:
            return
        if self._refusal and self._refusal[0] == states:
            raise self._refusal[1].with_traceback(None)
        try:
            self._open_corpus(trusted=False)
        except ContractError as error:
            self._refusal = states, error
            raise

    def _read_passages(self, ids: Collection[str]) -> dict[str, PassageRecord]:
        """Return records by id. Make the index, and the copy if one is needed, at the first call."""
        if self._index is None:
            self._index = self._read_offsets()
        if self._index is None:
            if self._is_copy and not self._copy():
                return _by_id(self._records(), ids)
            self._index = self._make_offsets()
        # The file may be the copy, which has just been verified or made.
        self._states.setdefault(self._file.path, file_state(self._file.path, changed=True))
        return self._read_at(self._index, ids)

    def _records(self, excerpt: DataFile | None = None) -> Iterator[PassageRecord]:
        """Yield the records of the corpus, or of some of its lines."""
        file = excerpt or self.corpus.file
        if self._metadata and has_metadata(file):
            return read_passage_records(file, EmptyPassagesPolicy("skip"))
        if excerpt is None:
            passages = self.corpus.read_located()
        else:
            assert excerpt.format.passages is not None
            passages = excerpt.format.passages(excerpt, Policy("skip"), None)
        return (PassageRecord(passage, {}, {}) for _, passage in passages)

    def _read_at(self, index: PassageOffsets, ids: Collection[str]) -> dict[str, PassageRecord]:
        """Return the records of the ids. Their lines are copied to a temporary file, which the format's reader
        reads."""
        hashes = np.array([hash_id(key) for key in ids], np.uint64)
        spans = zip(*(np.searchsorted(index.hashes, hashes, side) for side in ("left", "right")), strict=True)
        places = sorted({(int(index.starts[i]), int(index.ends[i])) for low, high in spans for i in range(low, high)})
        if self._folder is None:
            self._folder = TemporaryFolder()
        path = self._folder.path / self._file.path.name
        path.unlink(missing_ok=True)  # a new file is faster: ext4 writes a file that is overwritten to the disk at once
        with open(self._file.path, "rb") as corpus, open(path, "wb") as excerpt:
            for start, end in [(0, index.head), *places]:
                corpus.seek(start)
                lines = corpus.read(end - start)
                self.bytes_read += len(lines)
                excerpt.write(lines if lines.endswith(b"\n") or not lines else lines + b"\n")
        return _by_id(self._records(replace(self._file, path=path)), ids)

    def _read_offsets(self) -> PassageOffsets | None:
        path = self.folder / f"{self._name}.npy"
        try:
            record = read_shard_json(self.folder / f"{self._name}.json")
            if record["corpus"] != self.corpus.stat() or record["sha256_index"] != sha256_file(path):
                return None
            if self._is_copy and record["sha256_copy"] != sha256_file(self._file.path):
                return None
            hashes, starts, ends = map_array(path)
            return PassageOffsets(hashes, starts, ends, record["head"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # the index is rebuilt

    def _copy(self) -> bool:
        """Write each passage to a line of the copy. Return whether the folder can be written."""
        try:
            with atomic_write(self._file.path) as file:
                for record in self._records():
                    passage, fields = record.passage, record.fields
                    line: dict[str, Any] = {"_id": passage.id, "title": passage.title, "text": passage.text}
                    line |= {"metadata": fields} if fields else {}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except StorageError:
            return False
        return True

    def _make_offsets(self) -> PassageOffsets:
        corpus = replace(self.corpus, file=self._file)
        lines, size = _line_starts(self._file.path)
        columns = array("Q"), array("q")  # 16 bytes for each passage
        for location, passage in corpus.read_located(EmptyPassagesPolicy("skip")):
            columns[0].append(hash_id(passage.id))
            columns[1].append(int(location.line or 0))
        hashes, numbers = np.array(columns[0], np.uint64), np.array(columns[1], np.int64)
        starts = lines[numbers - 1]
        ends = np.append(starts, np.uint64(size))[1:]
        order = np.argsort(hashes, kind="stable")
        table, head = np.stack([hashes[order], starts[order], ends[order]]), int(starts[0]) if len(starts) else 0
        path = self.folder / f"{self._name}.npy"
        try:
            with atomic_write(path, "wb") as file:
                np.save(file, table, allow_pickle=False)
            record = {"corpus": self.corpus.stat(), "head": head, "sha256_index": sha256_file(path)}
            copy = {"sha256_copy": sha256_file(self._file.path)} if self._is_copy else {}
            write_json(self.folder / f"{self._name}.json", with_digest(record | copy))
        except StorageError:  # the folder cannot be written: the index stays in memory
            pass
        return PassageOffsets(table[0], table[1], table[2], head)


def _by_id(records: Iterable[PassageRecord], ids: Collection[str]) -> dict[str, PassageRecord]:
    """Return the records of passages with these ids. If several passages have the same id, the first with a text is
    used; if none has one, it was encoded under "keep"."""
    by_id: dict[str, PassageRecord] = {}
    empty: dict[str, PassageRecord] = {}
    for record in records:
        passage = record.passage
        if passage.id in ids:
            (by_id if passage.text.strip() or passage.title.strip() else empty).setdefault(passage.id, record)
    return empty | by_id


def unchanged_corpus(folder: Path) -> Corpus:
    """Return the corpus that was encoded into `folder`. Raises the errors of opening `Passages`."""
    return _verified_corpus(folder, trusted=True)[0]


def _states_of(paths: Iterable[Path]) -> dict[Path, FileState]:
    return {path: file_state(path, changed=True) for path in paths}


def _verified_corpus(
    folder: Path, trusted: bool, corpus: Corpus | None = None, sha256: str = ""
) -> tuple[Corpus, dict[Path, FileState]]:
    """Return (corpus that was encoded into `folder`, states of its files before the verification).

    A file that is replaced during the verification has another state afterwards.

    Args:
        folder: folder of the vectors.
        trusted: whether files of unchanged size and time are not read.
        corpus: the corpus that corpus.json names, if it is already open.
        sha256: digest of the texts that the folder must have; "": any.
    """
    note_path = folder / "corpus.json"
    if not note_path.exists():
        raise ShardError(f"{note_path} does not exist, so the place of the texts is unknown; run encode again")
    note = read_shard_json(note_path)
    if not isinstance(note.get("path"), str) or "\0" in note["path"]:
        raise ShardError(f"{note_path}: path is {note.get('path')!r}, not the path of a corpus; run encode again")
    path = note["path"]
    try:
        if not source_exists(path):
            raise missing_file_error(Path(path))
        corpus = corpus or open_source(path)
        states, stat = _states_of(corpus.files), corpus.stat()
    except DataError as error:
        if error.reason != "missing file":
            raise
        raise FileNotFoundError(
            f"the corpus that was encoded is no longer at {path} ({note_path}): no text can be shown"
        ) from error
    manifest = folder / "manifest.json"
    if sha256:
        stored_sha256 = _manifest_sha256(manifest)
        remedy = "It was encoded again with other texts: open the corpus again."
        require_equal({"sha256": sha256}, {"sha256": stored_sha256}, "the opened vectors", str(manifest), remedy)
    # A copied file has another time and the same digest.
    if not trusted or stat != {key: note.get(key) for key in ("bytes", "modified")}:
        expected, found_sha256 = _manifest_sha256(manifest), corpus.scan(Policy("skip")).sha256
        remedy = "Encode it again, or restore the corpus that was encoded."
        require_equal({"sha256": expected}, {"sha256": found_sha256}, str(manifest), str(path), remedy)
    return corpus, states


def _manifest_sha256(manifest: Path) -> object:
    """Return the digest of the texts whose vectors a manifest describes, or None if it does not record it."""
    return read_shard_json(manifest).get("fingerprint", {}).get("corpus", {}).get("sha256")


def location_prefix(corpus: Corpus, passage_id: str) -> str:
    """Return "FILE:LINE: " of a passage, to begin a message, or "" if the passage is not in the corpus. The corpus is
    read up to this passage."""
    return next((f"{location}: " for location, passage in corpus.read_located() if passage.id == passage_id), "")


def _line_starts(path: Path) -> tuple[np.ndarray, int]:
    """Return the beginning of each line, uint64, and the size of the file."""
    starts, size = [np.zeros(1, np.uint64)], 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")).astype(np.uint64) + size + 1)
            size += len(block)
    return np.concatenate(starts).astype(np.uint64), size
