"""Weights of words against NumPy: with expansion, from the logits of all tokens; without, from one scalar per token."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.heads.head import Side
from jaxret.models.retriever_model import RetrieverModel
from tests import tiny
from tests.pipeline import write_encoder

TOKENS = tiny.make_tokens(4, 7)  # lengths 7 and less
IDS, MASK = np.array(TOKENS.ids), np.array(TOKENS.mask)
IDS[0, :4] = IDS[0, 4], 2, 1, IDS[0, 5]  # repeated words, and two special tokens among them
TOKENS = replace(TOKENS, ids=jnp.asarray(IDS))


def encode(overrides: dict[str, Any], side: Side, train: bool = False) -> tuple[np.ndarray, Any, RetrieverModel]:
    retriever = tiny.make_retriever(overrides, tiny.WITHOUT_DROPOUT)
    params = tiny.make_params(retriever)
    program = jax.jit(lambda p: retriever.encode(p, TOKENS, side, train, jax.random.key(0)).vectors)
    return np.asarray(program(params))[:, 0], params, retriever


def last_states(params: Any, retriever: RetrieverModel) -> np.ndarray:
    return np.asarray(retriever.hidden_states(params, TOKENS, "passage").states[-1], np.float64)


@pytest.mark.parametrize("train", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_expansion_takes_the_largest_logit_of_every_token(train: bool) -> None:
    weights, params, retriever = encode(tiny.SPLADE, "passage", train)
    head = params["encoder"]["mlm_head"]
    table = np.asarray(params["encoder"]["embeddings"]["word"]["embedding"], np.float64)

    def logits(state: np.ndarray) -> np.ndarray:
        hidden = state @ np.asarray(head["dense"]["kernel"], np.float64) + head["dense"]["bias"]
        hidden = np.asarray(jax.nn.gelu(jnp.asarray(hidden), approximate=False), np.float64)
        hidden = (hidden - hidden.mean()) / np.sqrt(hidden.var() + 1e-12) * head["norm"]["scale"] + head["norm"]["bias"]
        return hidden @ table.T + np.asarray(head["bias"], np.float64)

    states = last_states(params, retriever)
    expected = np.zeros((len(IDS), tiny.BERT.vocab_size))
    for row, column in zip(*np.nonzero(MASK), strict=True):
        expected[row] = np.maximum(expected[row], np.log1p(np.maximum(logits(states[row, column]), 0)))
    np.testing.assert_allclose(weights, expected, atol=2e-6)
    assert 0.1 < (weights > 0).mean() < 0.95, "some words have no weight"
    assert np.abs(weights - expected.max(axis=0)).max() > 0.01, "control: the weights of different texts differ"


def test_without_expansion_only_words_of_the_text_have_a_weight() -> None:
    weights, params, retriever = encode(tiny.UNICOIL, "passage")
    linear = params["head"]["term_weight"]
    scalars = last_states(params, retriever) @ np.asarray(linear["kernel"], np.float64) + linear["bias"]
    expected = np.zeros((len(IDS), tiny.BERT.vocab_size))
    for row, column in zip(*np.nonzero(MASK), strict=True):
        word = IDS[row, column]
        if word not in (0, 1, 2):
            expected[row, word] = max(expected[row, word], float(scalars[row, column, 0]))
    np.testing.assert_allclose(weights, expected, atol=2e-6)
    assert (weights > 0).any()


@pytest.mark.table
@pytest.mark.parametrize("queries", ["words", "learned"])
def test_queries_without_the_encoder(queries: str) -> None:
    keys = tiny.SPLADE | {"head.splade.queries": queries}
    weights, params, retriever = encode(keys, "query")
    expected = np.zeros((len(IDS), tiny.BERT.vocab_size))
    table = np.maximum(params["head"]["word_weights"], 0) if queries == "learned" else np.ones(tiny.BERT.vocab_size)
    for row, column in zip(*np.nonzero(MASK), strict=True):
        if IDS[row, column] not in (0, 1, 2):
            expected[row, IDS[row, column]] = table[IDS[row, column]]
    np.testing.assert_array_equal(weights, expected.astype(np.float32))
    sides: tuple[Side, ...] = ("query", "passage")
    programs = [jax.jit(lambda p, side=side: retriever.encode(p, TOKENS, side).vectors) for side in sides]
    work: list[Any] = [program.lower(params).compile().cost_analysis() for program in programs]
    assert work[0]["flops"] < 0.05 * work[1]["flops"], "XLA computes no encoder"
    assert np.abs(encode(keys, "passage")[0] - expected).max() > 0.1, "control: passages are encoded"


def test_impossible_settings_are_errors() -> None:
    for keys, message in (
        ({"head.splade.queries": "bag"}, "must be one of encoded, words, learned"),
        ({"head.splade.chunk": 0}, "head.splade.chunk is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny.make_retriever(tiny.SPLADE | keys)


def test_special_tokens_have_no_weight(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(write_encoder(tmp_path), 8, 12)
    markers = tuple(sorted({tokenizer.marker_ids[0], tokenizer.sep_id, tokenizer.pad_id}))
    head = tiny.make_retriever(tiny.UNICOIL | {"head.splade.special_ids": (7, 8)}).module.head
    with pytest.raises(ValueError, match=rf"without .*tokenizer.*set .*{re.escape(str(markers))}"):
        head.check_tokenizer(tokenizer)
    good = tiny.make_retriever(tiny.UNICOIL | {"head.splade.special_ids": markers}).module.head
    good.check_tokenizer(tokenizer)
    every_token = tiny.make_retriever(tiny.SPLADE | {"head.splade.special_ids": ()}).module.head
    every_token.check_tokenizer(tokenizer)
