"""Append passages to an encoded corpus, and delete some: exact, and all or nothing.

Appended passages are a folder of vectors beside the first (`parts_list.py`), encoded as any other; deleted ones are a
note of rows that search leaves out. Either takes effect when parts.json is written; a job that is killed before leaves
the corpus unchanged, and the same command continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxret.data.errors import Location
from jaxret.data.formats import Corpus, Policy, hash_id
from jaxret.data.lines import decode_line, read_lines
from jaxret.data.record_checks import shorten
from jaxret.data.tokens.store import StringsBuilder
from jaxret.index.encode import EncodeResult, encode_source, keep_result
from jaxret.index.encode_options import EncodeOptions
from jaxret.index.encoded_corpus import EncodedCorpus, open_encoded
from jaxret.index.parts_list import CorpusPart, part_name, read_parts, write_parts
from jaxret.index.passages import location_prefix
from jaxret.index.shard_set import ShardSet, open_shards
from jaxret.index.shards import ShardError
from jaxret.index.source import CorpusSource, inspect_corpus
from jaxret.parallel.events import emit
from jaxret.parallel.progress import job_log
from jaxret.runs.contract import require_same_contract
from jaxret.runs.lock import hold_folder
from jaxret.runs.mismatch import require_equal
from jaxret.runs.run import Run
from jaxret.storage.working_copy import publish

_MOST_IDS = 3  # ids that an error names


def append_corpus(
    run: Run, corpus: Corpus, folder: Path, options: EncodeOptions = EncodeOptions(), progress: bool = True
) -> EncodeResult:
    """Encode the passages of another corpus, and add them to the one that was encoded into `folder`.

    The result counts these passages alone. A file that was appended before is not appended again. One job at a time
    appends; its processes share the work.

    Args:
        run: the run that encoded the corpus.
        corpus: the new passages.
        folder: folder of the encoded corpus.
        options: as of `encode_corpus`; the dtype must be the corpus's.

    Raises:
        ValueError: an id that the corpus has already (one that was deleted may come again), or another dtype.
        ContractError: another checkpoint or other lengths encoded the corpus.
        ShardError: the corpus is damaged.

    It raises what `encode_corpus` raises, too. The corpus is then as it was.
    """
    log = job_log(progress)
    shards = open_shards(folder, verify=False)
    if options.dimension not in (0, shards.dimension):
        raise ValueError(
            f"dimension={options.dimension}: the vectors in {folder} have {shards.dimension} numbers, as many as "
            "those of appended passages must have; leave it out"
        )
    if not shards.sparse and shards.dimension <= run.model.uncut.dimension:
        run = run.with_dimension(shards.dimension)  # the size of the cut vectors
    dtype, words = _require_same_vectors(run, shards, options)
    options = replace(options, dtype=dtype, words=words)
    source = inspect_corpus(run, corpus, options.on_error, options.store, log)
    with hold_folder(folder, "appending"):
        parts, sha256 = read_parts(folder), source.scan.sha256
        before = next((part for part in parts[1:] if part.sha256 == sha256 and part.present.any()), None)
        if before:
            count = int((~before.present).sum())
            log(f"{corpus} was appended before{f'; {count:,} of its passages were deleted since' if count else ''}")
            as_before = replace(options, shard_rows=0, shard_mb=0)  # encodes damaged shards
            result = encode_source(run, folder / before.name, source, as_before, progress)
            keep_result(run, folder.name, result, parts.index(before))
        else:
            encoded_corpus = open_encoded(folder)
            _require_new(encoded_corpus, source)
            number = len(encoded_corpus.parts)
            new = CorpusPart(part_name(number, sha256), sha256, source.scan.passages)
            result = encode_source(run, folder / new.name, source, options, progress)
            keep_result(run, folder.name, result, number)
            write_parts(folder, [*encoded_corpus.parts, new])
    publish(folder)
    return result


def encoded_passage_length(folder: Path) -> int | None:
    """Return the most tokens of a passage of an encoded corpus, for what is appended; None if it records none."""
    contract = open_shards(folder, verify=False).fingerprint.get("contract")
    length = contract.get("passage_length") if isinstance(contract, dict) else None
    return length if isinstance(length, int) else None


def _require_same_vectors(run: Run, shards: ShardSet, options: EncodeOptions) -> tuple[str, int]:
    """Return the dtype of the shards, and how many words of a passage they have (0: all). Raises unless they can be
    searched together with vectors of the run and of the options."""
    name, here = f"{shards.folder}/manifest.json", f"the model in {run.workdir}"
    remedy = "Append with the checkpoint and the lengths of the corpus, or encode all of it again under another name."
    fingerprint = shards.fingerprint
    if not isinstance(fingerprint.get("contract"), dict) or not isinstance(fingerprint.get("checkpoint"), dict):
        raise ShardError(f"{name} does not say what its vectors were made from; run encode again")
    require_same_contract(fingerprint["contract"], run.contract, name, here, remedy)
    require_equal({"checkpoint": fingerprint["checkpoint"]}, {"checkpoint": run.checkpoint}, name, here, remedy)
    if options.dtype not in ("", shards.manifest.dtype):
        raise ValueError(
            f"{name}: the vectors are {shards.manifest.dtype}; appended ones must have this dtype, not {options.dtype}"
        )
    words = int(fingerprint.get("encode", {}).get("words", 0))
    if options.words not in (None, words):
        amount = f"{words} words of a passage" if words else "all words of a passage"
        raise ValueError(f"{name}: the vectors have {amount}; words={options.words} would differ: leave it out")
    return shards.manifest.dtype, words


def _require_new(encoded_corpus: EncodedCorpus, source: CorpusSource) -> None:
    """Raise ValueError if a passage of the source has an id of the corpus. Holds its ids, and 8 bytes for each."""
    if source.texts:  # a store's scan does not say which ids the text has twice
        ids = source.texts.ids
    else:
        passages = source.corpus.read(Policy(source.policy.on_error), source.scan)
        ids = StringsBuilder(passage.id for passage in passages).strings()
    hashes = np.sort(np.fromiter((hash_id(key) for key in ids), np.uint64, len(ids)))
    rows: dict[str, int] = {}  # of what is there and may be among the ids
    for first, encoded_ids in encoded_corpus.id_blocks():
        theirs = np.fromiter((hash_id(key) for key in encoded_ids), np.uint64, len(encoded_ids))
        candidates = np.flatnonzero(hashes[np.minimum(np.searchsorted(hashes, theirs), len(hashes) - 1)] == theirs)
        rows |= {encoded_ids[i]: first + int(i) for i in candidates}
    common_ids = [key for key in ids if key in rows] if rows else []
    if common_ids:
        key = common_ids[0]
        more = f" ({len(common_ids) - 1:,} more like it)" if len(common_ids) > 1 else ""
        raise ValueError(
            f"{location_prefix(source.corpus, key)}passage {key!r} is in {encoded_corpus.folder} already, "
            f"row {rows[key]}{more}; leave it out, give it another id, or delete the one that is there"
        )


def delete_passages(folder: Path, ids: str | Path) -> tuple[int, int]:
    """Delete the passages whose ids a file has, an id a line, from the corpus that was encoded into `folder`.

    Searches leave them out from then on. Vectors stay on disk until the corpus is encoded again. An id of a passage
    that was deleted before is not an error. Returns how many were deleted now, and how many are left.

    Raises ValueError for an id that the corpus never had, before anything is changed, and ShardError if it is damaged.
    """
    return delete_ids(folder, dict(_read_ids(Path(ids))))


def delete_ids(folder: Path, where_of: Mapping[str, object]) -> tuple[int, int]:
    """Delete the passages with some ids, as `delete_passages` does; `where_of` has the place of each id, for errors.
    Raises ValueError for an id of no passage; nothing is deleted then."""
    with hold_folder(folder, "deleting"):
        encoded_corpus = open_encoded(folder)
        unknown, parts = set(where_of), []
        for number, part in enumerate(encoded_corpus.parts):
            part_corpus = EncodedCorpus(folder, [part], [encoded_corpus.shards[number]], None)
            rows = []
            for first, block in part_corpus.id_blocks():
                rows += [first + i for i, key in enumerate(block) if key in where_of]
                unknown.difference_update(block)
            parts.append(part.with_deleted(rows))
        if unknown:
            ids = [key for key in where_of if key in unknown]
            names = ", ".join(map(shorten, ids[:_MOST_IDS])) + ", ..." * (len(ids) > _MOST_IDS)
            raise ValueError(
                f"{where_of[ids[0]]}: {len(ids):,} of {len(where_of):,} ids are of no passage in {folder}: "
                f"{names}; correct them or leave them out (nothing was deleted)"
            )
        rows_left = sum(int(part.present.sum()) for part in parts)
        if rows_left < encoded_corpus.total_rows:
            write_parts(folder, parts)
        publish(folder)  # also what an earlier call could not
        emit("deletion", folder=folder, deleted=encoded_corpus.total_rows - rows_left, left=rows_left)
        return encoded_corpus.total_rows - rows_left, rows_left


def _read_ids(path: Path) -> Iterator[tuple[str, Location]]:
    """Yield (id, location) of each line that has one."""
    for where, line in read_lines(path):
        key = decode_line(line, where).strip()
        if len(key.split()) > 1:
            raise where.error("wrong id", f"{key[:60]!r} has white space in it", "write one id on each line")
        if key:
            yield key, where
