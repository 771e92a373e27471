"""Many texts -> vectors on the host: sorted by length, in batches of few static shapes."""

from __future__ import annotations

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
        counts = self.retriever.vector_counts(texts, side)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        result = Ragged(np.empty((int(offsets[-1]), self.retriever.dimension), np.float32), offsets)

        def store(rows: np.ndarray, vectors: Any) -> None:
            there = np.arange(vectors.shape[1]) < counts[rows][:, None]
            place = (offsets[rows][:, None] + np.arange(vectors.shape[1]))[there]
            result.flat[place] = np.asarray(vectors)[: len(rows)][there]

        program = self.program(side)
        before = program.count
        pending: tuple[np.ndarray, Any] | None = None
        with tqdm(total=len(texts), desc=f"encode {side}", unit="text", disable=not progress, delay=1) as bar:
            for rows, size, length in plan_batches(texts.lengths, self.tokens_per_batch, self.mesh.size):
                length = min(length, self.max_lengths[side])
                padding = np.full(size - len(rows), -1)
                tokens = Tokens(*texts.padded(np.concatenate([rows, padding]), length, self.pad_id))
                encoded = program(self.params, place_rows(self.mesh, tokens))
                if pending:  # the device works on this batch while the host stores the one before
                    store(*pending)
                pending = rows, encoded
                self.counts.real_tokens += int(texts.lengths[rows].sum())
                self.counts.padded_tokens += size * length
                bar.update(len(rows))
                if advance:
                    advance(len(rows))
            if pending:
                store(*pending)
        self.counts.programs += program.count - before
        return result
