"""Our language models against PyTorch's, from stored outputs (tests/goldens): no torch needed."""

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
from jaxret.models.encoders.architectures.decoder import DecoderConfig, decoder_constants, rotary_rates, scaled_rates
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.pretrained import load_pretrained, save_pretrained
from jaxret.models.encoders.selection import Selection
from jaxret.models.encoders.weight_files import weights_digest
from jaxret.models.retriever_model import encoder_config
from jaxret.types import HiddenStates, Packing, Tokens
from tests import tiny

GOLDENS = Path(__file__).parents[3] / "goldens"
KINDS = ("llama", "mistral", "qwen3", "gemma3", "embeddinggemma")
PLAIN_ROPE = {"theta": 1e4, "rope_type": "default", "rope_factor": 1.0, "rope_high": 4.0, "rope_original": 8192}
TOLERANCE = 1e-5  # relative to the largest number of a layer, because the residual stream grows


@functools.cache
def load(kind: str) -> tuple[DecoderConfig, Any, Tokens, np.ndarray]:
    """A golden model: config, parameters, input and torch's states [L+1,B,T,H]."""
    folder = GOLDENS / f"tiny_{kind}"
    config, params = load_pretrained(folder)
    assert isinstance(config, DecoderConfig)
    with np.load(folder / "hidden_states.npz", allow_pickle=False) as file:
        return config, params, Tokens(jnp.asarray(file["ids"]), jnp.asarray(file["mask"])), file["states"]


@functools.partial(jax.jit, static_argnames=("config", "selection", "compute"))
def encode(
    config: DecoderConfig,
    params: Any,
    tokens: Tokens,
    selection: Selection = Selection(),
    compute: Compute = Compute(),
) -> HiddenStates:
    return make_encoder(config, compute).apply({"params": params}, tokens, selection=selection)


def distance(states: Any, expected: np.ndarray, mask: Any) -> float:
    """The largest difference of any layer at real positions, relative to the layer's largest expected number."""
    actual, real = np.asarray(states), np.asarray(mask)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    return float((np.abs(actual - expected)[:, real].max((1, 2)) / np.abs(expected)[:, real].max((1, 2))).max())


@pytest.mark.parametrize("kind", KINDS)
def test_every_hidden_state_equals_torch(kind: str) -> None:
    config, params, tokens, expected = load(kind)
    assert config.num_heads * config.head_size != config.hidden_size
    assert config.num_heads > config.num_kv_heads
    assert config.window < tokens.ids.shape[1]  # there are keys outside the window
    assert distance(encode(config, params, tokens).states, expected, tokens.mask) <= TOLERANCE


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", {"rope_type": "default"}),
        ("llama", {"rope_type": "linear"}),
        ("llama", {"rope_low": 2.0}),
        ("llama", {"rope_original": 40}),
        ("llama", {"theta": 101.0}),
        ("llama", {"causal": False}),
        ("llama", {"hidden_act": "gelu"}),
        ("mistral", {"window": 5}),
        ("mistral", {"window": 0}),
        ("mistral", {"first_window": 1}),
        ("mistral", {"norm_eps": 1e-3}),
        ("qwen3", {"window": 3}),
        ("qwen3", {"first_window": 1}),
        ("gemma3", {"window": 7}),
        ("gemma3", {"global_every": 2}),
        ("gemma3", {"local_theta": 0.0}),
        ("gemma3", {"theta": 1e5}),
        ("gemma3", {"query_scalar": 8}),
        ("gemma3", {"hidden_act": "gelu"}),
        ("embeddinggemma", {"causal": True}),
        ("embeddinggemma", {"window": 8}),
    ],
    ids=str,
)
def test_control_other_constants_are_not_equal(kind: str, change: dict[str, Any]) -> None:
    config, params, tokens, expected = load(kind)
    wrong = encode(dataclasses.replace(config, **change), params, tokens)
    assert distance(wrong.states, expected, tokens.mask) > TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_left_and_packed_rows(kind: str) -> None:
    """A text has the same states wherever it lies in its row: rotary positions are relative."""
    config, params, tokens, expected = load(kind)
    mask = np.asarray(tokens.mask)
    lengths = mask.sum(axis=1)

    def shifted(rows: np.ndarray) -> np.ndarray:
        return np.stack([np.roll(row, len(row) - n, axis=0) for row, n in zip(rows, lengths, strict=True)])

    left = Tokens(jnp.asarray(shifted(np.asarray(tokens.ids))), jnp.asarray(shifted(mask)))
    states = encode(config, params, left).states
    moved = np.stack([shifted(layer) for layer in expected])
    assert distance(states, moved, left.mask) <= TOLERANCE
    # Texts of 12, 1, 7, 2 and 10 tokens in three rows.
    packed = dataclasses.replace(tokens, packing=Packing(jnp.array([0, 12, 16, 23, 32]), 3, 16))
    assert lengths.tolist() == [12, 1, 7, 2, 10]
    assert distance(encode(config, params, packed).states, expected, mask) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near_and_recomputation_is_equal(kind: str) -> None:
    config, params, tokens, expected = load(kind)
    again = encode(config, params, tokens, compute=Compute(recompute="layer")).states
    assert distance(again, expected, tokens.mask) <= TOLERANCE
    half = encode(config, params, tokens, compute=Compute(jnp.bfloat16)).states
    assert half.dtype == jnp.float32, "hidden states are summed in float32"
    real = np.asarray(tokens.mask)
    error = np.linalg.norm((half - expected)[:, real]) / np.linalg.norm(expected[:, real])
    assert 1e-4 < error < 5e-2  # torch's error in bfloat16 is between 1 and 3 %


