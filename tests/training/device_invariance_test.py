"""For every family, cached gradients over eight devices equal plain gradients on one device."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.scoring import similarities
from jaxret.parallel.mesh import make_mesh, replicated_sharding, row_sharding, shardings
from jaxret.training.losses.in_batch import Scores, competing_passages, contrastive_term, local_term
from jaxret.types import Batch
from tests import tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "me_bert": tiny.ME_BERT | {"pooling": "self_contrastive", "loss.local_weight": 0.1},
    "colbert": tiny.COLBERT | {"pooling": "self_contrastive", "loss.local_weight": 0.1},
    "late_interaction": tiny.LATE_INTERACTION | {"loss.temperature": 0.2},
    "mvr": tiny.MVR,
    "aggretriever": tiny.AGGRETRIEVER,
    "aggretriever_without_mlm": tiny.AGGRETRIEVER | {"head.aggretriever.mlm": False},
    "mvr_with_a_table": tiny.MVR | {"head.mvr.first_id": -1},
    "i3": tiny.I3,
    "i3_own_negatives": tiny.I3 | {"loss.in_batch_negatives": False},
    "splade": tiny.SPLADE,
    "splade_documents": tiny.SPLADE | {"head.splade.queries": "learned"},
    "unicoil": tiny.UNICOIL | {"loss.temperature": 0.1},
    "matryoshka": tiny.SELF_CONTRASTIVE
    | {"normalize": True, "loss.temperature": 0.2, "loss.matryoshka.sizes": (16, 8, 2)},
    "masked_negatives": tiny.DUAL_ENCODER
    | {"normalize": True, "loss.temperature": 0.2, "loss.false_negatives.masked": True},
    "own_masked_negatives": tiny.DUAL_ENCODER
    | {
        "normalize": True,
        "loss.temperature": 0.2,
        "loss.in_batch_negatives": False,
        "loss.false_negatives.masked": True,
        "loss.false_negatives.margin": 0.0,
    },
    "i3_released": tiny.I3 | {"head.i3.variant": "released"},
}
DAILY = "late_interaction"  # the cheapest
FAMILY_CASES = [pytest.param(name, marks=[] if name == DAILY else pytest.mark.exhaustive) for name in FAMILIES]
QUERIES = 16
TOLERANCE = 2e-6  # relative error of the loss and of the whole gradient: the order of a sum changes
LEAF_TOLERANCE = 1e-5  # relative error of one parameter's gradient, whose sums may nearly cancel
# One device and two, without chunks or parts, differ by 1.4e-5 here, because a sum that cancels has another order.
CANCELLING = {"mvr_with_a_table": 3e-5}


def gradient(family: str, devices: int, chunk_size: int, fsdp: int = 1) -> Any:
    """A compiled (params, batch) -> (loss, gradient) of a step in the second epoch. Without dropout, whose keys are
    tested elsewhere."""
    mesh = make_mesh(fsdp, jax.devices()[:devices])
    objective = tiny.make_objective(FAMILIES[family], mesh, tiny.WITHOUT_DROPOUT, chunk_size)
    params = tiny.make_params(objective.model)
    params = jax.device_put(params, shardings(mesh, params))

    def loss(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
        return objective(params, batch, key, batch_number=1).loss

    program = jax.jit(jax.value_and_grad(loss), out_shardings=replicated_sharding(mesh))
    return lambda batch: jax.device_get(program(params, jax.device_put(batch, row_sharding(mesh)), jax.random.key(0)))


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_eight_devices_equal_one(family: str) -> None:
    """Eight devices equal one, both in chunks over all devices, and with parameters split over four and gathered layer
    by layer."""
    plain, meshes = gradient(family, 1, 0), (gradient(family, 8, 8), gradient(family, 8, 0, fsdp=4))
    batch = tiny.make_batch(QUERIES, pseudo_queries=family.startswith("i3"))
    value, expected = plain(batch)
    for other in meshes:
        other_value, gradients = other(batch)
        assert abs(other_value - value) <= TOLERANCE * max(abs(value), 1)
        assert tiny.relative_error(gradients, expected) <= TOLERANCE
        assert tiny.distance(gradients, expected) <= CANCELLING.get(family, LEAF_TOLERANCE)
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 1e-2
    different = plain(tiny.make_batch(QUERIES, seed=5, pseudo_queries=family.startswith("i3")))
    assert tiny.distance(different[1], expected) > 0.01, "control: another batch has another gradient"


@pytest.mark.daily("splade_documents")
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_empty_slots_count_for_nothing(family: str) -> None:
    """Four queries on eight devices leave four devices without a query. This is tested with and without chunks."""
    batch = tiny.make_batch(4, pseudo_queries=family.startswith("i3"))
    value, expected = gradient(family, 1, 0)(batch)
    for more, chunk_size in ((8, 0), (16, 8)):
        other, gradients = gradient(family, 8, chunk_size)(tiny.filled(batch, more))
        assert abs(other - value) <= TOLERANCE * max(abs(value), 1)
        assert tiny.relative_error(gradients, expected) <= TOLERANCE
        assert tiny.distance(gradients, expected) <= 3 * LEAF_TOLERANCE  # some sums over few texts nearly cancel


def by_hand(family: str, step: int) -> tuple[dict[str, float], Any]:
    """The terms that the objective should add up, computed from its vectors and the shared loss; and the objective's
    own."""
    objective = tiny.make_objective(FAMILIES[family], make_mesh(devices=jax.devices()[:1]), tiny.WITHOUT_DROPOUT)
    retriever, settings = objective.model, objective.settings
    params = tiny.make_params(retriever)
    batch = jax.tree.map(jnp.asarray, tiny.make_batch(4, pseudo_queries=family.startswith("i3")))
    key = jax.random.key(0)

    @jax.jit
    def compute(params: Any, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
        q = retriever.encode(params, batch.queries, "query", True, key)
        d = retriever.encode(params, batch.passages, "passage", True, key, batch.pseudo_queries)

        def contrast(start: int, stop: int | None) -> jax.Array:
            S = similarities(q.vectors[:, 0, start:stop], d.vectors[..., start:stop], d.mask)
            annealing = max(0.3, math.exp(-settings.annealing_rate * step)) if settings.annealing_rate else 1.0
            scores = Scores(S, batch.positives, competing_passages(batch), settings, annealing)
            local = local_term(scores)
            return contrastive_term(scores).value + (settings.local_weight * local.value if local else 0.0)

        terms = {"contrastive": contrast(0, None)}
        if family == "aggretriever":
            terms |= {"lexical": contrast(0, 8), "cls": contrast(8, None)}
        if d.auxiliary_loss is not None:
            total, count = d.auxiliary_loss.sum(axis=0)
            terms["reconstruction"] = total / count
        return objective(params, batch, key, batch_number=step), terms

    terms, parts = compute(params, batch)
    return {name: float(value) for name, value in parts.items()}, terms


@pytest.mark.table
@pytest.mark.parametrize("step", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("family", ["mvr", "aggretriever", "i3"])
def test_terms_of_the_loss(family: str, step: int) -> None:
    """One step is an epoch here."""
    parts, terms = by_hand(family, step)
    expected = parts["contrastive"]
    if family == "aggretriever":
        expected += 0.5 * parts["lexical"] + 0.5 * parts["cls"]
    if family == "i3":
        expected += 0.1**step * parts["reconstruction"]
        assert float(terms.terms["reconstruction"]) == pytest.approx(parts["reconstruction"], rel=1e-5)
    assert float(terms.loss) == pytest.approx(expected, rel=1e-5)
    if family == "mvr":
        assert float(terms.terms["local"]) > 1e-3
        assert float(by_hand(family, 2 - step)[1].loss) != pytest.approx(float(terms.loss), rel=1e-3), (
            "control: another step has another loss"
        )


@pytest.mark.slow
def test_reconstruction_without_the_contrastive_loss() -> None:
    overrides = tiny.I3 | {"loss.contrastive_weight": 0.0}
    objective = tiny.make_objective(overrides, make_mesh(devices=jax.devices()[:1]), tiny.WITHOUT_DROPOUT)
    batch = jax.tree.map(jnp.asarray, tiny.make_batch(4, pseudo_queries=True))
    terms = jax.jit(lambda p: objective(p, batch, jax.random.key(0), batch_number=0))(tiny.make_params(objective.model))
    assert float(terms.loss) == pytest.approx(float(terms.terms["reconstruction"]), rel=1e-6)
    assert float(terms.terms["contrastive"]) > 0.01
