"""For every family: cached gradients are plain ones, and eight devices are one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxret.distributed import by_row, make_mesh, replicated
from jaxret.types import Batch
from tests import tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "me_bert": tiny.ME_BERT | {"pooling": "self_contrastive", "loss.local_weight": 0.1},
    "colbert": tiny.COLBERT | {"pooling": "self_contrastive", "loss.local_weight": 0.1},
    "late_interaction": tiny.LATE_INTERACTION | {"loss.temperature": 0.2},
    "mvr": tiny.MVR,
    "aggretriever": tiny.AGGRETRIEVER,
    "i3": tiny.I3,
    "i3_released": tiny.I3 | {"head.variant": "released"},
}
QUERIES = 16
TOLERANCE = 1e-6  # relative, of the loss and the whole gradient: chunks and devices add up in another order
LEAF_TOLERANCE = 1e-5  # of one parameter's gradient, whose sums may nearly cancel


def gradient(family: str, devices: int = 1, chunk_size: int = 0, batch: Batch | None = None) -> tuple[float, Any]:
    """Loss and gradient of a step in its second epoch, without dropout: keys are another test's."""
    mesh = make_mesh(devices=jax.devices()[:devices])
    objective = tiny.make_objective(FAMILIES[family], mesh, tiny.WITHOUT_DROPOUT, chunk_size)
    params = jax.device_put(tiny.make_params(objective.retriever), replicated(mesh))
    batch = batch or tiny.make_batch(QUERIES, pseudo_queries=family.startswith("i3"))

    def loss(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
        return objective(params, batch, key, step=1).loss

    program = jax.jit(jax.value_and_grad(loss), out_shardings=replicated(mesh))
    value, found = program(params, jax.device_put(batch, by_row(mesh)), jax.random.key(0))
    return float(value), jax.device_get(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_is_plain_and_eight_devices_are_one(family: str) -> None:
    value, plain = gradient(family)
    for other in ({"chunk_size": 4, "devices": 1}, {"chunk_size": 0, "devices": 8}):
        other_value, found = gradient(family, other["devices"], other["chunk_size"])
        assert abs(other_value - value) <= TOLERANCE * max(abs(value), 1), other
        assert tiny.relative_error(found, plain) <= TOLERANCE, other
        assert tiny.distance(found, plain) <= LEAF_TOLERANCE, other
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(plain)) > 1e-2
    different = tiny.make_batch(QUERIES, seed=5, pseudo_queries=family.startswith("i3"))
    assert tiny.distance(gradient(family, batch=different)[1], plain) > 0.01, "control: another batch"
