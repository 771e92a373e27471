"""The best passages of every query, found on the mesh.

Passages are encoded and scored a batch at a time: what is kept of a corpus is the best so far of each query, on its
device. No vector of a passage comes to the host, and none stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Float, Int
from tqdm import tqdm

from jaxret.distributed import Program, by_row, place_rows, replicated, shardings
from jaxret.runs.embedder import Embedder, plan_batches
from jaxret.scoring import late_interaction, similarities
from jaxret.types import Array, Ragged, Tokens

NOBODY = np.iinfo(np.int32).max  # the row of a place that no passage has taken


@struct.dataclass
class Best:
    """Of each query, best first; of equal scores the lower row first. A place that is not taken scores -inf."""

    scores: Float[Array, "Q k"]
    rows: Int[Array, "Q k"]


@dataclass(frozen=True)
class Ranker:
    """Queries and passages -> the `depth` best passages of each query, by float32 scores."""

    embedder: Embedder
    depth: int

    def __call__(
        self, params: Any, queries: Ragged, passages: Ragged, progress: bool = False
    ) -> dict[str, list[tuple[str, float]]]:
        """Number of the query -> [(row of the passage, score)], as text, best first."""
        mesh, limit = self.embedder.mesh, self.embedder.max_lengths["passage"]
        asked = self._place(self.embedder.with_params(params)(queries, "query", progress))
        best = place_rows(mesh, self._nothing(asked[0].shape[0]))
        with tqdm(total=len(passages), desc="rank passage", unit="text", disable=not progress, delay=1) as bar:
            for rows, size, length in plan_batches(passages.lengths, self.embedder.tokens_per_batch, mesh.size):
                # Ascending, so that of equal scores the first is the lower row.
                rows = np.concatenate([np.sort(rows), np.full(size - len(rows), -1)]).astype(np.int32)
                tokens = Tokens(*passages.padded(rows, min(length, limit), self.embedder.pad_id))
                best = self._merge(params, place_rows(mesh, tokens), rows, *asked, best)
                bar.update(int((rows >= 0).sum()))
        found = jax.jit(lambda x: x, out_shardings=replicated(mesh))(best)
        scores, rows = np.asarray(found.scores), np.asarray(found.rows)
        taken = [rows[query] != NOBODY for query in range(len(queries))]
        return {
            str(query): [(str(row), float(score)) for row, score in zip(rows[query][there], scores[query][there])]
            for query, there in enumerate(taken)
        }

    def _place(self, vectors: Ragged) -> tuple[jax.Array, jax.Array]:
        """Queries [Q,U,D] and which of their vectors exist [Q,U], split over devices; empty ones fill up."""
        devices = self.embedder.mesh.size
        rows = np.concatenate([np.arange(len(vectors)), np.full(-len(vectors) % devices, -1)])
        return place_rows(self.embedder.mesh, vectors.padded(rows, int(vectors.lengths.max())))

    def _nothing(self, queries: int) -> Best:
        shape = queries, self.depth
        return Best(np.full(shape, -np.inf, np.float32), np.full(shape, NOBODY, np.int32))

    @cached_property
    def _merge(self) -> Program:
        """(params, tokens, their rows, queries, which exist, best) -> best; compiled once per shape."""
        late, mesh = self.embedder.retriever.late_interaction, self.embedder.mesh
        encode = self.embedder.own("passage")

        def merge(
            params: Any, tokens: Tokens, rows: jax.Array, queries: jax.Array, exist: jax.Array, best: Best
        ) -> Best:
            passages = encode(params, tokens)
            vectors, mask = jax.lax.with_sharding_constraint((passages.vectors, passages.mask), replicated(mesh))
            if late:
                scores = late_interaction(queries, exist, vectors, mask)
            else:
                scores = jnp.max(similarities(queries[:, 0], vectors, mask), axis=-1)
            scores = jax.lax.with_sharding_constraint(scores, by_row(mesh))  # each device its own queries
            scores = jnp.where(rows >= 0, scores, -jnp.inf)
            top, places = jax.lax.top_k(scores, min(self.depth, scores.shape[1]))
            there = jnp.where(top > -jnp.inf, rows[places], NOBODY)
            both = -jnp.concatenate([best.scores, top], axis=1), jnp.concatenate([best.rows, there], axis=1)
            negated, found = jax.lax.sort(both, dimension=1, num_keys=2)
            return Best(-negated[:, : self.depth], found[:, : self.depth])

        own, whole = by_row(mesh), replicated(mesh)
        places = (shardings(mesh, self.embedder.params), own, whole, own, own, own)
        return Program(merge, in_shardings=places, out_shardings=own, donate_argnums=5)
