"""Negatives that are masked by their scores, against loops and PyTorch; and their effect on training."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.scoring import unit_length
from jaxret.parallel.mesh import make_mesh
from jaxret.training.losses.group_losses import FalseNegativeSettings, check_losses
from jaxret.training.losses.in_batch import LossSettings, Scores, competing_passages, total_loss
from jaxret.types import Batch
from tests import tiny

MARGIN, TEMPERATURE = 0.1, 0.2
MASKED = LossSettings(temperature=TEMPERATURE, false_negatives=FalseNegativeSettings(True, MARGIN))


def make_batch(group: int = 3) -> Batch:
    return jax.tree.map(jnp.asarray, tiny.make_batch(5, group))


def make_scores(batch: Batch, settings: LossSettings, in_batch: bool = True, vectors: int = 2) -> Scores:
    shape = len(batch.positives), len(batch.passage_ids), vectors
    cosines = np.random.default_rng(3).uniform(-0.2, 0.6, shape).astype(np.float32)
    return Scores(jnp.asarray(cosines), batch.positives, competing_passages(batch, in_batch), settings)


def by_loops(scores: Scores, batch: Batch, margin: float, in_batch: bool) -> tuple[float, int]:
    """Compute (the loss, how many negatives are masked) from the definition."""
    similarities = np.asarray(scores.similarities, np.float64).max(-1)
    ids, relevant, positives = (np.asarray(x) for x in (batch.passage_ids, batch.known_positives, batch.positives))
    group, losses, left_out = len(ids) // len(positives), [], 0
    for i, own in enumerate(positives):
        exponents = [similarities[i, own] / TEMPERATURE]
        for j in range(len(ids)):
            negative = j != own and ids[j] >= 0 and ids[j] not in relevant[i]
            if not negative or (not in_batch and not own <= j < own + group):
                continue
            if similarities[i, j] > similarities[i, own] + margin:
                left_out += 1
            else:
                exponents.append(similarities[i, j] / TEMPERATURE)
        losses.append(np.log(np.exp(exponents).sum()) - exponents[0])
    return float(np.mean(losses)), left_out


@pytest.mark.table
@pytest.mark.parametrize("in_batch", [True, False])
def test_the_loss_equals_a_loop(in_batch: bool) -> None:
    """Over all passages of the batch, and over only the query's own."""
    batch = make_batch()
    scores = make_scores(batch, MASKED, in_batch)
    expected, left_out = by_loops(scores, batch, MARGIN, in_batch)
    ours = total_loss(scores)
    assert float(ours.loss) == pytest.approx(expected, rel=1e-6)
    assert left_out > 2
    plain = total_loss(replace(scores, settings=replace(MASKED, false_negatives=FalseNegativeSettings())))
    every, _ = by_loops(scores, batch, np.inf, in_batch)
    assert float(plain.loss) == pytest.approx(every, rel=1e-6)
    assert every > expected + 0.1, "control: with all passages, the loss is larger"
    assert (float(ours.rank), float(ours.accuracy)) == (float(plain.rank), float(plain.accuracy))


def test_own_passages_only_equal_pytorchs_cross_entropy() -> None:
    """loss.in_batch_negatives=False: a softmax over each query's group, the positive first."""
    torch = pytest.importorskip("torch")
    batch = make_batch()
    batch = replace(batch, passage_ids=jnp.arange(15), known_positives=batch.positives[:, None])
    scores = make_scores(batch, LossSettings(temperature=TEMPERATURE), in_batch=False, vectors=1)
    own = torch.tensor(np.asarray(scores.similarities[..., 0])).reshape(5, 5, 3)[torch.arange(5), torch.arange(5)]
    expected = torch.nn.functional.cross_entropy(own / TEMPERATURE, torch.zeros(5).long())
    assert float(total_loss(scores).loss) == pytest.approx(float(expected), rel=1e-6)


def test_terms_with_other_labels_use_every_passage() -> None:
    """A teacher judges relevance itself, so its term masks no passage."""
    batch = make_batch()
    taught = jnp.asarray(np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32))
    settings = replace(MASKED, kl=replace(MASKED.kl, weight=1.0))
    scores = replace(make_scores(batch, settings), teacher_scores=taught)
    plain = replace(scores, settings=replace(settings, false_negatives=FalseNegativeSettings()))
    assert float(total_loss(scores).terms["kl"]) == float(total_loss(plain).terms["kl"])


def test_validation_masks_nothing() -> None:
    overrides: dict[str, Any] = {"normalize": True, "loss.temperature": TEMPERATURE}
    losses = {}
    for masked in (True, False):
        keys = overrides | {"loss.false_negatives.masked": masked, "loss.false_negatives.margin": 0.0}
        objective = tiny.make_objective(keys, make_mesh(1, jax.devices()[:1]), tiny.WITHOUT_DROPOUT)
        params = tiny.make_params(objective.model)
        for train in (True, False):
            program = jax.jit(partial(objective, key=jax.random.key(0), train=train))
            losses[masked, train] = float(program(params, make_batch()).loss)
    assert losses[True, False] == losses[False, False]
    assert losses[True, True] < losses[False, True] - 0.01


def test_an_unjudged_relevant_passage_gets_no_gradient() -> None:
    """The second passage is the best answer, but the example has the first as its positive. Only vectors are
    trained."""
    start = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    start[2] = start[0]
    start[1] = start[0] + 0.9 * start[1]  # the positive is near, but less near than the second passage
    competing = jnp.ones((1, 5), bool)

    def loss(vectors: jax.Array, settings: LossSettings) -> jax.Array:
        unit = unit_length(vectors)
        similarities = (unit[:1] @ unit[1:].T)[..., None]
        return total_loss(Scores(similarities, jnp.array([0]), competing, settings)).loss

    def train(settings: LossSettings) -> float:
        step = jax.jit(lambda vectors: vectors - 0.3 * jax.grad(loss)(vectors, settings))
        vectors = jnp.asarray(start)
        for _ in range(10):
            vectors = step(vectors)
        unit = unit_length(vectors)
        return float(unit[0] @ unit[2])

    assert train(MASKED) > 0.9
    assert train(replace(MASKED, false_negatives=FalseNegativeSettings())) < 0.7


def test_masking_without_a_softmax_is_an_error() -> None:
    config = tiny.make_config({"loss.false_negatives.masked": True, "loss.contrastive_weight": 0.0})
    config.loss.kl.weight = 1.0
    with pytest.raises(ValueError, match=r"loss.false_negatives.masked is True, but loss.contrastive_weight is 0"):
        check_losses(config)
