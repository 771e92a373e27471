"""Penalties on the weights of words, their growth over steps, and their terms in the loss, against loops in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.parallel.mesh import make_mesh
from jaxret.training.losses.in_batch import loss_settings
from jaxret.training.losses.sparsity import SparsitySettings, mean_words, penalty
from tests import tiny

WEIGHTS = np.maximum(np.random.default_rng(0).standard_normal((5, 7)), 0).astype(np.float32)
EXISTS = np.array([True, True, False, True, True])


def by_hand(norm: str, weights: np.ndarray) -> float:
    rows = [row.astype(float) for row, exists in zip(weights, EXISTS, strict=True) if exists]
    if norm == "l1":
        return sum(abs(value) for row in rows for value in row) / len(rows)
    return sum((sum(abs(row[word]) for row in rows) / len(rows)) ** 2 for word in range(weights.shape[1]))


@pytest.mark.parametrize("norm", ["flops", "l1"])
def test_penalties_and_their_gradients(norm: str) -> None:
    value, gradient = jax.value_and_grad(lambda w: penalty(norm, w, jnp.asarray(EXISTS)))(jnp.asarray(WEIGHTS))
    assert float(value) == pytest.approx(by_hand(norm, WEIGHTS), rel=1e-6)
    for place in [(int(row), int(word)) for row, word in np.argwhere(WEIGHTS > 0.1)[::3]]:
        more, less = WEIGHTS.astype(float), WEIGHTS.astype(float)
        more[place], less[place] = more[place] + 1e-5, less[place] - 1e-5
        assert float(gradient[place]) == pytest.approx((by_hand(norm, more) - by_hand(norm, less)) / 2e-5, abs=1e-6)
    assert not np.asarray(gradient)[2].any(), "an empty row has no gradient"


def test_flops_penalty_is_computed_over_the_whole_batch() -> None:
    everything = jnp.ones(4, bool)
    weights = jnp.asarray(WEIGHTS[:4])
    whole = penalty("flops", weights, everything)
    parts = [penalty("flops", weights[i : i + 2], everything[:2]) for i in (0, 2)]
    assert float(whole) < 0.95 * float(jnp.mean(jnp.array(parts)))


def test_words_are_counted() -> None:
    assert float(mean_words(jnp.asarray(WEIGHTS), jnp.asarray(EXISTS))) == (WEIGHTS[EXISTS] > 0).sum() / 4


def test_weights_grow_as_the_square_of_the_step() -> None:
    settings = SparsitySettings(steps=4)
    assert [float(settings.growth(step)) for step in range(6)] == [1 / 16, 4 / 16, 9 / 16, 1.0, 1.0, 1.0]
    assert settings.growth(None) == SparsitySettings().growth(0) == 1.0


@pytest.mark.table
@pytest.mark.parametrize("step", [0, 9])
def test_the_loss_adds_both_penalties(step: int) -> None:
    objective = tiny.make_objective(tiny.SPLADE, make_mesh(devices=jax.devices()[:1]), tiny.WITHOUT_DROPOUT)
    params, batch = tiny.make_params(objective.model), jax.tree.map(jnp.asarray, tiny.make_batch(4))
    terms = jax.jit(lambda p: objective(p, batch, jax.random.key(0), batch_number=step))(params)
    vectors = jax.jit(lambda p: objective.encode(p, batch, jax.random.key(0), True))(params)
    queries, passages = (np.asarray(x.vectors[:, 0], float) for x in vectors)
    passages = passages[np.asarray(batch.passage_ids) >= 0]
    assert len(passages) == 7, "the batch has an empty slot"
    expected = {
        "query_sparsity": np.abs(queries).sum(axis=1).mean(),
        "passage_sparsity": (np.abs(passages).mean(axis=0) ** 2).sum(),
    }
    for name, value in expected.items():
        assert float(terms.terms[name]) == pytest.approx(value, rel=1e-5)
    growth = min(1.0, ((step + 1) / 4) ** 2)
    more = growth * (0.02 * expected["query_sparsity"] + 0.03 * expected["passage_sparsity"])
    assert more > 1e-3
    assert float(terms.loss) == pytest.approx(float(terms.terms["contrastive"]) + more, rel=1e-5)
    counts = {"query_words": (queries > 0).sum() / 4, "passage_words": (passages > 0).sum() / 7}
    assert {name: float(value) for name, value in terms.words.items()} == pytest.approx(counts)


def test_steps_count_updates_not_batches() -> None:
    keys = tiny.SPLADE | {"train.accumulate": 3}
    sparsity = loss_settings(tiny.make_config(keys), tiny.make_retriever(keys)).sparsity
    factors = [float(sparsity.growth(batch)) for batch in (2, 10, 11, 12)]
    assert factors == pytest.approx([1 / 16, (11 / 12) ** 2, 1.0, 1.0])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (tiny.DUAL_ENCODER | {"loss.sparsity.passage": 0.1}, r"'dual_encoder' .*weights .*0"),
        (tiny.SPLADE | {"loss.sparsity.query_norm": "l2"}, r"query_norm .*'l2'; .*flops, l1"),
        (tiny.SPLADE | {"loss.sparsity.passage": -1.0}, r"loss.sparsity.passage .*-1.0; .*least 0"),
    ],
)
def test_impossible_settings_are_errors(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_settings(tiny.make_config(keys), tiny.make_retriever(keys))
