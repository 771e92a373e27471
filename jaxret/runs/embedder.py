"""Many texts -> vectors on the host: sorted by length, in batches of few static shapes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from jaxret.distributed import ROWS, Program, Reader, by_row, place_rows, replicated, shardings
from jaxret.models.heads.head import Side
from jaxret.models.retriever import BiEncoder
from jaxret.types import Embeddings, Ragged, Tokens

SMALLEST_BATCH = 8
IN_FLIGHT = 2  # batches on the device while the host has to do with those before and after them


def padded_length(length: int) -> int:
    """The next length a batch may have: steps of 8 to 128, of 16 to 256, then of 32 (at most an eighth wasted from 64
    tokens up, and few programs)."""
    step = 8 if length <= 128 else 16 if length <= 256 else 32
    return max(-(-length // step) * step, 8)


def plan_batches(lengths: np.ndarray, tokens_per_batch: int, multiple: int) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yields (rows, padded rows, padded length), longest texts first, ties in the order given.

    A batch holds about `tokens_per_batch` tokens; its number of rows is a power of two times `multiple` (the number of
    devices) and depends on its length only, except for the last batch, which shrinks. A text that comes alone, as a
    question does, is not padded to the smallest batch: that would take four times as long.
    """
    least = SMALLEST_BATCH if len(lengths) > 1 else 1
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        length = padded_length(int(lengths[order[start]]))
        smallest = -(-least // multiple) * multiple
        size = smallest
        while size * 2 * length <= tokens_per_batch:
            size *= 2
        rows = order[start : start + size]
        while size // 2 >= max(len(rows), smallest):
            size //= 2
        yield rows, size, length
        start += len(rows)


@dataclass
class Counts:
    """What an embedder computed so far."""

    real_tokens: int = 0
    padded_tokens: int = 0
    programs: int = 0


Programs = dict[tuple[BiEncoder, Mesh, Side], Program]


@dataclass(frozen=True)
class Embedder:
    """`BiEncoder.encode` over any number of texts, with the parameters that it holds. `compiled` holds the programs,
    which depend on nothing else here: copies with other parameters share them, and so may others."""

    retriever: BiEncoder
    params: Any = field(repr=False)
    mesh: Mesh
    pad_id: int
    max_lengths: Mapping[Side, int]
    tokens_per_batch: int
    compiled: Programs = field(default_factory=dict, repr=False, compare=False)
    counts: Counts = field(default_factory=Counts, compare=False)

    def with_params(self, params: Any) -> Embedder:
        """The same with other parameters (of the same shapes); nothing is compiled again."""
        return replace(self, params=params)

    @property
    def programs(self) -> int:
        """How many programs were compiled for the texts so far."""
        return self.counts.programs

    @property
    def padding_ratio(self) -> float:
        """Tokens computed for each real one."""
        return self.counts.padded_tokens / max(self.counts.real_tokens, 1)

    def program(self, side: Side) -> Program:
        """The program that encodes a batch, compiled once per shape; each device has texts of its own."""
        key = self.retriever, self.mesh, side
        if key not in self.compiled:

            def filled(found: Embeddings) -> jax.Array:
                # A short text may lack some of its V vectors; the first one again changes no maximum. It is taken by
                # its number: of two expressions XLA makes two computations, whose last bits may differ.
                there = jnp.where(found.mask, jnp.arange(found.mask.shape[1]), 0)
                return jnp.take_along_axis(found.vectors, there[..., None], axis=1)

            self.compiled[key] = Program(
                self.own(side, filled),
                in_shardings=(shardings(self.mesh, self.params), by_row(self.mesh)),
                out_shardings=replicated(self.mesh),
            )
        return self.compiled[key]

    def own(self, side: Side, of: Callable[[Embeddings], Any] = lambda found: found) -> Callable[[Any, Tokens], Any]:
        """(params, tokens) -> `of` their embeddings, for use in a program: each device encodes texts of its own, and
        reads parameters as `Reader` says."""
        retriever = self.retriever
        read = Reader(retriever.module.compute.dtype, jnp.float32, at_once=False, split=self.mesh.shape["fsdp"] > 1)

        def encode(params: Any, tokens: Tokens) -> Any:
            return of(retriever.reading(read).encode(read.entry(params), tokens, side))

        specs = jax.tree.map(lambda place: place.spec, shardings(self.mesh, self.params))
        return jax.shard_map(encode, mesh=self.mesh, in_specs=(specs, P(ROWS)), out_specs=P(ROWS))

    def __call__(
        self, texts: Ragged, side: Side, progress: bool = False, advance: Callable[[int], object] | None = None
    ) -> Ragged:
        """The vectors of every text, float32, in the order of `texts`. progress: shows a bar of its own; advance: is
        told how many more texts are done."""
        if not len(texts):
            return Ragged(np.empty((0, self.retriever.dimension), np.float32), np.zeros(1, np.int64))
        with tqdm(total=len(texts), desc=f"encode {side}", unit="text", disable=not progress, delay=1) as bar:

            def tell(count: int) -> None:
                bar.update(count)
                if advance:
                    advance(count)

            return next(self.stream(iter([texts]), side, tell))

    def stream(
        self, parts: Iterator[Ragged], side: Side, advance: Callable[[int], object] = lambda _: None
    ) -> Iterator[Ragged]:
        """The same of each part, none of which is empty. The next one is asked for, and its first batches are on the
        device, before the last vectors of the one before are copied: the device does not wait between two parts."""
        flight: deque[tuple[_Vectors, np.ndarray, jax.Array]] = deque()
        program = self.program(side)
        for texts in parts:
            vectors = self._room(texts, side)
            for rows, encoded in self._batches(program, texts, side):
                flight.append((vectors, rows, encoded))
                advance(len(rows))
                if len(flight) > IN_FLIGHT:
                    yield from _landed(flight)
        while flight:
            yield from _landed(flight)

    def _room(self, texts: Ragged, side: Side) -> _Vectors:
        counts = self.retriever.vector_counts(texts, side)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return _Vectors(np.empty((int(offsets[-1]), self.retriever.dimension), np.float32), offsets, len(texts))

    def _batches(self, program: Program, texts: Ragged, side: Side) -> Iterator[tuple[np.ndarray, jax.Array]]:
        """(rows of the texts, their vectors [size,V,D]), on the device and under way to the host."""
        for rows, size, length in plan_batches(texts.lengths, self.tokens_per_batch, self.mesh.size):
            length = min(length, self.max_lengths[side])
            padding = np.full(size - len(rows), -1)
            tokens = Tokens(*texts.padded(np.concatenate([rows, padding]), length, self.pad_id))
            before = program.count
            encoded = program(self.params, place_rows(self.mesh, tokens))
            encoded.copy_to_host_async()  # as soon as it is there, while the next batch is computed
            self.counts.programs += program.count - before
            self.counts.real_tokens += int(texts.lengths[rows].sum())
            self.counts.padded_tokens += size * length
            yield rows, encoded


@dataclass
class _Vectors:
    """Room for the vectors of some texts, `missing` of which are not there yet."""

    flat: np.ndarray  # [R,D]
    offsets: np.ndarray
    missing: int

    def store(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        counts = self.offsets[rows + 1] - self.offsets[rows]
        there = np.arange(vectors.shape[1]) < counts[:, None]
        place = (self.offsets[rows][:, None] + np.arange(vectors.shape[1]))[there]
        self.flat[place] = vectors[: len(rows)][there]
        self.missing -= len(rows)


def _landed(flight: deque[tuple[_Vectors, np.ndarray, jax.Array]]) -> Iterator[Ragged]:
    """Stores the batch that is longest under way; the vectors of its part, if all of them are there now."""
    vectors, rows, encoded = flight.popleft()
    vectors.store(rows, np.asarray(encoded))
    if not vectors.missing:
        yield Ragged(vectors.flat, vectors.offsets)
