"""Packed texts have the loss and the gradients of padded ones, for every head and every encoder, also with dropout."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders.layout import TokenLayout
from jaxret.parallel.mesh import make_mesh, replicated_sharding, row_sharding, shardings
from jaxret.types import Batch
from tests import tiny
from tests.packed import pack
from tests.training.device_invariance_test import CANCELLING, FAMILIES, LEAF_TOLERANCE, TOLERANCE

QUERIES = 16
LEAF = CANCELLING | {"mvr_roberta": 3e-5}  # RoBERTa's positions depend on ids, which changes the order of the same sums
MEAN = {"head.token": "mean"}
LAST = {"head.token": "last"}
MODERNBERT_DROPPING = dataclasses.replace(
    tiny.MODERNBERT, attention_dropout=0.1, mlp_dropout=0.1, embedding_dropout=0.1
)
ONE_LAYER = dataclasses.replace(tiny.WITHOUT_DROPOUT, num_layers=1)
# Overrides of the base config, and the config of the encoder.
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "one_layer": (tiny.DUAL_ENCODER | MEAN | {"encoder.tied": True}, ONE_LAYER),
    "dual_encoder": (tiny.DUAL_ENCODER, tiny.WITHOUT_DROPOUT),
    "dual_encoder_mean": (tiny.DUAL_ENCODER | MEAN, tiny.WITHOUT_DROPOUT),
    "mlr": (tiny.SELF_CONTRASTIVE, tiny.WITHOUT_DROPOUT),
    "mlr_scalar_mix": (tiny.SCALAR_MIX, tiny.WITHOUT_DROPOUT),
    **{name: (overrides, tiny.WITHOUT_DROPOUT) for name, overrides in FAMILIES.items()},
    "aggretriever_mean": (tiny.AGGRETRIEVER | MEAN, tiny.WITHOUT_DROPOUT),
    "dual_encoder_t5": (tiny.DUAL_ENCODER | MEAN, tiny.T5),
    "mlr_t5": (tiny.SELF_CONTRASTIVE | MEAN, tiny.T5),
    "me_bert_t5": (FAMILIES["me_bert"] | MEAN, tiny.T5),
    "colbert_t5": (FAMILIES["colbert"] | MEAN, tiny.T5),
    "late_interaction_t5": (FAMILIES["late_interaction"], tiny.T5),
    "dual_encoder_modernbert": (tiny.DUAL_ENCODER, tiny.MODERNBERT),
    "mlr_modernbert": (tiny.SELF_CONTRASTIVE, tiny.MODERNBERT),
    "mvr_modernbert": (FAMILIES["mvr"], tiny.MODERNBERT),
    "aggretriever_modernbert": (FAMILIES["aggretriever"], tiny.MODERNBERT),
    "late_interaction_modernbert": (FAMILIES["late_interaction"], tiny.MODERNBERT),
    "dual_encoder_llama": (tiny.DUAL_ENCODER | LAST, tiny.LLAMA),
    "mlr_llama": (tiny.SELF_CONTRASTIVE | {"head.token": "mean_without_first"}, tiny.LLAMA),
    "mlr_gemma": (tiny.SELF_CONTRASTIVE | MEAN, tiny.GEMMA),
    "late_interaction_llama": (FAMILIES["late_interaction"], tiny.LLAMA),
    "mlr_roberta": (tiny.SELF_CONTRASTIVE, tiny.XLM_ROBERTA),
    "mvr_roberta": (FAMILIES["mvr"], tiny.XLM_ROBERTA),
    "i3_roberta": (FAMILIES["i3"], tiny.XLM_ROBERTA),
    "mlr_dropout": (tiny.SELF_CONTRASTIVE, tiny.BERT),
    "mvr_dropout": (FAMILIES["mvr"], tiny.BERT),
    "i3_dropout": (FAMILIES["i3"], tiny.BERT),
    "mlr_t5_dropout": (tiny.SELF_CONTRASTIVE | MEAN, dataclasses.replace(tiny.T5, dropout=0.1)),
    "mlr_gemma_dropout": (tiny.SELF_CONTRASTIVE | MEAN, dataclasses.replace(tiny.GEMMA, attention_dropout=0.1)),
    "mvr_modernbert_dropout": (FAMILIES["mvr"], MODERNBERT_DROPPING),
}
SHORT = ("one_layer", "mlr")


def gradient(case: str, devices: int, chunk_size: int) -> Any:
    """Return a (batch, key) -> (loss, gradient) on the host, in the second epoch, compiled once per shape."""
    overrides, encoder = CASES[case]
    mesh = make_mesh(devices=jax.devices()[:devices])
    objective = tiny.make_objective(overrides, mesh, encoder, chunk_size)
    params = tiny.make_params(objective.model)
    params = jax.device_put(params, shardings(mesh, params))

    def loss(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
        return objective(params, batch, key, batch_number=1).loss

    program = jax.jit(jax.value_and_grad(loss), out_shardings=replicated_sharding(mesh))
    key = jax.random.key(3)
    return lambda batch: jax.device_get(program(params, jax.device_put(batch, row_sharding(mesh)), key))


def head_of(case: str) -> Any:
    return tiny.make_retriever(*CASES[case]).module.head


def make_batch(case: str, seed: int = 0) -> Batch:
    return tiny.make_batch(QUERIES, seed=seed, pseudo_queries="i3" in case)


@pytest.mark.daily("one_layer")
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.exhaustive]) for name in CASES]
)
def test_packed_texts_equal_padded_ones(case: str) -> None:
    """They are compared on one device, and over eight in chunks. Each mesh is compared with itself;
    device_invariance_test.py compares meshes. Padded texts are as long as packed rows are after the encoder, so that
    the masks of dropout are equal, too."""
    programs = [(gradient(case, 8, 8), 16), (gradient(case, 1, 0), 1)]
    batch, head = make_batch(case), head_of(case)
    for program, bins in programs[: 1 if case == "one_layer" else 2]:
        value, expected = program(batch)
        assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 1e-2
        rows = pack(batch, bins, head)
        assert rows.passages.packing is not None
        assert rows.passages.rows is not None
        assert sorted(rows.passages.rows) != rows.passages.rows.tolist(), "control: the packed order differs"
        packed_value, gradients = program(rows)
        assert abs(packed_value - value) <= TOLERANCE * max(abs(value), 1)
        assert tiny.relative_error(gradients, expected) <= TOLERANCE
        assert tiny.distance(gradients, expected) <= LEAF.get(case, LEAF_TOLERANCE)
    other = program(pack(make_batch(case, seed=5), bins, head))
    assert tiny.distance(other[1], expected) > 0.01, "control: another batch has another gradient"


def leaking(layout: TokenLayout) -> jax.Array:
    """A wrong mask: tokens attend to all tokens of their row."""
    assert layout.packing is not None
    text = layout.packing.text
    return jnp.broadcast_to((text >= 0)[:, None, :], (*text.shape, text.shape[1]))


def unplaced(layout: TokenLayout, of_tokens: jax.Array) -> jax.Array:
    """A wrong index: every text gets the numbers of the first."""
    assert layout.packing is not None
    return jnp.broadcast_to(of_tokens, layout.mask.shape)[0, layout.packing.token]


def behind(layout: TokenLayout, hidden: jax.Array, count: int | None) -> Any:
    """A wrong start: every state is one place too far to the right."""
    assert layout.packing is not None
    packed = dataclasses.replace(layout.packing, starts=layout.packing.starts + 1)
    return TEXTS(dataclasses.replace(layout, packing=packed), hidden, count)


TEXTS = TokenLayout.by_text


@pytest.mark.daily("by_text-behind")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("attention_mask", property(leaking)),
        pytest.param("arrange", unplaced, marks=pytest.mark.exhaustive),
        pytest.param("by_text", behind, marks=pytest.mark.exhaustive),
    ],
)
def test_control_mixed_up_texts_differ(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, program = make_batch("mlr"), gradient("mlr", 1, 0)
    value, _ = program(batch)
    monkeypatch.setattr(TokenLayout, name, wrong)
    mutated, _ = program(pack(batch, 1, head_of("mlr")))
    assert abs(mutated - value) > 1e-3


def test_dropout_masks_differ_by_step_and_text() -> None:
    """Masks differ between texts and steps: the control for the tests in which they are equal."""
    objective = tiny.make_objective(tiny.DUAL_ENCODER, make_mesh(devices=jax.devices()[:1]))
    batch = jax.device_put(pack(tiny.make_batch(QUERIES), 1, objective.model.module.head))
    params = tiny.make_params(objective.model)
    loss = jax.jit(lambda key: objective(params, batch, key).loss)
    one, again, other = (float(loss(jax.random.key(seed))) for seed in (0, 0, 1))
    assert one == again
    assert abs(one - other) > 1e-3