@pytest.mark.parametrize("kind", KINDS)
def test_final_norm_on_every_layer(kind: str) -> None:
    config, params, tokens, expected = load(kind)
    normed = encode(dataclasses.replace(config, normalize_intermediate=True), params, tokens).states
    scale = np.asarray(params["final_norm"], np.float64) + config.norm_offset
    raw = expected[1:-1].astype(np.float64)
    by_hand = raw / np.sqrt((raw**2).mean(-1, keepdims=True) + config.norm_eps) * scale
    assert distance(normed, np.concatenate([expected[:1], by_hand, expected[-1:]]), tokens.mask) <= TOLERANCE
    # A model of only the first layers has the same last state, because its last layer also has the final norm.
    fewer = dataclasses.replace(config, num_layers=2)
    _, first = load_pretrained(GOLDENS / f"tiny_{kind}", config=fewer)
    states = encode(fewer, first, tokens).states
    assert distance(states[-1:], by_hand[1:2], tokens.mask) <= TOLERANCE


@pytest.mark.table
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_nothing_but_padding_is_finite(kind: str) -> None:
    config, params, tokens, _ = load(kind)
    empty = Tokens(tokens.ids, tokens.mask.at[1].set(False))

    def loss(p: Any) -> jax.Array:
        return jnp.sum(make_encoder(config).apply({"params": p}, empty, Selection(0, mean=True)).states ** 2)

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


def test_a_batch_beyond_the_trained_length_is_an_error() -> None:
    config, params, _, _ = load("llama")
    with pytest.raises(ValueError, match=r"41 .*encoder's 40"):
        encode(config, params, Tokens(jnp.zeros((1, 41), jnp.int32), jnp.ones((1, 41), bool)))


def test_llama3_scaling_has_the_published_values() -> None:
    """Llama 3.1's numbers: base 500,000, heads of 128, factor 8, from 1 to 4 turns over 8,192 positions."""
    config = dataclasses.replace(load("llama")[0], theta=5e5, head_size=128, rope_factor=8.0, rope_original=8192)
    ratio = scaled_rates(config) / rotary_rates(5e5, 128)
    np.testing.assert_allclose(ratio[:29], 1)
    np.testing.assert_allclose(ratio[29:31], [0.82817, 0.64374], atol=1e-5)
    np.testing.assert_allclose(ratio[35:], 1 / 8)


def test_windows_of_a_bidirectional_gemma_are_halved() -> None:
    """EmbeddingGemma's 512 tokens are 256 to each side; global layers see everything."""
    config = dataclasses.replace(load("embeddinggemma")[0], num_layers=6, window=512, global_every=6)
    constants = decoder_constants(config)
    far = np.iinfo(np.int32).max
    assert constants["backward"].tolist() == constants["forward"].tolist() == [256] * 5 + [far]
    causal = decoder_constants(dataclasses.replace(config, causal=True))
    assert causal["backward"].tolist() == [511] * 5 + [far]  # 512 with the token itself
    assert causal["forward"].tolist() == [0] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path: Path, kind: str) -> None:
    config, params, _, _ = load(kind)
    save_pretrained(tmp_path / "once", config, params)
    stored = load_file(GOLDENS / f"tiny_{kind}" / "model.safetensors")
    original = {name.removeprefix("model."): tensor for name, tensor in stored.items() if name != "lm_head.weight"}
    assert any(name.startswith("model.") for name in stored) == (kind in ("llama", "gemma3"))
    saved = load_file(tmp_path / "once" / "model.safetensors")
    assert saved.keys() == original.keys()
    assert all(saved[name].tobytes() == original[name].tobytes() for name in saved)
    again, params = load_pretrained(tmp_path / "once")
    assert again == config
    save_pretrained(tmp_path / "twice", again, params)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()


