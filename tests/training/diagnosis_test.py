"""The error names the first thing that is not finite: a parameter, hidden layer, loss term or gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.parallel.mesh import make_mesh, row_sharding
from jaxret.training.diagnosis import diagnose
from jaxret.training.losses.in_batch import LossTerms
from jaxret.training.tasks.retrieval import RetrievalObjective
from jaxret.types import Batch
from tests.packed import pack
from tests.tiny import BERT, DUAL_ENCODER, make_batch, make_objective, make_params

DEEP = dataclasses.replace(BERT, num_layers=3)


@pytest.fixture
def objective() -> RetrievalObjective:
    return make_objective(DUAL_ENCODER, make_mesh(devices=jax.devices()[:1]), DEEP)


@pytest.fixture
def params(objective: RetrievalObjective) -> Any:
    return make_params(objective.model)


def say(objective: RetrievalObjective, params: Any) -> str:
    return diagnose(objective, params, jax.tree.map(jnp.asarray, make_batch(2)), jax.random.key(0))


def change(params: Any, path: str, function: Any) -> None:
    *parents, last = path.split("/")
    for name in parents:
        params = params[name]
    params[last] = function(params[last])


@pytest.mark.slow
def test_a_finite_step_has_no_diagnosis(objective: RetrievalObjective, params: Any) -> None:
    assert say(objective, params).endswith("are finite, so the optimizer's update is not")


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_parameter_is_named(objective: RetrievalObjective, params: Any, value: float) -> None:
    path = "query_encoder/layers/intermediate/bias"
    change(params, path, lambda x: x.at[1, 3].set(value))
    assert say(objective, params) == f"parameter {path} (1 in all) is not finite"
    change(params, "passage_encoder/layers/output/kernel", lambda x: x * jnp.nan)
    assert say(objective, params) == "parameter passage_encoder/layers/output/kernel (2 in all) is not finite"


@pytest.mark.slow
def test_a_text_of_a_packed_batch_is_named() -> None:
    """The text may be on any device: each device packs texts in its own order, so the diagnosis computes them
    padded."""
    mesh = make_mesh(devices=jax.devices()[:4])
    objective = make_objective(DUAL_ENCODER, mesh, DEEP)
    params, batch = make_params(objective.model), make_batch(16)
    huge = 39  # a word whose vector is finite, but whose norm overflows
    ids = np.where(batch.passages.ids == huge, 1, batch.passages.ids)
    change(params, "passage_encoder/embeddings/word/embedding", lambda x: x.at[huge].set(3e38))
    for text in (0, 30):
        changed = ids.copy()
        changed[text, int(batch.passages.mask[text].sum()) - 1] = huge
        odd = dataclasses.replace(batch, passages=dataclasses.replace(batch.passages, ids=changed))
        packed = jax.device_put(pack(odd, mesh.size, objective.model.module.head), row_sharding(mesh))
        message = diagnose(objective, params, packed, jax.random.key(0))
        assert message == "the embedding layer of the passage encoder is not finite", text


@pytest.mark.parametrize("side", ["query", "passage"])
def test_a_hidden_layer_is_named(objective: RetrievalObjective, params: Any, side: str) -> None:
    """The parameters of the second layer are finite, but its product is not."""
    change(params, f"{side}_encoder/layers/intermediate/kernel", lambda x: x.at[1].set(3e38))
    assert say(objective, params) == f"layer 2 of the {side} encoder is not finite"


def test_embeddings_are_named(objective: RetrievalObjective, params: Any) -> None:
    change(params, "passage_encoder/embeddings/word/embedding", lambda x: x * 0 + 3e38)
    change(params, "passage_encoder/embeddings/position/embedding", lambda x: x * 0 + 3e38)
    assert say(objective, params) == "the embedding layer of the passage encoder is not finite"


@pytest.mark.slow
def test_a_loss_term_is_named(objective: RetrievalObjective, params: Any) -> None:
    """The vectors are finite, but their dot products are not."""
    for side in ("query", "passage"):
        change(params, f"{side}_encoder/layers/output_norm/scale", lambda x: x.at[-1].set(1e25))
    assert say(objective, params) == "loss term loss is not finite, though every hidden state is"


@pytest.mark.slow
def test_a_gradient_is_named(objective: RetrievalObjective, params: Any) -> None:
    class WithRoot(RetrievalObjective):
        """An objective that adds the square root of 0, whose derivative is infinite."""

        def __call__(
            self, params: Any, batch: Batch, key: jax.Array, step: Any = None, train: bool = True
        ) -> LossTerms:
            terms = super().__call__(params, batch, key, step, train)
            scale = params["query_encoder"]["embeddings"]["norm"]["scale"]
            return terms.replace(loss=terms.loss + jnp.sqrt(jnp.sum(0 * scale)))  # type: ignore[attr-defined]

    rooted = WithRoot(model=objective.model, mesh=objective.mesh, settings=objective.settings)
    where = "query_encoder/embeddings/norm/scale"
    assert say(rooted, params) == f"the gradient of {where} (1 in all) is not finite, though the loss is"
