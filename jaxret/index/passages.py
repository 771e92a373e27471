"""The text of passages whose vectors were encoded, read by position from the corpus's file."""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from jaxret.data.compression import detect_compression
from jaxret.data.errors import DataError
from jaxret.data.formats import (
    Corpus,
    Policy,
    hash_id,
    source_exists,
)
from jaxret.data.formats.detect import FORMATS_BY_NAME
from jaxret.data.formats.format import DataFile
from jaxret.data.lines import missing_file_error
from jaxret.data.records import Passage
from jaxret.index.shards import ShardError, read_shard_json
from jaxret.index.source import open_source
from jaxret.runs.mismatch import ContractError, require_equal
from jaxret.storage.atomic import StorageError, atomic_write, sha256_file, with_digest, write_json
from jaxret.storage.file_state import FileState, file_state
from jaxret.storage.mapped_array import map_array
from jaxret.storage.temporary import TemporaryFolder

_BLOCK = 2**24  # bytes of a file looked at for line ends at a time


class PassageOffsets(NamedTuple):
    """The positions of the passages of a file: 24 bytes each, sorted by the hash of their ids."""

    hashes: np.ndarray  # uint64 [N]
    starts: np.ndarray  # uint64 [N]
    ends: np.ndarray  # uint64 [N]
    head: int  # bytes before the first passage: a header


