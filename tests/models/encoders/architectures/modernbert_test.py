"""Our ModernBERT against PyTorch's, from stored outputs (tests/goldens): no torch needed."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxret.models.encoders.architectures import make_encoder, read_config
from jaxret.models.encoders.architectures.modernbert import ModernBertConfig
from jaxret.models.encoders.pretrained import load_pretrained, save_pretrained, stores_mlm_head
from jaxret.models.encoders.selection import Selection
from jaxret.types import HiddenStates, Tokens

GOLDEN = Path(__file__).parents[3] / "goldens" / "tiny_modernbert"
IGNORE = ("head.", "decoder")
TOLERANCE = 1e-5  # relative to the largest number of a layer, because the residual stream grows


@functools.cache
def load() -> tuple[ModernBertConfig, Any, Tokens, np.ndarray]:
    """The golden model: config, parameters, input and torch's states [L+1,B,T,H]."""
    config, params = load_pretrained(GOLDEN, IGNORE)
    assert isinstance(config, ModernBertConfig)
    with np.load(GOLDEN / "hidden_states.npz", allow_pickle=False) as file:
        return config, params, Tokens(jnp.asarray(file["ids"]), jnp.asarray(file["mask"])), file["states"]


@functools.partial(jax.jit, static_argnames=("config", "selection"))
def encode(config: ModernBertConfig, params: Any, tokens: Tokens, selection: Selection = Selection()) -> HiddenStates:
    return make_encoder(config).apply({"params": params}, tokens, selection=selection)


def distance(states: Any, expected: np.ndarray, mask: Any) -> float:
    """The largest difference of any layer at real positions, relative to the layer's largest expected number."""
    actual, real = np.asarray(states), np.asarray(mask)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    return float((np.abs(actual - expected)[:, real].max((1, 2)) / np.abs(expected)[:, real].max((1, 2))).max())


