"""Files <-> records: the front that the rest of the project reads data through.

What a path is shows in its name: a folder is a BEIR folder, otherwise the suffix decides (before an optional `.gz`). A
new format is a new line in the four tables at the end of this file.

Every reader takes a `Policy`; the default stops at the first bad record with a `DataError` that names file and line.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from jaxret.data.files import DataError, Digest, PathLike, Policy, Where, find_file, missing_file, require_file
from jaxret.data.formats import beir, dpr, trec
from jaxret.data.formats.beir import duplicate_error, refuse_duplicate, write_beir
from jaxret.data.formats.dpr import write_dpr_corpus, write_dpr_examples, write_dpr_queries
from jaxret.data.formats.trec import read_run, write_run
from jaxret.data.records import Example, Judgement, Passage, Query

__all__ = [
    "CorpusScan",
    "DataError",
    "Policy",
    "corpus_file",
    "example_files",
    "read_corpus",
    "read_examples",
    "read_judgements",
    "read_located",
    "read_queries",
    "read_run",
    "scan_corpus",
    "stat_corpus",
    "write_beir",
    "write_dpr_corpus",
    "write_dpr_examples",
    "write_dpr_queries",
    "write_run",
]

Reader = TypeVar("Reader")


@dataclass(frozen=True)
class CorpusScan:
    """What a first pass over a corpus found.

    `passages` counts what `read_corpus` yields under the same policy; `sha256` is of the decompressed bytes;
    `duplicates` maps an id that occurs more than once to the lines of its passages, in order; `stat` is `stat_corpus`
    before the pass.
    """

    passages: int
    sha256: str
    duplicates: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stat: Mapping[str, int] = field(default_factory=dict, compare=False)


def scan_corpus(path: PathLike, policy: Policy | None = None) -> CorpusScan:
    """Validates, counts and digests a corpus in one pass that keeps 8 bytes a passage.

    Ids are compared by 64-bit hashes; only if two agree does a second pass compare the ids themselves.
    """
    policy = policy or Policy()
    digest = hashlib.sha256()
    passages, stat = _passages(path, policy, digest), stat_corpus(path)
    hashes = array("Q", (hash_id(passage.id) for _, passage in passages))
    ordered = np.sort(np.frombuffer(hashes, dtype=np.uint64)) if hashes else np.empty(0, np.uint64)
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    duplicates = _duplicates(path, suspects, policy) if suspects else {}
    dropped = sum(len(lines) - 1 for lines in duplicates.values())
    return CorpusScan(len(hashes) - dropped, digest.hexdigest(), duplicates, stat)


def stat_corpus(path: PathLike) -> dict[str, int]:
    """{"bytes", "modified"}: size and time of change (nanoseconds) of a corpus, to see cheaply that it is the same."""
    try:
        found = corpus_file(path).stat()
    except FileNotFoundError:
        raise missing_file(Path(path)) from None
    return {"bytes": found.st_size, "modified": found.st_mtime_ns}


def _require_scanned(path: PathLike, scan: CorpusScan, sha256: str) -> None:
    if sha256 != scan.sha256:
        found = f"the corpus changed: its SHA-256 was {scan.sha256} when it was scanned and is {sha256} now"
        raise Where(corpus_file(path)).error("changed corpus", found, "leave it alone, and encode it again")


def corpus_file(path: PathLike) -> Path:
    """The file that `read_corpus` reads. Raises DataError if a folder has none."""
    path = Path(path)
    return require_file(path, "corpus.jsonl") if path.is_dir() else path


def hash_id(passage_id: str) -> int:
    """64 bits of an id: what is looked up among millions without holding them."""
    return int.from_bytes(hashlib.blake2b(passage_id.encode(), digest_size=8).digest(), "little")


def _duplicates(path: PathLike, suspects: Collection[int], policy: Policy) -> dict[str, tuple[int, ...]]:
    places: dict[str, list[Where]] = {}
    for where, passage in _passages(path, Policy(policy.on_error)):  # the first pass has reported all else
        if hash_id(passage.id) in suspects:
            found = places.setdefault(passage.id, [])
            found.append(where)
            if len(found) > 1:
                policy.reject(duplicate_error(passage.id, "passage id", where, found[0]))
    return {key: tuple(int(where.line or 0) for where in found) for key, found in places.items() if len(found) > 1}


def read_corpus(path: PathLike, policy: Policy | None = None, scan: CorpusScan | None = None) -> Iterator[Passage]:
    """Streams the passages of a BEIR folder, corpus.jsonl or psgs.tsv, in the file's order.

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


def _passages(path: PathLike, policy: Policy, digest: Digest | None = None) -> Iterator[tuple[Where, Passage]]:
    path = corpus_file(path)
    passages = _choose(CORPORA, path, "corpus")(path, policy, digest)
    # On a terminal only (disable=None), and only if it takes over a second.
    return iter(tqdm(passages, f"read {path.name}", unit="psg", unit_scale=True, delay=1, leave=False, disable=None))


