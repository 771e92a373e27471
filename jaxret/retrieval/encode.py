"""A checkpoint and a corpus -> shards of vectors, by any number of jobs; resumable, and the same bytes however many
there were and however often they were killed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxret.data.formats import CorpusScan, Policy, absolute, called, describe, is_named, scan_corpus, source_path
from jaxret.data.store import Strings, store_root
from jaxret.data.tokenized import TokenizedCorpus, find_corpus, stored_corpus
from jaxret.leases import BOUND, Lease, Leases
from jaxret.retrieval.collapse import alarm
from jaxret.retrieval.passages import place
from jaxret.retrieval.shard_set import ShardSet
from jaxret.retrieval.shards import DTYPES, Shard, ShardError, ShardWriter, VectorError, begun, read_entry
from jaxret.runs.embedder import Embedder
from jaxret.runs.run import Run
from jaxret.storage import sealed, sweep, write_json
from jaxret.types import VECTOR_DTYPES, Ragged

# Passages per shard at most, unless asked for: a kill loses one shard's work. 8,192 passages take BERT-base about ten
# minutes on a laptop and seconds on an accelerator, are 25 MB, and sorting them by length wastes no more than 50,000.
SHARD_ROWS = 8192
COUNTED = 65_536  # passages whose vectors are counted at a time
MB = 10**6
WRITING = 2  # shards that wait to be on disk; the device goes on meanwhile
PAUSE = 0.5  # seconds between two looks at what other jobs do
OLD = 86_400  # seconds after which what a killed job of another kind left in the folder is nobody's


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


Say = Callable[[str], None]


@dataclass
class Source:
    """A corpus that was looked at: counted and digested, and tokenised where it was before."""

    corpus: str | Path
    policy: Policy
    root: Path  # of token stores
    scan: CorpusScan
    texts: TokenizedCorpus | None

    def tokenized(self, run: Run, progress: bool, say: Say) -> TokenizedCorpus:
        """As tokens, which are made unless they were before."""
        if self.texts is None:
            self.texts = stored_corpus(self.corpus, self.scan, self.policy, run.tokenizer, self.root, progress, say)
        return self.texts


def look_at(run: Run, corpus: str | Path, on_error: str, store: str, say: Say) -> Source:
    """Checks and counts a corpus. Raises DataError for a bad record, ValueError if there is no passage."""
    root, policy = store_root(store or run.config.data.store), Policy(on_error)
    say(f"{corpus}: {describe(corpus, 'passages')}")
    texts = find_corpus(corpus, policy, run.tokenizer, root)
    scan = texts.scan if texts else scan_corpus(corpus, policy)
    if report := texts.report if texts else policy.report():
        say(report)
    if not scan.passages:
        raise ValueError(f"{corpus} has no passage to encode; give a folder or file with some")
    return Source(corpus, policy, root, scan, texts)


def speaker(progress: bool) -> Say:
    return tqdm.write if progress and jax.process_index() == 0 else lambda _: None


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

    The corpus is checked, counted and, unless it was before, tokenised into a store; then one shard after another is
    encoded, so memory does not grow with the corpus. Any number of jobs may do so at the same time, on any hosts that
    share the folder: each claims shards that nobody has (`leases.py`), takes over those of jobs that died, and returns
    when all shards are there.

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
        except BaseException:
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
        say(f"{embedder.padding_ratio:.2f} tokens computed for each real one, {embedder.programs} programs compiled")
    return EncodeResult(
        folder=folder,
        passages=scan.passages,
        shards=len(writer.shards),
        shards_written=len(job.written),
        padding_ratio=embedder.padding_ratio,
        programs=embedder.programs,
        truncation=str(source.texts.truncation) if source.texts else "",
    )


@dataclass
class Job:
    """One of the jobs that fill a folder."""

    run: Run
    source: Source
    writer: ShardWriter
    leases: Leases
    embedder: Embedder
    progress: bool
    written: set[int] = field(default_factory=set)  # numbers of the shards that it wrote

    def fill(self) -> None:
        """Encodes shards that nobody else does, until all of them are there."""
        say, left = speaker(self.progress), self.writer.pending()
        if not left:
            return
        texts, total = self.source.tokenized(self.run, self.progress, say), self.source.scan.passages
        say(f"{total:,} passages in {left[0].count} shard(s), {len(left)} to encode")
        say(str(texts.truncation))
        done, pause, waiting = total - sum(shard.rows for shard in left), PAUSE, False
        with tqdm(total=total, initial=done, desc="encode", unit="text", disable=not self.progress, delay=1) as bar:
            while left:
                before = len(left)
                self.encode(left, texts, bar)
                left = [shard for shard in left if not self.writer.has(shard, verify=False)]
                if changed := [shard for shard in left if shard.index in self.written]:
                    raise ShardError(
                        f"{self.writer.folder}: {len(changed)} of {left[0].count} shards, from {changed[0]} on, were "
                        "changed or removed while others were written. Run encode again"
                    )
                bar.update(total - sum(shard.rows for shard in left) - bar.n)
                if len(left) < before:
                    pause = PAUSE
                elif left:  # other jobs have them
                    if not waiting:
                        shard = left[0].suffix
                        say(f"waiting for {len(left)} shards of others; {shard} is with {self.leases.holder(shard)}")
                    waiting = True
                    time.sleep(pause)
                    pause = min(1.5 * pause, max(PAUSE, self.leases.bound / 20))

    def encode(self, left: list[Shard], texts: TokenizedCorpus, bar: tqdm[Any]) -> None:
        """Encodes those of the shards that can be claimed, and writes each while the next ones are computed."""
        claimed: deque[tuple[Shard, Lease]] = deque()
        writing: deque[Future[None]] = deque()

        def parts() -> Iterator[Ragged]:
            for shard in left:
                if lease := self.claim(shard):
                    claimed.append((shard, lease))
                    yield texts.passages.part(shard.start, shard.stop)

        with ThreadPoolExecutor(1, "shards") as writers:
            for vectors in self.embedder.stream(parts(), "passage", bar.update):
                shard, lease = claimed.popleft()
                writing.append(writers.submit(self.write, shard, lease, vectors, texts.ids))
                if len(writing) > WRITING:
                    writing.popleft().result()
            for written in writing:
                written.result()

    def claim(self, shard: Shard) -> Lease | None:
        """The lease of a shard that is neither there nor another job's."""
        if self.writer.has(shard, verify=False):
            return None
        begin(self.writer, self.leases)
        lease = self.leases.claim(shard.suffix)
        if lease and self.writer.has(shard, verify=False):  # written just before
            self.leases.release(lease)
            return None
        return lease

    def write(self, shard: Shard, lease: Lease, vectors: Ragged, every: Strings) -> None:
        """Writes a shard, unless another job has taken it over. every: the ids of the corpus."""
        ids = every[shard.start : shard.stop]
        stored = vectors.astype(self.writer.made_from["fingerprint"]["encode"]["dtype"])
        fixed = self.run.retriever.vectors_per_passage is not None
        try:
            published = lease.publishes(
                lambda: self.writer.write(shard, stored.stacked() if fixed else stored, ids, lease.work)
            )
        except VectorError as error:
            raise ValueError(f"{place(self.source.corpus, error.passage_id)}{error}") from error
        finally:
            self.leases.release(lease)
        if published:
            self.written.add(shard.index)


