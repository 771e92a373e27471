"""Late interaction: which tokens become vectors, and which are attended to. PyLate is compared in pylate_test.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders.architectures import make_encoder
from jaxret.training.config_check import check_config, check_retrieval
from jaxret.types import Ragged, Tokens
from tests import tiny

MASK = 3
EXPANDED = tiny.LATE_INTERACTION | {"head.colbert.expansion": "unattended", "head.colbert.mask_id": MASK}
TIED = {"encoder.tied": True}


def encode(overrides: dict[str, Any], tokens: Tokens, side: Any) -> tuple[np.ndarray, np.ndarray]:
    retriever = tiny.make_retriever(overrides | TIED)
    embeddings = jax.jit(lambda params: retriever.encode(params, tokens, side))(tiny.make_params(retriever))
    return np.asarray(embeddings.vectors), np.asarray(embeddings.mask)


def test_skipped_tokens_are_encoded_and_have_no_vectors() -> None:
    tokens = tiny.make_tokens(4, 6)
    ids, mask = np.array(tokens.ids), np.asarray(tokens.mask)
    ids[0, 2], ids[0, 4], ids[2, 0] = 7, 8, 7  # the first token always counts
    tokens = Tokens(jnp.asarray(ids), tokens.mask)
    skipping = tiny.LATE_INTERACTION | {"head.colbert.skiplist": (7, 8)}
    every, _ = encode(tiny.LATE_INTERACTION, tokens, "passage")
    vectors, exists = encode(skipping, tokens, "passage")
    kept = mask & ~(np.isin(ids, (7, 8)) & (np.arange(6) > 0))
    assert kept.sum() < mask.sum()
    np.testing.assert_array_equal(exists, np.arange(6) < kept.sum(1, keepdims=True))
    np.testing.assert_allclose(vectors[exists], every[kept], atol=1e-6)

    retriever = tiny.make_retriever(skipping)
    texts = Ragged.from_lists([row[real].tolist() for row, real in zip(ids, mask)])
    np.testing.assert_array_equal(retriever.vector_counts(texts, "passage"), kept.sum(1))
    np.testing.assert_array_equal(retriever.vector_counts(texts, "query"), mask.sum(1))
    assert retriever.most_vectors(6) == 6
    query, _ = encode(skipping, tokens, "query")
    np.testing.assert_allclose(query, encode(tiny.LATE_INTERACTION, tokens, "query")[0])


def test_query_expansion_masks_attend_but_are_not_attended() -> None:
    # The first [MASK] is part of the text.
    ids = np.array([[2, 9, MASK, 5, MASK, MASK], [2, 11, 12, 13, 14, 5]], np.int32)
    seen = np.array([[1, 1, 1, 1, 0, 0], [1] * 6], bool)
    tokens = Tokens(jnp.asarray(ids), jnp.ones(ids.shape, bool))
    vectors, exists = encode(EXPANDED, tokens, "query")
    assert exists.all(), "every token is a vector"

    retriever = tiny.make_retriever(EXPANDED | TIED)
    params = tiny.make_params(retriever)
    states = (
        make_encoder(tiny.BERT).apply({"params": params["encoder"]}, Tokens(tokens.ids, jnp.asarray(seen))).states[-1]
    )
    expected = np.asarray(states) @ np.asarray(params["head"]["projection"]["kernel"])
    np.testing.assert_allclose(vectors, expected / np.linalg.norm(expected, axis=-1, keepdims=True), atol=1e-5)
    attended, _ = encode(EXPANDED | {"head.colbert.expansion": "attended"}, tokens, "query")
    assert np.abs(attended - vectors)[0].max() > 0.01, "control: if [MASK]s are attended, vectors differ"
    np.testing.assert_allclose(attended[1], vectors[1], atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"head.colbert.expansion": "some"}, r"expansion .*'some'; .*unattended"),
        ({"head.colbert.skiplist": (1, 40)}, r"head.colbert.skiplist .*40; .*vocabulary .*0 .*39"),
        ({"head.colbert.query_marker": -2}, r"query_marker .*-2; .*vocabulary .*-1 .*39"),
        ({"head.colbert.expansion": "attended"}, r"mask_id .*103; .*vocabulary .*0 .*39"),
        (
            {"head.colbert.late": False, "head.colbert.passage_marker": 1},
            r"passage_marker .*interaction .*head.colbert.late=True",
        ),
    ],
)
def test_invalid_settings_are_errors(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.make_retriever(tiny.LATE_INTERACTION | overrides)


def test_unattended_masks_need_plain_attention_without_packing() -> None:
    with pytest.raises(ValueError, match=r"'flash', .*computes .*\[MASK\]s"):
        tiny.make_retriever(EXPANDED | {"encoder.attention": "flash"})
    config = tiny.make_config(EXPANDED | {"tokens.packing": True, "data.train": "x", "tokens.query_length": 8,
                                          "tokens.passage_length": 8, "train.batch_size": 8})  # fmt: skip
    check_config(config)
    with pytest.raises(ValueError, match=r"tokens.packing .*True, .*packed"):
        check_retrieval(config, tiny.make_retriever(EXPANDED))