def read_queries(path: PathLike, policy: Policy | None = None) -> list[Query]:
    """Reads the queries of a BEIR folder (with its answers.jsonl), queries.jsonl, *.qa.csv or biencoder JSON.

    The last two have no ids: a query's id is its row or record number, from "0".
    """
    return _choose(QUERIES, Path(path), "query")(Path(path), policy or Policy())


def read_judgements(
    path: PathLike,
    split: str | None = None,
    policy: Policy | None = None,
    query_ids: Collection[str] | None = None,
    passage_ids: Collection[str] | None = None,
) -> list[Judgement]:
    """Reads the judgements of a BEIR folder's split, of a qrels file, or the positives of biencoder JSON.

    Where `query_ids` or `passage_ids` are given (sets, best), a judgement for any other id is bad input.
    """
    policy = policy or Policy()
    found = _judgements(Path(path), split, policy)
    return [judgement for _, judgement in trec.known(found, query_ids, passage_ids, policy)]


def _judgements(path: Path, split: str | None, policy: Policy) -> Iterator[tuple[Where, Judgement]]:
    if path.is_dir():
        path = _split_file(path, split)
    return _choose(JUDGEMENTS, path, "judgement")(path, policy)


def _split_file(folder: Path, split: str | None) -> Path:
    if split is None:
        raise Where(folder).error("no split", "this is a BEIR folder, and no split was named", "name one, like 'test'")
    return require_file(folder / "qrels", f"{split}.tsv")


def read_examples(
    path: PathLike,
    split: str | None = None,
    policy: Policy | None = None,
    negatives_run: PathLike | None = None,
) -> list[Example]:
    """Reads training examples, which share their passages (equal id, same object).

    BEIR folder: one example for each relevant judgement of the split; its positives are the judged passage, then the
    query's other relevant ones. Negatives are the passages judged not relevant or, with `negatives_run` (a TREC
    run), the passages it retrieved that are not judged relevant, in rank order.
    Biencoder JSON: one example a record, see `dpr.examples`; `split` means nothing there.
    """
    return _choose(EXAMPLES, Path(path), "training")(Path(path), split, policy or Policy(), negatives_run)


def example_files(path: PathLike, split: str | None = None, negatives_run: PathLike | None = None) -> list[Path]:
    """The files that `read_examples` reads when it is given the same. Raises its DataError for one that is missing."""
    path, run = Path(path), None if negatives_run is None else Path(negatives_run)
    _choose(EXAMPLES, path, "training")
    found: list[Path | None] = [path]
    if path.is_dir():
        found = [_split_file(path, split), require_file(path, "queries.jsonl"), corpus_file(path)]
        found.append(find_file(path, "answers.jsonl"))
    if run and not run.exists():
        raise missing_file(run)
    return [file for file in (*found, run) if file]


def _folder_examples(path: Path, split: str | None, policy: Policy, negatives_run: PathLike | None) -> list[Example]:
    judged = list(_judgements(path, split, policy))
    run = None if negatives_run is None else trec.ranked_lines(negatives_run, policy)
    return beir.examples(read_queries(path, policy), judged, read_corpus(path, policy), run, policy)


def _record_examples(path: Path, split: str | None, policy: Policy, negatives_run: PathLike | None) -> list[Example]:
    if negatives_run is not None:
        found = "this file names its own negatives, and a run was given for them too"
        raise Where(path).error("two sources", found, "use a run with a BEIR folder")
    return dpr.examples(path, policy)


def _choose(readers: Mapping[str, Reader], path: Path, what: str) -> Reader:
    """The reader for what `path` is: "folder", or its suffix before `.gz`."""
    if not path.exists():
        raise missing_file(path)
    kind = "folder" if path.is_dir() else path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind not in readers:
        found = f"a {kind or 'file without a suffix'} is no {what} format"
        raise Where(path).error("unknown format", found, f"known are {', '.join(readers)} (files also with .gz)")
    return readers[kind]


# what a path is -> its reader

CORPORA: dict[str, Callable[[Path, Policy, Digest | None], Iterator[tuple[Where, Passage]]]] = {
    ".jsonl": beir.passages,
    ".tsv": dpr.passages,
}
QUERIES: dict[str, Callable[[Path, Policy], list[Query]]] = {
    "folder": beir.queries,
    ".jsonl": beir.queries,
    ".csv": dpr.table_queries,
    ".json": dpr.record_queries,
}
JUDGEMENTS: dict[str, Callable[[Path, Policy], Iterator[tuple[Where, Judgement]]]] = {
    ".tsv": trec.judgements,
    ".txt": trec.judgements,
    ".qrels": trec.judgements,
    ".trec": trec.judgements,
    ".json": dpr.judgements,
}
EXAMPLES: dict[str, Callable[[Path, str | None, Policy, PathLike | None], list[Example]]] = {
    "folder": _folder_examples,
    ".json": _record_examples,
}
