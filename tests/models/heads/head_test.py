"""The last token, and the mean without the first token: positions, padding on both sides, packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders.selection import Selection
from jaxret.models.heads.head import TOKENS, one_token_selection
from tests import tiny

LENGTHS = [5, 1, 2, 0]


def by_hand(states: np.ndarray, token: str) -> np.ndarray:
    """Compute the vector from the real states [T,H] of a text."""
    if token in ("cls", "last"):
        return states[0 if token == "cls" else -1]
    return states.mean(0) if token == "mean" or len(states) == 1 else states[1:].mean(0)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("token", TOKENS)
def test_vectors_of_each_token_selection(token: str, side: str) -> None:
    if (token, side) == ("cls", "left"):
        pytest.skip("[CLS] is at position 0")
    mask = np.arange(6) < np.array(LENGTHS)[:, None]
    mask = mask[:, ::-1] if side == "left" else mask
    states = np.random.default_rng(0).normal(size=(4, 6, 3)).astype(np.float32)
    selection = one_token_selection(token, "last")
    chosen, exists = selection.select_positions(jnp.asarray(states), jnp.asarray(mask))
    assert chosen.shape == (4, 1, 3)
    assert exists[:, 0].tolist() == [True, True, True, False]
    expected = np.stack([by_hand(states[row][mask[row]], token) for row in range(3)])
    np.testing.assert_allclose(chosen[:3, 0], expected, rtol=1e-6, atol=1e-6)
    if token == "last":
        np.testing.assert_array_equal(chosen[:3, 0], expected)


def test_only_the_last_token_of_a_causal_model_attends_to_the_text() -> None:
    retriever = tiny.make_retriever({"head.token": "last", "encoder.tied": True}, tiny.LLAMA)
    params, tokens = tiny.make_params(retriever), tiny.make_tokens(2, 6)
    other = tokens.replace(ids=tokens.ids.at[:, 0].add(1))  # type: ignore[attr-defined]
    encode = jax.jit(lambda tokens: retriever.encode(params, tokens, "query").vectors)
    assert np.abs(encode(tokens) - encode(other)).min(axis=(1, 2)).max() > 0
    hidden = retriever.hidden_states(params, tokens, "query")
    last = np.asarray(tokens.mask).sum(axis=1) - 1
    np.testing.assert_allclose(encode(tokens)[:, 0], hidden.states[-1][np.arange(2), last], rtol=1e-5)


def test_a_selection_of_every_layer() -> None:
    assert one_token_selection("last", "all") == Selection(0, mean=True, over="last", layers="all")


@pytest.mark.parametrize("head", ["me_bert", "aggretriever"])
def test_heads_without_token_selection_are_errors(head: str) -> None:
    with pytest.raises(ValueError, match=r"head\.token .*'last'; .*cls"):
        tiny.make_retriever({"head.name": head, "head.token": "last"})


def test_multi_vector_heads_refuse_other_tokens() -> None:
    keys = tiny.COLBERT | {"head.token": "last", "pooling": "self_contrastive", "loss.local_weight": 0.1}
    with pytest.raises(ValueError, match=r"'colbert' .*vector .*head\.token 'last'"):
        tiny.make_retriever(keys)
