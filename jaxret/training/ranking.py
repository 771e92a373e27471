"""Retrieve the best passages of every query on the mesh.

Passages are encoded and scored a batch at a time; each device merges the scores of its queries into their best so far.
No passage vector comes to the host, and none stays on a device.
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

from jaxret.models.scoring import late_interaction, similarities
from jaxret.parallel.mesh import (
    Program,
    replicated_sharding,
    row_parts,
    row_sharding,
    shard_whole_batch,
    shardings,
)
from jaxret.parallel.progress import Progress
from jaxret.runs.embedder import Embedder, plan_batches
from jaxret.types import Array, Ragged, TextVectors, Tokens

NO_PASSAGE = np.iinfo(np.int32).max  # the row of an empty rank


@struct.dataclass
class BestPassages:
    """The best passages of each query, best first; of equal scores the lower row first. Empty ranks score -inf."""

    scores: Float[Array, "Q k"]
    rows: Int[Array, "Q k"]


@dataclass(frozen=True)
class Ranker:
    """Ranks passages by float32 scores, `depth` for each query."""

    embedder: Embedder
    depth: int

    def __call__(
        self, params: Any, queries: Ragged, passages: Ragged, progress: bool = False
    ) -> dict[str, list[tuple[str, float]]]:
        """Return the best passages, best first: number of the query -> [(row of the passage, score)], numbers as text.

        Args:
            queries: tokens.
            passages: tokens.
        """
        mesh, limit = self.embedder.mesh, self.embedder.max_lengths["passage"]
        placed_queries = self._place(self.embedder.with_params(params)(queries, "query", progress))
        best = shard_whole_batch(mesh, self._empty_ranks(placed_queries[0].shape[0]))
        with Progress("rank passages", len(passages), shown=progress) as bar:
            for rows, size, length in plan_batches(passages.lengths, self.embedder.tokens_per_batch, row_parts(mesh)):
                # Ascending, so that of equal scores the first is the lower row.
                rows = np.concatenate([np.sort(rows), np.full(size - len(rows), -1)]).astype(np.int32)
                tokens = Tokens(*passages.padded(rows, min(length, limit), self.embedder.pad_id))
                best = self._merge(params, shard_whole_batch(mesh, tokens), rows, *placed_queries, best)
                bar.update(int((rows >= 0).sum()))
        results = jax.jit(lambda x: x, out_shardings=replicated_sharding(mesh))(best)
        scores, rows = np.asarray(results.scores), np.asarray(results.rows)
        masks = [rows[query] != NO_PASSAGE for query in range(len(queries))]
        return {
            str(query): [(str(row), float(score)) for row, score in zip(rows[query][mask], scores[query][mask])]
            for query, mask in enumerate(masks)
        }

    def _place(self, vectors: TextVectors) -> tuple[jax.Array, jax.Array]:
        """Return queries [Q,U,D] and the mask of their vectors [Q,U], split over devices, padded with empty queries."""
        devices = row_parts(self.embedder.mesh)
        rows = np.concatenate([np.arange(len(vectors)), np.full(-len(vectors) % devices, -1)])
        return shard_whole_batch(self.embedder.mesh, vectors.padded(rows, int(vectors.lengths.max())))

    def _empty_ranks(self, queries: int) -> BestPassages:
        shape = queries, self.depth
        return BestPassages(np.full(shape, -np.inf, np.float32), np.full(shape, NO_PASSAGE, np.int32))

    @cached_property
    def _merge(self) -> Program:
        """The program (params, tokens, their rows, queries, query mask, best) -> best; compiled once per shape."""
        late, mesh = self.embedder.retriever.late_interaction, self.embedder.mesh
        encode = self.embedder.sharded_encode("passage")

        def merge(
            params: Any, tokens: Tokens, rows: jax.Array, queries: jax.Array, exist: jax.Array, best: BestPassages
        ) -> BestPassages:
            passages = encode(params, tokens)
            vectors, mask = jax.lax.with_sharding_constraint(
                (passages.vectors, passages.mask), replicated_sharding(mesh)
            )
            if late:
                scores = late_interaction(queries, exist, vectors, mask)
            else:
                scores = jnp.max(similarities(queries[:, 0], vectors, mask), axis=-1)
            scores = jax.lax.with_sharding_constraint(scores, row_sharding(mesh))  # each device its own queries
            scores = jnp.where(rows >= 0, scores, -jnp.inf)
            top, columns = jax.lax.top_k(scores, min(self.depth, scores.shape[1]))
            top_rows = jnp.where(top > -jnp.inf, rows[columns], NO_PASSAGE)
            both = -jnp.concatenate([best.scores, top], axis=1), jnp.concatenate([best.rows, top_rows], axis=1)
            negative_scores, merged_rows = jax.lax.sort(both, dimension=1, num_keys=2)
            return BestPassages(-negative_scores[:, : self.depth], merged_rows[:, : self.depth])

        rows, whole = row_sharding(mesh), replicated_sharding(mesh)
        in_shardings = (shardings(mesh, self.embedder.params), rows, whole, rows, rows, rows)
        return Program(merge, in_shardings=in_shardings, out_shardings=rows, donate_argnums=5)
