"""One of the jobs that fill a folder with shards: it claims those that nobody has. While one is computed, the text of
the next is read and tokenised, and those before are written."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
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

READING = 1  # shards whose tokens wait for the device
WRITING = 2  # shards that wait to be on disk; the device goes on meanwhile
PAUSE = 0.5  # seconds between two looks at what other jobs do
OLD = 86_400  # seconds after which what a killed job of another kind left in the folder is nobody's


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

        with ThreadPoolExecutor(1, "texts") as readers, ThreadPoolExecutor(1, "shards") as writers:
            for vectors in self.embedder.stream(passages(self.read(left, readers)), "passage", bar.update):
                shard, lease, ids = claimed.popleft()
                writing.append(writers.submit(self.write, shard, lease, vectors, ids))
                if len(writing) > WRITING:
                    writing.popleft().result()
            for written in writing:
                written.result()

    def read(self, left: list[Shard], readers: ThreadPoolExecutor) -> Iterator[tuple[Shard, Lease, Part]]:
        """Claims shards, and reads their passages ahead."""
        ahead: deque[tuple[Shard, Lease, Future[Part]]] = deque()
        for shard in left:
            if lease := self.claim(shard):
                ahead.append((shard, lease, readers.submit(self.texts.part, shard.start, shard.stop)))
            if len(ahead) > READING:
                shard, lease, part = ahead.popleft()
                yield shard, lease, part.result()
        for shard, lease, part in ahead:
            yield shard, lease, part.result()

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
