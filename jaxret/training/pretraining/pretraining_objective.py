"""The losses of pre-training, over the texts of all devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxret.models.encoders.layers import MASKED_LOGIT, product
from jaxret.models.pretraining import PretrainingMethod, PretrainingModel, PretrainingOutput
from jaxret.parallel.mesh import row_sharding
from jaxret.training.losses.grad_cache import encode_in_chunks
from jaxret.training.losses.in_batch import LossTerms
from jaxret.training.objective import Objective, number_rows
from jaxret.types import HiddenStates, MaskedTexts, Params


@dataclass(frozen=True, kw_only=True)
class PretrainingObjective(Objective[PretrainingModel, MaskedTexts]):
    """The loss of pre-training: the mean loss of the hidden tokens of a batch and, with coCondenser, the contrastive
    loss of spans."""

    def __call__(
        self,
        params: Params,
        batch: MaskedTexts,
        key: jax.Array,
        batch_number: jax.Array | int | None = None,
        train: bool = True,
    ) -> LossTerms:
        chunks = self.chunks(batch.size)

        def learn_rows(
            model: PretrainingModel, params: Params, batch: MaskedTexts, key: jax.Array
        ) -> PretrainingOutput:
            def learn(chunk: MaskedTexts) -> PretrainingOutput:
                return model.learn(params, chunk, train, key)

            batch = replace(batch, tokens=number_rows(batch.tokens))
            return encode_in_chunks(learn, (batch,), chunks)

        output = self.on_devices(learn_rows, params, batch, key, repeated=chunks > 1)
        vectors = jax.lax.with_sharding_constraint(output.vectors, row_sharding(self.mesh))
        exists = jnp.any(batch.tokens.mask, axis=1)
        return pretraining_loss(replace(output, vectors=vectors), exists, self.model.module.method)

    def hidden_states(self, params: Params, batch: MaskedTexts) -> Iterator[tuple[str, HiddenStates]]:
        yield "encoder", jax.jit(self.model.hidden_states)(params, batch.tokens)


def pretraining_loss(output: PretrainingOutput, exists: Bool[jax.Array, " B"], method: PretrainingMethod) -> LossTerms:
    """Return the loss of a batch and its terms. `exists` is False for empty rows."""
    terms = {}
    for name, pairs in output.losses.items():
        total, count = jnp.sum(pairs, axis=0)
        terms[name] = total / jnp.maximum(count, 1)
    loss = sum(terms.values(), jnp.zeros(()))
    if not method.in_pairs:
        return LossTerms(loss, terms)
    terms["contrast"], accuracy = span_contrast(output.vectors, exists)
    return LossTerms(loss + method.contrast * terms["contrast"], terms, accuracy)


def span_contrast(
    vectors: Float[jax.Array, "B H"], exists: Bool[jax.Array, " B"]
) -> tuple[Float[jax.Array, ""], Float[jax.Array, ""]]:
    """Return mean_i -log softmax_j(v_i·v_j)[partner of i] over all other spans j, and the fraction of spans whose
    partner has the best score. Rows 2k and 2k + 1 are partners: spans of one document. There is no temperature and no
    normalization (Gao & Callan 2022, eq. 5)."""
    rows = jnp.arange(len(vectors))
    scores = product("ah,bh->ab", vectors, vectors, jnp.float32, jnp.float32)
    scores = jnp.where((rows[:, None] != rows) & exists, scores, MASKED_LOGIT)
    partner = jnp.minimum(rows ^ 1, len(rows) - 1)  # if the number of rows is odd, the last row is empty
    partner_scores = jnp.take_along_axis(scores, partner[:, None], axis=1)[:, 0]
    count = jnp.maximum(jnp.sum(exists), 1)
    loss = jnp.sum(jnp.where(exists, jax.nn.logsumexp(scores, axis=1) - partner_scores, 0.0)) / count
    return loss, jnp.sum(exists & (partner_scores >= jnp.max(scores, axis=1))) / count
