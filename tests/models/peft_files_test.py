"""Our adapters give the states of PEFT's, and are read from PEFT's files and written to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders.architectures import make_encoder
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.pretrained import load_pretrained
from jaxret.models.lora import make_adapters, merge_adapters
from jaxret.models.partition import join_parameters
from jaxret.models.peft_files import load_adapters, save_adapters
from jaxret.types import Tokens
from tests.tiny import make_config

torch = pytest.importorskip("torch", reason="PyTorch is what the encoders are compared with")
peft = pytest.importorskip("peft", reason="PEFT is what adapters are compared with")
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
MODELS: dict[str, Any] = {
    "qwen3": lambda: transformers.Qwen3Config(
        **SIZES, intermediate_size=20, num_key_value_heads=2, head_dim=8, max_position_embeddings=40
    ),
    "bert": lambda: transformers.BertConfig(**SIZES, intermediate_size=20, max_position_embeddings=40),
    "modernbert": lambda: transformers.ModernBertConfig(
        **SIZES, intermediate_size=20, max_position_embeddings=40, **dict.fromkeys(("pad_token_id", "cls_token_id"), 0)
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=50, d_model=24, num_layers=3, num_heads=4, d_kv=6, d_ff=20, feed_forward_proj="gated-gelu"
    ),
}
CLASSES = {"t5": "T5EncoderModel"}


def random_adapters(name: str, folder: Path, **options: Any) -> Any:
    """A torch model with random weights, wrapped by PEFT with random adapters; the base is saved in folder/base, the
    adapters in folder/adapters."""
    torch.manual_seed(1)
    config = MODELS[name]()
    model = getattr(transformers, CLASSES.get(name, "AutoModel"))
    base = (model(config) if name in CLASSES else model.from_config(config)).eval()
    for parameter in base.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    base.save_pretrained(folder / "base")
    wrapped = peft.get_peft_model(base, peft.LoraConfig(task_type="FEATURE_EXTRACTION", **options)).eval()
    for key, parameter in wrapped.named_parameters():
        if "lora_" in key:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    wrapped.save_pretrained(folder / "adapters")
    return wrapped


def tokens() -> Tokens:
    mask = np.arange(10) < np.array([[10], [5], [2]])
    ids = np.random.default_rng(0).integers(2, 50, (3, 10))
    return Tokens(jnp.asarray(np.where(mask, ids, 0), jnp.int32), jnp.asarray(mask))


def torch_states(model: Any) -> np.ndarray:
    ids, mask = (torch.tensor(np.asarray(x), dtype=torch.long) for x in (tokens().ids, tokens().mask))
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    return torch.stack(output.hidden_states).numpy()[:, np.asarray(tokens().mask)]


def our_states(config: Any, params: Any, compute: Compute = Compute()) -> np.ndarray:
    encode = jax.jit(lambda p: make_encoder(config, compute).apply({"params": p}, tokens()).states)
    return np.asarray(encode(params))[:, np.asarray(tokens().mask)]


def distance(states: np.ndarray, expected: np.ndarray) -> float:
    return float((np.abs(states - expected).max((1, 2)) / np.abs(expected).max((1, 2))).max())


TARGETS = {
    "qwen3": (["q_proj", "v_proj", "down_proj"], {"use_rslora": True}),
    "bert": (["query", "attention.output.dense"], {}),
    "modernbert": (["Wqkv", "mlp.Wo"], {}),
    "t5": (r".*\.(SelfAttention\.[qo]|DenseReluDense\.wi_0)", {"use_rslora": True}),
}


@pytest.mark.daily("qwen3")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "qwen3" else pytest.param(name, marks=pytest.mark.exhaustive) for name in TARGETS]
)
def test_adapters_round_trip_through_peft(name: str, tmp_path: Path) -> None:
    targets, more = TARGETS[name]
    wrapped = random_adapters(name, tmp_path, r=3, lora_alpha=5, target_modules=targets, **more)
    expected = torch_states(wrapped)
    config, base = load_pretrained(tmp_path / "base")
    rslora = bool(more)
    chosen = (targets,) if isinstance(targets, str) else tuple(targets)
    keys = {"lora.rank": 3, "lora.alpha": 5.0, "lora.targets": chosen, "lora.rslora": rslora}
    settings = make_config(keys).lora
    read = load_adapters(tmp_path / "adapters", config, settings)
    adapters = make_adapters(settings, config)
    assert adapters is not None
    params = join_parameters(base, read)
    assert distance(our_states(config, params, Compute(adapters=adapters)), expected) <= 5e-6
    assert distance(our_states(config, merge_adapters(params, adapters.scaling)), expected) <= 5e-6
    assert distance(our_states(config, base), expected) > 1e-2, "control: the adapters change the states"

    save_adapters(tmp_path / "ours", config, params, settings, str(tmp_path / "base"))
    clean = getattr(transformers, CLASSES.get(name, "AutoModel")).from_pretrained(tmp_path / "base").eval()
    again = peft.PeftModel.from_pretrained(clean, str(tmp_path / "ours")).eval()
    assert distance(torch_states(again), expected) <= 1e-6


@pytest.mark.slow
def test_all_linear_matches_peft(tmp_path: Path) -> None:
    wrapped = random_adapters("qwen3", tmp_path, r=2, target_modules="all-linear")
    config, base = load_pretrained(tmp_path / "base")
    settings = make_config({"lora.rank": 2, "lora.alpha": 8.0}).lora
    read = load_adapters(tmp_path / "adapters", config, settings)
    compute = Compute(adapters=make_adapters(settings, config))
    assert distance(our_states(config, join_parameters(base, read), compute), torch_states(wrapped)) <= 5e-6


@pytest.mark.slow
def test_adapters_of_some_layers(tmp_path: Path) -> None:
    """Adapters of some layers are read from PEFT's files, and PEFT reads ours."""
    chosen = {"layers_to_transform": [0, 2], "layers_pattern": "layers"}
    wrapped = random_adapters("qwen3", tmp_path, r=2, target_modules=["q_proj", "down_proj"], **chosen)
    config, base = load_pretrained(tmp_path / "base")
    keys = {"lora.rank": 2, "lora.alpha": 8.0, "lora.targets": ("q_proj", "down_proj"), "lora.layers": (1, 3)}
    settings = make_config(keys).lora
    params = join_parameters(base, load_adapters(tmp_path / "adapters", config, settings))
    adapters = make_adapters(settings, config)
    assert adapters is not None
    expected = torch_states(wrapped)
    assert distance(our_states(config, params, Compute(adapters=adapters)), expected) <= 5e-6
    assert distance(our_states(config, merge_adapters(params, adapters.scaling)), expected) <= 5e-6
    save_adapters(tmp_path / "ours", config, params, settings, str(tmp_path / "base"))
    clean = transformers.AutoModel.from_pretrained(tmp_path / "base").eval()
    again = peft.PeftModel.from_pretrained(clean, str(tmp_path / "ours")).eval()
    assert distance(torch_states(again), expected) <= 1e-6
    assert sum("lora_B" in name for name, _ in again.named_parameters()) == 2 * 2, "no other adapters are made"


