"""Our T5 encoder against PyTorch's, from stored outputs (tests/goldens): no torch needed."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxret.models.encoders.architectures import make_encoder
from jaxret.models.encoders.architectures.t5 import T5Config, relative_buckets
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.pretrained import load_pretrained, save_pretrained
from jaxret.models.encoders.selection import Selection
from jaxret.types import HiddenStates, Tokens

GOLDENS = Path(__file__).parents[3] / "goldens"
TINY = ("tiny_t5", "tiny_t5_gated")
TOLERANCE = 1e-5  # relative to the largest number of a layer, because the residual stream grows


def load(name: str) -> tuple[T5Config, Any, Tokens, np.ndarray]:
    """A golden model: config, parameters, input and torch's states [L+1,B,T,H]."""
    config, params = load_pretrained(GOLDENS / name, ignore=())
    assert isinstance(config, T5Config)
    with np.load(GOLDENS / name / "hidden_states.npz", allow_pickle=False) as file:
        tokens = Tokens(jnp.asarray(file["ids"]), jnp.asarray(file["mask"]))
        return config, params, tokens, file["states"]


@functools.partial(jax.jit, static_argnames=("config", "selection", "compute"))
def encode(
    config: T5Config, params: Any, tokens: Tokens, selection: Selection = Selection(), compute: Compute = Compute()
) -> HiddenStates:
    return make_encoder(config, compute).apply({"params": params}, tokens, selection=selection)


def distances(states: Any, expected: np.ndarray, mask: Any) -> np.ndarray:
    """The largest difference of each layer at real positions, relative to the layer's largest expected number."""
    actual, real = np.asarray(states, np.float32), np.asarray(mask)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    return np.abs(actual - expected)[:, real].max(axis=(1, 2)) / np.abs(expected)[:, real].max(axis=(1, 2))


@pytest.mark.parametrize("name", TINY)
def test_every_hidden_state_equals_torch(name: str) -> None:
    config, params, tokens, expected = load(name)
    assert config.gated == (name == "tiny_t5_gated")
    actual = encode(config, params, tokens)
    assert actual.states.shape[0] == config.num_layers + 1
    assert distances(actual.states, expected, tokens.mask).max() <= TOLERANCE
    assert np.abs(expected[-2]).max() > 2 * np.abs(expected[-1]).max(), "the last state is normed, the others are not"


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(
    "change",
    [{"buckets": 16}, {"max_distance": 20}, {"layer_norm_eps": 1e-2}, {"feed_forward": "gelu"}],
    ids=lambda change: next(iter(change)),
)
def test_control_other_constants_are_not_equal(name: str, change: dict[str, Any]) -> None:
    config, params, tokens, expected = load(name)
    if "buckets" in change:
        params["position_bias"]["embedding"] = np.resize(params["position_bias"]["embedding"], (16, config.num_heads))
    if "feed_forward" in change and config.gated:
        change = {"feed_forward": "gated-relu"}
    wrong = encode(dataclasses.replace(config, **change), params, tokens)
    assert distances(wrong.states, expected, tokens.mask).max() > 10 * TOLERANCE


def test_control_without_the_mask_is_not_equal() -> None:
    config, params, tokens, expected = load("tiny_t5")
    wrong = encode(config, params, dataclasses.replace(tokens, mask=jnp.ones_like(tokens.mask)))
    assert distances(wrong.states, expected, tokens.mask).max() > 10 * TOLERANCE


def test_buckets_of_distances() -> None:
    """Buckets are exact below a quarter of them, then logarithmic; the last one has all larger distances. Keys before
    the query are in the first half, keys after it in the second."""
    buckets = np.asarray(relative_buckets(300, buckets=32, max_distance=128))
    np.testing.assert_array_equal(buckets[10, 2:19], [8, 7, 6, 5, 4, 3, 2, 1, 0, 17, 18, 19, 20, 21, 22, 23, 24])
    assert buckets[0, 8] == 24
    assert buckets[0, 127] == buckets[0, 299] == 31
    assert buckets[299, 0] == 15
    assert (np.diff(buckets[0, 1:]) >= 0).all()


