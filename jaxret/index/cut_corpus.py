"""Cut the vectors of an encoded corpus to their first numbers, as another corpus, without encoding a text again."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import numpy as np

from jaxret.data.formats import source_exists
from jaxret.index.cut_shard import cut_shard
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.parts_list import CorpusPart, read_parts, write_parts
from jaxret.index.passages import unchanged_corpus
from jaxret.index.shard_set import ShardSet
from jaxret.index.shards import DTYPES, Manifest, ShardError, ShardWriter, read_entry, read_manifest
from jaxret.index.source import encoded_source, is_source
from jaxret.parallel.progress import Progress
from jaxret.runs.contract import DIMENSION, of_whole_vectors, require_same_contract
from jaxret.runs.lock import hold_folder
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import Run
from jaxret.storage.atomic import with_digest, write_json
from jaxret.types import Ragged


def find_larger_vectors(run: Run, corpus: str | Path, folder: Path, dtype: str = "") -> Path | None:
    """Return the folder of the longest vectors that a corpus has and that can be cut to those of a run; None if it has
    none.

    Args:
        run: with the dimension to cut to.
        corpus: the folder or file that was encoded, unchanged; or, if no such path exists, the name of an encoded
            corpus.
        folder: of the cut vectors, which is left out.
        dtype: of the cut vectors; "": as stored.
    """
    sizes: dict[Path, int] = {}
    path, exists = os.fspath(corpus), source_exists(corpus)
    for name in run.workdir.corpora:
        source = run.workdir.embeddings(name)
        same = is_source(encoded_source(source), path) if exists else name == path
        if same and source != folder and _can_be_cut(run, manifest := read_manifest(source / "manifest.json"), dtype):
            sizes[source] = manifest.dimension
    largest_first = sorted(sizes, key=lambda source: -sizes[source])
    return next((source for source in largest_first if not exists or _is_unchanged(source)), None)


def _is_unchanged(folder: Path) -> bool:
    """Return whether the file of an encoded corpus has the passages that were encoded."""
    try:
        unchanged_corpus(folder)
    except ContractError:
        return False
    return True


def _can_be_cut(run: Run, manifest: Manifest, dtype: str) -> bool:
    """Return whether the vectors of a manifest are longer ones of the same checkpoint, texts and precision."""
    made_by = manifest.fingerprint
    contract = made_by.get("contract")
    if not isinstance(contract, dict) or made_by.get("checkpoint") != run.checkpoint:
        return False
    try:
        require_same_contract(of_whole_vectors(contract), of_whole_vectors(run.contract), "", "", "")
    except ContractError:
        return False
    precise = np.dtype(DTYPES[manifest.dtype]).itemsize >= np.dtype(DTYPES[dtype or manifest.dtype]).itemsize
    return manifest.dimension > run.model.dimension and precise


def cut_corpus(run: Run, source: Path, folder: Path, dtype: str = "", progress: bool = True) -> int:
    """Cut the vectors of all parts of a corpus, shard by shard, and return how many shards were written.

    The same command continues a killed job, and applies later appends and deletes.

    Args:
        run: with the dimension to cut to.
        source: folder of the longer vectors.
        folder: folder of the cut ones.
        dtype: of the cut vectors; "": as stored.

    Raises:
        ShardError: the stored vectors are damaged.
        ContractError: the folder holds vectors of something else, or changes of its own.
    """
    encoded_corpus, count = open_encoded(source), 0
    with hold_folder(folder, "cutting vectors"):
        if jax.process_index() == 0:
            _require_no_own_changes(folder, source, encoded_corpus.parts)
            parts = list(zip(encoded_corpus.parts, encoded_corpus.shards, strict=True))
            with Progress("cut", int(encoded_corpus.firsts[-1]), "passage", shown=progress) as bar:
                for part, shards in reversed(parts):  # the first part last: its manifest completes the corpus
                    if part is parts[0][0] and read_parts(source):
                        write_parts(folder, encoded_corpus.parts)
                    count += _cut_part(run, shards, folder / part.name, dtype, bar)
    return count


def _require_no_own_changes(folder: Path, source: Path, parts: list[CorpusPart]) -> None:
    """Raise ContractError if passages were appended to or deleted from a cut corpus, but not the one that it is cut
    from: to cut it again would undo that.

    Args:
        folder: of the cut vectors.
        source: of the longer ones.
        parts: of the longer ones.
    """
    own = read_parts(folder)
    texts, theirs = ([(part.sha256, part.rows) for part in each] for each in (own, parts))
    same = texts == theirs[: len(own)]
    if not same or any((whole.present & ~cut.present).any() for cut, whole in zip(own, parts)):
        raise ContractError(
            f"{folder}/parts.json has passages appended or deleted that {source} has not: to cut it again would undo "
            "that. Change the whole corpus likewise first, or give another --name"
        )


def _cut_part(run: Run, shards: ShardSet, folder: Path, dtype: str, bar: Progress) -> int:
    """Cut the vectors of a part, and return how many shards were written."""
    made_by = shards.fingerprint
    dtype = dtype or shards.manifest.dtype
    fingerprint = {
        **made_by,
        "contract": {**made_by["contract"], DIMENSION: run.model.dimension},
        "encode": {**made_by["encode"], "dtype": dtype},
    }
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, shards.total_rows, shards.manifest.rows_per_shard, fingerprint)
    writer.announce()
    numbers = {shard.index for shard in writer.pending()}
    for shard, (first, vectors) in zip(shards.shards, shards, strict=True):
        if shard.index in numbers:
            whole = cut_shard(vectors, run.model.dimension, run.model.module.normalize)
            every = np.arange(shard.rows)
            cut = whole.take(every) if isinstance(vectors, Ragged) else whole[:]  # type: ignore[call-arg,index]
            writer.made_on = shards.manifest.shards[shard.index].get("made_on", {})
            writer.write(shard, cut.astype(DTYPES[dtype]), shards.ids(first + every))
        bar.update(shard.rows)
    where = read_entry(shards.folder / "corpus.json")
    if where is None:
        raise ShardError(f"{shards.folder}/corpus.json is missing or damaged; run encode again")
    write_json(folder / "corpus.json", with_digest(where))
    writer.finish()
    return len(numbers)
