"""Encode many texts to vectors, sorted by length, in batches of few static shapes."""

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

from jaxret.models.heads.head import Side
from jaxret.models.retriever_model import RetrieverModel
from jaxret.parallel.mesh import (
    ROW_AXES,
    ParameterGatherer,
    Program,
    parameter_specs,
    replicated_sharding,
    row_parts,
    row_sharding,
    shard_whole_batch,
    shardings,
)
from jaxret.parallel.progress import COMPILATION, Progress
from jaxret.runs.cut_vectors import cut_vectors
from jaxret.types import Embeddings, Ragged, SparseRows, TextVectors, Tokens

SMALLEST_BATCH = 8
IN_FLIGHT = 2  # batches on the device while the host prepares and stores other batches


def padded_length(length: int) -> int:
    """Return a length, rounded up to a multiple of 8 up to 128, of 16 up to 256, and of 32 above.

    From 64 tokens on, padding is at most an eighth, and few programs are compiled.
    """
    step = 8 if length <= 128 else 16 if length <= 256 else 32
    return max(-(-length // step) * step, 8)


Padding = Callable[[int], int]  # function that returns the padded length of a text


def plan_batches(
    lengths: np.ndarray, tokens_per_batch: int, multiple: int, padding: Padding = padded_length
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield (rows, padded number of rows, padded length) of batches. The longest texts come first; texts of equal
    length keep their order.

    A batch has about `tokens_per_batch` tokens. Its number of rows is a power of two times `multiple`. It depends only
    on the padded length, except that the last batch may be smaller. A single text, such as a query of a user, is not
    padded to SMALLEST_BATCH, which would take four times as long.

    Args:
        lengths: tokens of each text.
        tokens_per_batch: approximate tokens of a batch.
        multiple: number of devices.
        padding: function that returns the padded length of a text.
    """
    least = SMALLEST_BATCH if len(lengths) > 1 else 1
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        length = padding(int(lengths[order[start]]))
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
class EncodingCounts:
    """Counts of the tokens that an embedder has encoded and of the programs that it has compiled."""

    real_tokens: int = 0
    padded_tokens: int = 0
    programs: int = 0


Programs = dict[tuple[RetrieverModel, Mesh, Side], Program]


@dataclass(frozen=True)
class Embedder:
    """A function that encodes any number of texts with `RetrieverModel.encode` and fixed parameters, and cuts their
    vectors to `RetrieverModel.dimension`.
    """

    retriever: RetrieverModel
    params: Any = field(repr=False)
    mesh: Mesh
    pad_id: int  # id of padding
    max_lengths: Mapping[Side, int]  # largest padded length of queries and of passages, in tokens
    tokens_per_batch: int  # approximate tokens of a batch
    # Programs depend only on model, mesh and side, so embedders with other parameters may share them.
    program_cache: Programs = field(default_factory=dict, repr=False, compare=False)
    counts: EncodingCounts = field(default_factory=EncodingCounts, compare=False)
    # Largest number of words stored for a sparse passage, those with the largest weights; 0: no limit.
    most_words: int = 0
    # Padded length of a text. A server uses fewer lengths, and compiles programs for all of them at its start.
    padding: Padding = padded_length

    def with_params(self, params: Any) -> Embedder:
        """Return a copy with other parameters of the same shapes; no program is compiled again."""
        return replace(self, params=params)

    @property
    def programs(self) -> int:
        """Return the number of programs compiled so far."""
        return self.counts.programs

    @property
    def padding_ratio(self) -> float:
        """Return the ratio of padded tokens to real tokens."""
        return self.counts.padded_tokens / max(self.counts.real_tokens, 1)

    def program(self, side: Side) -> Program:
        """Return the program that encodes a batch to uncut vectors. It is compiled for each shape, and splits rows over
        devices."""
        key = self.retriever.uncut, self.mesh, side
        if key not in self.program_cache:

            def fill_missing(embeddings: Embeddings) -> jax.Array:
                # Fill missing vectors with a copy of vector 0: the maximum over vectors is unchanged. This is a gather
                # and not a `where`, because XLA computes the two expressions of a `where` separately, and their last
                # bits may differ.
                vector_rows = jnp.where(embeddings.mask, jnp.arange(embeddings.mask.shape[1]), 0)
                return jnp.take_along_axis(embeddings.vectors, vector_rows[..., None], axis=1)

            self.program_cache[key] = Program(
                self.sharded_encode(side, fill_missing),
                in_shardings=(shardings(self.mesh, self.params), row_sharding(self.mesh)),
                out_shardings=replicated_sharding(self.mesh),
            )
        return self.program_cache[key]

    def sharded_encode(
        self, side: Side, transform: Callable[[Embeddings], Any] = lambda embeddings: embeddings
    ) -> Callable[[Any, Tokens], Any]:
        """Return a function (params, tokens) -> `transform` of the uncut embeddings, for use in a jitted program.

        Each device encodes its rows, and gathers parameters with `ParameterGatherer`.
        """
        retriever = self.retriever
        gatherer = ParameterGatherer.of(self.mesh, retriever.module.compute.dtype)

        # Without a gradient, nothing is recomputed.
        forward = retriever.with_gatherer(gatherer).with_compute(recompute="none")

        def encode(params: Any, tokens: Tokens) -> Any:
            return transform(forward.encode(gatherer.gather_at_entry(params), tokens, side))

        specs = parameter_specs(self.mesh, self.params)
        return jax.shard_map(encode, mesh=self.mesh, in_specs=(specs, P(ROW_AXES)), out_specs=P(ROW_AXES))

    def __call__(
        self, texts: Ragged, side: Side, progress: bool = False, advance: Callable[[int], object] | None = None
    ) -> TextVectors:
        """Return the vectors of every text, float32, in the order of `texts`.

        Args:
            texts: token ids.
            side: "query" or "passage".
            progress: whether to show a bar.
            advance: called with the number of texts of each finished batch.
        """
        if not len(texts) and self.retriever.sparse:
            return SparseRows.from_dense(np.empty((0, self.retriever.dimension), np.float32))
        if not len(texts):
            return Ragged(np.empty((0, self.retriever.dimension), np.float32), np.zeros(1, np.int64))
        name = "encode queries" if side == "query" else "encode passages"
        with Progress(name, len(texts), progress=progress, cause=COMPILATION) as bar:

            def report(count: int) -> None:
                bar.update(count)
                if advance:
                    advance(count)

            return next(self.encode_stream(iter([texts]), side, report))

    def encode_stream(
        self, parts: Iterator[Ragged], side: Side, advance: Callable[[int], object] = lambda _: None
    ) -> Iterator[TextVectors]:
        """Yield the vectors of each part; a part must not be empty.

        The next part is read, and its first batches are sent to the device, before the last vectors of the current part
        are copied. So the device does not wait between parts.
        """
        flight: deque[tuple[_Vectors | _SparseVectors, np.ndarray, jax.Array]] = deque()
        program = self.program(side)
        for texts in parts:
            vectors = self._room(texts, side)
            for rows, batch in self._batches(program, texts, side):
                flight.append((vectors, rows, batch))
                advance(len(rows))
                if len(flight) > IN_FLIGHT:
                    yield from _receive_batch(flight)
        while flight:
            yield from _receive_batch(flight)

    def _room(self, texts: Ragged, side: Side) -> _Vectors | _SparseVectors:
        if self.retriever.sparse:
            return _SparseVectors(len(texts), self.most_words if side == "passage" else 0)
        counts = self.retriever.vector_counts(texts, side)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        flat = np.empty((int(offsets[-1]), self.retriever.dimension), np.float32)
        return _Vectors(flat, offsets, len(texts), self.retriever.module.normalize)

    def _batches(self, program: Program, texts: Ragged, side: Side) -> Iterator[tuple[np.ndarray, jax.Array]]:
        """Yield (rows of the texts, their vectors [size, V, D] on the device, being copied to the host)."""
        for rows, size, length in plan_batches(
            texts.lengths, self.tokens_per_batch, row_parts(self.mesh), self.padding
        ):
            length = min(length, self.max_lengths[side])
            padding = np.full(size - len(rows), -1)
            tokens = Tokens(*texts.padded(np.concatenate([rows, padding]), length, self.pad_id))
            count_before = program.count
            vectors = program(self.params, shard_whole_batch(self.mesh, tokens))
            vectors.copy_to_host_async()  # the copy starts when the batch is computed, during the next batch
            self.counts.programs += program.count - count_before
            self.counts.real_tokens += int(texts.lengths[rows].sum())
            self.counts.padded_tokens += size * length
            yield rows, vectors


@dataclass
class _Vectors:
    """A buffer for the vectors of a part. Vectors with more dimensions than the buffer are cut."""

    flat: np.ndarray  # [R,D], vectors of all texts
    offsets: np.ndarray  # row of the first vector of each text, then R
    missing_texts: int  # number of texts without vectors yet
    normalize: bool  # whether cut vectors are scaled to length 1

    def store(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        counts = self.offsets[rows + 1] - self.offsets[rows]
        exists = np.arange(vectors.shape[1]) < counts[:, None]
        positions = (self.offsets[rows][:, None] + np.arange(vectors.shape[1]))[exists]
        new_vectors, size = vectors[: len(rows)][exists], self.flat.shape[1]
        self.flat[positions] = (
            new_vectors if size == new_vectors.shape[1] else cut_vectors(new_vectors, size, self.normalize)
        )
        self.missing_texts -= len(rows)

    def complete(self) -> Ragged:
        return Ragged(self.flat, self.offsets)


@dataclass
class _SparseVectors:
    """Buffer for the words and weights of a part; `missing_texts` is the number of texts without words yet."""

    missing_texts: int
    limit: int  # largest number of words of a text; 0: all
    rows: list[np.ndarray] = field(default_factory=list)
    batches: list[SparseRows] = field(default_factory=list)

    def store(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        self.rows.append(rows)
        self.batches.append(SparseRows.from_dense(vectors[: len(rows), 0], self.limit))
        self.missing_texts -= len(rows)

    def complete(self) -> SparseRows:
        return SparseRows.concatenate(self.batches).take(np.argsort(np.concatenate(self.rows)))


def _receive_batch(flight: deque[tuple[_Vectors | _SparseVectors, np.ndarray, jax.Array]]) -> Iterator[TextVectors]:
    """Store the oldest batch in flight, and yield the vectors of its part if it is now complete."""
    vectors, rows, batch = flight.popleft()
    vectors.store(rows, np.asarray(batch))
    if not vectors.missing_texts:
        yield vectors.complete()
