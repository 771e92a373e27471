"""Append passages to an encoded corpus, and delete passages from it. Both are exact, and take effect all at once.

Appended passages are encoded into another folder of vectors next to the first (`parts_list.py`). Deleted passages stay
in their folders; parts.json lists their rows, and search leaves them out. Changes take effect when parts.json is
written. A job that is killed before that leaves the corpus unchanged, and the same command continues.
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
from jaxret.index.encoded_corpus import EncodedCorpus, open_encoded
from jaxret.index.encoding.encode import EncodeResult, encode_source, keep_result
from jaxret.index.encoding.encode_options import EncodeOptions
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
from jaxret.storage.buckets.working_copy import publish

_NAMED_IDS = 3  # ids that an error names


def append_corpus(
    run: Run, corpus: Corpus, folder: Path, options: EncodeOptions = EncodeOptions(), progress: bool = True
) -> EncodeResult:
    """Encode the passages of another corpus, and add them to the encoded corpus in `folder`.

    The result counts only these passages. A file that was appended before is not appended again. One job at a time
    appends; its processes share the work.

    Args:
        run: the run that encoded the corpus.
        corpus: the new passages.
        folder: folder of the encoded corpus.
        options: options of `encode_corpus`; the dtype must be the dtype of the encoded corpus.
        progress: whether to show progress.

    Raises:
        ValueError: an id is already in the encoded corpus (ids of deleted passages are allowed), or the dtype differs.
        ContractError: the encoded corpus was made with another checkpoint or other lengths.
        ShardError: the encoded corpus is damaged.

    It also raises the errors of `encode_corpus`. After an error the encoded corpus is unchanged.
    """
    log = job_log(progress)
    shards = open_shards(folder, verify=False)
    if options.dimension not in (0, shards.dimension):
        raise ValueError(
            f"dimension={options.dimension}: the vectors in {folder} have dimension {shards.dimension}, and appended "
            "passages must have the same. Remove it"
        )
    if not shards.sparse and shards.dimension <= run.model.uncut.dimension:
        run = run.with_dimension(shards.dimension)  # the size of the cut vectors
    dtype, words = _require_same_vectors(run, shards, options)
    options = replace(options, dtype=dtype, words=words)
    source = inspect_corpus(run, corpus, options.on_error, options.store, log)
    with hold_folder(folder, "appending"):
        parts, sha256 = read_parts(folder), source.scan.sha256
        earlier = next((part for part in parts[1:] if part.sha256 == sha256 and part.present.any()), None)
        if earlier:
            count = int((~earlier.present).sum())
            log(f"{corpus} was appended before{f'; {count:,} of its passages were deleted since' if count else ''}")
            shard_options = replace(options, shard_rows=0, shard_mb=0)  # damaged shards keep their rows
            result = encode_source(run, folder / earlier.name, source, shard_options, progress)
            keep_result(run, folder.name, result, parts.index(earlier))
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
    """Return the limit of tokens with which the passages of an encoded corpus were encoded, or None if it is
    unknown."""
    contract = open_shards(folder, verify=False).fingerprint.get("contract")
    length = contract.get("passage_length") if isinstance(contract, dict) else None
    return length if isinstance(length, int) else None


def _require_same_vectors(run: Run, shards: ShardSet, options: EncodeOptions) -> tuple[str, int]:
    """Return (dtype of the shards, number of words that they store for a passage; 0: all).

    Raises ShardError, ContractError or ValueError if vectors of the run and the options cannot be searched together
    with the shards.
    """
    name, run_name = f"{shards.folder}/manifest.json", f"the model in {run.workdir}"
    remedy = "Append with the checkpoint and the lengths of the corpus, or encode all passages under another name."
    fingerprint = shards.fingerprint
    if not isinstance(fingerprint.get("contract"), dict) or not isinstance(fingerprint.get("checkpoint"), dict):
        raise ShardError(f"{name} does not record the contract and checkpoint of its vectors; run encode again")
    require_same_contract(fingerprint["contract"], run.contract, name, run_name, remedy)
    require_equal({"checkpoint": fingerprint["checkpoint"]}, {"checkpoint": run.checkpoint}, name, run_name, remedy)
    if options.dtype not in ("", shards.manifest.dtype):
        raise ValueError(
            f"{name}: the vectors are {shards.manifest.dtype}. Appended vectors must have this dtype, not "
            f"{options.dtype}"
        )
    words = int(fingerprint.get("encode", {}).get("words", 0))
    if options.words not in (None, words):
        amount = f"{words} words of a passage" if words else "all words of a passage"
        raise ValueError(f"{name}: the vectors have {amount}, but words is {options.words}. Remove words")
    return shards.manifest.dtype, words


def _require_new(encoded_corpus: EncodedCorpus, source: CorpusSource) -> None:
    """Raise ValueError if a passage of the source has an id that the corpus has. The ids of the source, and 8 bytes for
    each, are held in memory."""
    if source.texts:  # the scan of a store lists no repeated ids, which `Corpus.read` needs
        ids = source.texts.ids
    else:
        passages = source.corpus.read(Policy(source.policy.on_error), source.scan)
        ids = StringsBuilder(passage.id for passage in passages).strings()
    hashes = np.sort(np.fromiter((hash_id(key) for key in ids), np.uint64, len(ids)))
    rows: dict[str, int] = {}  # id of an encoded passage -> its row, if an id of the source has the same hash
    for first, encoded_ids in encoded_corpus.id_blocks():
        id_hashes = np.fromiter((hash_id(key) for key in encoded_ids), np.uint64, len(encoded_ids))
        places = np.minimum(np.searchsorted(hashes, id_hashes), len(hashes) - 1)
        candidates = np.flatnonzero(hashes[places] == id_hashes)
        rows |= {encoded_ids[i]: first + int(i) for i in candidates}
    common_ids = [key for key in ids if key in rows] if rows else []
    if common_ids:
        key = common_ids[0]
        suffix = f" ({len(common_ids) - 1:,} more like it)" if len(common_ids) > 1 else ""
        raise ValueError(
            f"{location_prefix(source.corpus, key)}passage {key!r} is in {encoded_corpus.folder} already, "
            f"row {rows[key]}{suffix}. Leave it out, give it another id, or delete the encoded passage first"
        )


def delete_passages(folder: Path, ids: str | Path) -> tuple[int, int]:
    """Delete passages from the encoded corpus in `folder`. The file `ids` has an id on each line. Return (number of
    passages that were deleted, number of passages that are left).

    Later searches leave these passages out. Their vectors stay on disk until the corpus is encoded again. The id of a
    passage that was deleted before is not an error.

    Raises ValueError, and deletes nothing, for an id that the corpus never had. Raises ShardError if the corpus is
    damaged.
    """
    return delete_ids(folder, dict(_read_ids(Path(ids))))


def delete_ids(folder: Path, locations: Mapping[str, object]) -> tuple[int, int]:
    """Delete the passages whose ids are the keys of `locations`, see `delete_passages`. The values are the places in
    the file of ids, for errors. Raises ValueError, and deletes nothing, if an id belongs to no passage."""
    with hold_folder(folder, "deleting"):
        encoded_corpus = open_encoded(folder)
        unknown, parts = set(locations), []
        for number, part in enumerate(encoded_corpus.parts):
            part_corpus = EncodedCorpus(folder, [part], [encoded_corpus.shards[number]], None)
            rows = []
            for first, block in part_corpus.id_blocks():
                rows += [first + i for i, key in enumerate(block) if key in locations]
                unknown.difference_update(block)
            parts.append(part.with_deleted(rows))
        if unknown:
            ids = [key for key in locations if key in unknown]
            names = ", ".join([*map(shorten, ids[:_NAMED_IDS]), *(["..."] if len(ids) > _NAMED_IDS else [])])
            raise ValueError(
                f"{locations[ids[0]]}: {len(ids):,} of {len(locations):,} ids belong to no passage in {folder}: "
                f"{names}; correct or remove them (nothing was deleted)"
            )
        rows_left = sum(int(part.present.sum()) for part in parts)
        if rows_left < encoded_corpus.total_rows:
            write_parts(folder, parts)
        publish(folder)  # an earlier call may have failed to publish its deletions, so always publish
        emit("deletion", folder=folder, deleted=encoded_corpus.total_rows - rows_left, left=rows_left)
        return encoded_corpus.total_rows - rows_left, rows_left


def _read_ids(path: Path) -> Iterator[tuple[str, Location]]:
    """Yield (id, location) of each line that is not blank."""
    for location, line in read_lines(path):
        key = decode_line(line, location).strip()
        if len(key.split()) > 1:
            raise location.error("wrong id", f"{key[:60]!r} has white space in it", "write one id on each line")
        if key:
            yield key, location
