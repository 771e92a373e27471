"""A job that fills a folder with shards. It claims shards that no other job has. While one shard is computed, the text
of the next shard is read and tokenized, and the previous shards are written.

A shard has two leases. "next-SHARD" is a reservation: its job reads the text of the shard, and other jobs prefer shards
without a reservation. "SHARD" is the shard itself: the first job that has read the text and has an idle device claims
it. So no job waits for a shard that another job has not begun.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from threading import Event
from typing import Any

from jaxret.data.tokens.tokenizer import Truncation
from jaxret.index.encoding.token_reader import TokenBlock, TokenReader, open_token_reader
from jaxret.index.passages import location_prefix
from jaxret.index.shards import Shard, ShardError, ShardWriter, VectorError, read_entry
from jaxret.index.source import CorpusSource, note_corpus
from jaxret.parallel.progress import COMPILATION, Progress, job_log
from jaxret.runs.embedder import Embedder
from jaxret.runs.run import Run, require_checkpoint
from jaxret.storage.leases import Lease, Leases
from jaxret.storage.unfinished import remove_leftovers
from jaxret.types import Ragged, TextVectors

PENDING_WRITES = 2  # shards that may wait to be written while the device computes
LEASE_PAUSE = 0.5  # seconds between two reads of the leases of other jobs
OLD_LEFTOVERS = 86_400  # seconds after which leftovers of other commands are deleted


@dataclass
class PendingBlock:
    """A shard whose text is being read."""

    shard: Shard
    reservation: Lease | None  # the lease "next-SHARD"; None: another job has it
    text: Future[TokenBlock]
    cancellation: Event  # ends the reading


@dataclass
class EncodeWorker:
    """A job that fills a folder with shards."""

    run: Run
    source: CorpusSource
    writer: ShardWriter
    leases: Leases
    embedder: Embedder
    progress: bool
    own_shards: set[int] = field(default_factory=set)  # numbers of the shards that this job wrote
    truncation: Truncation | None = None  # counts of cut texts among the passages that this job read

    @cached_property
    def texts(self) -> TokenReader:
        return open_token_reader(self.source, self.run.tokenizer)

    def fill(self) -> None:
        """Encode shards that no other job encodes, until all shards exist. Raises ShardError if a shard that this job
        wrote is changed or removed."""
        log, shards = job_log(self.progress), self.writer.pending()
        if not shards:
            return
        total = self.source.scan.passages
        log(f"{total:,} passages in {shards[0].count} shard(s), {len(shards)} to encode")
        count, pause, waiting = total - sum(shard.rows for shard in shards), LEASE_PAUSE, False
        with Progress("encode", total, "passage", count, self.progress, COMPILATION) as bar:
            while shards:
                count_before = len(shards)
                self.encode(shards, bar)
                self.leases.refresh()
                shards = [shard for shard in shards if not self.writer.has(shard, verify=False)]
                if losses := [shard for shard in shards if shard.index in self.own_shards]:
                    raise ShardError(
                        f"{self.writer.folder}: {len(losses)} of {shards[0].count} shards, from {losses[0]} on, were "
                        "changed or removed while other shards were written. Run encode again"
                    )
                bar.update(total - sum(shard.rows for shard in shards) - bar.done)
                if len(shards) < count_before:
                    pause = LEASE_PAUSE
                elif shards:  # other jobs have these shards
                    if not waiting:
                        shard = shards[0].suffix
                        holder = self.leases.holder(shard)
                        log(f"waiting for {len(shards)} shard(s) of other jobs; {shard} is with {holder}")
                    waiting = True
                    time.sleep(pause)
                    pause = min(1.5 * pause, max(LEASE_PAUSE, self.leases.bound / 20))

    def encode(self, shards: list[Shard], bar: Progress) -> None:
        """Encode the shards that this job can claim, and write each while the next ones are computed."""
        claims: deque[tuple[Shard, Lease, Sequence[str]]] = deque()
        writes: deque[Future[None]] = deque()

        def passages(blocks: Iterator[tuple[Shard, Lease, TokenBlock]]) -> Iterator[Ragged]:
            for shard, lease, part in blocks:
                claims.append((shard, lease, part.ids))
                if self.truncation is None:  # printed early, before the long computation
                    job_log(self.progress)(str(part.truncation))
                self.truncation = part.truncation
                yield part.passages

        with (
            ThreadPoolExecutor(1, "texts") as readers,
            ThreadPoolExecutor(1, "shards") as writers,
            closing(self.read(shards, readers)) as read,
        ):
            for vectors in self.embedder.encode_stream(passages(read), "passage", bar.update):
                shard, lease, ids = claims.popleft()
                writes.append(writers.submit(self.write, shard, lease, vectors, ids))
                if len(writes) > PENDING_WRITES:
                    writes.popleft().result()
            for write in writes:
                write.result()

    def read(
        self, shards: list[Shard], readers: ThreadPoolExecutor
    ) -> Generator[tuple[Shard, Lease, TokenBlock], None, None]:
        """Yield the passages of claimed shards. One shard is read ahead. When the generator is closed, also by Ctrl-C
        or another error, the reading ends."""
        candidates = self.choose_shards(shards)

        def ahead() -> PendingBlock | None:
            for shard, reservation in candidates:
                cancellation = Event()
                text = readers.submit(self.texts.part, shard.start, shard.stop, cancellation)
                return PendingBlock(shard, reservation, text, cancellation)
            return None

        block = ahead()
        try:
            while block:
                shard, part = block.shard, self.wait_for_text(block)
                lease = self.claim(shard) if part else None
                if block.reservation:
                    self.leases.release(block.reservation)
                block = ahead()
                if part and lease:
                    yield shard, lease, part
        finally:
            if block:
                block.cancellation.set()

    def wait_for_text(self, block: PendingBlock) -> TokenBlock | None:
        """Wait until the text of a shard has been read, and return it. Return None if another job begins the shard
        first."""
        while not block.reservation and wait([block.text], LEASE_PAUSE).not_done:
            if not self.is_open(block.shard):
                block.cancellation.set()
                wait([block.text])
                return None
        return block.text.result()

    def choose_shards(self, shards: list[Shard]) -> Iterator[tuple[Shard, Lease | None]]:
        """Yield the open shards that no other job has reserved, each with this job's reservation. If there are none,
        yield the other open shards with None: the first job that has the text computes the shard."""
        any_reservation = False
        for shard in shards:
            if self.is_open(shard) and (reservation := self.leases.claim(f"next-{shard.suffix}")):
                any_reservation = True
                yield shard, reservation
        if not any_reservation:
            yield from ((shard, None) for shard in shards if self.is_open(shard))

    def is_open(self, shard: Shard) -> bool:
        """Return whether a shard does not exist and no other job has claimed it."""
        return not self.writer.has(shard, verify=False) and self.leases.is_free(shard.suffix)

    def claim(self, shard: Shard) -> Lease | None:
        """Return the lease of a shard, or None if the shard exists or another job has claimed it."""
        if self.writer.has(shard, verify=False):
            return None
        announce(self.writer, self.leases)
        require_checkpoint(self.run, self.writer.folder)
        lease = self.leases.claim(shard.suffix)
        if lease and self.writer.has(shard, verify=False):  # another job wrote it before this job had the lease
            self.leases.release(lease)
            return None
        return lease

    def write(self, shard: Shard, lease: Lease, vectors: TextVectors, ids: Sequence[str]) -> None:
        """Write a shard, unless another job has taken it over.

        Args:
            shard: shard to write.
            lease: lease of the shard.
            vectors: vectors of its passages.
            ids: ids of its passages.

        Raises:
            ValueError: the vectors of a passage are not finite. The error names the passage.
        """
        array: Any = vectors.astype(self.writer.settings["fingerprint"]["encode"]["dtype"])
        if isinstance(array, Ragged) and self.run.model.vectors_per_passage is not None:
            array = array.stacked()
        try:
            self.texts.require_unchanged()
            published = lease.publish(lambda: self.writer.write(shard, array, ids, lease.work))
        except VectorError as error:
            raise ValueError(f"{location_prefix(self.source.corpus, error.passage_id)}{error}") from error
        finally:
            self.leases.release(lease)
        if published:
            self.own_shards.add(shard.index)


def announce(writer: ShardWriter, leases: Leases) -> None:
    """Record the fingerprint of the folder, unless it is recorded. One job writes it, before any job has a shard."""
    leases.refresh()
    while not writer.is_announced():
        lease = leases.claim("begun")
        if lease:
            lease.publish(partial(writer.announce, lease.work))
            leases.release(lease)
        else:
            time.sleep(LEASE_PAUSE)


def finish_encoding(writer: ShardWriter, leases: Leases, source: CorpusSource) -> None:
    """Compare every digest, and write the manifest and corpus.json. The first job that gets here does this. Nothing is
    written to a finished folder, which may be read-only."""
    folder = writer.folder
    corpus_entry = {"path": source.corpus.absolute, **source.scan.stat}

    def publish(work: Path) -> None:
        note_corpus(folder, source.corpus, source.scan, work)
        writer.finish(work)
        remove_leftovers(folder, OLD_LEFTOVERS)

    while not writer.is_finished() or read_entry(folder / "corpus.json") != corpus_entry:
        lease = leases.claim("manifest")
        if lease and lease.publish(partial(publish, lease.work)):
            break
        time.sleep(LEASE_PAUSE)
        leases.refresh()
    leases.clear()
