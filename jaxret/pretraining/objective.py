"""The losses of pre-training, over all texts of a batch, whichever device has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxret.distributed import by_row
from jaxret.models.encoders.layers import MASKED, product
from jaxret.models.model import Params
from jaxret.models.pretraining import Learned, Method, Pretrainer
from jaxret.training.grad_cache import encode_in_chunks
from jaxret.training.losses import LossTerms
from jaxret.training.objective import Objective, numbered
from jaxret.types import HiddenStates, Masked


@dataclass(frozen=True)
class PretrainingObjective(Objective):
    """Tokens recovered, means over all that are hidden in the batch, and under coCondenser spans told apart."""

    @property
    def pretrainer(self) -> Pretrainer:
        assert isinstance(self.model, Pretrainer)
        return self.model

    def __call__(
        self, params: Params, batch: Masked, key: jax.Array, step: jax.Array | int | None = None, train: bool = True
    ) -> LossTerms:
        chunks = self.chunks(batch.size)

        def own(model: Pretrainer, params: Params, batch: Masked, key: jax.Array) -> Learned:
            def learn(part: Masked) -> Learned:
                return model.learn(params, part, train, key)

            batch = replace(batch, tokens=numbered(batch.tokens))
            return encode_in_chunks(learn, (batch,), chunks)

        learned = self.on_devices(own, params, batch, key, often=chunks > 1)
        vectors = jax.lax.with_sharding_constraint(learned.vectors, by_row(self.mesh))
        there = jnp.any(batch.tokens.mask, axis=1)
        return total(replace(learned, vectors=vectors), there, self.pretrainer.module.method)

    def hidden_states(self, params: Params, batch: Masked) -> Iterator[tuple[str, HiddenStates]]:
        yield "encoder", jax.jit(self.pretrainer.hidden_states)(params, batch.tokens)


def total(learned: Learned, there: Bool[jax.Array, " B"], method: Method) -> LossTerms:
    """The sum of the losses of all texts. there: which rows are texts."""
    terms = {}
    for name, pairs in learned.losses.items():
        lost, count = jnp.sum(pairs, axis=0)
        terms[name] = lost / jnp.maximum(count, 1)
    loss = sum(terms.values(), jnp.zeros(()))
    if not method.pairs:
        return LossTerms(loss, terms)
    terms["contrast"], accuracy = contrast(learned.vectors, there)
    return LossTerms(loss + method.contrast * terms["contrast"], terms, accuracy)


def contrast(
    vectors: Float[jax.Array, "B H"], there: Bool[jax.Array, " B"]
) -> tuple[Float[jax.Array, ""], Float[jax.Array, ""]]:
    """mean_i -log softmax_j(v_i·v_j)[partner of i] over all others, and how often the partner is first. Rows 2k and
    2k + 1 are spans of one document. No temperature, no normalisation. [Gao & Callan 2022, eq. 5]"""
    rows = jnp.arange(len(vectors))
    scores = product("ah,bh->ab", vectors, vectors, jnp.float32, jnp.float32)
    scores = jnp.where((rows[:, None] != rows) & there, scores, MASKED)
    partner = jnp.minimum(rows ^ 1, len(rows) - 1)  # of an odd number of rows the last is empty
    own = jnp.take_along_axis(scores, partner[:, None], axis=1)[:, 0]
    count = jnp.maximum(jnp.sum(there), 1)
    lost = jnp.sum(jnp.where(there, jax.nn.logsumexp(scores, axis=1) - own, 0.0)) / count
    return lost, jnp.sum(there & (own >= jnp.max(scores, axis=1))) / count
