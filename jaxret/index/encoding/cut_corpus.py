"""Make an encoded corpus with shorter vectors: cut the vectors of another one, without encoding its texts again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

from jaxret.data.formats import Corpus, source_path
from jaxret.data.lines import missing_file_error
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.parts_list import CorpusPart, read_parts, write_parts
from jaxret.index.passages import unchanged_corpus
from jaxret.index.row_subset import cut_shard
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
    """Return the folder with the longest vectors of a corpus that can be cut to the run's dimension, or None.

    Args:
        run: run with the dimension to cut to.
        corpus: the corpus that was encoded, unchanged.
        folder: folder of the cut vectors, which is left out.
        dtype: dtype of the cut vectors; "": the dtype of the source.
    """
    folders = [run.workdir.embeddings(name) for name in run.workdir.corpora]
    sources = (source for source in folders if source != folder and is_source(encoded_source(source), corpus.source))
    return next((source for source in _largest_first(run, sources, dtype) if _is_unchanged(source)), None)


def named_larger_vectors(run: Run, encoded_name: str, folder: Path, dtype: str = "") -> Path:
    """Return the folder of an encoded corpus whose vectors can be cut to the run's dimension.

    Args:
        run: run with the dimension to cut to.
        encoded_name: name of the encoded corpus.
        folder: folder of the cut vectors, which must be another folder.
        dtype: dtype of the cut vectors; "": the dtype of the source.

    Raises:
        DataError: the run has no such corpus, or its vectors cannot be cut. The error is about the path `encoded_name`,
            because no corpus exists there either.
    """
    named = [run.workdir.embeddings(name) for name in run.workdir.corpora if name == encoded_name]
    larger = _largest_first(run, (source for source in named if source != folder), dtype)
    if not larger:
        raise missing_file_error(source_path(encoded_name))
    return larger[0]


def _largest_first(run: Run, folders: Iterable[Path], dtype: str) -> list[Path]:
    """Return the folders whose vectors can be cut to the run's dimension, the longest vectors first."""
    manifests = {folder: read_manifest(folder / "manifest.json") for folder in folders}
    sizes = {folder: manifest.dimension for folder, manifest in manifests.items() if _can_be_cut(run, manifest, dtype)}
    return sorted(sizes, key=lambda folder: -sizes[folder])


def _is_unchanged(folder: Path) -> bool:
    """Return whether the source of an encoded corpus still has the passages that were encoded."""
    try:
        unchanged_corpus(folder)
    except ContractError:
        return False
    return True


def _can_be_cut(run: Run, manifest: Manifest, dtype: str) -> bool:
    """Return whether the vectors of a manifest are longer than the run's, are of the same checkpoint and contract, and
    have at least the precision of `dtype`."""
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
    """Cut the vectors of all parts of a corpus, shard by shard, and return the number of shards that were written.

    The same command continues a killed job, and applies later appends and deletions. If several jobs run it, one cuts,
    and the other jobs wait.

    Args:
        run: run with the dimension to cut to.
        source: folder of the longer vectors.
        folder: folder of the cut vectors.
        dtype: dtype of the cut vectors; "": the dtype of the source.
        progress: whether to show progress.
        patience: seconds to wait for another job that cuts them, counted from its last shard.

    Raises:
        LockedError: another job holds the folder and has stopped writing.
        ShardError: the stored vectors are damaged.
        ContractError: the folder has vectors of another corpus, checkpoint or dimension, or passages were appended or
            deleted there and not in the source.
    """
    encoded_corpus, count = open_encoded(source), 0
    with hold_folder(folder, "cutting vectors", patience):
        if jax.process_index() == 0:
            _require_no_own_changes(folder, source, encoded_corpus.parts)
            parts = list(zip(encoded_corpus.parts, encoded_corpus.shards, strict=True))
            with Progress("cut", int(encoded_corpus.firsts[-1]), "passage", progress=progress) as bar:
                for part, shards in reversed(parts):  # the first part comes last: its manifest completes the corpus
                    if part is parts[0][0] and read_parts(source):
                        write_parts(folder, encoded_corpus.parts)
                    count += _cut_part(run, shards, folder / part.name, dtype, bar)
    return count


def _require_no_own_changes(folder: Path, source: Path, parts: list[CorpusPart]) -> None:
    """Raise ContractError if passages were appended to a cut corpus or deleted from it, but not in its source. Cutting
    again would undo these changes.

    Args:
        folder: folder of the cut vectors.
        source: folder of the longer vectors.
        parts: parts of the corpus with the longer vectors.
    """
    cut_parts = read_parts(folder)
    cut_texts, source_texts = ([(part.sha256, part.rows) for part in part_list] for part_list in (cut_parts, parts))
    is_source_prefix = cut_texts == source_texts[: len(cut_parts)]
    if not is_source_prefix or any((part.present & ~cut.present).any() for cut, part in zip(cut_parts, parts)):
        raise ContractError(
            f"{folder}/parts.json has appended or deleted passages, but {source} does not have these changes: cutting "
            "again would undo them. Change this corpus in the same way first, or give another --name"
        )


def _cut_part(run: Run, shards: ShardSet, folder: Path, dtype: str, bar: Progress) -> int:
    """Cut the vectors of a part, and return the number of shards that were written."""
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
            short = cut_shard(vectors, run.model.dimension, run.model.module.normalize)
            rows = np.arange(shard.rows)
            cut = short.take(rows) if isinstance(vectors, Ragged) else short[:]  # type: ignore[call-arg,index]
            writer.made_on = shards.manifest.shards[shard.index].get("made_on", {})
            writer.write(shard, cut.astype(SHARD_DTYPES[dtype]), shards.ids(first + rows))
        bar.update(shard.rows)
    source_entry = read_entry(shards.folder / "corpus.json")
    if source_entry is None:
        raise ShardError(f"{shards.folder}/corpus.json is missing or damaged; run encode again")
    write_json(folder / "corpus.json", with_digest(source_entry))
    writer.finish()
    return len(numbers)
