"""A checkpoint has the averaged weights, and the weights from which training continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxret.parallel.mesh import make_mesh
from jaxret.storage.checkpoint import Checkpoints
from jaxret.training.optimizers import make_optimizer
from jaxret.training.train_state import UpdateRule, checkpoint_trees, place_state, restore_state
from tests.tiny import DUAL_ENCODER, OPTIMIZER, WITHOUT_DROPOUT, make_config, make_params, make_retriever


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_averaged_weights_and_trained_ones_are_restored(ema: float, tmp_path: Path) -> None:
    model, mesh, rule = (
        make_retriever(DUAL_ENCODER, WITHOUT_DROPOUT),
        make_mesh(devices=jax.devices()[:1]),
        UpdateRule(ema=ema),
    )
    optimizer, _ = make_optimizer(make_config(DUAL_ENCODER | OPTIMIZER).optimizer, total_steps=10)
    state = place_state(mesh, make_params(model), optimizer, rule)
    average = jax.tree.map(lambda x: x + 1, state.params)
    state = replace(state, ema=average if ema else None, step=state.step + 3)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, *checkpoint_trees(state, rule))
        checkpoints.wait()
        restored = restore_state(checkpoints, 3, mesh, model, optimizer, rule)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    jax.tree.map(np.testing.assert_array_equal, checkpoint_trees(state, rule)[0], average if ema else state.params)