def begin(writer: ShardWriter, leases: Leases) -> None:
    """Says what the folder is to hold, unless it does: one job does so, before any of them has a shard."""
    while not writer.begun():
        lease = leases.claim("begun")
        if lease:
            lease.publishes(partial(writer.begin, lease.work))
            leases.release(lease)
        else:
            time.sleep(PAUSE)


def complete(writer: ShardWriter, leases: Leases, source: Source) -> None:
    """Compares every digest, writes the manifest, and where to find the text again; by whichever job comes first. A
    finished folder may be read-only."""
    folder = writer.folder
    where = {"path": absolute(source.corpus), **source.scan.stat}

    def publish(work: Path) -> None:
        note_corpus(folder, source.corpus, source.scan, work)
        writer.finish(work)
        sweep(folder, OLD)

    while not writer.finished() or read_entry(folder / "corpus.json") != where:
        lease = leases.claim("manifest")
        if lease and lease.publishes(partial(publish, lease.work)):
            break
        time.sleep(PAUSE)
    leases.clear()


def rows_per_shard(run: Run, source: Source, dtype: str, shard_rows: int, shard_mb: int, progress: bool = False) -> int:
    """Passages per shard: as many as are allowed, and as have no more than the allowed MB of vectors. Where a passage
    has as many vectors as tokens, these are counted first, so that the largest shard is within the limit too."""
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


def note_corpus(folder: Path, corpus: str | Path, scan: CorpusScan, work: Path | None = None) -> None:
    """Writes where to find the text again."""
    write_json(folder / "corpus.json", sealed({"path": absolute(corpus), **scan.stat}), work)


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