class Passages:
    """The passages of the corpus that was encoded into `folder`; reading some reads only their lines.

    The first reading makes an index beside the shards, `passages.npy`. A corpus whose lines have no usable positions
    (compressed, parquet, a JSON array, training records) is copied there first, a line each: `passages.jsonl`. Where
    the folder cannot be written, the index is in memory, and a corpus that needs a copy is read through each time.

    Opening, and each reading, raises FileNotFoundError if the corpus was moved, ContractError if it was changed,
    DataError if it is no corpus any more, and ShardError if corpus.json is missing or damaged.
    """

    def __init__(self, folder: Path, corpus: Corpus | None = None) -> None:
        """Verify the corpus of a folder; `corpus`, if the caller has opened it: the one that the folder was made
        from."""
        self.folder = folder
        self._open(trusted=True, corpus=corpus)
        self._file = self.corpus.file  # of lines that can be pointed into
        self._copied = (
            not self._file.in_lines or self._file.format.passages is None or bool(detect_compression(self._file.path))
        )
        if self._copied:
            self._file = DataFile(folder / "passages.jsonl", FORMATS_BY_NAME["beir.texts"], "lines")
        self.bytes_read = 0  # of the corpus or its copy, so far, by index
        self._folder: TemporaryFolder | None = None  # of the lines that were read last
        self._lock = Lock()  # there is one place for these, and threads may share an index
        self._refusal: tuple[dict[Path, FileState], ContractError] | None = None  # changed files, which are read once

    def _open(self, trusted: bool, corpus: Corpus | None = None) -> None:
        """Verify the corpus and keep it, with the states that its files had before."""
        self.corpus, self._states = _verified_corpus(self.folder, trusted, corpus)
        self._index: PassageOffsets | None = None

    def _states_now(self) -> dict[Path, FileState]:
        return _states_of(self._states)

    def read(self, ids: Collection[str]) -> dict[str, Passage]:
        """Return the passages with these ids that exist and have a text, by id. One thread reads at a time."""
        with self._lock:
            while True:
                self._require_unchanged()
                passages = self._read(ids)
                if self._states_now() == self._states:  # else they changed meanwhile
                    return passages

    def _require_unchanged(self) -> None:
        """Open a corpus again whose files are others than before, if they have the same passages; else raise."""
        now = self._states_now()
        if now == self._states:
            return
        if self._refusal and self._refusal[0] == now:
            raise self._refusal[1].with_traceback(None)
        try:
            self._open(trusted=False)
        except ContractError as error:
            self._refusal = now, error
            raise

    def _read(self, ids: Collection[str]) -> dict[str, Passage]:
        """Return passages of a corpus that no other process changes."""
        if self._index is None:
            self._index = self._read_offsets()
        if self._index is None:
            if self._copied and not self._copy():
                return {passage.id: passage for passage in self.corpus.read(Policy("skip")) if passage.id in ids}
            self._index = self._make_offsets()
        # The copy, verified or made just now.
        self._states.setdefault(self._file.path, file_state(self._file.path, changed=True))
        return self._read_at(self._index, ids)

    def _read_at(self, index: PassageOffsets, ids: Collection[str]) -> dict[str, Passage]:
        """Copy the lines of the ids to a temporary file, for the reader of the format."""
        hashes = np.array([hash_id(key) for key in ids], np.uint64)
        spans = zip(*(np.searchsorted(index.hashes, hashes, side) for side in ("left", "right")), strict=True)
        places = sorted({(int(index.starts[i]), int(index.ends[i])) for low, high in spans for i in range(low, high)})
        if self._folder is None:
            self._folder = TemporaryFolder()
        path = self._folder.path / self._file.path.name
        path.unlink(missing_ok=True)  # ext4 writes a file that is overwritten to the disk at once, a new one later
        with open(self._file.path, "rb") as corpus, open(path, "wb") as few:
            for start, end in [(0, index.head), *places]:
                corpus.seek(start)
                lines = corpus.read(end - start)
                self.bytes_read += len(lines)
                few.write(lines if lines.endswith(b"\n") or not lines else lines + b"\n")
        assert self._file.format.passages is not None
        passages: dict[str, Passage] = {}
        for _, passage in self._file.format.passages(replace(self._file, path=path), Policy("skip"), None):
            if passage.id in ids:
                passages.setdefault(passage.id, passage)  # of several the first counts
        return passages

    def _read_offsets(self) -> PassageOffsets | None:
        path = self.folder / "passages.npy"
        try:
            record = read_shard_json(self.folder / "passages.json")
            if record["corpus"] != self.corpus.stat() or record["sha256_index"] != sha256_file(path):
                return None
            if self._copied and record["sha256_copy"] != sha256_file(self._file.path):
                return None
            hashes, starts, ends = map_array(path)
            return PassageOffsets(hashes, starts, ends, record["head"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # made again

    def _copy(self) -> bool:
        """Write the passages a line each; return whether the folder could be written."""
        try:
            with atomic_write(self._file.path) as file:
                for _, passage in self.corpus.read_located():
                    line = {"_id": passage.id, "title": passage.title, "text": passage.text}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except StorageError:
            return False
        return True

    def _make_offsets(self) -> PassageOffsets:
        corpus = replace(self.corpus, file=self._file)
        lines, size = _line_starts(self._file.path)
        columns = array("Q"), array("q")  # 16 bytes a passage
        for where, passage in corpus.read_located():
            columns[0].append(hash_id(passage.id))
            columns[1].append(int(where.line or 0))
        hashes, numbers = np.array(columns[0], np.uint64), np.array(columns[1], np.int64)
        starts = lines[numbers - 1]
        ends = np.append(starts, np.uint64(size))[1:]
        order = np.argsort(hashes, kind="stable")
        table, head = np.stack([hashes[order], starts[order], ends[order]]), int(starts[0]) if len(starts) else 0
        path = self.folder / "passages.npy"
        try:
            with atomic_write(path, "wb") as file:
                np.save(file, table, allow_pickle=False)
            record = {"corpus": self.corpus.stat(), "head": head, "sha256_index": sha256_file(path)}
            copy = {"sha256_copy": sha256_file(self._file.path)} if self._copied else {}
            write_json(self.folder / "passages.json", with_digest(record | copy))
        except StorageError:  # a disk that cannot be written
            pass
        return PassageOffsets(table[0], table[1], table[2], head)


def unchanged_corpus(folder: Path) -> Corpus:
    """Return the corpus that was encoded into `folder`. Raises as opening `Passages` does."""
    return _verified_corpus(folder, trusted=True)[0]


def _states_of(paths: Iterable[Path]) -> dict[Path, FileState]:
    return {path: file_state(path, changed=True) for path in paths}


def _verified_corpus(folder: Path, trusted: bool, corpus: Corpus | None = None) -> tuple[Corpus, dict[Path, FileState]]:
    """Return what `unchanged_corpus` returns, and the states of its files before they were read: one that is replaced
    meanwhile has another state afterwards. `corpus`: the one that corpus.json names, if it is open."""
    note_path = folder / "corpus.json"
    if not note_path.exists():
        raise ShardError(f"{note_path}, which says where the texts are, does not exist; run encode again")
    note = read_shard_json(note_path)
    if not isinstance(note.get("path"), str) or "\0" in note["path"]:
        raise ShardError(f"{note_path}: path is {note.get('path')!r}, no place of a corpus; run encode again")
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
    if not trusted or stat != {key: note.get(key) for key in ("bytes", "modified")}:  # copied, perhaps: look closer
        manifest = folder / "manifest.json"
        expected = read_shard_json(manifest).get("fingerprint", {}).get("corpus", {}).get("sha256")
        sha256, remedy = corpus.scan(Policy("skip")).sha256, "Encode it again, or put back what was encoded."
        require_equal({"sha256": expected}, {"sha256": sha256}, str(manifest), str(path), remedy)
    return corpus, states


def location_prefix(corpus: Corpus, passage_id: str) -> str:
    """Return "FILE:LINE: " of a passage, to begin a message with; "" if the corpus lacks it. Reads up to it."""
    return next((f"{where}: " for where, passage in corpus.read_located() if passage.id == passage_id), "")


def _line_starts(path: Path) -> tuple[np.ndarray, int]:
    """Return the beginning of each line, uint64, and the size of the file."""
    starts, size = [np.zeros(1, np.uint64)], 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")).astype(np.uint64) + size + 1)
            size += len(block)
    return np.concatenate(starts).astype(np.uint64), size
