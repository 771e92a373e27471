"""Every family x pooling x encoder x tied or not: two training steps, and ten passages encoded and searched; or the
error that says why the combination is invalid."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxret.parallel.mesh import make_mesh, shard_batch, shardings
from jaxret.runs.embedder import Embedder
from jaxret.search.backends.select import select_backend
from jaxret.search.vectors.exact import search
from jaxret.search.vectors.inverted_lists import InvertedLists
from jaxret.training.step import make_train_step
from jaxret.training.train_state import TrainState
from jaxret.types import Ragged, SparseRows, TextVectors
from tests import tiny
from tests.tiny import SparseBlocks

FAMILIES: dict[str, dict[str, Any]] = {
    "dual_encoder": tiny.DUAL_ENCODER,
    "mlr": tiny.MLR,
    "me_bert": tiny.ME_BERT,
    "colbert": tiny.COLBERT,
    "late_interaction": tiny.LATE_INTERACTION,
    "mvr": tiny.MVR,
    "aggretriever": tiny.AGGRETRIEVER,
    "aggretriever_without_mlm": tiny.AGGRETRIEVER | {"head.aggretriever.mlm": False},
    "i3": tiny.I3,
    "splade": tiny.SPLADE,
    "unicoil": tiny.UNICOIL,
}
POOLINGS = ("none", "average", "scalar_mix", "self_contrastive")
ENCODERS: dict[str, Any] = {
    "bert": tiny.WITHOUT_DROPOUT,
    "t5": tiny.T5,
    "xlm_roberta": tiny.XLM_ROBERTA,
    "modernbert": tiny.MODERNBERT,
    "llama": tiny.LLAMA,
}
# Vectors of a passage with the pooling "none"; families that are not listed have 1. None: one for each token.
VECTORS = {"mlr": 3, "me_bert": 3, "mvr": 3, "colbert": None, "late_interaction": None}
# Parameters that add the same number to every score of a softmax: biases of keys, and of all passages' vectors.
WITHOUT_GRADIENT = (
    "['key']['bias']",
    "['interactor_layers']['output_norm']['bias']",
    "['passage_head']['cls']['bias']",
)
ERRORS = {
    **{
        (family, pooling): r"gives one vector: use 'none'"
        for family in ("dual_encoder", "aggretriever", "aggretriever_without_mlm", "i3", "splade", "unicoil")
        for pooling in POOLINGS[1:]
    },
    **{("mvr", pooling): r"keeps every viewer's vector" for pooling in POOLINGS[1:]},
    ("colbert", "scalar_mix"): r"number of weights is not fixed",
    ("late_interaction", "scalar_mix"): r"needs the vectors of all tokens for late interaction",
    ("late_interaction", "average"): r"needs the vectors of all tokens for late interaction",
    ("late_interaction", "self_contrastive"): r"needs the vectors of all tokens for late interaction",
}


def message(family: str, pooling: str, encoder: str) -> str | None:
    """Return the error of an invalid combination, or None."""
    if encoder in ("t5", "llama") and family == "i3":
        return r"head.token is '\w+'; the interactor's output is read at \[CLS\]"
    if encoder == "llama" and family in ("me_bert", "aggretriever", "aggretriever_without_mlm"):
        return r"head.token is 'last'; it must be one of cls, mean"
    if encoder == "llama" and family in ("mvr", "splade"):
        return r"which llama does not support"
    if encoder == "t5" and family in ("mvr", "aggretriever", "splade"):
        return r"which t5 does not support"
    if encoder == "modernbert" and family == "i3":
        return r"which modernbert does not support: ModernBERT's embeddings hold no positions"
    return ERRORS.get((family, pooling))


CASES = [(f, p, e) for f in FAMILIES for p in POOLINGS for e in ENCODERS]
MEANINGFUL = [case for case in CASES if message(*case) is None]


def overrides(family: str, pooling: str, encoder: str, tied: bool = True) -> dict[str, Any]:
    keys = FAMILIES[family] | {"pooling": pooling, "encoder.tied": tied}
    if encoder in ("t5", "llama"):
        keys["head.token"] = "mean" if encoder == "t5" or family == "colbert" else "last"
    if pooling == "self_contrastive":
        keys["loss.local_weight"] = 0.1
    return keys


@pytest.mark.parametrize(("family", "pooling", "encoder"), [case for case in CASES if message(*case)])
def test_unsupported_combinations_are_errors(family: str, pooling: str, encoder: str) -> None:
    with pytest.raises(ValueError, match=message(family, pooling, encoder)):
        tiny.make_retriever(overrides(family, pooling, encoder), ENCODERS[encoder])


def test_t5_has_no_cls() -> None:
    with pytest.raises(ValueError, match=r"'dual_encoder', .*t5 .*T5 .*\[CLS\]; .*head.token='mean'"):
        tiny.make_retriever({}, tiny.T5)


FIRST = [(family, "none", "bert", True) for family in FAMILIES]
TABLE = [
    (*case, tied)
    for case in MEANINGFUL
    for tied in (True, False)
    # poolings and untied encoders do not depend on the encoder: two encoders are enough
    if (*case, tied) not in FIRST and (case[2] in ("bert", "t5") or (case[1], tied) == ("none", True))
]


DAILY = ("mlr", "self_contrastive", "t5", False)  # a case with a pooling, with T5, and with untied encoders
LONG = ("dual_encoder", "me_bert", "aggretriever_without_mlm", "splade")  # families whose code other families run, too


@pytest.mark.table
@pytest.mark.parametrize(
    ("family", "pooling", "encoder", "tied"),
    [pytest.param(*case, marks=[pytest.mark.exhaustive] if case[0] in LONG else []) for case in FIRST],
)
def test_every_family(family: str, pooling: str, encoder: str, tied: bool) -> None:
    train_encode_search(family, pooling, encoder, tied)


@pytest.mark.daily("dual_encoder-none-t5-True")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "pooling", "encoder", "tied"),
    [pytest.param(*case, marks=[] if case == DAILY else pytest.mark.exhaustive) for case in TABLE],
)
def test_other_encoders_of_the_table(family: str, pooling: str, encoder: str, tied: bool) -> None:
    train_encode_search(family, pooling, encoder, tied)


def train_encode_search(family: str, pooling: str, encoder: str, tied: bool) -> None:
    mesh = make_mesh(devices=jax.devices()[:1])
    objective = tiny.make_objective(overrides(family, pooling, encoder, tied), mesh, ENCODERS[encoder])
    retriever = objective.model
    assert {name for name in jax.eval_shape(retriever.init, jax.random.key(0)) if name.endswith("encoder")} == (
        {"encoder"} if tied else {"query_encoder", "passage_encoder"}
    )
    first = tiny.make_params(retriever)
    for name in first:
        # All weights of terms are negative at the start, so that no gradient reaches them.
        if "term_weight" in first[name]:
            first[name]["term_weight"]["bias"] += 1
    optimizer = optax.sgd(0.1)  # compiles faster than AdamW, which has its own test
    params = jax.tree.map(jnp.array, first)
    state = TrainState(params, optimizer.init(params), jnp.int32(0), jnp.array(True))
    state = jax.device_put(state, shardings(mesh, state))
    step = make_train_step(objective, optimizer, state, jax.random.key(0))
    batch = tiny.make_batch(4, pseudo_queries=family == "i3")
    for _ in range(2):
        state, metrics = step(state, shard_batch(mesh, batch))
        assert all(np.isfinite(float(value)) for value in metrics.values())
    assert step.count == 1
    assert bool(state.healthy)
    before = dict(jax.tree_util.tree_leaves_with_path(first))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        name = jax.tree_util.keystr(path)
        if not any(end in name for end in WITHOUT_GRADIENT):
            assert np.abs(np.asarray(leaf) - np.asarray(before[path])).max() > 0, f"{name} has no gradient"

    embedder = Embedder(retriever, state.params, mesh, 0, {"query": 8, "passage": 12}, tokens_per_batch=96)
    generator = np.random.default_rng(0)
    texts = Ragged.from_lists([generator.integers(4, 40, size).tolist() for size in generator.integers(9, 13, 10)])
    passages, queries = (
        embedder(texts, "passage"),
        embedder(Ragged.from_lists([t[:6].tolist() for t in texts]), "query"),
    )
    expected = VECTORS.get(family, 1) if pooling == "none" else 1
    assert retriever.vectors_per_passage == expected
    assert passages.flat.shape[1] == queries.flat.shape[1] == retriever.dimension
    if isinstance(passages, SparseRows):
        assert isinstance(queries, SparseRows)
        hits = InvertedLists(SparseBlocks([passages])).search(queries, 10)
    elif expected is None:
        assert isinstance(passages, Ragged)
        extra = int(encoder in ("t5", "llama") and family == "colbert")  # the mean is the first vector
        np.testing.assert_array_equal(passages.lengths, texts.lengths + extra)
        hits = search(queries, [passages], 10, select_backend(multi_vector=True))
    else:
        assert (passages.lengths == expected).all()
        hits = search(queries.stacked()[:, 0], [passages.stacked()], 10, select_backend("faiss-cpu"))
    assert_ranking(hits.scores, hits.rows, queries, passages)


def assert_ranking(scores: np.ndarray, rows: np.ndarray, queries: TextVectors, passages: TextVectors) -> None:
    """Assert that every passage is ranked once, with the score of a loop."""
    for i in range(len(queries)):
        assert sorted(rows[i]) == list(range(10))
        assert (np.diff(scores[i]) <= 0).all()
        for score, row in zip(scores[i], rows[i], strict=True):
            by_hand = sum(max(float(q @ v) for v in passages[row].astype(float)) for q in queries[i].astype(float))
            assert score == pytest.approx(by_hand, rel=1e-6, abs=1e-6)