def copied(folder: Path, kind: str, **changes: np.ndarray | None) -> Path:
    """A copy of a golden directory in which some tensors are replaced, or removed (None)."""
    stored = load_file(GOLDENS / f"tiny_{kind}" / "model.safetensors") | changes
    folder.mkdir(exist_ok=True)
    save_file({name: t for name, t in stored.items() if t is not None}, folder / "model.safetensors")
    (folder / "config.json").write_bytes((GOLDENS / f"tiny_{kind}" / "config.json").read_bytes())
    return folder


def test_weights_in_several_files(tmp_path: Path) -> None:
    config, expected, _, _ = load("llama")
    whole = load_file(GOLDENS / "tiny_llama" / "model.safetensors")
    folder = copied(tmp_path / "parts", "llama")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for part, tensors in parts.items():
        save_file({name: whole[name] for name in tensors}, folder / part)
    weight_map = {name: part for part, tensors in parts.items() for name in tensors}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    again, params = load_pretrained(folder)
    assert again == config
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, expected)))
    digest = weights_digest(folder)
    with pytest.raises(ValueError, match=r"encoder\.sha256 .*12: .*expected"):
        weights_digest(folder, "12")
    save_file({name: 2 * whole[name] for name in names[1::2]}, folder / "model-00002-of-00002.safetensors")
    assert weights_digest(folder) != digest
    index.write_text(json.dumps({"weight_map": weight_map | {names[0]: "model-00002-of-00002.safetensors"}}))
    with pytest.raises(ValueError, match=rf"{names[0]} .*model-00002-of-00002.safetensors"):
        load_pretrained(folder)
    index.write_text(json.dumps({"weight_map": {n: p for n, p in weight_map.items() if n != names[0]}}))
    with pytest.raises(ValueError, match=rf"{names[0]}, which model.safetensors.index.json does not list"):
        load_pretrained(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names model-00002-of-00002\.safetensors, .*file"):
        load_pretrained(folder)


def test_rotary_rates_of_old_files_are_ignored(tmp_path: Path) -> None:
    rates = np.ones(4, np.float32)
    folder = copied(tmp_path, "llama", **{"model.layers.0.self_attn.rotary_emb.inv_freq": rates})
    assert load_pretrained(folder)[0] == load("llama")[0]


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "what"),
    [
        ("llama", "model.layers.1.input_layernorm.weight", None, "missing layers.1"),
        ("llama", "layers.1.input_layernorm.weight", np.ones(30, np.float32), "duplicate"),
        ("llama", "model.layers.1.self_attn.q_norm.weight", np.ones(8, np.float32), "unused layers.1"),
        ("qwen3", "layers.1.self_attn.q_norm.weight", None, "missing layers.1"),
        ("qwen3", "layers.0.self_attn.q_proj.bias", np.ones(24, np.float32), "unused layers.0"),
        ("qwen3", "layers.3.self_attn.k_proj.weight", np.ones((24, 30), np.float32), r"\(24, 30\).*\(8, 30\)"),
        ("gemma3", "model.layers.2.pre_feedforward_layernorm.weight", None, "missing layers.2"),
    ],
)
def test_loading_names_the_tensor_that_does_not_fit(
    tmp_path: Path, kind: str, name: str, tensor: np.ndarray | None, what: str
) -> None:
    with pytest.raises(ValueError, match=what) as error:
        load_pretrained(copied(tmp_path, kind, **{name: tensor}))
    assert name.removeprefix("model.") in str(error.value)


