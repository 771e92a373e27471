"""Score many pairs of texts, sorted by length, in batches of few static shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxret.data.tokens.pairs import PairJoiner
from jaxret.models.cross_encoder import CrossEncoderModel
from jaxret.parallel.mesh import (
    ROW_AXES,
    ParameterGatherer,
    Program,
    parameter_specs,
    replicated_sharding,
    row_sharding,
    shard_whole_batch,
    shardings,
)
from jaxret.runs.embedder import Padding, padded_length, plan_batches
from jaxret.types import Ragged, Tokens

OnProgress = Callable[[int], object]  # called with the size of each finished batch


def ignore_progress(count: int) -> None:
    """Do nothing: the default of `on_progress`."""


@dataclass(frozen=True)
class PairScorer:
    """A function that scores any number of pairs with `CrossEncoderModel.score`."""

    model: CrossEncoderModel
    params: Any = field(repr=False)  # parameters on the mesh
    mesh: Mesh
    joiner: PairJoiner  # makes the tokens of a pair
    tokens_per_batch: int  # largest number of padded tokens of a batch
    # the compiled program, which copies share
    program_cache: dict[str, Program] = field(default_factory=dict, repr=False, compare=False)
    padding: Padding = padded_length  # function that returns the padded length of a text

    @property
    def program(self) -> Program:
        """The program (params, pairs) -> scores [N], compiled once per shape; rows are split over devices."""
        if "score" not in self.program_cache:
            gatherer = ParameterGatherer.of(self.mesh, self.model.compute.dtype)
            model = self.model.with_gatherer(gatherer)

            def score(params: Any, pairs: Tokens) -> jax.Array:
                return model.score(gatherer.gather_at_entry(params), pairs)

            specs = parameter_specs(self.mesh, self.params)
            sharded_score = jax.shard_map(score, mesh=self.mesh, in_specs=(specs, P(ROW_AXES)), out_specs=P(ROW_AXES))
            self.program_cache["score"] = Program(
                sharded_score,
                in_shardings=(shardings(self.mesh, self.params), row_sharding(self.mesh)),
                out_shardings=replicated_sharding(self.mesh),
            )
        return self.program_cache["score"]

    def __call__(
        self,
        queries: Ragged,
        passages: Ragged,
        query_rows: np.ndarray,
        passage_rows: np.ndarray,
        on_progress: OnProgress = ignore_progress,
    ) -> np.ndarray:
        """Return the score of each pair, float32 [N].

        Args:
            queries: token ids of queries.
            passages: token ids of passages.
            query_rows: row of each pair's query [N].
            passage_rows: row of each pair's passage [N].
            on_progress: called with the size of each finished batch.
        """
        scores = np.full(len(query_rows), np.nan, np.float32)
        lengths = self.joiner.lengths(queries, passages, query_rows, passage_rows)
        for rows, size, length in plan_batches(lengths, self.tokens_per_batch, self.mesh.size, self.padding):
            padded_rows = np.concatenate([rows, np.full(size - len(rows), rows[-1])])  # copies of the last pair
            length = min(length, self.joiner.limit)
            pairs = self.joiner.tokens(queries, passages, query_rows[padded_rows], passage_rows[padded_rows], length)
            batch_scores = self.program(self.params, shard_whole_batch(self.mesh, pairs))
            scores[rows] = np.asarray(batch_scores)[: len(rows)]
            on_progress(len(rows))
        return scores
