"""For every family: cached gradients over eight devices are the plain ones of one."""

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
TOLERANCE = 2e-6  # relative, of the loss and the whole gradient: chunks and devices add up in another order
LEAF_TOLERANCE = 1e-5  # of one parameter's gradient, whose sums may nearly cancel


def gradient(family: str, devices: int, chunk_size: int) -> Any:
    """A compiled (params, batch) -> (loss, gradient) of a step in its second epoch, without dropout: keys are another
    test's."""
    mesh = make_mesh(devices=jax.devices()[:devices])
    objective = tiny.make_objective(FAMILIES[family], mesh, tiny.WITHOUT_DROPOUT, chunk_size)
    params = jax.device_put(tiny.make_params(objective.retriever), replicated(mesh))

    def loss(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
        return objective(params, batch, key, step=1).loss

    program = jax.jit(jax.value_and_grad(loss), out_shardings=replicated(mesh))
    return lambda batch: jax.device_get(program(params, jax.device_put(batch, by_row(mesh)), jax.random.key(0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_devices_in_chunks_are_one_device_at_once(family: str) -> None:
    """Both at the same time, each chunk over all devices."""
    plain, other = gradient(family, 1, 0), gradient(family, 8, 8)
    batch = tiny.make_batch(QUERIES, pseudo_queries=family.startswith("i3"))
    (value, expected), (other_value, found) = plain(batch), other(batch)
    assert abs(other_value - value) <= TOLERANCE * max(abs(value), 1)
    assert tiny.relative_error(found, expected) <= TOLERANCE
    assert tiny.distance(found, expected) <= LEAF_TOLERANCE
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 1e-2
    different = plain(tiny.make_batch(QUERIES, seed=5, pseudo_queries=family.startswith("i3")))
    assert tiny.distance(different[1], expected) > 0.01, "control: another batch"
