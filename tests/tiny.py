"""A retriever small enough to compile in a second, with random parameters and random batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxret.configs import base
from jaxret.models.encoders.architectures import EncoderConfig
from jaxret.models.encoders.architectures.bert import BertConfig
from jaxret.models.encoders.architectures.decoder import DecoderConfig
from jaxret.models.encoders.architectures.modernbert import ModernBertConfig
from jaxret.models.encoders.architectures.t5 import T5Config
from jaxret.models.heads import make_head
from jaxret.models.retriever_model import RetrieverModel, make_retriever_model
from jaxret.parallel.mesh import make_mesh, shard_batch
from jaxret.runs.embedder import Embedder
from jaxret.training.losses.in_batch import loss_settings
from jaxret.training.optimizers import make_optimizer
from jaxret.training.ranking import BestPassages, Ranker
from jaxret.training.starting_weights import init_state
from jaxret.training.step import make_train_step
from jaxret.training.tasks.retrieval import RetrievalObjective
from jaxret.types import Batch, SparseRows, Tokens
from tests.packed import pack

BERT = BertConfig(
    vocab_size=40, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=16, type_vocab_size=0
)
WITHOUT_DROPOUT = dataclasses.replace(BERT, hidden_dropout=0.0, attention_dropout=0.0)  # compiles in half the time
T5 = T5Config(
    vocab_size=40,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    head_size=6,
    intermediate_size=32,
    buckets=8,
    max_distance=10,
    dropout=0.0,
)
XLM_ROBERTA = dataclasses.replace(WITHOUT_DROPOUT, model_type="xlm-roberta", first_position=2, max_positions=18)
MODERNBERT = ModernBertConfig(
    vocab_size=40,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    intermediate_size=24,
    max_positions=16,
    global_every=2,
    local_window=4,
)
LLAMA = DecoderConfig(
    vocab_size=40,
    hidden_size=16,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_size=8,
    intermediate_size=24,
    max_positions=16,
)
GEMMA = dataclasses.replace(
    LLAMA, hidden_act="gelu_new", local_theta=100.0, window=4, global_every=2, query_scalar=64, model_type="gemma3_text"
)
# The families, as overrides of the base config. Temperatures are high because scores of random vectors are far apart.
DUAL_ENCODER: dict[str, Any] = {"loss.temperature": 4.0}
MLR: dict[str, Any] = {"head.name": "mlr", "head.mlr.chosen": (0, 1, 2), "loss.temperature": 4.0}
SELF_CONTRASTIVE = MLR | {"pooling": "self_contrastive", "loss.local_weight": 0.5, "encoder.tied": True}
SCALAR_MIX = MLR | {"pooling": "scalar_mix"}
ME_BERT: dict[str, Any] = {"head.name": "me_bert", "head.me_bert.count": 3, "loss.temperature": 4.0}
COLBERT: dict[str, Any] = {"head.name": "colbert", "loss.temperature": 4.0}
LATE_INTERACTION = COLBERT | {"head.colbert.late": True, "head.colbert.projection": 6, "normalize": True}
MVR: dict[str, Any] = {
    "head.name": "mvr",
    "head.mvr.count": 3,
    "head.mvr.first_id": 5,
    "loss.temperature": 4.0,
    "loss.local_weight": 0.1,
    "loss.annealing_rate": 0.1,
}
AGGRETRIEVER: dict[str, Any] = {
    "head.name": "aggretriever",
    "head.aggretriever.lexical_dim": 8,
    "head.aggretriever.cls_dim": 4,
    "head.aggretriever.chunk": 2,
    "encoder.tied": True,
}
SPLADE: dict[str, Any] = {
    "head.name": "splade",
    "head.splade.special_ids": (0, 1, 2),
    "head.splade.chunk": 2,
    "encoder.tied": True,
    "loss.sparsity.query": 0.02,
    "loss.sparsity.passage": 0.03,
    "loss.sparsity.query_norm": "l1",
    "loss.sparsity.steps": 4,
}
UNICOIL = SPLADE | {"head.splade.expansion": False}
I3: dict[str, Any] = {
    "head.name": "i3",
    "head.i3.pseudo_length": 4,
    "head.i3.mask_id": 3,
    "data.pseudo_queries": "query",
    "loss.temperature": 4.0,
}


def make_config(overrides: dict[str, Any]) -> ConfigDict:
    """The base config without recomputation, with some keys set ("head.name": "mlr"); unknown keys are errors."""
    config = base.get_config().lock()
    config.encoder.recompute = "none"
    config.update_from_flattened_dict(overrides)
    return config


def make_retriever(overrides: dict[str, Any], encoder: EncoderConfig = BERT) -> RetrieverModel:
    config = make_config(overrides)
    if "mlm_head" in {field.name for field in dataclasses.fields(encoder)}:
        encoder = dataclasses.replace(encoder, mlm_head="mlm_head" in make_head(config, encoder).needs())
    return make_retriever_model(config, encoder)


def make_objective(
    overrides: dict[str, Any], mesh: Any, encoder: EncoderConfig = BERT, chunk_size: int = 0
) -> RetrievalObjective:
    retriever = make_retriever(overrides, encoder)
    settings = loss_settings(make_config(overrides), retriever, epochs_per_batch=1.0)
    return RetrievalObjective(model=retriever, mesh=mesh, chunk_size=chunk_size, settings=settings)


def make_params(retriever: Any, seed: int = 0) -> Any:
    """Random parameters, including biases, layer norms and mixing weights, so that a test fails if one of them is left
    out."""
    shapes = jax.eval_shape(retriever.init, jax.random.key(0))
    generator = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(centre + 0.2 * generator.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def make_tokens(rows: int, length: int, seed: int = 0) -> Tokens:
    """Rows of different lengths, padded on the right; the first is full."""
    generator = np.random.default_rng(seed)
    lengths = np.append(length, generator.integers(2, length + 1, rows - 1))
    mask = np.arange(length)[None] < lengths[:, None]
    ids = generator.integers(1, BERT.vocab_size, (rows, length)) * mask
    return Tokens(jnp.asarray(ids, jnp.int32), jnp.asarray(mask))


def ranking(embedder: Embedder) -> Any:
    """Return the program by which validation ranks a batch of passages for eight queries: (params, tokens) ->
    BestPassages."""
    ranker = Ranker(embedder, depth=3)

    def rank(params: Any, tokens: Tokens) -> BestPassages:
        queries = jnp.ones((8, 1, embedder.retriever.dimension)), jnp.ones((8, 1), bool)
        return ranker._merge(params, tokens, jnp.arange(len(tokens.ids)), *queries, ranker._empty_ranks(8))

    return jax.jit(rank)


def make_batch(queries: int, group: int = 2, seed: int = 0, pseudo_queries: bool = False) -> Batch:
    """Host arrays: every query with its positive and group - 1 hard negatives. The last query's negative is an empty
    slot, and the second query's positive is also relevant to the first. Every third passage has no pseudo-query."""
    passages = queries * group
    ids = np.arange(100, 100 + passages, dtype=np.int32)
    if group > 1:
        ids[-1] = -1
    positives = np.arange(0, passages, group, dtype=np.int32)
    known_positives = np.stack([ids[positives], np.full(queries, -1, np.int32)], axis=1)
    if queries > 1:
        known_positives[0, 1] = ids[positives[1]]
    tokens = jax.tree.map(np.asarray, (make_tokens(queries, 4, seed), make_tokens(passages, 6, seed + 1)))
    labels = None
    if pseudo_queries:
        labels = np.random.default_rng(seed).integers(4, BERT.vocab_size, (passages, 4), np.int32)
        labels[::3] = labels[:, 3] = -1
    return Batch(*tokens, positives, ids, known_positives, labels)  # type: ignore[call-arg]


