"""A job that fills a folder with shards: it claims those that no other job has. While one is computed, the text of the
next is read and tokenized, and the previous ones are written.

A shard has two leases. "next-SHARD" is a wish: a job reads the text, and others leave it that shard as long as there
are shards without a wish. SHARD is the shard itself: it is claimed when the text is read and the device is idle, by the
first job. So no job waits for a shard that another has not begun.
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
from jaxret.index.passages import location_prefix
from jaxret.index.shards import Shard, ShardError, ShardWriter, VectorError, read_entry
from jaxret.index.source import CorpusSource, note_corpus
from jaxret.index.token_reader import TokenBlock, TokenReader, open_token_reader
from jaxret.parallel.progress import Progress, job_log
from jaxret.runs.embedder import Embedder
from jaxret.runs.run import Run
from jaxret.storage.leases import Lease, Leases
from jaxret.storage.unfinished import remove_leftovers
from jaxret.types import Ragged, TextVectors

PENDING_WRITES = 2  # shards that wait to be on disk; the device goes on meanwhile
PAUSE = 0.5  # seconds between two reads of the state of other jobs
OLD = 86_400  # seconds after which leftovers of other commands are deleted


@dataclass
class PendingBlock:
    """A shard whose text is read. wish: the lease that leaves it to this job; None where another job has that."""

    shard: Shard
    wish: Lease | None
    text: Future[TokenBlock]
    cancellation: Event


@dataclass
class EncodeWorker:
    """A job that fills a folder with shards."""

    run: Run
    source: CorpusSource
    writer: ShardWriter
    leases: Leases
    embedder: Embedder
    progress: bool
    own_shards: set[int] = field(default_factory=set)  # numbers of the shards that it wrote
    truncation: Truncation | None = None  # of the passages that it read

    @cached_property
    def texts(self) -> TokenReader:
        return open_token_reader(self.source, self.run.tokenizer)

    def fill(self) -> None:
        """Encode shards that no other job encodes, until all of them exist. Raises ShardError if others change shards
        that were written."""
        log, shards = job_log(self.progress), self.writer.pending()
        if not shards:
            return
        total = self.source.scan.passages
        log(f"{total:,} passages in {shards[0].count} shard(s), {len(shards)} to encode")
        count, pause, waiting = total - sum(shard.rows for shard in shards), PAUSE, False
        with Progress("encode", total, "passage", count, self.progress) as bar:
            while shards:
                before = len(shards)
                self.encode(shards, bar)
                self.leases.refresh()
                shards = [shard for shard in shards if not self.writer.has(shard, verify=False)]
                if losses := [shard for shard in shards if shard.index in self.own_shards]:
                    raise ShardError(
                        f"{self.writer.folder}: {len(losses)} of {shards[0].count} shards, from {losses[0]} on, were "
                        "changed or removed while others were written. Run encode again"
                    )
                bar.update(total - sum(shard.rows for shard in shards) - bar.done)
                if len(shards) < before:
                    pause = PAUSE
                elif shards:  # other jobs have them
                    if not waiting:
                        shard = shards[0].suffix
                        log(f"waiting for {len(shards)} shards of others; {shard} is with {self.leases.holder(shard)}")
                    waiting = True
                    time.sleep(pause)
                    pause = min(1.5 * pause, max(PAUSE, self.leases.bound / 20))

    def encode(self, shards: list[Shard], bar: Progress) -> None:
        """Encode those of the shards that can be claimed, and write each while the next ones are computed."""
        claims: deque[tuple[Shard, Lease, Sequence[str]]] = deque()
        writes: deque[Future[None]] = deque()

        def passages(blocks: Iterator[tuple[Shard, Lease, TokenBlock]]) -> Iterator[Ragged]:
            for shard, lease, part in blocks:
                claims.append((shard, lease, part.ids))
                if self.truncation is None:  # print cut texts before the long computation
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
        """Yield the passages of claimed shards; read one shard ahead. When it is closed, as by Ctrl-C and by any other
        error, reading ends."""
        candidates = self.choose_shards(shards)

        def ahead() -> PendingBlock | None:
            for shard, wish in candidates:
                cancellation = Event()
                text = readers.submit(self.texts.part, shard.start, shard.stop, cancellation)
                return PendingBlock(shard, wish, text, cancellation)
            return None

        block = ahead()
        try:
            while block:
                shard, part = block.shard, self.wait_for_text(block)
                lease = self.claim(shard) if part else None
                if block.wish:
                    self.leases.release(block.wish)
                block = ahead()
                if part and lease:
                    yield shard, lease, part
        finally:
            if block:
                block.cancellation.set()

    def wait_for_text(self, block: PendingBlock) -> TokenBlock | None:
        """Return the text of a shard when it is read; None if the job that wished for it has begun it meanwhile."""
        while not block.wish and wait([block.text], PAUSE).not_done:
            if not self.is_open(block.shard):
                block.cancellation.set()
                wait([block.text])
                return None
        return block.text.result()

    def choose_shards(self, shards: list[Shard]) -> Iterator[tuple[Shard, Lease | None]]:
        """Yield the open shards without a wish of another job, with this job's wish; if there are none, the others: the
        first job that has the text computes it."""
        any_wish = False
        for shard in shards:
            if self.is_open(shard) and (wish := self.leases.claim(f"next-{shard.suffix}")):
                any_wish = True
                yield shard, wish
        if not any_wish:
            yield from ((shard, None) for shard in shards if self.is_open(shard))

    def is_open(self, shard: Shard) -> bool:
        """Return whether a shard neither exists nor is another job's."""
        return not self.writer.has(shard, verify=False) and self.leases.is_free(shard.suffix)

    def claim(self, shard: Shard) -> Lease | None:
        """Return the lease of a shard that neither exists nor is another job's, else None."""
        if self.writer.has(shard, verify=False):
            return None
        announce(self.writer, self.leases)
        lease = self.leases.claim(shard.suffix)
        if lease and self.writer.has(shard, verify=False):  # written just before
            self.leases.release(lease)
            return None
        return lease

    def write(self, shard: Shard, lease: Lease, vectors: TextVectors, ids: Sequence[str]) -> None:
        """Write a shard, unless another job has taken it over.

        Args:
            lease: of the shard.
            vectors: of its passages.
            ids: of its passages.

        Raises:
            ValueError: vectors that are not finite; it names the passage.
        """
        array: Any = vectors.astype(self.writer.settings["fingerprint"]["encode"]["dtype"])
        if isinstance(array, Ragged) and self.run.model.vectors_per_passage is not None:
            array = array.stacked()
        try:
            self.texts.require_unchanged()
            published = lease.publishes(lambda: self.writer.write(shard, array, ids, lease.work))
        except VectorError as error:
            raise ValueError(f"{location_prefix(self.source.corpus, error.passage_id)}{error}") from error
        finally:
            self.leases.release(lease)
        if published:
            self.own_shards.add(shard.index)


def announce(writer: ShardWriter, leases: Leases) -> None:
    """Record what the folder is to hold, unless it is recorded: one job does so, before any of them has a shard."""
    leases.refresh()
    while not writer.announced():
        lease = leases.claim("begun")
        if lease:
            lease.publishes(partial(writer.announce, lease.work))
            leases.release(lease)
        else:
            time.sleep(PAUSE)


def finish_encoding(writer: ShardWriter, leases: Leases, source: CorpusSource) -> None:
    """Compare every digest, write the manifest, and where to find the text again; the first job does so. A finished
    folder may be read-only."""
    folder = writer.folder
    where = {"path": source.corpus.absolute, **source.scan.stat}

    def publish(work: Path) -> None:
        note_corpus(folder, source.corpus, source.scan, work)
        writer.finish(work)
        remove_leftovers(folder, OLD)

    while not writer.finished() or read_entry(folder / "corpus.json") != where:
        lease = leases.claim("manifest")
        if lease and lease.publishes(partial(publish, lease.work)):
            break
        time.sleep(PAUSE)
        leases.refresh()
    leases.clear()
