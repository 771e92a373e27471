"""Which hidden states become vectors, and in which order."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders.architectures import make_encoder
from jaxret.models.encoders.architectures.bert import Bert
from jaxret.models.encoders.pretrained import load_pretrained
from jaxret.models.encoders.selection import Selection
from jaxret.models.heads.dual_encoder import DualEncoderHead
from jaxret.models.heads.head import HeadInput
from jaxret.models.heads.me_bert import MeBertHead
from jaxret.models.heads.mlr import MlrHead
from jaxret.models.heads.mvr import MvrHead
from jaxret.types import Embeddings, HiddenStates, Tokens
from tests.tiny import BERT, make_params, make_retriever, make_tokens

DEEP = dataclasses.replace(BERT, num_layers=3)
SHAPES: dict[str, Any] = {
    "num_layers": DEEP.num_layers,
    "hidden_size": DEEP.hidden_size,
    "vocab_size": DEEP.vocab_size,
}
ROWS = 4


@functools.partial(jax.jit, static_argnames="selection")
def encode(params: Any, tokens: Tokens, selection: Selection) -> HiddenStates:
    return Bert(DEEP).apply({"params": params}, tokens, selection)


@pytest.fixture(scope="module")
def encoder() -> tuple[Any, Tokens, HiddenStates]:
    """(parameters, tokens, every hidden state [4,B,T,H]) of a BERT with three layers."""
    tokens = make_tokens(ROWS, 6)
    params = make_params(make_retriever({"encoder.tied": True}, DEEP))["encoder"]
    return params, tokens, encode(params, tokens, Selection())


def embed(head: Any, side: Any, encoder: tuple[Any, Tokens, HiddenStates]) -> Embeddings:
    params, tokens, _ = encoder
    hidden = encode(params, tokens, head.selection(side))
    return head.apply({}, hidden, HeadInput(side, tokens))


def expected(layer: int, token: str, encoder: tuple[Any, Tokens, HiddenStates]) -> np.ndarray:
    """The layer's expected vectors [B,H], from all its hidden states."""
    states, mask = np.asarray(encoder[2].states, np.float64), np.asarray(encoder[1].mask)
    if token == "cls":
        return states[layer][:, 0]
    return np.stack([states[layer, row][mask[row]].mean(axis=0) for row in range(ROWS)])


@pytest.mark.table
@pytest.mark.parametrize("token", ["cls", "mean"])
@pytest.mark.parametrize("side", ["query", "passage"])
def test_last_layer(token: str, side: str, encoder: Any) -> None:
    embeddings = embed(DualEncoderHead(**SHAPES, token=token), side, encoder)
    assert embeddings.vectors.shape == (ROWS, 1, DEEP.hidden_size)
    assert embeddings.mask.all()
    np.testing.assert_allclose(embeddings.vectors[:, 0], expected(3, token, encoder), atol=1e-6)
    other = expected(3, "mean" if token == "cls" else "cls", encoder)
    assert np.abs(np.asarray(embeddings.vectors[:, 0]) - other).max() > 0.1, "control: the two choices of token differ"


@pytest.mark.parametrize("token", ["cls", "mean"])
@pytest.mark.parametrize("layers", [(1, 3), (3, 1), (0, 1, 2, 3), (3,)])
def test_layers_are_ordered_from_the_last(token: str, layers: tuple[int, ...], encoder: Any) -> None:
    head = MlrHead(**SHAPES, chosen=layers, token=token)
    embeddings = embed(head, "passage", encoder)
    assert head.vectors_per_passage() == len(layers) == embeddings.vectors.shape[1]
    assert embeddings.mask.shape == (ROWS, len(layers))
    assert embeddings.mask.all()
    for index, layer in enumerate(sorted(layers, reverse=True)):
        np.testing.assert_allclose(embeddings.vectors[:, index], expected(layer, token, encoder), atol=1e-6)
        for other in set(range(4)) - {layer}:
            assert np.abs(np.asarray(embeddings.vectors[:, index]) - expected(other, token, encoder)).max() > 0.1, (
                "control: other layers have other vectors"
            )