def filled(batch: Batch, places: int) -> Batch:
    """Append empty places for more queries to a batch, as BatchPlan does."""
    queries = len(batch.positives)

    def more(array: np.ndarray, empty: int) -> np.ndarray:
        rows = len(array) * places // queries - len(array)
        return np.concatenate([array, np.full((rows, *array.shape[1:]), empty, array.dtype)])

    def tokens(side: Tokens) -> Tokens:
        return Tokens(more(side.ids, 0), more(side.mask, False))  # type: ignore[call-arg]

    labels = None if batch.pseudo_queries is None else more(batch.pseudo_queries, -1)
    rest = (more(array, -1) for array in (batch.positives, batch.passage_ids, batch.known_positives))
    return Batch(tokens(batch.queries), tokens(batch.passages), *rest, labels)  # type: ignore[call-arg]


def distance(actual: Any, expected: Any) -> float:
    """The largest difference between two trees, each leaf's relative to that leaf's largest value in `expected` (at
    least one hundredth of the whole tree's: a leaf that is zero except for rounding has no scale)."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)  # type: ignore[operator]
    leaves = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    ]
    floor = 1e-2 * max(float(np.abs(b).max()) for _, b in leaves)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), floor)) for a, b in leaves)


def relative_error(actual: Any, expected: Any) -> float:
    """|actual - expected| / |expected| over all numbers of two trees."""
    pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    squares = [(float(((a - b) ** 2).sum()), float((b**2).sum())) for a, b in wide]
    return (sum(d for d, _ in squares) / sum(e for _, e in squares)) ** 0.5


OPTIMIZER: dict[str, Any] = {
    # The value is large, because Adam would amplify rounding errors where the true gradient is zero (the keys' biases).
    "optimizer.eps": 1e-3,
    "optimizer.learning_rate": 1e-2,
    "optimizer.warmup_fraction": 0.2,
    "optimizer.weight_decay": 0.01,
}


def run_steps(overrides: dict[str, Any], fsdp: int, steps: int = 3, packed: bool = False) -> list[dict[str, float]]:
    """The metrics of the first steps over all devices of all processes; each process contributes its own rows."""
    config, mesh = make_config(overrides | OPTIMIZER), make_mesh(fsdp)
    objective = make_objective(overrides, mesh)
    optimizer, _ = make_optimizer(config.optimizer, total_steps=10)
    pretrained = jax.tree.map(np.array, make_params(make_retriever({"encoder.tied": True}))["encoder"])
    state = init_state(config, mesh, objective.model, pretrained, optimizer)
    step = make_train_step(objective, optimizer, state, jax.random.key(9))
    history = []
    for seed in range(steps):
        batch = make_batch(8, 2, seed)
        if packed:
            batch = pack(batch, mesh.size, objective.model.module.head)
        own = jax.tree.map(lambda x: np.split(x, jax.process_count())[jax.process_index()], batch)
        state, metrics = step(state, shard_batch(mesh, own))
        history.append(jax.tree.map(float, metrics))
    return history


class SparseBlocks:
    """A corpus of blocks of SparseRows in memory, for `InvertedLists`."""

    def __init__(self, blocks: list[SparseRows]) -> None:
        self.blocks = blocks
        self.total_rows, self.dimension = sum(map(len, blocks)), blocks[0].dimension

    def describe(self, row: int) -> str:
        return f"passage row {row}"

    def __iter__(self) -> Iterator[tuple[int, SparseRows]]:
        first = 0
        for block in self.blocks:
            yield first, block
            first += len(block)
