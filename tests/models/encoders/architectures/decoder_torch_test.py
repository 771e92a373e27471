"""Our language models against PyTorch's, run now: configs of every kind, and saved models. Skipped without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxret.models.encoders.architectures import make_encoder
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.pretrained import load_pretrained, save_pretrained
from jaxret.types import Tokens

torch = pytest.importorskip("torch", reason="PyTorch is only needed for live parity")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.exhaustive  # the stored outputs of torch are the quick test

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 20,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
ALL_HEADS: dict[str, Any] = SIZES | {"head_dim": None, "num_key_value_heads": None}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
GEMMA: dict[str, Any] = SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1, "query_pre_attn_scalar": 7}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama, biases": lambda: transformers.LlamaConfig(**ALL_HEADS, attention_bias=True, mlp_bias=True),
    "llama 3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama, linear scaling": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "llama, bidirectional": lambda: transformers.LlamaConfig(**SIZES, is_causal=False),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=3),
    "mistral, no window": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "mistral, bidirectional": lambda: transformers.MistralConfig(**SIZES, sliding_window=3, is_causal=False),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "qwen3, biases, windows": lambda: transformers.Qwen3Config(
        **SIZES, attention_bias=True, use_sliding_window=True, sliding_window=3, max_window_layers=2
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GEMMA, sliding_window=3, sliding_window_pattern=2),
    "gemma3, linear scaling": lambda: transformers.Gemma3TextConfig(
        **GEMMA, sliding_window=5, sliding_window_pattern=3, rope_scaling={"rope_type": "linear", "factor": 8.0}
    ),
    "embeddinggemma": lambda: transformers.Gemma3TextConfig(
        **GEMMA, sliding_window=5, sliding_window_pattern=2, use_bidirectional_attention=True
    ),
}


def random_model(name: str, seed: int = 1) -> Any:
    """A torch model in eval mode whose every parameter is random."""
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(CONFIGS[name]()).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    return model


def random_tokens(side: str) -> Tokens:
    """Four rows of 1 to 12 tokens, padded on the left or right."""
    mask = np.arange(12) < np.array([[12], [5], [1], [9]])
    mask = mask[:, ::-1] if side == "left" else mask
    ids = np.random.default_rng(0).integers(2, 50, (4, 12))
    return Tokens(jnp.asarray(np.where(mask, ids, 0), jnp.int32), jnp.asarray(mask))


def torch_states(model: Any, tokens: Tokens) -> np.ndarray:
    """Every hidden state of a torch model at real positions, [L+1,R,H]."""
    ids, mask = (torch.tensor(np.asarray(x), dtype=torch.long) for x in (tokens.ids, tokens.mask))
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    return torch.stack(output.hidden_states).float().numpy()[:, np.asarray(tokens.mask)]


def our_states(config: Any, params: Any, tokens: Tokens, compute: Compute = Compute()) -> np.ndarray:
    encode = jax.jit(lambda p: make_encoder(config, compute).apply({"params": p}, tokens).states)
    return np.asarray(encode(params))[:, np.asarray(tokens.mask)]


def distance(states: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of any layer, relative to the layer's largest expected number."""
    return float((np.abs(states - expected).max((1, 2)) / np.abs(expected).max((1, 2))).max())


@pytest.mark.daily("llama 3-right")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_round_trip(tmp_path: Path, name: str, side: str) -> None:
    model, tokens = random_model(name), random_tokens(side)
    expected = torch_states(model, tokens)
    model.save_pretrained(tmp_path / "theirs")
    config, params = load_pretrained(tmp_path / "theirs")
    assert distance(our_states(config, params, tokens), expected) <= 5e-6
    assert distance(torch_states(random_model(name, seed=2), tokens), expected) > 0.1, (
        "control: another model has other states"
    )
    save_pretrained(tmp_path / "ours", config, params)
    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True, local_files_only=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    np.testing.assert_array_equal(torch_states(again.eval(), tokens), expected)
    assert load_pretrained(tmp_path / "ours")[0] == config


@pytest.mark.daily("embeddinggemma")
@pytest.mark.parametrize("name", ["llama 3", "mistral", "qwen3", "gemma3", "embeddinggemma"])
def test_bfloat16_is_as_near_to_float32_as_torch_is(tmp_path: Path, name: str) -> None:
    model, tokens = random_model(name), random_tokens("right")
    model.save_pretrained(tmp_path)
    expected = torch_states(model, tokens)
    config, params = load_pretrained(tmp_path)
    ours = our_states(config, params, tokens, Compute(jnp.bfloat16))
    theirs = torch_states(model.to(torch.bfloat16), tokens)
    error, of_torch = (np.linalg.norm(states - expected) / np.linalg.norm(expected) for states in (ours, theirs))
    assert 1e-4 < error <= 1.5 * of_torch


@pytest.mark.daily("llama 3")
@pytest.mark.parametrize("name", ["llama 3", "qwen3, biases, windows", "gemma3"])
def test_gradients_of_every_weight_equal_torch(tmp_path: Path, name: str) -> None:
    model, tokens = random_model(name), random_tokens("right")
    model.save_pretrained(tmp_path / "weights")
    config, params = load_pretrained(tmp_path / "weights")
    vectors = np.random.default_rng(3).normal(size=(config.num_layers + 1, config.hidden_size)).astype(np.float32)
    ids, mask = (torch.tensor(np.asarray(x), dtype=torch.long) for x in (tokens.ids, tokens.mask))
    states = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    sum((s[mask.bool()] @ torch.tensor(v)).sum() for s, v in zip(states, vectors, strict=True)).backward()
    expected = {key: p.grad.numpy() for key, p in model.named_parameters()}

    def loss(p: Any) -> jax.Array:
        states = make_encoder(config).apply({"params": p}, tokens).states
        return jnp.einsum("lbth,lh,bt->", states, vectors, tokens.mask, precision="highest")

    # A gradient has the shapes of the parameters, so saving it as a model gives it torch's names and layout.
    save_pretrained(tmp_path / "gradients", config, jax.jit(jax.grad(loss))(params))
    actual = load_file(tmp_path / "gradients" / "model.safetensors")
    assert actual.keys() == expected.keys()
    largest = max(float(np.abs(gradient).max()) for gradient in expected.values())
    for key, gradient in expected.items():
        np.testing.assert_allclose(actual[key], gradient, rtol=0, atol=2e-6 * largest, err_msg=key)
        assert np.abs(gradient).max() > 1e-4 * largest, f"{key}: control: a zero gradient would prove nothing"