@pytest.mark.parametrize("token", ["cls", "mean"])
def test_a_query_has_one_vector_of_the_last_layer(token: str, encoder: Any) -> None:
    embeddings = embed(MlrHead(**SHAPES, chosen=(0, 1, 3), token=token), "query", encoder)
    assert embeddings.vectors.shape == (ROWS, 1, DEEP.hidden_size)
    np.testing.assert_allclose(embeddings.vectors[:, 0], expected(3, token, encoder), atol=1e-6)


def test_an_empty_text_has_no_vector(encoder: Any) -> None:
    params, tokens, _ = encoder
    empty = (params, Tokens(tokens.ids, tokens.mask.at[1].set(False)), encoder[2])
    for token in ("cls", "mean"):
        embeddings = embed(MlrHead(**SHAPES, chosen=(1, 3), token=token), "passage", empty)
        np.testing.assert_array_equal(embeddings.mask, [[True] * 2, [False] * 2, [True] * 2, [True] * 2])
        assert bool(jnp.isfinite(embeddings.vectors).all())


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), r"head.mlr.chosen .*\(\); .*different"),
        ((3, 3), r"head.mlr.chosen .*\(3, 3\); .*different"),
        (
            (1, 2),
            r"chosen .*\(1, 2\); .*0 \(embeddings\) .*3, .*3",
        ),
        ((3, 4), r"layers are 0 \(embeddings\) to 3"),
        ((-1, 3), r"layers are 0 \(embeddings\) to 3"),
    ],
)
def test_impossible_layers(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MlrHead(**SHAPES, chosen=layers)


@pytest.mark.parametrize(
    ("head", "keys"), [(DualEncoderHead, {}), (MlrHead, {"chosen": (3,)}), (MeBertHead, {"count": 2})], ids=str
)
def test_unknown_token(head: Any, keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"head.token .*'max'; .*cls"):
        head(**SHAPES, **keys, token="max")


@pytest.mark.parametrize("token", ["cls", "mean"])
def test_first_tokens(token: str, encoder: Any) -> None:
    """ME-BERT's vectors are those of the first tokens; with T5, the first vector is the mean."""
    states, mask = np.asarray(encoder[2].states)[-1], np.asarray(encoder[1].mask)
    embeddings = embed(MeBertHead(**SHAPES, count=3, token=token), "passage", encoder)
    if token == "cls":
        np.testing.assert_allclose(embeddings.vectors, states[:, :3], atol=1e-6)
        np.testing.assert_array_equal(embeddings.mask, mask[:, :3])
    else:
        np.testing.assert_allclose(embeddings.vectors[:, 0], expected(3, "mean", encoder), atol=1e-6)
        np.testing.assert_allclose(embeddings.vectors[:, 1:], states[:, :2], atol=1e-6)
    assert embed(MeBertHead(**SHAPES, count=3, token=token), "query", encoder).vectors.shape == (
        ROWS,
        1,
        DEEP.hidden_size,
    )


def test_first_tokens_without_the_mean(encoder: Any) -> None:
    """Footnote 4 of MLR: with T5, a passage is its first m tokens, while a query is the mean."""
    states = np.asarray(encoder[2].states)[-1]
    head = MeBertHead(**SHAPES, count=3, token="mean", mean_vector=False)
    np.testing.assert_allclose(embed(head, "passage", encoder).vectors, states[:, :3], atol=1e-6)
    np.testing.assert_allclose(embed(head, "query", encoder).vectors[:, 0], expected(3, "mean", encoder), atol=1e-6)
    assert head.vector_names() == ("token 0", "token 1", "token 2")
    assert MeBertHead(**SHAPES, count=3, token="mean").vector_names() == ("mean", "token 0", "token 1")


def test_viewers_replace_cls(encoder: Any) -> None:
    """The states equal those computed by hand: embeddings of [viewer ids at position 0, text from position 1], run
    through the layers."""
    params, tokens, _ = encoder
    head = MvrHead(**SHAPES, count=3, first_id=5)
    hidden = jax.jit(
        lambda p: Bert(DEEP).apply({"params": p}, tokens, head.selection("passage"), prefix=jnp.arange(5, 8))
    )(params)
    ids = np.concatenate([np.tile([5, 6, 7], (ROWS, 1)), np.asarray(tokens.ids)[:, 1:]], axis=1)
    positions = np.array([0, 0, 0, 1, 2, 3, 4, 5])
    words = np.asarray(params["embeddings"]["word"]["embedding"])[ids]
    table = np.array(params["embeddings"]["position"]["embedding"])
    np.testing.assert_array_equal(head.apply({}, "passage", method=head.prefix_tokens), [5, 6, 7])
    np.testing.assert_array_equal(head.apply({}, "query", method=head.prefix_tokens), [5])
    # A model whose position table has position 0 three times gives the same sum of embeddings.
    other = jax.tree.map(lambda x: x, params)
    other["embeddings"]["position"]["embedding"] = table[np.append(positions, range(8, 16))]
    mask = np.concatenate([np.ones((ROWS, 3), bool), np.asarray(tokens.mask)[:, 1:]], axis=1)
    by_hand = encode(other, Tokens(jnp.asarray(ids, jnp.int32), jnp.asarray(mask)), Selection(3))
    assert words.shape == (ROWS, 8, DEEP.hidden_size)
    np.testing.assert_allclose(hidden.states[0], by_hand.states[-1], atol=1e-5)
    running = encode(params, Tokens(jnp.asarray(ids, jnp.int32), jnp.asarray(mask)), Selection(3))
    assert np.abs(np.asarray(running.states[-1]) - hidden.states[0]).max() > 0.01, "control: running positions differ"


@pytest.mark.parametrize("deviation", [1.0, 0.5])
def test_a_table_of_viewers_is_drawn_with_its_deviation(deviation: float) -> None:
    head = MvrHead(**SHAPES | {"hidden_size": 64}, count=8, deviation=deviation)
    params = head.init(jax.random.key(0), "passage", method=head.prefix_tokens)["params"]
    assert params["table"].shape == (8, 64)
    assert 0.9 * deviation < float(params["table"].std()) < 1.1 * deviation
    query = head.apply({"params": params}, "query", method=head.prefix_tokens)
    np.testing.assert_array_equal(query, params["table"][:1])


def spread(minilm_dir: Path, **keys: Any) -> float:
    """The smallest 1 - cos between two of a passage's eight viewers at MiniLM's last layer, without training."""
    config, params = load_pretrained(minilm_dir, ("pooler",))
    shapes = {"num_layers": config.num_layers, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    head = MvrHead(**shapes, **keys)
    drawn = head.init(jax.random.key(1), "passage", method=head.prefix_tokens)
    prefix = head.apply(drawn, "passage", method=head.prefix_tokens)
    ids = np.random.default_rng(0).integers(2000, 20000, (2, 24))
    tokens = Tokens(jnp.asarray(ids, jnp.int32), jnp.ones(ids.shape, bool))
    states = make_encoder(config).apply({"params": params}, tokens, head.selection("passage"), False, prefix).states[-1]
    unit = np.asarray(states, np.float64)
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    cosines = np.einsum("bvh,bwh->bvw", unit, unit)
    return float((1 - cosines)[:, ~np.eye(8, dtype=bool)].min())


@pytest.mark.exhaustive
def test_viewers_of_a_pretrained_encoder_differ(minilm_dir: Path) -> None:
    """Viewers are drawn with a large deviation, so that their vectors differ from the start."""
    assert spread(minilm_dir) > 0.01
    assert spread(minilm_dir, deviation=0.02) < 1e-5, "control: viewers as small as the encoder's words give one vector"
    assert spread(minilm_dir, first_id=1) < 1e-5, "control: unused words give one vector, too"
