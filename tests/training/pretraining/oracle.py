"""BERT and the heads of pre-training in plain numpy float64, one text at a time, written from the papers' formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import erf, logsumexp

from jaxret.models.encoders.architectures.bert import BertConfig
from jaxret.models.pretraining import PretrainingMethod
from jaxret.types import MaskedTexts

Tree = dict[str, Any]


def norm(x: np.ndarray, p: Tree, config: BertConfig) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.layer_norm_eps) * p["scale"] + p["bias"]


def dense(x: np.ndarray, p: Tree) -> np.ndarray:
    return x @ p["kernel"] + p["bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def layer(queries: np.ndarray, memory: np.ndarray, seen: np.ndarray, p: Tree, config: BertConfig) -> np.ndarray:
    """[T,H], [T,H], [T,T] -> [T,H]; in self-attention, `queries` is `memory`."""
    size = config.hidden_size // config.num_heads
    q, k, v = dense(queries, p["attention"]["query"]), *(dense(memory, p["attention"][n]) for n in ("key", "value"))
    mixed = []
    for head in range(config.num_heads):
        part = slice(head * size, (head + 1) * size)
        scores = np.where(seen, q[:, part] @ k[:, part].T / np.sqrt(size), -np.inf)
        mixed.append(np.exp(scores - logsumexp(scores, axis=-1, keepdims=True)) @ v[:, part])
    hidden = norm(
        queries + dense(np.concatenate(mixed, axis=-1), p["attention"]["output"]), p["attention_norm"], config
    )
    return norm(hidden + dense(gelu(dense(hidden, p["intermediate"])), p["output"]), p["output_norm"], config)


def row(tree: Tree, index: int) -> Tree:
    return {name: row(part, index) if isinstance(part, dict) else part[index] for name, part in tree.items()}


def stack(x: np.ndarray, layers: Tree, count: int, config: BertConfig) -> list[np.ndarray]:
    states, everything = [x], np.ones((len(x), len(x)), bool)
    for index in range(count):
        states.append(layer(states[-1], states[-1], everything, row(layers, index), config))
    return states


def embed(ids: np.ndarray, p: Tree, config: BertConfig) -> np.ndarray:
    rows = p["word"]["embedding"][ids] + p["position"]["embedding"][: len(ids)]
    return norm(rows, p["norm"], config)


def lost(states: np.ndarray, labels: np.ndarray, encoder: Tree, config: BertConfig) -> tuple[float, int]:
    """(sum, count) of -log p(label); a label of -1 is skipped."""
    head = encoder["mlm_head"]
    transformed = norm(gelu(dense(states, head["dense"])), head["norm"], config)
    logits = transformed @ encoder["embeddings"]["word"]["embedding"].T + head["bias"]
    labelled = labels >= 0
    picked = (logits - logsumexp(logits, axis=-1, keepdims=True))[np.arange(len(labels)), labels]
    return float(-picked[labelled].sum()), int(labelled.sum())


def losses(params: Tree, batch: MaskedTexts, config: BertConfig, method: PretrainingMethod) -> dict[str, float]:
    """Compute every term of the loss, and their sum as "loss"."""
    params = _doubled(params)
    encoder, sums = params["encoder"], dict[str, list[tuple[float, int]]]()
    vectors = []
    for text in range(batch.size):
        length = int(batch.tokens.mask[text].sum())
        if not length:
            continue
        embedded = embed(batch.tokens.ids[text, :length], encoder["embeddings"], config)
        states = stack(embedded, encoder["layers"], config.num_layers, config)
        places, labels = batch.positions[text], batch.labels[text]
        vectors.append(states[-1][0])
        if method.late or not method.condenses:
            sums.setdefault("mlm", []).append(lost(states[-1][places], labels, encoder, config))
        if method.condenses:
            mixed = np.concatenate([states[-1][:1], states[method.skip_from][1:]])
            read = stack(mixed, params["head"]["layers"], method.layers, config)[-1]
            sums.setdefault("head", []).append(lost(read[places], labels, encoder, config))
        if method.decodes:
            assert batch.original_ids is not None
            assert batch.attention_mask is not None
            assert batch.targets is not None
            queries = states[-1][:1] + encoder["embeddings"]["position"]["embedding"][:length]
            memory = np.concatenate(
                [states[-1][:1], embed(batch.original_ids[text, :length], encoder["embeddings"], config)[1:]]
            )
            attention_mask = batch.attention_mask[text, :length, :length]
            read = layer(queries, memory, attention_mask, row(params["head"]["layers"], 0), config)
            sums.setdefault("decoder", []).append(lost(read, batch.targets[text, :length], encoder, config))
    terms = {name: sum(a for a, _ in pairs) / sum(n for _, n in pairs) for name, pairs in sums.items()}
    terms["loss"] = sum(terms.values())
    if method.in_pairs:
        terms["contrast"] = contrast(np.array(vectors))
        terms["loss"] += method.contrast * terms["contrast"]
    return terms


def contrast(vectors: np.ndarray) -> float:
    scores = vectors @ vectors.T
    np.fill_diagonal(scores, -np.inf)
    partner = np.arange(len(vectors)) ^ 1
    return float(np.mean(logsumexp(scores, axis=1) - scores[np.arange(len(vectors)), partner]))


def slope(f: Callable[[Tree], float], params: Tree, direction: Tree, step: float = 1e-5) -> float:
    """The derivative of f along a direction, by central differences."""

    def moved(by: float) -> Tree:
        return _map(lambda a, b: np.asarray(a, np.float64) + by * b, params, direction)

    return (f(moved(step)) - f(moved(-step))) / (2 * step)


def _map(f: Callable[..., Any], *trees: Tree) -> Tree:
    return {
        name: _map(f, *(tree[name] for tree in trees)) if isinstance(part, dict) else f(*(tree[name] for tree in trees))
        for name, part in trees[0].items()
    }


def _doubled(tree: Tree) -> Tree:
    return _map(lambda x: np.asarray(x, np.float64), tree)
