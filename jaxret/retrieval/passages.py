"""The text of passages whose vectors were encoded: what is asked for is read, by its place in the corpus's file."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from array import array
from collections.abc import Collection
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from jaxret.contract import require_equal
from jaxret.data.compression import compression
from jaxret.data.files import PathLike
from jaxret.data.formats import (
    Policy,
    exists,
    found_corpus,
    hash_id,
    read_corpus,
    read_located,
    scan_corpus,
    stat_corpus,
)
from jaxret.data.formats.recognise import BY_NAME
from jaxret.data.records import Passage
from jaxret.retrieval.shards import ShardError, read_sealed
from jaxret.storage import StorageError, atomic_write, sealed, sha256_file, write_json

_BLOCK = 2**24  # bytes of a file looked at for line ends at a time


class Index(NamedTuple):
    """Where the passages of a file lie: 24 bytes each, sorted by the hash of their ids."""

    hashes: np.ndarray  # uint64 [N]
    starts: np.ndarray  # uint64 [N]
    ends: np.ndarray  # uint64 [N]
    head: int  # bytes before the first passage: a header


class Passages:
    """The passages of the corpus that was encoded into `folder`: reading some reads their lines alone.

    The first reading makes an index beside the shards, `passages.npy`. A corpus whose bytes cannot be pointed into
    (compressed, parquet, a JSON array, training records) is copied there first, a line each: `passages.jsonl`. Where
    the folder cannot be written the index is in memory, and a corpus that needs a copy is read through each time.

    Opening raises FileNotFoundError if the corpus is no longer where it was, ContractError if it is another now, and
    ShardError if corpus.json is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = unchanged_corpus(folder)
        found = found_corpus(self.path)
        self._file, self._format = found.path, found.format
        self._copied = not found.in_lines or found.format.passages is None or bool(compression(found.path))
        if self._copied:
            self._file, self._format = folder / "passages.jsonl", BY_NAME["beir.texts"]
        self.bytes_read = 0  # of the corpus or its copy, so far, by index
        self._index: Index | None = None
        self._folder: Path | None = None  # of the lines that were read last
        self._reading = Lock()  # there is one place for these, and threads may share an index

    def read(self, wanted: Collection[str]) -> dict[str, Passage]:
        """Those of the passages that there are and that say something, by id. One thread reads at a time."""
        with self._reading:
            if self._index is None:
                self._index = self._stored()
            if self._index is None:
                if self._copied and not self._copy():
                    return {p.id: p for p in read_corpus(self.path, Policy("skip")) if p.id in wanted}
                self._index = self._make()
            return self._at_places(self._index, wanted)

    def _at_places(self, index: Index, wanted: Collection[str]) -> dict[str, Passage]:
        """Copies the lines that are wanted to a file of their own, for the reader that knows the format."""
        hashes = np.array([hash_id(key) for key in wanted], np.uint64)
        spans = zip(*(np.searchsorted(index.hashes, hashes, side) for side in ("left", "right")), strict=True)
        places = sorted({(int(index.starts[i]), int(index.ends[i])) for low, high in spans for i in range(low, high)})
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="jaxret-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / self._file.name
        path.unlink(missing_ok=True)  # ext4 writes a file that is overwritten to the disk at once, a new one later
        with open(self._file, "rb") as corpus, open(path, "wb") as few:
            for start, end in [(0, index.head), *places]:
                corpus.seek(start)
                lines = corpus.read(end - start)
                self.bytes_read += len(lines)
                few.write(lines if lines.endswith(b"\n") or not lines else lines + b"\n")
        assert self._format.passages is not None
        found: dict[str, Passage] = {}
        for _, passage in self._format.passages(path, Policy("skip"), None):  # a few lines need not say what they are
            if passage.id in wanted:
                found.setdefault(passage.id, passage)  # of several the first counts
        return found

    def _stored(self) -> Index | None:
        path = self.folder / "passages.npy"
        try:
            made = read_sealed(self.folder / "passages.json")
            if made["corpus"] != stat_corpus(self.path) or made["sha256_index"] != sha256_file(path):
                return None
            if self._copied and made["sha256_copy"] != sha256_file(self._file):
                return None
            hashes, starts, ends = np.load(path, mmap_mode="r", allow_pickle=False)
            return Index(hashes, starts, ends, made["head"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # made again

    def _copy(self) -> bool:
        """Writes the passages a line each; whether the folder could be written."""
        try:
            with atomic_write(self._file) as file:
                for _, passage in read_located(self.path):
                    line = {"_id": passage.id, "title": passage.title, "text": passage.text}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except StorageError:
            return False
        return True

    def _make(self) -> Index:
        source = f"{self._format.name}:{self._file}" if self._copied else self.path
        lines, size = _line_starts(self._file)
        columns = array("Q"), array("q")  # 16 bytes a passage
        for where, passage in read_located(source):
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
            made = {"corpus": stat_corpus(self.path), "head": head, "sha256_index": sha256_file(path)}
            copy = {"sha256_copy": sha256_file(self._file)} if self._copied else {}
            write_json(self.folder / "passages.json", sealed(made | copy))
        except StorageError:  # a disk that cannot be written
            pass
        return Index(table[0], table[1], table[2], head)


def unchanged_corpus(folder: Path) -> str:
    """The corpus that was encoded into `folder`. Raises as opening `Passages` does."""
    written = folder / "corpus.json"
    found = read_sealed(written)
    if not isinstance(found.get("path"), str) or "\0" in found["path"]:
        raise ShardError(f"{written}: path is {found.get('path')!r}, no place of a corpus; run encode again")
    path = found["path"]
    if not exists(path):
        raise FileNotFoundError(f"the corpus that was encoded is no longer at {path} ({written}): no text can be shown")
    if stat_corpus(path) != {key: found.get(key) for key in ("bytes", "modified")}:  # copied, perhaps: look closer
        manifest = folder / "manifest.json"
        expected = read_sealed(manifest).get("fingerprint", {}).get("corpus", {}).get("sha256")
        sha256, remedy = scan_corpus(path, Policy("skip")).sha256, "Encode it again, or put back what was encoded."
        require_equal({"sha256": expected}, {"sha256": sha256}, str(manifest), str(path), remedy)
    return path


def place(corpus: PathLike, passage_id: str) -> str:
    """ "FILE:LINE: " of a passage, to begin a message with; reads the corpus up to it. "" if it is not there."""
    return next((f"{where}: " for where, passage in read_located(corpus) if passage.id == passage_id), "")


def _line_starts(path: Path) -> tuple[np.ndarray, int]:
    """Where each line begins, uint64, and the size of the file."""
    starts, done = [np.zeros(1, np.uint64)], 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")).astype(np.uint64) + done + 1)
            done += len(block)
    return np.concatenate(starts).astype(np.uint64), done