@pytest.mark.parametrize("name", TINY)
def test_normalize_intermediate_gives_every_block_the_final_norm(name: str) -> None:
    config, params, tokens, expected = load(name)
    normalized = encode(dataclasses.replace(config, normalize_intermediate=True), params, tokens).states
    raw = expected.astype(np.float64)
    normed = raw / np.sqrt((raw**2).mean(-1, keepdims=True) + config.layer_norm_eps) * params["final_norm"]
    normed[0], normed[-1] = expected[0], expected[-1]
    assert distances(normalized, normed, tokens.mask).max() <= TOLERANCE
    assert distances(normalized, expected, tokens.mask)[1:-1].min() > 0.1, "control: the norm changes the states"


@pytest.mark.parametrize(
    "selection", [Selection(3), Selection(0, mean=True), Selection(2, mean=True), Selection(None, mean=True)]
)
def test_keep_selects_of_every_layer(selection: Selection) -> None:
    config, params, tokens, expected = load("tiny_t5")
    mask = np.asarray(tokens.mask)
    expected_states = expected[:, :, : selection.tokens]
    if selection.mean:
        mean = np.stack([expected[:, row, real].mean(axis=1) for row, real in enumerate(mask)], axis=1)
        expected_states = np.concatenate([mean[:, :, None], expected_states], axis=2)
    selected = encode(config, params, tokens, selection)
    exists = np.asarray(selected.mask)
    assert distances(selected.states, expected_states, exists).max() <= TOLERANCE
    last = encode(config, params, tokens, dataclasses.replace(selection, layers="last"))
    assert distances(last.states, expected_states[-1:], exists).max() <= TOLERANCE
    np.testing.assert_array_equal(last.mask, exists)


def test_keep_more_positions_than_tokens() -> None:
    """The result has K positions, whatever the padded length of the batch."""
    hidden, mask = jnp.ones((2, 3, 4)), jnp.array([[True] * 3, [True, False, False]])
    states, exists = Selection(5, mean=True).select_positions(hidden, mask)
    assert states.shape == (2, 6, 4)
    np.testing.assert_array_equal(exists, [[True] * 4 + [False] * 2, [True, True] + [False] * 4])
    assert float(jnp.abs(states[:, 4:]).max()) == 0


def test_recomputation_changes_nothing_and_bfloat16_little() -> None:
    config, params, tokens, expected = load("tiny_t5_gated")
    again = encode(config, params, tokens, compute=Compute(recompute="cheap")).states
    assert distances(again, expected, tokens.mask).max() <= TOLERANCE
    half = encode(config, params, tokens, compute=Compute(jnp.bfloat16)).states
    assert half.dtype == jnp.float32, "hidden states are summed in float32"
    # Two gated layers amplify rounding errors; attention_test.py bounds those of attention alone.
    assert 1e-3 < distances(half, expected, tokens.mask).max() < 0.2


def test_a_row_of_nothing_but_padding_is_finite() -> None:
    config, params, tokens, _ = load("tiny_t5")
    empty = Tokens(tokens.ids, tokens.mask.at[1].set(False))
    gradient = jax.jit(
        jax.grad(
            lambda p: jnp.sum(make_encoder(config).apply({"params": p}, empty, Selection(1, mean=True)).states ** 2)
        )
    )(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("name", TINY)
def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    config, params = load_pretrained(GOLDENS / name, ignore=())
    save_pretrained(tmp_path, config, params)
    original, saved = load_file(GOLDENS / name / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert saved.keys() == original.keys() - {"encoder.embed_tokens.weight"}
    assert all(saved[key].tobytes() == original[key].tobytes() for key in saved)
    again, _ = load_pretrained(tmp_path, ignore=())
    assert again == config


def test_the_whole_model_loads_without_its_decoder(tmp_path: Path) -> None:
    """The file of t5-base holds the decoder, and the word table under three names."""
    tensors = load_file(GOLDENS / "tiny_t5" / "model.safetensors")
    tensors["decoder.block.0.layer.0.SelfAttention.q.weight"] = np.zeros((24, 32), np.float32)
    tensors["encoder.embed_tokens.weight"] = tensors["decoder.embed_tokens.weight"] = tensors["shared.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((GOLDENS / "tiny_t5" / "config.json").read_bytes())
    load_pretrained(tmp_path, ignore=("decoder",))
    with pytest.raises(ValueError, match=r"unused decoder\.block\.0"):
        load_pretrained(tmp_path, ignore=())
