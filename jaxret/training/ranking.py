"""Retrieve the best passages of every query on the mesh.

Passages are encoded and scored batch by batch. Each device merges the scores of its queries into the best passages so
far. Passage vectors are not sent to the host, and are not kept on a device.
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
from jaxret.parallel.mesh import Program, replicated_sharding, row_parts, row_sharding, shard_whole_batch, shardings
from jaxret.parallel.progress import Progress
from jaxret.runs.embedder import Embedder, plan_batches
from jaxret.training.diagnosis import NotFiniteError
from jaxret.types import Array, Ragged, TextVectors, Tokens

NO_PASSAGE = np.iinfo(np.int32).max  # row number of an empty rank


@struct.dataclass
class BestPassages:
    """The best passages of each query, best first. If scores are equal, the lower row is first. Empty ranks have the
    score -inf."""

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
        """Return number of a query -> [(row of a passage, score)], best first, with numbers and rows as text.

        Args:
            params: parameters of the model.
            queries: tokens of the queries.
            passages: tokens of the passages.
            progress: whether progress is printed.

        Raises NotFiniteError for a score that is NaN or infinite.
        """
        mesh, limit = self.embedder.mesh, self.embedder.max_lengths["passage"]
        placed_queries = self._place(self.embedder.with_params(params)(queries, "query", progress))
        best = shard_whole_batch(mesh, self._empty_ranks(placed_queries[0].shape[0]))
        with Progress("rank passages", len(passages), progress=progress) as bar:
            for rows, size, length in plan_batches(passages.lengths, self.embedder.tokens_per_batch, row_parts(mesh)):
                # Rows ascend, so that the lower row is first if scores are equal.
                rows = np.concatenate([np.sort(rows), np.full(size - len(rows), -1)]).astype(np.int32)
                tokens = Tokens(*passages.padded(rows, min(length, limit), self.embedder.pad_id))
                best = self._merge(params, shard_whole_batch(mesh, tokens), rows, *placed_queries, best)
                bar.update(int((rows >= 0).sum()))
        results = jax.jit(lambda x: x, out_shardings=replicated_sharding(mesh))(best)
        scores, rows = np.asarray(results.scores), np.asarray(results.rows)
        if bad := rows[scores == np.inf].tolist():
            raise NotFiniteError(f"the score of passage {bad[0]} of the validation is not finite for a dev query")
        masks = [rows[query] != NO_PASSAGE for query in range(len(queries))]
        return {
            str(query): [(str(row), float(score)) for row, score in zip(rows[query][mask], scores[query][mask])]
            for query, mask in enumerate(masks)
        }

    def _place(self, vectors: TextVectors) -> tuple[jax.Array, jax.Array]:
        """Return the vectors of queries [Q,U,D] and their mask [Q,U], padded with empty queries and split over
        devices."""
        devices = row_parts(self.embedder.mesh)
        rows = np.concatenate([np.arange(len(vectors)), np.full(-len(vectors) % devices, -1)])
        return shard_whole_batch(self.embedder.mesh, vectors.padded(rows, int(vectors.lengths.max())))

    def _empty_ranks(self, queries: int) -> BestPassages:
        shape = queries, self.depth
        return BestPassages(np.full(shape, -np.inf, np.float32), np.full(shape, NO_PASSAGE, np.int32))

    @cached_property
    def _merge(self) -> Program:
        """The program (params, tokens, rows of the passages, queries, query mask, best) -> best, one per shape."""
        is_late_interaction, mesh = self.embedder.retriever.late_interaction, self.embedder.mesh
        encode = self.embedder.sharded_encode("passage")

        def merge(
            params: Any, tokens: Tokens, rows: jax.Array, queries: jax.Array, exist: jax.Array, best: BestPassages
        ) -> BestPassages:
            passages = encode(params, tokens)
            vectors, mask = jax.lax.with_sharding_constraint(
                (passages.vectors, passages.mask), replicated_sharding(mesh)
            )
            if is_late_interaction:
                scores = late_interaction(queries, exist, vectors, mask)
            else:
                scores = jnp.max(similarities(queries[:, 0], vectors, mask), axis=-1)
            scores = jax.lax.with_sharding_constraint(scores, row_sharding(mesh))  # each device has its own queries
            # A score that is not finite is ranked first, where `__call__` finds it.
            scores = jnp.where(rows >= 0, jnp.where(jnp.isfinite(scores), scores, jnp.inf), -jnp.inf)
            top, columns = jax.lax.top_k(scores, min(self.depth, scores.shape[1]))
            top_rows = jnp.where(top > -jnp.inf, rows[columns], NO_PASSAGE)
            columns_by_rank = (
                -jnp.concatenate([best.scores, top], axis=1),
                jnp.concatenate([best.rows, top_rows], axis=1),
            )
            negative_scores, merged_rows = jax.lax.sort(columns_by_rank, dimension=1, num_keys=2)
            return BestPassages(-negative_scores[:, : self.depth], merged_rows[:, : self.depth])

        rows, all_devices = row_sharding(mesh), replicated_sharding(mesh)
        in_shardings = (shardings(mesh, self.embedder.params), rows, all_devices, rows, rows, rows)
        return Program(merge, in_shardings=in_shardings, out_shardings=rows, donate_argnums=5)
