"""Appending passages to an encoded corpus, and deleting some: exact, and all or nothing.

What is appended is a folder of vectors of its own beside the first (`parts.py`), encoded as any other; what is deleted
is a note of rows that search leaves out. Either counts from the moment that parts.json is written; a job that is killed
before leaves the corpus as it was, and goes on with the same command.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxret.contract import require_equal
from jaxret.data.files import Where, decode, read_lines
from jaxret.data.formats import Policy, hash_id, read_corpus
from jaxret.data.store import StringsBuilder
from jaxret.leases import BOUND
from jaxret.retrieval.encode import EncodeResult, encode_source
from jaxret.retrieval.encoded import EncodedCorpus, open_encoded
from jaxret.retrieval.parts import Part, part_name, read_parts, write_parts
from jaxret.retrieval.passages import place
from jaxret.retrieval.shard_set import ShardSet, open_shards
from jaxret.retrieval.shards import ShardError
from jaxret.retrieval.source import Source, look_at, speaker
from jaxret.runs.contract import require_same
from jaxret.runs.lock import hold
from jaxret.runs.run import Run

_SHOWN = 3  # ids that an error names


def append_corpus(
    run: Run,
    corpus: str | Path,
    folder: Path,
    on_error: str = "error",
    progress: bool = True,
    dtype: str = "",
    shard_rows: int = 0,
    store: str = "",
    shard_mb: int = 0,
    lease: float = BOUND,
) -> EncodeResult:
    """Encodes the passages of another folder or file, and adds them to the corpus that was encoded into `folder`. The
    result counts these passages alone. A file that was appended before is not appended again.

    dtype, shard_rows, shard_mb, lease: as for `encode_corpus`, but the dtype is the corpus's, and one job at a time
    appends; its processes share the work.

    Raises ValueError for an id that the corpus has (one that was deleted may come again) and for another dtype,
    ContractError if another checkpoint or other lengths encoded the corpus, ShardError if it is damaged, and what
    `encode_corpus` raises. The corpus is then as it was.
    """
    say = speaker(progress)
    dtype = _require_same_vectors(run, open_shards(folder, verify=False), dtype)
    source = look_at(run, corpus, on_error, store, say)
    with hold(folder, "appending"):
        parts, sha256 = read_parts(folder), source.scan.sha256
        before = next((part for part in parts[1:] if part.sha256 == sha256 and part.kept.any()), None)
        if before:
            gone = int((~before.kept).sum())
            say(f"{corpus} was appended before{f'; {gone:,} of its passages were deleted since' if gone else ''}")
            return encode_source(run, folder / before.name, source, progress, dtype, lease=lease)  # what is damaged
        there = open_encoded(folder)
        _require_new(there, source)
        new = Part(part_name(len(there.parts), sha256), sha256, source.scan.passages)
        result = encode_source(run, folder / new.name, source, progress, dtype, shard_rows, shard_mb, lease)
        write_parts(folder, [*there.parts, new])
    return result


def _require_same_vectors(run: Run, there: ShardSet, dtype: str) -> str:
    """The dtype of what is there. Raises unless what the run encodes can be searched together with it."""
    name, here = f"{there.folder}/manifest.json", f"the model in {run.workdir}"
    remedy = "Append with the checkpoint and the lengths of the corpus, or encode all of it again under another name."
    made_by = there.fingerprint
    if not isinstance(made_by.get("contract"), dict) or not isinstance(made_by.get("checkpoint"), dict):
        raise ShardError(f"{name} does not say what its vectors were made from; run encode again")
    require_same(made_by["contract"], run.contract, run.tokenizer.digest, name, here, remedy)
    require_equal({"checkpoint": made_by["checkpoint"]}, {"checkpoint": run.checkpoint}, name, here, remedy)
    if dtype not in ("", there.manifest.dtype):
        raise ValueError(f"{name}: the vectors are {there.manifest.dtype}; what is appended must be too, not {dtype}")
    return there.manifest.dtype


def _require_new(there: EncodedCorpus, source: Source) -> None:
    """Raises ValueError if a passage of the source has an id that is there. Holds its ids, and 8 bytes for each."""
    if source.texts:  # a store's scan does not say which ids the text has twice
        ids = source.texts.ids
    else:
        passages = read_corpus(source.corpus, Policy(source.policy.on_error), source.scan)
        ids = StringsBuilder(passage.id for passage in passages).strings()
    hashes = np.sort(np.fromiter((hash_id(key) for key in ids), np.uint64, len(ids)))
    rows: dict[str, int] = {}  # of what is there and may be among the ids
    for first, known in there.id_blocks():
        theirs = np.fromiter((hash_id(key) for key in known), np.uint64, len(known))
        found = np.flatnonzero(hashes[np.minimum(np.searchsorted(hashes, theirs), len(hashes) - 1)] == theirs)
        rows |= {known[i]: first + int(i) for i in found}
    repeated = [key for key in ids if key in rows] if rows else []
    if repeated:
        key = repeated[0]
        more = f" ({len(repeated) - 1:,} more like it)" if len(repeated) > 1 else ""
        raise ValueError(
            f"{place(source.corpus, key)}passage {key!r} is in {there.folder} already, row {rows[key]}{more}; "
            "leave it out, give it another id, or delete the one that is there"
        )


def delete_passages(folder: Path, ids: str | Path) -> tuple[int, int]:
    """Deletes the passages whose ids a file has, an id a line, from the corpus that was encoded into `folder`: searches
    leave them out from then on. Vectors stay on disk until the corpus is encoded again. An id of a passage that was
    deleted before is no error. Returns how many were deleted now, and how many are left.

    Raises ValueError for an id that the corpus never had, before anything is changed, and ShardError if it is damaged.
    """
    wanted = dict(_read_ids(Path(ids)))
    with hold(folder, "deleting"):
        there = open_encoded(folder)
        unknown, parts = set(wanted), []
        for number, part in enumerate(there.parts):
            everything = EncodedCorpus(folder, [part], [there.shards[number]], None)
            rows = []
            for first, known in everything.id_blocks():
                rows += [first + i for i, key in enumerate(known) if key in wanted]
                unknown.difference_update(known)
            parts.append(part.without(rows))
        if unknown:
            missing = [key for key in wanted if key in unknown]
            names = ", ".join(map(repr, missing[:_SHOWN])) + ", ..." * (len(missing) > _SHOWN)
            raise ValueError(
                f"{wanted[missing[0]]}: {len(missing):,} of {len(wanted):,} ids are of no passage in {folder}: "
                f"{names}; correct them or leave them out (nothing was deleted)"
            )
        left = sum(int(part.kept.sum()) for part in parts)
        if left < there.total_rows:
            write_parts(folder, parts)
        return there.total_rows - left, left


def _read_ids(path: Path) -> Iterator[tuple[str, Where]]:
    """(id, place) of each line that has one."""
    for where, line in read_lines(path):
        key = decode(line, where).strip()
        if len(key.split()) > 1:
            raise where.error("wrong id", f"{key[:60]!r} has white space in it", "write one id on each line")
        if key:
            yield key, where