def test_adapters_of_a_pooler_are_left_out(tmp_path: Path) -> None:
    """No state depends on them. PEFT's "all-linear" creates them, and lists the module names of small models one by
    one."""
    wrapped = random_adapters("bert", tmp_path, r=2, target_modules="all-linear")
    assert any("pooler" in name for name, _ in wrapped.named_parameters() if "lora" in name), (
        "control: the pooler has adapters"
    )
    config, base = load_pretrained(tmp_path / "base")
    settings = make_config({"lora.rank": 2, "lora.alpha": 8.0}).lora
    params = join_parameters(base, load_adapters(tmp_path / "adapters", config, settings, ("pooler",)))
    states = our_states(config, params, Compute(adapters=make_adapters(settings, config)))
    assert distance(states, torch_states(wrapped)) <= 5e-6
    with pytest.raises(ValueError, match=r"'pooler.dense', .*matches .*dense"):
        load_adapters(tmp_path / "adapters", config, settings)


def test_names_of_a_causal_model_are_read(tmp_path: Path) -> None:
    """PEFT's names have a prefix from the wrapped class; names with another class's prefix are not read by PEFT."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(MODELS["qwen3"]())
    model.save_pretrained(tmp_path / "base")
    peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapters")
    config, _ = load_pretrained(tmp_path / "base")
    settings = make_config({"lora.rank": 8, "lora.alpha": 8.0, "lora.targets": ("q_proj",)}).lora
    read = load_adapters(tmp_path / "adapters", config, settings)
    assert read["layers"]["attention"]["query"]["lora_a"].shape == (3, 24, 8)


@pytest.mark.parametrize(
    ("changes", "keys", "message"),
    [
        ({"use_dora": True}, {}, "use_dora is True; only False is implemented"),
        ({"bias": "all"}, {}, "bias is 'all'; only 'none'"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights is 'pissa'"),
        ({"modules_to_save": ["norm"]}, {}, "modules_to_save is"),
        ({}, {"lora.rank": 4}, "lora.rank is 4, but"),
        ({}, {"lora.alpha": 1.0}, "set lora.alpha=8"),
        ({}, {"lora.targets": ("q_proj", "v_proj")}, r"set lora.targets=\('q_proj',\)"),
        (
            {},
            {"lora.layers": (3,)},
            r"lora.layers is \(3,\), but .* in layers 1, 2, 3 \(from 1\): set lora.layers=\(\)",
        ),
        ({"target_modules": ["q_proj", "v_proj"]}, {"lora.targets": ("q_proj", "v_proj")}, "missing layers.0"),
    ],
)
def test_unsupported_adapters_are_refused(changes: Any, keys: Any, message: str, tmp_path: Path) -> None:
    random_adapters("qwen3", tmp_path, r=2, target_modules=["q_proj"])
    file = tmp_path / "adapters" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    config, _ = load_pretrained(tmp_path / "base")
    settings = make_config({"lora.rank": 2, "lora.alpha": 8.0, "lora.targets": ("q_proj",)} | keys).lora
    with pytest.raises(ValueError, match=message):
        load_adapters(tmp_path / "adapters", config, settings)
