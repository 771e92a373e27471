"""Cut the vectors of an encoded corpus to their first numbers, as another corpus, without encoding a text again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

from jaxret.data.formats import Corpus, source_path
from jaxret.data.lines import missing_file_error
from jaxret.index.cut_shard import cut_shard
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.parts_list import CorpusPart, read_parts, write_parts
from jaxret.index.passages import unchanged_corpus
from jaxret.index.shard_set import ShardSet
from jaxret.index.shards import SHARD_DTYPES, Manifest, ShardError, ShardWriter, read_entry, read_manifest
from jaxret.index.source import encoded_source, is_source
from jaxret.parallel.progress import Progress
from jaxret.runs.contract import DIMENSION, of_whole_vectors, require_same_contract
from jaxret.runs.lock import hold_folder
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import Run
from jaxret.storage.atomic import with_digest, write_json
from jaxret.storage.leases import BOUND
from jaxret.types import Ragged


def find_larger_vectors(run: Run, corpus: Corpus, folder: Path, dtype: str = "") -> Path | None:
    """Return the folder of the longest vectors that a corpus has and that can be cut to those of a run; None if it has
    none.

    Args:
        run: with the dimension to cut to.
        corpus: that was encoded, unchanged.
        folder: of the cut vectors, which is left out.
        dtype: of the cut vectors; "": as stored.
    """
    folders = [run.workdir.embeddings(name) for name in run.workdir.corpora]
    same = (source for source in folders if source != folder and is_source(encoded_source(source), corpus.source))
    return next((source for source in _largest_first(run, same, dtype) if _is_unchanged(source)), None)


def named_larger_vectors(run: Run, encoded_name: str, folder: Path, dtype: str = "") -> Path:
    """Return the folder of an encoded corpus, if its vectors can be cut to those of a run.

    Args:
        run: with the dimension to cut to.
        encoded_name: name of the encoded corpus.
        folder: of the cut vectors, which must be another one.
        dtype: of the cut vectors; "": as stored.

    Raises:
        DataError: there is no such corpus, or its vectors cannot be cut; a path of this name does not exist either.
    """
    named = [run.workdir.embeddings(name) for name in run.workdir.corpora if name == encoded_name]
    larger = _largest_first(run, (source for source in named if source != folder), dtype)
    if not larger:
        raise missing_file_error(source_path(encoded_name))
    return larger[0]


def _largest_first(run: Run, folders: Iterable[Path], dtype: str) -> list[Path]:
    """Return the folders whose vectors can be cut to those of a run, those with the longest vectors first."""
    manifests = {folder: read_manifest(folder / "manifest.json") for folder in folders}
    sizes = {folder: one.dimension for folder, one in manifests.items() if _can_be_cut(run, one, dtype)}
    return sorted(sizes, key=lambda folder: -sizes[folder])


def _is_unchanged(folder: Path) -> bool:
    """Return whether the file of an encoded corpus has the passages that were encoded."""
    try:
        unchanged_corpus(folder)
    except ContractError:
        return False
    return True


def _can_be_cut(run: Run, manifest: Manifest, dtype: str) -> bool:
    """Return whether the vectors of a manifest are longer ones of the same checkpoint, texts and precision."""
    fingerprint = manifest.fingerprint
    contract = fingerprint.get("contract")
    if not isinstance(contract, dict) or fingerprint.get("checkpoint") != run.checkpoint:
        return False
    try:
        require_same_contract(of_whole_vectors(contract), of_whole_vectors(run.contract), "", "", "")
    except ContractError:
        return False
    precise = (
        np.dtype(SHARD_DTYPES[manifest.dtype]).itemsize >= np.dtype(SHARD_DTYPES[dtype or manifest.dtype]).itemsize
    )
    return manifest.dimension > run.model.dimension and precise


def cut_corpus(
    run: Run, source: Path, folder: Path, dtype: str = "", progress: bool = True, patience: float = BOUND
) -> int:
    """Cut the vectors of all parts of a corpus, shard by shard, and return how many shards were written.

    The same command continues a killed job, and applies later appends and deletes. Of several jobs at once one cuts,
    and the others wait for it.

    Args:
        run: with the dimension to cut to.
        source: folder of the longer vectors.
        folder: folder of the cut ones.
        dtype: of the cut vectors; "": as stored.
        patience: seconds to wait for another job that cuts them, from its last shard.

    Raises:
        LockedError: another job holds the folder, and writes nothing.
        ShardError: the stored vectors are damaged.
        ContractError: the folder holds vectors of something else, or changes of its own.
    """
    encoded_corpus, count = open_encoded(source), 0
    with hold_folder(folder, "cutting vectors", patience):
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
    fingerprint = shards.fingerprint
    dtype = dtype or shards.manifest.dtype
    fingerprint = {
        **fingerprint,
        "contract": {**fingerprint["contract"], DIMENSION: run.model.dimension},
        "encode": {**fingerprint["encode"], "dtype": dtype},
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
            writer.write(shard, cut.astype(SHARD_DTYPES[dtype]), shards.ids(first + every))
        bar.update(shard.rows)
    where = read_entry(shards.folder / "corpus.json")
    if where is None:
        raise ShardError(f"{shards.folder}/corpus.json is missing or damaged; run encode again")
    write_json(folder / "corpus.json", with_digest(where))
    writer.finish()
    return len(numbers)
