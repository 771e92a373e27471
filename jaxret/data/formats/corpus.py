"""Corpora: passages one at a time, in the file's order, scanned before they are streamed."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.errors import DataError, Location, Policy
from jaxret.data.formats.data_source import DataSource, FileSource
from jaxret.data.formats.format import DataFile, distinct_passages, hash_id
from jaxret.data.formats.texts import duplicate_id_error, require_new_id
from jaxret.data.lines import Digest, PathLike, missing_file_error
from jaxret.data.records import Passage
from jaxret.parallel.progress import with_progress


class ChangedCorpusError(DataError):
    """A corpus that was read to its end is not the corpus that was scanned before."""


@dataclass(frozen=True)
class CorpusScan:
    """The result of a first pass over a corpus."""

    passages: int  # How many passages `Corpus.read` yields under the same policy
    sha256: str  # Digest of the decompressed bytes
    # An id that occurs more than once -> the lines of its passages, in order
    duplicates: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    stat: Mapping[str, int] = field(default_factory=dict, compare=False)  # `Corpus.stat` before the pass


@dataclass(frozen=True)
class Corpus(FileSource):
    """A corpus whose file and format are detected once, when it is opened.

    The interfaces `cli/` and `api/` open the path that a user gives; functions below them take a `Corpus`. A path that
    a file gives is opened by the module that reads this file: `training/config_sources.py` for the keys of a config,
    `index/source.py` for the corpus.json of an encoded corpus. A module that takes a data set of any kind (training
    records, a folder of data sets) opens the corpus in it; tests/data/formats/corpus_test.py lists these modules.

    A policy belongs to one pass, which counts what it skips: `scan` and `read` take it.
    """

    @classmethod
    def open(cls, source: PathLike) -> Corpus:
        """Detect the file and the format of a folder, file or named set.

        Raises:
            DataError: there is no file of passages, or its format is unknown.
        """
        return cls.of(DataSource.open(source))

    @classmethod
    def of(cls, data: DataSource) -> Corpus:
        """Return the passages of an open source. Raises DataError if it has none, or if their format is unknown."""
        return cls(data, data.detect(data.layout.require_passages(), "passages"))

    @property
    def name(self) -> str:
        """The name of the folder, file or named set, in one word."""
        return self.data.name

    @property
    def absolute(self) -> str:
        """The source with its path from the root."""
        return self.data.absolute

    def stat(self) -> dict[str, int]:
        """Return {"bytes", "modified" (ns)} of the files: a cheap sign that they are the same. Raises DataError if a
        file is missing."""
        try:
            return stat_files(self.files)
        except FileNotFoundError:
            raise missing_file_error(self.data.path) from None

    def scan(self, policy: Policy | None = None) -> CorpusScan:
        """Validate, count and digest the corpus in one pass, which keeps 8 bytes per passage.

        Ids are compared by 64-bit hashes; only if two agree does a second pass compare the ids themselves.
        """
        policy = policy or Policy()
        digest = self._new_digest()
        passages, stat = self._passages(policy, digest), self.stat()
        hashes = array("Q", (hash_id(passage.id) for _, passage in passages))
        duplicates = self.reject_repeated_ids(hashes, policy)
        surplus = sum(len(lines) - 1 for lines in duplicates.values())
        return CorpusScan(len(hashes) - surplus, digest.hexdigest(), duplicates, stat)

    def read(
        self, policy: Policy | None = None, scan: CorpusScan | None = None, progress: bool = True
    ) -> Iterator[Passage]:
        """Stream the passages in the file's order. Of passages with the same id, a policy that skips keeps the first.

        Args:
            policy: what to do with bad records; by default an error.
            scan: scan of this corpus. With it nothing is held in memory, and the last passage is yielded after the
                whole file has been read and has the digest of the scan. Without it the ids are held, to find
                duplicates.
            progress: whether to show progress; a caller with slower work shows its own.

        Raises:
            DataError: a record is bad, or the file changed after the scan.
        """
        policy = policy or Policy()
        if scan is None:
            return _drop_duplicates(self._passages(policy, None, progress), policy, None)
        digest = self._new_digest()
        return self._verify_passages(
            _drop_duplicates(self._passages(policy, digest, progress), policy, scan), scan, digest
        )

    def _new_digest(self) -> hashlib._Hash:
        """Return the digest of no bytes. A forced format that reads the file differently from its content is part of
        the digest, because the same bytes are then other passages."""
        digest = hashlib.sha256()
        if self.data.format_name and self.file.format.name != self._detected_format():
            digest.update(f"{self.file.format.name}\0".encode())
        return digest

    def _detected_format(self) -> str:
        try:
            return replace(self.data, format_name="").detect(self.file.path, "passages").format.name
        except DataError:  # the content alone does not show a format
            return ""

    def read_located(self, policy: Policy | None = None) -> Iterator[tuple[Location, Passage]]:
        """Yield every passage with its location, including passages with a repeated id. Bad records are skipped by
        default."""
        return self._passages(policy or Policy("skip"))

    def reject_repeated_ids(self, hashes: array[int], policy: Policy) -> dict[str, tuple[int | str, ...]]:
        """Return the ids that occur more than once, with the lines of their passages. All but the first are errors.

        `hashes` are the hashes of all ids. If two are equal, the corpus is read once more to compare the ids
        themselves.
        """
        sorted_hashes = np.sort(np.frombuffer(hashes, dtype=np.uint64)) if hashes else np.empty(0, np.uint64)
        suspects = set(sorted_hashes[1:][sorted_hashes[1:] == sorted_hashes[:-1]].tolist())
        return self._repeated_ids(suspects, policy) if suspects else {}

    def _repeated_ids(self, suspects: Collection[int], policy: Policy) -> dict[str, tuple[int | str, ...]]:
        locations: dict[str, list[Location]] = {}
        for location, passage in self._passages(Policy(policy.on_error)):  # the first pass reported all other errors
            if hash_id(passage.id) in suspects:
                same_id = locations.setdefault(passage.id, [])
                same_id.append(location)
                if len(same_id) > 1:
                    policy.reject(duplicate_id_error(passage.id, "passage id", location, same_id[0]))
        duplicates = {key: same_id for key, same_id in locations.items() if len(same_id) > 1}
        return {key: tuple(location.line or 0 for location in same_id) for key, same_id in duplicates.items()}

    def _verify_passages(self, passages: Iterator[Passage], scan: CorpusScan, digest: Any) -> Iterator[Passage]:
        for number, passage in enumerate(passages, 1):
            if number >= scan.passages:  # no passage follows, unless the file has changed
                for _ in passages:
                    pass
                self._require_scanned(scan, digest.hexdigest())
            yield passage
        self._require_scanned(scan, digest.hexdigest())

    def _require_scanned(self, scan: CorpusScan, sha256: str) -> None:
        if sha256 != scan.sha256:
            problem = f"the corpus changed: its SHA-256 was {scan.sha256} when it was scanned and is {sha256} now"
            remedy = "do not change it, and encode it again"
            raise ChangedCorpusError(Location(self.file.path), "changed corpus", problem, remedy)

    def _passages(
        self, policy: Policy, digest: Digest | None = None, progress: bool = True
    ) -> Iterator[tuple[Location, Passage]]:
        read = self.file.format.passages or _passages_of_examples
        return with_progress(read(self.file, policy, digest), f"read {self.file.path.name}", None, "passage", progress)


def stat_files(files: Sequence[Path]) -> dict[str, int]:
    """Return {"bytes", "modified" (ns)}: the total size and the latest change of files; 0 if there are no files."""
    stats = [file.stat() for file in files]
    times = [stat.st_mtime_ns for stat in stats]
    return {"bytes": sum(stat.st_size for stat in stats), "modified": max(times, default=0)}


def _drop_duplicates(
    passages: Iterator[tuple[Location, Passage]], policy: Policy, scan: CorpusScan | None
) -> Iterator[Passage]:
    first: dict[str, Location] = {}

    def check(passage: Passage, location: Location) -> Passage:
        if scan is None:
            require_new_id(passage.id, "passage id", location, first)
        elif passage.id in scan.duplicates and location.line != scan.duplicates[passage.id][0]:
            earlier = Location(location.path, scan.duplicates[passage.id][0])
            raise duplicate_id_error(passage.id, "passage id", location, earlier)
        return passage

    return (passage for _, passage in policy.parse_records(passages, check))


def _passages_of_examples(file: DataFile, policy: Policy, digest: Digest | None) -> Iterator[tuple[Location, Passage]]:
    """Yield the passages of training records, without repetition."""
    assert file.format.examples is not None
    examples = file.format.examples(file, policy)
    passages = ((at, passage) for at, example in examples for passage in (*example.positives, *example.negatives))
    return distinct_passages(passages, file.path, digest)
