"""Many pairs of texts -> scores on the host: sorted by length, in batches of few static shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxret.data.pairs import Joiner
from jaxret.distributed import ROWS, Program, Reader, by_row, place_rows, replicated, shardings
from jaxret.models.cross_encoder import CrossEncoder
from jaxret.runs.embedder import plan_batches
from jaxret.types import Ragged, Tokens

Done = Callable[[int], object]  # is told how many more are done


def untold(count: int) -> None:
    """Nobody asked."""


@dataclass(frozen=True)
class PairScorer:
    """`CrossEncoder.score` over any number of pairs. `compiled` holds the program, for copies to share."""

    model: CrossEncoder
    params: Any = field(repr=False)
    mesh: Mesh
    joiner: Joiner
    tokens_per_batch: int
    compiled: dict[str, Program] = field(default_factory=dict, repr=False, compare=False)

    @property
    def program(self) -> Program:
        """(params, pairs) -> scores [N], compiled once per shape; each device has pairs of its own."""
        if "score" not in self.compiled:
            read = Reader(self.model.compute.dtype, jnp.float32, at_once=False, split=self.mesh.shape["fsdp"] > 1)
            model, places = self.model.reading(read), shardings(self.mesh, self.params)

            def score(params: Any, pairs: Tokens) -> jax.Array:
                return model.score(read.entry(params), pairs)

            specs = jax.tree.map(lambda place: place.spec, places)
            mapped = jax.shard_map(score, mesh=self.mesh, in_specs=(specs, P(ROWS)), out_specs=P(ROWS))
            self.compiled["score"] = Program(
                mapped, in_shardings=(places, by_row(self.mesh)), out_shardings=replicated(self.mesh)
            )
        return self.compiled["score"]

    def __call__(
        self, queries: Ragged, passages: Ragged, asked: np.ndarray, found: np.ndarray, done: Done = untold
    ) -> np.ndarray:
        """The score of each pair, float32 [N], by rows of token ids of queries and passages (Joiner says how they are
        joined)."""
        scores = np.full(len(asked), np.nan, np.float32)
        lengths = self.joiner.lengths(queries, passages, asked, found)
        for rows, size, length in plan_batches(lengths, self.tokens_per_batch, self.mesh.size):
            places = np.concatenate([rows, np.full(size - len(rows), rows[-1])])  # the last again, where none is
            length = min(length, self.joiner.limit)
            pairs = self.joiner.tokens(queries, passages, asked[places], found[places], length)
            scored = self.program(self.params, place_rows(self.mesh, pairs))
            scores[rows] = np.asarray(scored)[: len(rows)]
            done(len(rows))
        return scores