def written(folder: Path, kind: str, changes: dict[str, Any]) -> Path:
    raw = json.loads((GOLDENS / f"tiny_{kind}" / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return folder


@pytest.mark.parametrize(
    ("kind", "older", "means"),
    [
        (
            "llama",
            {
                "rope_parameters": ...,
                "rope_theta": 100.0,
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
            {},
        ),
        ("llama", {"rope_parameters": ..., "rope_scaling": None}, PLAIN_ROPE),
        ("llama", {"num_key_value_heads": None, "head_dim": None}, {"num_kv_heads": 3, "head_size": 10}),
        ("mistral", {"sliding_window": None}, {"window": 0}),
        ("mistral", {"sliding_window": ...}, {"window": 4096}),
        ("qwen3", {"layer_types": ...}, {}),
        ("qwen3", {"layer_types": ["full_attention"] * 4}, {"window": 0}),
        ("qwen3", {"layer_types": ..., "use_sliding_window": False}, {"window": 0}),
        ("qwen3", {"head_dim": ...}, {"head_size": 128}),
        ("gemma3", {"layer_types": ..., "sliding_window_pattern": 3}, {}),
        ("gemma3", {"layer_types": ...}, {"global_every": 6}),
        # `...` removes the key; a list shorter than six layers shows no global layer.
        ("gemma3", {"layer_types": ["sliding_attention"] * 4}, {"global_every": 6}),
        ("gemma3", {"layer_types": ["full_attention"] * 4}, {"global_every": 1}),
        (
            "gemma3",
            {"rope_parameters": ..., "rope_theta": 50.0, "rope_local_base_freq": 20.0},
            {"theta": 50.0, "local_theta": 20.0},
        ),
        (
            "gemma3",
            {"rope_parameters": ..., "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {"rope_type": "linear", "rope_factor": 8.0},
        ),
        ("embeddinggemma", {"use_bidirectional_attention": False}, {"causal": True}),
        ("llama", {"is_causal": False}, {"causal": False}),
    ],
    ids=str,
)
def test_other_spellings_of_a_config(tmp_path: Path, kind: str, older: dict[str, Any], means: dict[str, Any]) -> None:
    config = read_config(written(tmp_path, kind, older))
    same = {"first_window": load(kind)[0].first_window}
    if "qwen3" in kind and means.get("window") == 0:
        same = {"first_window": config.first_window}  # type: ignore[attr-defined]  # nothing begins there
    assert config == dataclasses.replace(load(kind)[0], **(same | means))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("llama", {"rope_parameters": 3}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),  # rope_parameters are present, too
        ("llama", {"layer_types": ["sliding_attention"] * 4}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"quantization_config": {"bits": 4}}),
        ("llama", {"num_key_value_heads": 2}),
        ("llama", {"head_dim": 7}),
        ("llama", {"hidden_act": "mish"}),
        ("llama", {"attention_bias": 3}),
        ("mistral", {"sliding_window": -1}),
        ("mistral", {"layer_types": ["full_attention"] * 4}),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}),
        ("qwen3", {"layer_types": ["full_attention"] * 3}),
        ("qwen3", {"layer_types": ["full_attention", *["sliding_attention"] * 3], "use_sliding_window": False}),
        ("gemma3", {"attn_logit_softcapping": 50.0}),
        ("gemma3", {"is_causal": False}),
        ("gemma3", {"sliding_window": None}),
        ("gemma3", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}),
        ("gemma3", {"layer_types": 3}),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}),
        ("gemma3", {"query_pre_attn_scalar": 0}),
    ],
    ids=str,
)
def test_unsupported_options_are_errors(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {next(iter(changes))} is "):
        read_config(written(tmp_path, kind, changes))


def test_another_kind_of_gemma_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model_type is 'gemma3'; .* one of .*gemma3_text"):
        read_config(written(tmp_path, "gemma3", {"model_type": "gemma3"}))


def test_the_direction_is_the_checkpoint_s_unless_set() -> None:
    def causal(kind: str, direction: str) -> bool:
        config = tiny.make_config({"encoder.direction": direction, "head.token": "mean"})
        return encoder_config(config, GOLDENS / f"tiny_{kind}").causal  # type: ignore[attr-defined]

    assert causal("llama", "")
    assert not causal("embeddinggemma", "")
    assert not causal("llama", "bidirectional")
    assert causal("embeddinggemma", "causal")
    with pytest.raises(ValueError, match=r"encoder\.direction .*'left'; .*bidirectional"):
        causal("llama", "left")
    with pytest.raises(ValueError, match=r"direction .*'causal'; .*bert"):
        causal("bert", "causal")


def test_me_bert_refuses_a_causal_model() -> None:
    me_bert = tiny.ME_BERT | {"head.token": "mean"}
    with pytest.raises(ValueError, match=r"llama .*tokens .*after"):
        tiny.make_retriever(me_bert, tiny.LLAMA)
    tiny.make_retriever(me_bert, dataclasses.replace(tiny.LLAMA, causal=False))
