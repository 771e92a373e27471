"""Losses and gradients of every method against numpy, on eight devices, in chunks, with parameters split."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders.architectures.t5 import T5Config
from jaxret.models.encoders.layers import Compute
from jaxret.models.pretraining import PretrainingMethod, PretrainingModel, PretrainingModule
from jaxret.parallel.mesh import make_mesh, shard_whole_batch, shardings
from jaxret.training.pretraining.masked_batches import MaskedBatches
from jaxret.training.pretraining.masking import MaskingVocabulary
from jaxret.training.pretraining.pretraining_objective import PretrainingObjective, span_contrast
from jaxret.training.pretraining.spans import cut_spans
from jaxret.types import MaskedTexts, Ragged
from tests.tiny import MODERNBERT, T5, WITHOUT_DROPOUT, make_params
from tests.training.pretraining import oracle

BERT = dataclasses.replace(WITHOUT_DROPOUT, mlm_head=True)
VOCABULARY = MaskingVocabulary(np.arange(BERT.vocab_size) >= 30, np.arange(BERT.vocab_size) < 4, mask_id=3)
METHODS = {
    "mlm": PretrainingMethod(),
    "condenser": PretrainingMethod("condenser", layers=2, skip_from=1),
    "cocondenser": PretrainingMethod("cocondenser", layers=1, skip_from=0, late=False, contrast=0.7),
    "retromae": PretrainingMethod("retromae"),
}


def make_batch(method: PretrainingMethod, number: int = 0) -> MaskedTexts:
    """Sixteen rows, some of which are empty."""
    random = np.random.default_rng(7)
    documents = Ragged.from_lists([random.integers(4, BERT.vocab_size, n).tolist() for n in random.integers(6, 50, 30)])
    spans = cut_spans(documents, 10, 4, least=2 if method.in_pairs else 1)
    half = (0.5, 4) if method.decodes else None
    sizes: dict[str, Any] = {"size": 6 if method.in_pairs else 13, "devices": 8, "length": 12, "rate": 0.3}
    batches = MaskedBatches(
        spans, VOCABULARY, (1, 2), 0, data_seed=1, mask_seed=2, in_pairs=method.in_pairs, decoder=half, **sizes
    )
    batch = batches(number)
    assert batch.size == 16
    return batch


def make_pretrainer(method: PretrainingMethod) -> PretrainingModel:
    return PretrainingModel(PretrainingModule(BERT, Compute(), method))


@pytest.mark.table
@pytest.mark.parametrize("name", METHODS)
def test_losses_and_gradients_equal_numpy(name: str) -> None:
    method, mesh = METHODS[name], make_mesh(fsdp=2)
    model, batch = make_pretrainer(method), make_batch(METHODS[name])
    objective = PretrainingObjective(model=model, mesh=mesh, chunk_size=8)
    params = jax.device_get(make_params(model))

    def loss(params: Any, batch: MaskedTexts) -> Any:
        terms = objective(params, batch, jax.random.key(0))
        return terms.loss, terms

    both = jax.jit(jax.value_and_grad(loss, has_aux=True))
    placed = jax.device_put(params, shardings(mesh, params))
    (total, terms), gradients = both(placed, shard_whole_batch(mesh, batch))
    expected = oracle.losses(params, batch, BERT, method)
    assert {**terms.terms, "loss": total}.keys() == expected.keys()
    for term, value in {**terms.terms, "loss": total}.items():
        assert float(value) == pytest.approx(expected[term], rel=2e-5), term
    random = np.random.default_rng(3)
    direction = jax.tree.map(lambda x: random.standard_normal(x.shape), params)
    along = sum(float((g * d).sum()) for g, d in zip(jax.tree.leaves(gradients), jax.tree.leaves(direction)))
    slope = oracle.slope(lambda p: oracle.losses(p, batch, BERT, method)["loss"], params, direction)
    assert along == pytest.approx(slope, rel=2e-4)
    others, _ = both(placed, shard_whole_batch(mesh, make_batch(method, 1)))  # control: another batch has another loss
    assert float(others[0]) != pytest.approx(expected["loss"], rel=2e-3)
    if method.decodes:
        assert batch.attention_mask is not None
        seen = dataclasses.replace(batch, attention_mask=np.ones_like(batch.attention_mask))
        assert oracle.losses(params, seen, BERT, method)["decoder"] != pytest.approx(expected["decoder"], rel=2e-3)


@pytest.mark.slow
def test_contrast_of_four_vectors_by_hand() -> None:
    vectors = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    value, accuracy = span_contrast(jnp.asarray(vectors), jnp.ones(4, bool))
    assert float(value) == pytest.approx(0.673577, abs=2e-6)
    assert float(accuracy) == 1.0
    assert oracle.contrast(vectors.astype(np.float64)) == pytest.approx(0.673577, abs=1e-6)
    more = np.concatenate([vectors, np.full((3, 2), 9, np.float32)])  # an odd number of empty rows
    value, accuracy = span_contrast(jnp.asarray(more), jnp.arange(7) < 4)
    assert float(value) == pytest.approx(0.673577, abs=2e-6)
    # Control: with wrong partners, the loss is large.
    assert float(span_contrast(jnp.asarray(vectors[[0, 2, 1, 3]]), jnp.ones(4, bool))[0]) > 1


def test_unsupported_methods_of_an_encoder() -> None:
    assert isinstance(T5, T5Config)
    assert "MLM" in METHODS["mlm"].problem(T5) or METHODS["mlm"].problem(T5)
    assert METHODS["mlm"].problem(MODERNBERT) == ""
    assert "modernbert does not use" in METHODS["retromae"].problem(MODERNBERT)
    assert "skip_from is 6, and the layers below the last layer are 0 to 1" in PretrainingMethod("condenser").problem(
        BERT
    )
    assert all(method.problem(BERT) == "" for method in METHODS.values())
