"""Corpora: passages one at a time, in the file's order, scanned before they are streamed."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxret.data.files import DataError, Digest, PathLike, Policy, Where, missing_file
from jaxret.data.formats.format import feed
from jaxret.data.formats.places import is_folder, passages_in
from jaxret.data.formats.recognise import Found, recognise, source_path, split_source
from jaxret.data.formats.texts import duplicate_error, refuse_duplicate
from jaxret.data.libraries.named import files_of
from jaxret.data.records import Passage


class ChangedError(DataError):
    """All of a corpus was read, and it is not the one that was scanned: any passage may be of another text."""


@dataclass(frozen=True)
class CorpusScan:
    """What a first pass over a corpus found.

    `passages` counts what `read_corpus` yields under the same policy; `sha256` is of the decompressed bytes;
    `duplicates` maps an id that occurs more than once to the lines of its passages, in order; `stat` is `stat_corpus`
    before the pass.
    """

    passages: int
    sha256: str
    duplicates: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    stat: Mapping[str, int] = field(default_factory=dict, compare=False)


def scan_corpus(path: PathLike, policy: Policy | None = None) -> CorpusScan:
    """Validates, counts and digests a corpus in one pass that keeps 8 bytes a passage.

    Ids are compared by 64-bit hashes; only if two agree does a second pass compare the ids themselves.
    """
    policy = policy or Policy()
    digest = hashlib.sha256()
    passages, stat = _passages(path, policy, digest), stat_corpus(path)
    hashes = array("Q", (hash_id(passage.id) for _, passage in passages))
    duplicates = refuse_repeated(path, hashes, policy)
    dropped = sum(len(lines) - 1 for lines in duplicates.values())
    return CorpusScan(len(hashes) - dropped, digest.hexdigest(), duplicates, stat)


def stat_corpus(path: PathLike) -> dict[str, int]:
    """{"bytes", "modified"}: size and time of change (nanoseconds) of a corpus, to see cheaply that it is the same; of
    all the files that a named set is read from."""
    try:
        return stat_files(files_of(corpus_file(path)))
    except FileNotFoundError:
        raise missing_file(source_path(path)) from None


def stat_files(files: Sequence[Path]) -> dict[str, int]:
    """The same of files."""
    found = [file.stat() for file in files]
    return {"bytes": sum(one.st_size for one in found), "modified": max(one.st_mtime_ns for one in found)}


def _require_scanned(path: PathLike, scan: CorpusScan, sha256: str) -> None:
    if sha256 != scan.sha256:
        found = f"the corpus changed: its SHA-256 was {scan.sha256} when it was scanned and is {sha256} now"
        raise ChangedError(Where(corpus_file(path)), "changed corpus", found, "leave it alone, and encode it again")


def corpus_file(source: PathLike) -> Path:
    """The file that `read_corpus` reads. Raises DataError if a folder has none."""
    path = source_path(source)
    return passages_in(path) if is_folder(path) else path


def found_corpus(source: PathLike) -> Found:
    """That file, and what it is."""
    name, _ = split_source(source)
    return recognise(f"{name}:{corpus_file(source)}" if name else corpus_file(source), "passages")


def hash_id(passage_id: str) -> int:
    """64 bits of an id: what is looked up among millions without holding them."""
    return int.from_bytes(hashlib.blake2b(passage_id.encode(), digest_size=8).digest(), "little")


def refuse_repeated(path: PathLike, hashes: array[int], policy: Policy) -> dict[str, tuple[int | str, ...]]:
    """The ids that a corpus has more than once, with the lines of their passages, each bad input but the first.
    hashes: of its ids. Only if two agree is it read once more, for the ids themselves."""
    ordered = np.sort(np.frombuffer(hashes, dtype=np.uint64)) if hashes else np.empty(0, np.uint64)
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    return _duplicates(path, suspects, policy) if suspects else {}


def _duplicates(path: PathLike, suspects: Collection[int], policy: Policy) -> dict[str, tuple[int | str, ...]]:
    places: dict[str, list[Where]] = {}
    for where, passage in _passages(path, Policy(policy.on_error)):  # the first pass has reported all else
        if hash_id(passage.id) in suspects:
            found = places.setdefault(passage.id, [])
            found.append(where)
            if len(found) > 1:
                policy.reject(duplicate_error(passage.id, "passage id", where, found[0]))
    return {key: tuple(where.line or 0 for where in found) for key, found in places.items() if len(found) > 1}


def read_corpus(path: PathLike, policy: Policy | None = None, scan: CorpusScan | None = None) -> Iterator[Passage]:
    """Streams the passages of a folder or file, in the file's order.

    With the file's `scan`, nothing is held in memory, and the last passage comes only when the whole file has been
    read again and is the one that was scanned; if not, a DataError does. Without it, the ids are held, to find
    duplicates. Of passages with the same id, a policy that skips keeps the first.
    """
    policy = policy or Policy()
    if scan is None:
        return _unique(_passages(path, policy), policy, None)
    digest = hashlib.sha256()
    return _as_scanned(_unique(_passages(path, policy, digest), policy, scan), path, scan, digest)


def _as_scanned(passages: Iterator[Passage], path: PathLike, scan: CorpusScan, digest: Any) -> Iterator[Passage]:
    for number, passage in enumerate(passages, 1):
        if number >= scan.passages:  # the rest holds none, or it is another file
            for _ in passages:
                pass
            _require_scanned(path, scan, digest.hexdigest())
        yield passage
    _require_scanned(path, scan, digest.hexdigest())


def read_located(path: PathLike, policy: Policy | None = None) -> Iterator[tuple[Where, Passage]]:
    """The passages of a corpus with their places, those with an id that was used before too; skips what is wrong."""
    return _passages(path, policy or Policy("skip"))


def _unique(passages: Iterator[tuple[Where, Passage]], policy: Policy, scan: CorpusScan | None) -> Iterator[Passage]:
    seen: dict[str, Where] = {}
    for where, passage in passages:
        try:
            if scan is None:
                refuse_duplicate(passage.id, "passage id", where, seen)
            elif passage.id in scan.duplicates and where.line != scan.duplicates[passage.id][0]:
                first = Where(where.path, scan.duplicates[passage.id][0])
                raise duplicate_error(passage.id, "passage id", where, first)
        except DataError as error:
            policy.reject(error)
            continue
        yield passage


def _passages(source: PathLike, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Where, Passage]]:
    found = found_corpus(source)
    read = found.format.passages or _of_examples(found)
    passages = read(found.path, policy, digest)
    # On a terminal only (disable=None), and only if it takes over a second.
    return iter(
        tqdm(passages, f"read {found.path.name}", unit="psg", unit_scale=True, delay=1, leave=False, disable=None)
    )


def _of_examples(found: Found) -> Any:
    """A reader of the passages that training records hold, each once."""

    def passages(path: Path, policy: Policy, digest: Digest | None) -> Iterator[tuple[Where, Passage]]:
        assert found.format.examples is not None
        seen: set[int] = set()
        for where, example in found.format.examples(path, policy):
            for passage in (*example.positives, *example.negatives):
                key = hash_id(passage.id)
                if key not in seen:
                    seen.add(key)
                    yield where, passage
        if digest is not None:
            feed(path, digest)

    return passages
