"""From tokens to vectors: which encoder, which shape, the parts that a config makes, and the arrays that are never in
memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders.fused import require_kernel
from jaxret.models.retriever_model import RetrieverModel, with_pretrained
from tests.tiny import (
    BERT,
    DUAL_ENCODER,
    LLAMA,
    MLR,
    SCALAR_MIX,
    SELF_CONTRASTIVE,
    T5,
    make_params,
    make_retriever,
    make_tokens,
)

ROWS, LENGTH = 5, 7


def test_untied_and_tied_parameter_trees() -> None:
    untied = jax.eval_shape(make_retriever({}).init, jax.random.key(0))
    assert set(untied) == {"query_encoder", "passage_encoder"}
    assert jax.tree.structure(untied["query_encoder"]) == jax.tree.structure(untied["passage_encoder"])  # type: ignore[operator]
    tied = jax.eval_shape(make_retriever({"encoder.tied": True}).init, jax.random.key(0))
    assert set(tied) == {"encoder"}
    mixed = jax.eval_shape(make_retriever(SCALAR_MIX).init, jax.random.key(0))
    assert set(mixed) == {"query_encoder", "passage_encoder", "pooling"}
    assert mixed["pooling"]["alpha"].shape == (3,)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(mixed))


@functools.partial(jax.jit, static_argnames=("retriever", "side", "train"))
def _encode(retriever: RetrieverModel, params: Any, side: Any, train: bool, dropout_key: Any) -> jax.Array:
    return retriever.encode(params, make_tokens(ROWS, LENGTH), side, train, dropout_key).vectors


def encode(
    retriever: RetrieverModel, params: Any, side: Any, train: bool = False, dropout_key: Any = None
) -> np.ndarray:
    return np.asarray(_encode(retriever, params, side, train, dropout_key))


def test_each_side_has_its_own_encoder() -> None:
    retriever = make_retriever(DUAL_ENCODER)
    params = make_params(retriever)
    query, passage = encode(retriever, params, "query"), encode(retriever, params, "passage")
    assert np.abs(query - passage).max() > 0.1
    swapped = {"query_encoder": params["passage_encoder"], "passage_encoder": params["query_encoder"]}
    np.testing.assert_array_equal(encode(retriever, swapped, "query"), passage)
    np.testing.assert_array_equal(encode(retriever, swapped, "passage"), query)
    moved = {**params, "passage_encoder": jax.tree.map(jnp.zeros_like, params["passage_encoder"])}
    np.testing.assert_array_equal(encode(retriever, moved, "query"), query)
    assert np.abs(encode(retriever, moved, "passage") - passage).max() > 0.1, "control: the vectors of passages change"


def test_a_tied_encoder_gives_both_sides_the_same_vector() -> None:
    retriever = make_retriever(DUAL_ENCODER | {"encoder.tied": True})
    params = make_params(retriever)
    np.testing.assert_array_equal(encode(retriever, params, "query"), encode(retriever, params, "passage"))


@pytest.mark.parametrize(
    ("family", "training", "inference"),
    [(DUAL_ENCODER, 1, 1), (MLR, 3, 3), (SELF_CONTRASTIVE, 3, 1), (SCALAR_MIX, 1, 1)],
    ids=["dual_encoder", "mlr", "self_contrastive", "scalar_mix"],
)
def test_shapes(family: dict[str, Any], training: int, inference: int) -> None:
    retriever = make_retriever(family)
    shapes = jax.eval_shape(retriever.init, jax.random.key(0))
    assert retriever.vectors_per_passage == inference
    assert retriever.dimension == BERT.hidden_size
    expected = {("query", True): 1, ("query", False): 1, ("passage", True): training, ("passage", False): inference}
    for (side, train), vectors in expected.items():
        embeddings = jax.eval_shape(
            lambda p, k, side=side, train=train: retriever.encode(p, make_tokens(ROWS, LENGTH), side, train, k),
            shapes,
            jax.random.key(0),
        )
        assert embeddings.vectors.shape == (ROWS, vectors, BERT.hidden_size)
        assert embeddings.vectors.dtype == jnp.float32
        assert embeddings.mask.shape == (ROWS, vectors)


def test_self_contrastive_and_scalar_mix_pool_what_mlr_keeps() -> None:
    mlr = make_retriever(MLR)
    params = make_params(make_retriever(SCALAR_MIX))
    encoders = {name: part for name, part in params.items() if name != "pooling"}
    vectors = encode(mlr, encoders, "passage")
    first = encode(make_retriever(SELF_CONTRASTIVE | {"encoder.tied": False}), encoders, "passage")
    np.testing.assert_allclose(first, vectors[:, :1], atol=1e-6)
    weights = np.asarray(jax.nn.softmax(params["pooling"]["alpha"]))
    mixed = encode(make_retriever(SCALAR_MIX), params, "passage")
    np.testing.assert_allclose(mixed[:, 0], np.einsum("v,bvd->bd", weights, vectors), atol=1e-5)


@pytest.mark.parametrize("side", ["query", "passage"])
def test_normalize_gives_vectors_of_length_one(side: Any) -> None:
    retriever = make_retriever(MLR | {"normalize": True})
    params = make_params(retriever)
    normalized, plain = encode(retriever, params, side), encode(make_retriever(MLR), params, side)
    np.testing.assert_allclose(np.linalg.norm(normalized, axis=-1), 1.0, atol=1e-6)
    lengths = np.linalg.norm(plain, axis=-1, keepdims=True)
    np.testing.assert_allclose(normalized, plain / lengths, atol=1e-6)
    assert np.abs(lengths - 1).max() > 0.1, "control: without normalize, lengths are not 1"


@pytest.mark.slow
def test_normalize_leaves_a_zero_vector_and_its_gradient_finite() -> None:
    retriever = make_retriever(DUAL_ENCODER | {"normalize": True, "encoder.tied": True})
    zeros = jax.tree.map(jnp.zeros_like, make_params(retriever))
    tokens = make_tokens(ROWS, LENGTH)
    value, gradient = jax.jit(jax.value_and_grad(lambda p: retriever.encode(p, tokens, "query").vectors.sum()))(zeros)
    assert float(value) == 0.0
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))


def test_dropout_depends_on_the_key_and_is_off_at_inference() -> None:
    retriever = make_retriever(DUAL_ENCODER | {"encoder.tied": True})
    params = make_params(retriever)
    one, same, other = (
        encode(retriever, params, "query", train=True, dropout_key=jax.random.key(k)) for k in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 0.01
    assert np.abs(one - encode(retriever, params, "query")).max() > 0.01


def test_bfloat16_returns_float32_within_tolerance() -> None:
    params = make_params(make_retriever(DUAL_ENCODER))
    half = encode(make_retriever(DUAL_ENCODER | {"encoder.dtype": "bfloat16"}), params, "query")
    full = encode(make_retriever(DUAL_ENCODER), params, "query")
    assert half.dtype == np.float32
    assert 1e-4 < np.abs(half - full).max() < 0.2
    assert (half != np.asarray(jnp.asarray(half, jnp.bfloat16), np.float32)).any(), "the last norm is in float32"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"head.name": "last_layer"}, r"head.name .*'last_layer'; .*dual_encoder, mlr"),
        ({"pooling": "max"}, r"'max'; .*average, scalar_mix, self_contrastive"),
        ({"encoder.dtype": "float16"}, r"encoder.dtype .*'float16'; .*float32, bfloat16"),
        ({"encoder.attention": "fused"}, r"encoder.attention .*'fused'; .*plain"),
        ({"encoder.attention": "cudnn"}, r"encoder.attention is 'cudnn', which needs bfloat16"),
        ({"pooling": "average"}, r"pooling .*'average', .*'dual_encoder' .*'none'"),
        (MLR | {"head.mlr.chosen": (2,), "pooling": "scalar_mix"}, r"head 'mlr' gives one vector"),
        (MLR | {"head.mlr.chosen": (0, 1)}, r"last .*2, .*among"),
        ({"head.token": "max"}, r"head.token .*'max'; .*cls"),
    ],
)
def test_configs_that_name_no_retriever(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_retriever(overrides)


def test_cudnn_refuses_large_heads() -> None:
    options = {"encoder.attention": "cudnn", "encoder.dtype": "bfloat16", "head.token": "last"}
    make_retriever(options, LLAMA)
    with pytest.raises(ValueError, match=r"128 dimensions, .*; .*256"):
        make_retriever(options, dataclasses.replace(LLAMA, head_size=256))


def test_a_bias_of_positions_needs_plain_attention() -> None:
    with pytest.raises(ValueError, match=r"'flash', .*T5 .*positions"):
        make_retriever({"encoder.attention": "flash", "head.token": "mean"}, T5)


def test_kernels_are_used_on_their_platform() -> None:
    for attention, platform in (("flash", "tpu"), ("cudnn", "gpu"), ("cudnn", "cuda"), ("plain", "cpu")):
        require_kernel(attention, platform)
    with pytest.raises(ValueError, match=r"encoder.attention .*'flash', .*TPU, .*JAX runs .*CPU"):
        require_kernel("flash", "cpu")
    with pytest.raises(ValueError, match=r"encoder.attention .*'cudnn', .*GPU, .*JAX runs .*TPU"):
        require_kernel("cudnn", "tpu")


def shapes_in(jaxpr: Any) -> set[tuple[int, ...]]:
    """The shapes of all intermediate values, including those of inner programs."""
    shapes = {tuple(v.aval.shape) for equation in jaxpr.eqns for v in equation.outvars if hasattr(v.aval, "shape")}
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                shapes |= shapes_in(inner)
    return shapes


@pytest.mark.parametrize("token", ["cls", "mean"])
@pytest.mark.parametrize("side", ["query", "passage"])
def test_multi_layer_encoding_keeps_only_chosen_states(token: str, side: Any) -> None:
    bert = dataclasses.replace(BERT, num_layers=4)
    retriever = make_retriever(MLR | {"head.mlr.chosen": (0, 2, 3, 4), "head.token": token}, bert)
    shapes = jax.eval_shape(retriever.init, jax.random.key(0))
    tokens = make_tokens(ROWS, LENGTH)
    H = bert.hidden_size

    def whole(shapes: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
        return shapes & {(layers, ROWS, LENGTH, H) for layers in (bert.num_layers, bert.num_layers + 1)}

    encoding = jax.make_jaxpr(lambda p: retriever.encode(p, tokens, side))(shapes)
    assert not whole(shapes_in(encoding.jaxpr))
    assert (ROWS, LENGTH, H) in shapes_in(encoding.jaxpr)
    control = jax.make_jaxpr(lambda p: retriever.hidden_states(p, tokens, side))(shapes)
    assert whole(shapes_in(control.jaxpr)) == {(4, ROWS, LENGTH, H), (5, ROWS, LENGTH, H)}


def test_pretrained_weights_are_loaded_into_both_encoders() -> None:
    retriever = make_retriever(SCALAR_MIX)
    params = make_params(retriever)
    loaded = make_params(make_retriever({"encoder.tied": True}), seed=1)["encoder"]
    replaced = with_pretrained(params, loaded)
    assert replaced["query_encoder"] is loaded
    assert replaced["passage_encoder"] is loaded
    assert replaced["pooling"] is params["pooling"]


def test_pretrained_weights_of_another_shape_are_errors() -> None:
    retriever = make_retriever({"encoder.tied": True})
    params = make_params(retriever)
    wrong = jax.tree.map(lambda x: x, params["encoder"])
    wrong["embeddings"]["word"]["embedding"] = jnp.zeros((3, 16))
    with pytest.raises(ValueError, match=r"encoder/embeddings/word/embedding: \(3, 16\) loaded, \(40, 16\) needed"):
        with_pretrained(params, wrong)
