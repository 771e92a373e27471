"""One of the jobs that fill a folder with shards: it claims those that nobody has. While one is computed, the text of
the next is read and tokenised, and those before are written.

A shard has two leases. "next-SHARD" is a wish: a job reads the text, and others leave it that shard as long as there
are some that nobody wishes for. SHARD is the shard itself: it is claimed when the text is there and the device has
nothing to do, by whoever comes first. So no job waits for a shard that another has not begun.
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

from tqdm import tqdm

from jaxret.data.formats import absolute
from jaxret.data.tokenizer import Truncation
from jaxret.leases import Lease, Leases
from jaxret.retrieval.passages import place
from jaxret.retrieval.reading import Part, Reader, reader
from jaxret.retrieval.shards import Shard, ShardError, ShardWriter, VectorError, read_entry
from jaxret.retrieval.source import Source, note_corpus, speaker
from jaxret.runs.embedder import Embedder
from jaxret.runs.run import Run
from jaxret.storage import sweep
from jaxret.types import Ragged

WRITING = 2  # shards that wait to be on disk; the device goes on meanwhile
PAUSE = 0.5  # seconds between two looks at what other jobs do
OLD = 86_400  # seconds after which what a killed job of another kind left in the folder is nobody's


@dataclass
class Reading:
    """A shard whose text is read. wish: the lease that leaves it to this job; None where another job has that."""

    shard: Shard
    wish: Lease | None
    text: Future[Part]
    unwanted: Event


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
    truncation: Truncation | None = None  # of the passages that it read

    @cached_property
    def texts(self) -> Reader:
        return reader(self.source, self.run.tokenizer)

    def fill(self) -> None:
        """Encodes shards that nobody else does, until all of them are there."""
        say, left = speaker(self.progress), self.writer.pending()
        if not left:
            return
        total = self.source.scan.passages
        say(f"{total:,} passages in {left[0].count} shard(s), {len(left)} to encode")
        done, pause, waiting = total - sum(shard.rows for shard in left), PAUSE, False
        with tqdm(total=total, initial=done, desc="encode", unit="text", disable=not self.progress, delay=1) as bar:
            while left:
                before = len(left)
                self.encode(left, bar)
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

    def encode(self, left: list[Shard], bar: tqdm[Any]) -> None:
        """Encodes those of the shards that can be claimed, and writes each while the next ones are computed."""
        claimed: deque[tuple[Shard, Lease, Sequence[str]]] = deque()
        writing: deque[Future[None]] = deque()

        def passages(found: Iterator[tuple[Shard, Lease, Part]]) -> Iterator[Ragged]:
            for shard, lease, part in found:
                claimed.append((shard, lease, part.ids))
                if self.truncation is None:  # what is cut is said before hours are spent on it
                    speaker(self.progress)(str(part.truncation))
                self.truncation = part.truncation
                yield part.passages

        with (
            ThreadPoolExecutor(1, "texts") as readers,
            ThreadPoolExecutor(1, "shards") as writers,
            closing(self.read(left, readers)) as read,
        ):
            for vectors in self.embedder.stream(passages(read), "passage", bar.update):
                shard, lease, ids = claimed.popleft()
                writing.append(writers.submit(self.write, shard, lease, vectors, ids))
                if len(writing) > WRITING:
                    writing.popleft().result()
            for written in writing:
                written.result()

    def read(self, left: list[Shard], readers: ThreadPoolExecutor) -> Generator[tuple[Shard, Lease, Part], None, None]:
        """Reads the passages of one shard ahead, and claims each when it is asked for. When it is closed, as by Ctrl-C
        and by whatever goes wrong elsewhere, reading ends."""
        wished = self.wished(left)

        def ahead() -> Reading | None:
            for shard, wish in wished:
                unwanted = Event()
                text = readers.submit(self.texts.part, shard.start, shard.stop, unwanted)
                return Reading(shard, wish, text, unwanted)
            return None

        coming = ahead()
        try:
            while coming:
                shard, part = coming.shard, self.awaited(coming)
                lease = self.claim(shard) if part else None
                if coming.wish:
                    self.leases.release(coming.wish)
                coming = ahead()
                if part and lease:
                    yield shard, lease, part
        finally:
            if coming:
                coming.unwanted.set()

    def awaited(self, coming: Reading) -> Part | None:
        """The text of a shard when it is read; None if meanwhile the job whose wish it was has begun the shard."""
        while not coming.wish and wait([coming.text], PAUSE).not_done:
            if not self.open(coming.shard):
                coming.unwanted.set()
                wait([coming.text])
                return None
        return coming.text.result()

    def wished(self, left: list[Shard]) -> Iterator[tuple[Shard, Lease | None]]:
        """The shards that nobody has and nobody else wishes for, with the wish; if there are none, those that others
        wish for: whoever has the text first computes it."""
        found = False
        for shard in left:
            if self.open(shard) and (wish := self.leases.claim(f"next-{shard.suffix}")):
                found = True
                yield shard, wish
        if not found:
            yield from ((shard, None) for shard in left if self.open(shard))

    def open(self, shard: Shard) -> bool:
        """Whether a shard is neither there nor another job's."""
        return not self.writer.has(shard, verify=False) and self.leases.free(shard.suffix)

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

    def write(self, shard: Shard, lease: Lease, vectors: Ragged, ids: Sequence[str]) -> None:
        """Writes a shard, unless another job has taken it over. ids: of its passages."""
        stored = vectors.astype(self.writer.made_from["fingerprint"]["encode"]["dtype"])
        fixed = self.run.retriever.vectors_per_passage is not None
        try:
            self.texts.require_unchanged()
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
