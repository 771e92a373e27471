"""Encode texts once, and keep the vector of every layer for every pooling of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxret.models.heads.head import Side
from jaxret.models.retriever_model import RetrieverModel
from jaxret.parallel.mesh import shard_whole_batch
from jaxret.parallel.progress import Progress
from jaxret.runs.embedder import plan_batches
from jaxret.runs.run import Run
from jaxret.types import HiddenStates, Ragged, Tokens

# Pooling of a layer's tokens to one vector -> its description. "cls" and "mean" are also values of head.token.
TOKEN_TITLES = {
    "cls": "first token",
    "mean": "mean",
    "mean_without_first": "mean without the first",
    "last": "last token",
}


@dataclass(frozen=True)
class LayerVectors:
    """Vectors of n texts, for layers 0 (the output of the embeddings) to L and each of `tokens`."""

    vectors: Float[np.ndarray, "layers P n H"]
    tokens: tuple[str, ...]

    def of(self, layer: int, token: str) -> np.ndarray:
        """Return the vectors [n,H] float32 of a layer."""
        return self.vectors[layer, self.tokens.index(token)]


def pool_layers(
    hidden: HiddenStates, mean_mask: Bool[jax.Array, "B T"] | None = None
) -> Float[jax.Array, "layers P B H"]:
    """Return the vector of every layer for each of TOKEN_TITLES. The mean without the first token of a text with one
    token is the vector of this token. Means are over the tokens of `mean_mask`; None: all real tokens."""
    states, mask = hidden.states.astype(jnp.float32), hidden.mask
    mean_mask = mask if mean_mask is None else mask & mean_mask
    later_tokens = mask & (jnp.arange(mask.shape[1]) > 0)
    later_tokens = jnp.where(later_tokens.any(axis=1, keepdims=True), later_tokens, mask)
    last = jnp.maximum(mask.sum(axis=1) - 1, 0)

    def mean(token_mask: jax.Array) -> jax.Array:
        total = jnp.where(token_mask[None, ..., None], states, 0).sum(axis=2)
        return total / jnp.maximum(token_mask.sum(axis=1), 1)[None, :, None]

    ends = jnp.take_along_axis(states, last[None, :, None, None], axis=2)[:, :, 0]
    return jnp.stack([states[:, :, 0], mean(mean_mask), mean(later_tokens & mean_mask), ends], axis=1)


@partial(jax.jit, static_argnames=("model", "side"))
def _pooled_states(params: dict, tokens: Tokens, model: RetrieverModel, side: Side) -> jax.Array:
    mean_mask = tokens.ids >= 0 if model.module.skip_prompt else None  # ids of prompts are marked
    return pool_layers(model.hidden_states(params, tokens, side), mean_mask)


def encode_layers(run: Run, texts: Ragged, side: Side) -> LayerVectors:
    """Return the vectors of texts at every layer, from one pass over the texts.

    An encoder that has no [CLS] token (T5) has no vectors "cls".

    Args:
        run: the run whose encoder is probed; its head and pooling are not used.
        texts: token ids.
        side: whether the texts are queries or passages.
    """
    embedder = run.embedder()
    shapes = run.model.module.config
    result = np.empty((shapes.num_layers + 1, len(TOKEN_TITLES), len(texts), shapes.hidden_size), np.float32)
    with Progress(f"layers of {side}", len(texts)) as bar:
        for rows, size, length in plan_batches(texts.lengths, embedder.tokens_per_batch, embedder.mesh.size):
            padded_rows = np.concatenate([rows, np.full(size - len(rows), -1)])
            tokens = Tokens(*texts.padded(padded_rows, min(length, embedder.max_lengths[side]), embedder.pad_id))
            states = _pooled_states(embedder.params, shard_whole_batch(embedder.mesh, tokens), run.model, side)
            result[:, :, rows] = np.asarray(states)[:, :, : len(rows)]
            bar.update(len(rows))
    token_names = [token for token in TOKEN_TITLES if token not in shapes.lacks]
    places = [list(TOKEN_TITLES).index(token) for token in token_names]
    return LayerVectors(result[:, places], tuple(token_names))
