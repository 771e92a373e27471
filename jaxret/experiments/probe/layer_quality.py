"""Quality of retrieval by the vectors of single layers, of a layer with the last one, and of a mixture of layers.

A query is compared with all passages. With a single layer, queries and passages have the vectors of this layer, like an
encoder that ends there. If a passage has several layers, the query has the last one, as in MLR (section 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import jax
import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize

from jaxret.experiments.probe.layer_vectors import LayerVectors

NDCG, RECALL = 10, 100  # cut-offs of nDCG and R
BYTES = 4  # bytes of a dimension of a stored vector, float32
START = 20.0  # initial weight of the last layer, for scores of at most 1; this is a temperature of .05


@dataclass(frozen=True)
class Choice:
    """A way to make vectors of a passage from the layers of an encoder."""

    layers: tuple[int, ...]  # layers of a passage, ascending; a query has the last one of them
    token: str  # one of TOKEN_TITLES
    normalize: bool  # whether vectors are scaled to length 1
    pooling: str = "none"  # score of several layers: "none" (maximum), "average" or "mix" (weighted sum)
    weights: tuple[float, ...] = ()  # weight of each layer if `pooling` is "mix"

    @property
    def vectors(self) -> int:
        """Number of vectors that are stored for a passage."""
        return len(self.layers) if self.pooling == "none" else 1


@dataclass(frozen=True)
class Quality:
    """Measures of a choice for every query."""

    choice: Choice
    ndcg: np.ndarray  # nDCG@10 [Q]
    recall: np.ndarray  # R@100 [Q]

    def mean(self, queries: np.ndarray | slice = slice(None)) -> float:
        """Return the mean nDCG of some queries."""
        return float(self.ndcg[queries].mean())


@dataclass(frozen=True)
class ProbeData:
    """Vectors of queries and passages, and the relevance of each pair."""

    queries: LayerVectors
    passages: LayerVectors
    relevance: Int[np.ndarray, "Q N"]  # 0: not relevant, or not judged

    @property
    def last(self) -> int:
        """The number of the last layer."""
        return len(self.queries.vectors) - 1

    def stored_bytes(self, choice: Choice) -> int:
        """Return the bytes of a passage's vectors on disk, in float32; float16 takes half."""
        return choice.vectors * self.passages.vectors.shape[-1] * BYTES

    def side(self, side: str, layer: int, choice: Choice) -> np.ndarray:
        """Return the vectors [n,H] of "query" or "passage" at a layer, of length 1 if the choice normalizes."""
        vectors = (self.queries if side == "query" else self.passages).of(layer, choice.token)
        return unit(vectors) if choice.normalize else vectors

    def scores(self, choice: Choice) -> Float[np.ndarray, "Q N"]:
        """Return the score of every query with every passage."""
        query = self.side("query", choice.layers[-1], choice)
        if choice.pooling == "none":
            layers = (query @ self.side("passage", layer, choice).T for layer in choice.layers)
            result = next(layers)
            for scores in layers:
                np.maximum(result, scores, out=result)
            return result
        weights = choice.weights or [1 / len(choice.layers)] * len(choice.layers)
        raw = choice.pooling == "average"  # as in training, averages are scaled after pooling; a mixture before it
        parts = (self.passages.of(x, choice.token) if raw else self.side("passage", x, choice) for x in choice.layers)
        terms = (np.float32(weight) * part for weight, part in zip(weights, parts, strict=True))
        mixture: np.ndarray = reduce(np.add, terms)
        return query @ (unit(mixture) if raw and choice.normalize else mixture).T

    def quality(self, choice: Choice) -> Quality:
        """Return nDCG@10 and R@100 of a choice."""
        return Quality(choice, *rank_measures(self.scores(choice), self.relevance))


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors [n,H] scaled to length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def rank_measures(scores: np.ndarray, relevance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return nDCG@10 and R@100 of every query, float64 [Q]. If scores are equal, the passage with the lower index is
    first. `scores` and `relevance` are [Q,N]; every row of `relevance` has a relevant passage."""
    depth = min(RECALL, scores.shape[1])
    _, rows = jax.lax.top_k(scores, depth)
    gains = np.take_along_axis(relevance, np.asarray(rows), axis=1)
    ideal = -np.sort(-relevance, axis=1)[:, :NDCG]
    discounts = 1 / np.log2(np.arange(2, NDCG + 2))
    top = gains[:, :NDCG]
    ndcg = (top @ discounts[: top.shape[1]]) / (ideal @ discounts[: ideal.shape[1]])
    return ndcg, (gains > 0).sum(axis=1) / (relevance > 0).sum(axis=1)


def single_layer_choices(layers: int, tokens: tuple[str, ...]) -> Iterator[Choice]:
    """Yield every single layer from 0 to `layers`, with every token, as cosines and as dot products."""
    for normalize, token, layer in itertools.product((True, False), tokens, range(layers + 1)):
        yield Choice((layer,), token, normalize)


def layer_pair_choices(layers: int, tokens: tuple[str, ...]) -> Iterator[Choice]:
    """Yield every layer, 0 included, together with the last one, by maximum and by average."""
    axes = (True, False), tokens, ("none", "average"), range(layers)
    for normalize, token, pooling, layer in itertools.product(*axes):
        yield Choice((layer, layers), token, normalize, pooling)


def fit_weights(data: ProbeData, token: str, normalize: bool, queries: np.ndarray) -> Choice:
    """Return the mixture of layers 1 to L with fitted weights.

    The weights are not negative. They minimize the mean cross-entropy of the relevant passages among all passages, over
    the queries that are fitted.

    Args:
        data: vectors and relevance.
        token: one of TOKEN_TITLES.
        normalize: whether vectors are scaled to length 1.
        queries: rows of the queries to fit on.
    """
    layers = tuple(range(1, data.last + 1))
    single = Choice((data.last,), token, normalize)
    query = data.side("query", data.last, single)[queries]
    scores = np.stack([query @ data.side("passage", layer, single).T for layer in layers])  # [L,Q,N]
    scores /= np.abs(scores).max()
    target = (data.relevance[queries] > 0).astype(np.float32)
    target /= target.sum(axis=1, keepdims=True)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        logits = np.einsum("l,lqn->qn", weights.astype(np.float32), scores)
        logits -= logits.max(axis=1, keepdims=True)
        exponentials = np.exp(logits)
        total = exponentials.sum(axis=1, keepdims=True)
        value = float((np.log(total[:, 0]) - (target * logits).sum(axis=1)).mean())
        gradient = np.einsum("lqn,qn->l", scores, exponentials / total - target) / len(queries)
        return value, gradient.astype(np.float64)

    start = np.zeros(len(layers))
    start[-1] = START
    solution = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(0, None)] * len(layers)).x
    weights = solution / solution.sum() if solution.sum() else np.eye(len(layers))[-1]
    return Choice(layers, token, normalize, "mix", tuple(float(weight) for weight in weights))
