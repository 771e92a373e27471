"""A checkpoint and a corpus -> shards of vectors, by any number of jobs; resumable, and the same bytes however many
there were and however often they were killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.formats import ChangedError, called, is_named, source_path
from jaxret.leases import BOUND, Leases
from jaxret.retrieval.collapse import alarm
from jaxret.retrieval.jobs import Job, complete
from jaxret.retrieval.shard_set import ShardSet
from jaxret.retrieval.shards import DTYPES, ShardWriter, begun, read_entry
from jaxret.retrieval.source import Source, look_at, speaker
from jaxret.runs.run import Run
from jaxret.types import VECTOR_DTYPES

# Passages per shard at most, unless asked for: a kill loses one shard's work. 8,192 passages take BERT-base about ten
# minutes on a laptop and seconds on an accelerator, are 25 MB, and sorting them by length wastes no more than 50,000.
SHARD_ROWS = 8192
COUNTED = 65_536  # passages whose vectors are counted at a time
MB = 10**6


@dataclass(frozen=True)
class EncodeResult:
    """What a call of `encode_corpus` did."""

    folder: Path
    passages: int
    shards: int
    shards_written: int  # by this job: others were there already, or other jobs wrote them
    padding_ratio: float  # tokens computed for each real one
    programs: int  # compiled
    truncation: str


def corpus_name(path: str | Path) -> str:
    """The folder under embeddings/ for a corpus: the name of its BEIR folder or of its file, without suffixes, or
    of its set."""
    if is_named(source_path(path)):
        return called(path)
    path = source_path(path).absolute()
    path = path.resolve() if path.name in ("", "..") else path
    return path.name if path.is_dir() else path.name.split(".")[0]


def encode_corpus(
    run: Run,
    corpus: str | Path,
    name: str = "",
    on_error: str = "error",
    progress: bool = True,
    dtype: str = "",
    shard_rows: int = 0,
    store: str = "",
    shard_mb: int = 0,
    lease: float = BOUND,
) -> EncodeResult:
    """Encodes every passage of a folder or file into `<workdir>/embeddings/<name>/`.

    The corpus is checked and counted; then one shard after another is read, tokenised (unless a store has its tokens),
    encoded and written, all at the same time, so memory does not grow with the corpus. Any number of jobs may do so at
    the same time, on any hosts that share the folder: each claims shards that nobody has (`leases.py`), takes over
    those of jobs that died, and returns when all shards are there.

    dtype: of the vectors on disk; "": the run's encode.dtype. shard_rows, shard_mb: passages per shard, and MB of
    vectors (10^6 bytes), whichever is less; 0: as the folder's shards have it, else the run's encode.shard_rows, but no
    more than SHARD_ROWS, and encode.shard_mb. store: the folder of token stores; "": the run's data.store, else the
    user's cache. lease: seconds without a sign of life after which other hosts hold this job to be dead.

    Raises DataError for a bad record, ContractError if the folder holds vectors of another checkpoint or corpus,
    VectorError for a passage whose vectors are not finite, and ShardError if shards that were written are changed or
    removed meanwhile.
    """
    folder = run.workdir.embeddings(name or corpus_name(corpus))
    source = look_at(run, corpus, on_error, store, speaker(progress))
    return encode_source(run, folder, source, progress, dtype, shard_rows, shard_mb, lease)


def encode_source(
    run: Run,
    folder: Path,
    source: Source,
    progress: bool = True,
    dtype: str = "",
    shard_rows: int = 0,
    shard_mb: int = 0,
    lease: float = BOUND,
) -> EncodeResult:
    """As `encode_corpus`, of a corpus that was looked at, into a folder."""
    say, scan = speaker(progress), source.scan
    dtype = vector_dtype(dtype or run.config.encode.dtype)
    rows = rows_begun(folder)
    if shard_mb or not rows or shard_rows not in (0, rows):
        rows = rows_per_shard(run, source, dtype, shard_rows, shard_mb, progress)
    produced_by = made_from(run, scan.sha256, scan.passages, dtype, rows, contract_begun(run, folder))
    writer = ShardWriter(folder, scan.passages, rows, produced_by, {"devices": run.mesh.size, "kind": device_kind(run)})
    with Leases(folder, lease) as leases:
        job = Job(run, source, writer, leases, run.embedder(), progress)
        try:
            job.fill()
            complete(writer, leases, source)
        except BaseException as error:
            if isinstance(error, ChangedError):
                writer.retract(job.written)
            if not leases.others():
                writer.withdraw()
            raise
    embedder = job.embedder
    manifest = writer.manifest()
    made_on = {str(entry.get("made_on", "others")) for entry in manifest.shards}
    if len(made_on) > 1:
        say(f"shards were made on {' and on '.join(sorted(made_on))}: their last digits differ by rounding")
    if told := alarm(ShardSet(folder, manifest)):
        say(f"alarm: {told}")
    if job.written:
        if len(job.written) > 1 and not source.texts:
            say(str(job.truncation))
        say(f"{embedder.padding_ratio:.2f} tokens computed for each real one, {embedder.programs} programs compiled")
    return EncodeResult(
        folder=folder,
        passages=scan.passages,
        shards=len(writer.shards),
        shards_written=len(job.written),
        padding_ratio=embedder.padding_ratio,
        programs=embedder.programs,
        truncation=str(job.truncation or ""),
    )


def rows_per_shard(run: Run, source: Source, dtype: str, shard_rows: int, shard_mb: int, progress: bool = False) -> int:
    """Passages per shard: as many as are allowed, and as have no more than the allowed MB of vectors. Where a passage
    has as many vectors as tokens, these are counted first, so that the largest shard is within the limit too. Raises
    ValueError for less than none of either."""
    for name, asked in (("shard_rows", shard_rows), ("shard_mb", shard_mb)):
        if asked < 0:
            raise ValueError(f"{name} is {asked}; it must be at least 1, or 0 for what the folder or the run says")
    rows = shard_rows or min(run.config.encode.shard_rows, SHARD_ROWS)
    megabytes = shard_mb or run.config.encode.shard_mb
    vectors = megabytes * MB // (run.retriever.dimension * np.dtype(DTYPES[dtype]).itemsize)
    each = run.retriever.vectors_per_passage
    if each is not None:
        return max(1, min(rows, vectors // each))
    passages = source.tokenized(run, progress, speaker(progress)).passages
    parts = np.array_split(np.arange(len(passages)), -(-len(passages) // COUNTED))
    counts = np.concatenate([run.retriever.vector_counts(passages.take(part), "passage") for part in parts])
    return rows_within(counts, rows, vectors)


def rows_within(counts: np.ndarray, rows: int, most: int) -> int:
    """Of equal shards of at most `rows` passages, which have `counts` vectors [N], a size at which none has above
    `most` (or 1)."""
    ends = np.concatenate([[0], np.cumsum(counts)])
    rows = min(rows, len(counts))
    while rows > 1:
        starts = np.arange(0, len(counts), rows)
        largest = int((ends[np.minimum(starts + rows, len(counts))] - ends[starts]).max())
        if largest <= most:
            break
        rows = max(1, min(rows - 1, rows * most // largest))
    return rows


def entries_begun(folder: Path) -> Iterator[dict[str, Any]]:
    """What the shards that are in a folder were made from, or are to be."""
    return (read_entry(path) or {} for path in begun(folder))


def rows_begun(folder: Path) -> int:
    """The rows per shard of a folder that has some; 0 if none has."""
    return next((rows for entry in entries_begun(folder) if type(rows := entry.get("rows_per_shard")) is int), 0)


def contract_begun(run: Run, folder: Path) -> dict[str, Any]:
    """The run's contract, as an older version wrote it if the folder has shards of that version."""
    for entry in entries_begun(folder):
        made_by = entry.get("fingerprint")
        contract = made_by.get("contract") if isinstance(made_by, dict) else None
        if isinstance(contract, dict) and run.understands(contract):
            return contract
    return run.contract


def device_kind(run: Run) -> str:
    return str(run.mesh.devices.flat[0].device_kind)


def vector_dtype(name: str) -> str:
    """numpy's name of the type of the vectors on disk."""
    if name not in VECTOR_DTYPES:
        raise ValueError(f"encode.dtype is {name!r}; it must be one of {', '.join(VECTOR_DTYPES)}")
    return name


def made_from(
    run: Run, sha256: str, passages: int, dtype: str, shard_rows: int, contract: dict[str, Any]
) -> dict[str, Any]:
    """Everything that the bytes of the shards depend on."""
    settings = {"dtype": dtype, "shard_rows": shard_rows, "tokens_per_batch": run.config.encode.tokens_per_batch}
    return {
        "contract": contract,
        "checkpoint": run.checkpoint,
        "corpus": {"sha256": sha256, "passages": passages},
        "encode": settings,
    }