def test_every_hidden_state_equals_torch() -> None:
    config, params, tokens, expected = load()
    assert (config.global_every, config.global_theta, config.local_theta) == (3, 1000.0, 50.0)
    assert tokens.ids.shape[1] > config.local_window + 1  # there are keys outside the window
    assert distance(encode(config, params, tokens).states, expected, tokens.mask) <= TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        {"local_window": 6},
        {"local_window": 2},
        {"global_every": 2},
        {"global_theta": 1100.0},
        {"local_theta": 60.0},
        {"hidden_act": "gelu_new"},
        {"norm_eps": 1e-3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_control_other_constants_are_not_equal(change: dict[str, Any]) -> None:
    config, params, tokens, expected = load()
    wrong = encode(dataclasses.replace(config, **change), params, tokens)
    assert distance(wrong.states, expected, tokens.mask) > TOLERANCE


def test_control_without_the_mask_is_not_equal() -> None:
    config, params, tokens, expected = load()
    wrong = encode(config, params, dataclasses.replace(tokens, mask=jnp.ones_like(tokens.mask)))
    assert distance(wrong.states, expected, tokens.mask) > 10 * TOLERANCE


def test_more_padding_changes_nothing() -> None:
    config, params, tokens, expected = load()
    extra = ((0, 0), (0, 9))  # in a local layer, the last positions see no key
    ids = jnp.pad(tokens.ids, extra, constant_values=7)
    wide = encode(config, params, Tokens(ids, jnp.pad(tokens.mask, extra))).states
    assert np.isfinite(wide).all()
    assert distance(wide[:, :, : tokens.ids.shape[1]], expected, tokens.mask) <= TOLERANCE


def test_keep_is_a_slice_of_all() -> None:
    config, params, tokens, expected = load()
    first = encode(config, params, tokens, Selection(2))
    assert distance(first.states, expected[:, :, :2], first.mask) <= TOLERANCE
    mask = np.asarray(tokens.mask)
    mean = np.stack([expected[-1:, row, real].mean(axis=1) for row, real in enumerate(mask)], axis=1)[:, :, None]
    last = encode(config, params, tokens, Selection(0, mean=True, layers="last"))
    assert distance(last.states, mean, last.mask) <= TOLERANCE


def test_a_row_of_nothing_but_padding_is_finite() -> None:
    config, params, tokens, _ = load()
    empty = Tokens(tokens.ids, tokens.mask.at[1].set(False))

    def loss(p: Any) -> jax.Array:
        return jnp.sum(make_encoder(config).apply({"params": p}, empty, Selection(1, mean=True)).states ** 2)

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


def test_a_batch_beyond_the_trained_length_is_an_error() -> None:
    config, params, _, _ = load()
    with pytest.raises(ValueError, match=r"41 .*encoder's 40"):
        encode(config, params, Tokens(jnp.zeros((1, 41), jnp.int32), jnp.ones((1, 41), bool)))


def test_mlm_logits_equal_torch() -> None:
    assert stores_mlm_head(GOLDEN)
    config = dataclasses.replace(load()[0], mlm_head=True)
    _, params = load_pretrained(GOLDEN, (), config)  # every tensor is used
    _, _, tokens, _ = load()
    with np.load(GOLDEN / "hidden_states.npz", allow_pickle=False) as file:
        expected = file["mlm_logits"]

    def logits(module: Any) -> jax.Array:
        return module.mlm_head(module(tokens, Selection(layers="last")).states[-1], module.word_table)

    actual = np.asarray(jax.jit(lambda p: make_encoder(config).apply({"params": p}, method=logits))(params))
    assert np.abs(actual - expected)[np.asarray(tokens.mask)].max() <= 1e-4


@pytest.mark.parametrize("with_head", [False, True])
def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path: Path, with_head: bool) -> None:
    config = dataclasses.replace(load()[0], mlm_head=with_head)
    _, params = load_pretrained(GOLDEN, IGNORE, config)
    save_pretrained(tmp_path / "once", config, params)
    prefix = "" if with_head else "model."
    original = {
        name.removeprefix(prefix): tensor
        for name, tensor in load_file(GOLDEN / "model.safetensors").items()
        if with_head or name.startswith(prefix)
    }
    saved = load_file(tmp_path / "once" / "model.safetensors")
    assert saved.keys() == original.keys()
    assert not any("layers.0.attn_norm" in name for name in saved)
    assert all(saved[name].tobytes() == original[name].tobytes() for name in saved)
    again, params = load_pretrained(tmp_path / "once", (), config)
    assert again == config
    assert stores_mlm_head(tmp_path / "once") == with_head
    save_pretrained(tmp_path / "twice", again, params)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "tensor", "what"),
    [
        ("layers.1.attn_norm.weight", None, "missing"),
        ("layers.0.attn_norm.weight", np.ones(32, np.float32), "unused"),
        ("layers.5.mlp.Wi.weight", np.zeros((80, 32), np.float32), "unused"),
        ("layers.2.mlp.Wi.weight", np.zeros((40, 32), np.float32), r"shape \(40, 32\).*\(80, 32\)"),
        ("final_norm.bias", np.zeros(32, np.float32), "unused"),
    ],
)
def test_loading_names_the_tensor_that_does_not_fit(
    tmp_path: Path, name: str, tensor: np.ndarray | None, what: str
) -> None:
    tensors = load_file(GOLDEN / "model.safetensors") | {f"model.{name}": tensor}
    save_file({name: t for name, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((GOLDEN / "config.json").read_bytes())
    with pytest.raises(ValueError, match=what) as error:
        load_pretrained(tmp_path, IGNORE)
    assert name in str(error.value)


def written(folder: Path, changes: dict[str, Any]) -> Path:
    raw = json.loads((GOLDEN / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return folder


def test_older_config_keys_have_the_same_meaning(tmp_path: Path) -> None:
    older = {"layer_types": ..., "rope_parameters": ..., "global_attn_every_n_layers": 3, "global_rope_theta": 1000.0}
    assert read_config(written(tmp_path, older | {"local_rope_theta": 50.0})) == load()[0]
    assert read_config(written(tmp_path, {"layer_types": None, "rope_parameters": None})) == dataclasses.replace(
        load()[0], global_theta=160_000.0, local_theta=10_000.0
    )
    one = {"layer_types": ["full_attention", *["sliding_attention"] * 4]}
    assert dataclasses.asdict(read_config(written(tmp_path, one)))["global_every"] == 5
    every = {"layer_types": ["full_attention"] * 5}
    assert dataclasses.asdict(read_config(written(tmp_path, every)))["global_every"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["sliding_attention"] * 5},
        {"layer_types": ["full_attention"] * 4},
        {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]},
        {"layer_types": "full_attention"},
        {"layer_types": 3},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1000.0}}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5}}},
        {"rope_parameters": {"rope_theta": 1000.0}},
        {"rope_parameters": 3},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"norm_bias": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"decoder_bias": False},
        {"classifier_bias": True},
        {"classifier_activation": "silu"},
        {"hidden_activation": "silu"},
        {"num_attention_heads": 32},
        {"local_attention": -1},
        {"attention_dropout": 1.0},
    ],
    ids=str,
)
def test_unsupported_options_are_errors(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {next(iter(changes))} is "):
        read_config(written(tmp_path, changes))
