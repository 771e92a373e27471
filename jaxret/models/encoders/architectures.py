"""The encoders there are, and how transformers stores each: keys of config.json, names of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import traverse_util

from jaxret.models.encoders.bert import ACTIVATIONS, Bert, BertConfig
from jaxret.models.encoders.t5 import T5, T5Config
from jaxret.storage import read_json
from jaxret.types import Tokens

EncoderConfig: TypeAlias = BertConfig | T5Config


@dataclass(frozen=True)
class Architecture:
    """How one `model_type` of transformers is stored. keys: our field -> their key in config.json, and its default.
    names: our parameter path -> their tensor name, "{}" being the layer; a module's name is without suffix. prefix:
    what models with a head put before every name. buffers: stored, but no weights."""

    config: type[EncoderConfig]
    keys: dict[str, tuple[str, Any]]
    names: dict[str, str]
    prefix: str
    class_name: str
    buffers: tuple[str, ...] = ()


REQUIRED = object()  # a key without a default

_BERT_KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", REQUIRED),
    "hidden_size": ("hidden_size", REQUIRED),
    "num_layers": ("num_hidden_layers", REQUIRED),
    "num_heads": ("num_attention_heads", REQUIRED),
    "intermediate_size": ("intermediate_size", REQUIRED),
    "max_positions": ("max_position_embeddings", REQUIRED),
    "type_vocab_size": ("type_vocab_size", 2),
    "hidden_act": ("hidden_act", "gelu"),
    "layer_norm_eps": ("layer_norm_eps", 1e-12),
    "hidden_dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "initializer_range": ("initializer_range", 0.02),
}
_DISTILBERT_KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", REQUIRED),
    "hidden_size": ("dim", REQUIRED),
    "num_layers": ("n_layers", REQUIRED),
    "num_heads": ("n_heads", REQUIRED),
    "intermediate_size": ("hidden_dim", REQUIRED),
    "max_positions": ("max_position_embeddings", REQUIRED),
    "hidden_act": ("activation", "gelu"),
    "hidden_dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "initializer_range": ("initializer_range", 0.02),
}
_T5_KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", REQUIRED),
    "hidden_size": ("d_model", REQUIRED),
    "num_layers": ("num_layers", REQUIRED),
    "num_heads": ("num_heads", REQUIRED),
    "head_size": ("d_kv", REQUIRED),
    "intermediate_size": ("d_ff", REQUIRED),
    "feed_forward": ("feed_forward_proj", "relu"),
    "buckets": ("relative_attention_num_buckets", 32),
    "max_distance": ("relative_attention_max_distance", 128),
    "layer_norm_eps": ("layer_norm_epsilon", 1e-6),
    "dropout": ("dropout_rate", 0.1),
    "initializer_factor": ("initializer_factor", 1.0),
}
_BERT_NAMES = {
    "embeddings/word": "embeddings.word_embeddings",
    "embeddings/position": "embeddings.position_embeddings",
    "embeddings/type": "embeddings.token_type_embeddings",
    "embeddings/norm": "embeddings.LayerNorm",
    "layers/attention/query": "encoder.layer.{}.attention.self.query",
    "layers/attention/key": "encoder.layer.{}.attention.self.key",
    "layers/attention/value": "encoder.layer.{}.attention.self.value",
    "layers/attention/output": "encoder.layer.{}.attention.output.dense",
    "layers/attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "layers/intermediate": "encoder.layer.{}.intermediate.dense",
    "layers/output": "encoder.layer.{}.output.dense",
    "layers/output_norm": "encoder.layer.{}.output.LayerNorm",
}
_BERT_MLM = {
    "mlm_head/dense": "cls.predictions.transform.dense",
    "mlm_head/norm": "cls.predictions.transform.LayerNorm",
    "mlm_head/bias": "cls.predictions.bias",
}
_ROBERTA_MLM = {
    "mlm_head/dense": "lm_head.dense",
    "mlm_head/norm": "lm_head.layer_norm",
    "mlm_head/bias": "lm_head.bias",
}
_DISTILBERT_MLM = {
    "mlm_head/dense": "vocab_transform",
    "mlm_head/norm": "vocab_layer_norm",
    "mlm_head/bias": "vocab_projector.bias",
}
_DISTILBERT_NAMES = {
    "embeddings/word": "embeddings.word_embeddings",
    "embeddings/position": "embeddings.position_embeddings",
    "embeddings/norm": "embeddings.LayerNorm",
    "layers/attention/query": "transformer.layer.{}.attention.q_lin",
    "layers/attention/key": "transformer.layer.{}.attention.k_lin",
    "layers/attention/value": "transformer.layer.{}.attention.v_lin",
    "layers/attention/output": "transformer.layer.{}.attention.out_lin",
    "layers/attention_norm": "transformer.layer.{}.sa_layer_norm",
    "layers/intermediate": "transformer.layer.{}.ffn.lin1",
    "layers/output": "transformer.layer.{}.ffn.lin2",
    "layers/output_norm": "transformer.layer.{}.output_layer_norm",
}
_T5_NAMES = {
    "word": "shared",
    "position_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "final_norm": "encoder.final_layer_norm.weight",
    "layers/attention_norm": "encoder.block.{}.layer.0.layer_norm",
    "layers/query": "encoder.block.{}.layer.0.SelfAttention.q",
    "layers/key": "encoder.block.{}.layer.0.SelfAttention.k",
    "layers/value": "encoder.block.{}.layer.0.SelfAttention.v",
    "layers/output": "encoder.block.{}.layer.0.SelfAttention.o",
    "layers/feed_forward_norm": "encoder.block.{}.layer.1.layer_norm",
    "layers/wide": "encoder.block.{}.layer.1.DenseReluDense.wi",
    "layers/narrow": "encoder.block.{}.layer.1.DenseReluDense.wo",
}
_T5_GATED = {  # v1.1
    "layers/wide": "encoder.block.{}.layer.1.DenseReluDense.wi_0",
    "layers/gate": "encoder.block.{}.layer.1.DenseReluDense.wi_1",
}
_POSITION_IDS = ("embeddings.position_ids",)  # 0, 1, 2, ...
ARCHITECTURES = {
    "bert": Architecture(BertConfig, _BERT_KEYS, _BERT_NAMES | _BERT_MLM, "bert.", "BertModel", _POSITION_IDS),
    "distilbert": Architecture(
        BertConfig,
        _DISTILBERT_KEYS,
        _DISTILBERT_NAMES | _DISTILBERT_MLM,
        "distilbert.",
        "DistilBertModel",
        _POSITION_IDS,
    ),
    "roberta": Architecture(
        BertConfig, _BERT_KEYS, _BERT_NAMES | _ROBERTA_MLM, "roberta.", "RobertaModel", _POSITION_IDS
    ),
    # Files of the whole model also hold the word table a second and third time.
    "t5": Architecture(
        T5Config, _T5_KEYS, _T5_NAMES, "", "T5EncoderModel", ("encoder.embed_tokens", "decoder.embed_tokens")
    ),
}
_FIXED: dict[str, dict[str, Any]] = {  # fields that no key of config.json says
    "distilbert": {"type_vocab_size": 0},
}
_SUFFIXES = {"embedding": "weight", "kernel": "weight", "scale": "weight", "bias": "bias"}


def read_config(directory: str | Path) -> EncoderConfig:
    """config.json -> BertConfig or T5Config. Raises ValueError for an architecture or option that is not
    implemented."""
    path = Path(directory) / "config.json"
    raw = read_json(path)
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"{path}: model_type is {kind!r}; implemented are {', '.join(sorted(ARCHITECTURES))}")
    architecture = ARCHITECTURES[kind]
    missing = [key for key, default in architecture.keys.values() if default is REQUIRED and key not in raw]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} missing; found {', '.join(sorted(raw))}")
    fields = {field: raw.get(key, default) for field, (key, default) in architecture.keys.items()}
    fields |= _FIXED.get(kind, {})
    if kind == "roberta":  # positions begin after that of padding
        fields["first_position"] = raw.get("pad_token_id", 1) + 1
    config = architecture.config(**fields, model_type=kind)
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(f"{path}: activation {config.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")
    if raw.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"{path}: position_embedding_type {raw['position_embedding_type']!r}; only 'absolute' is")
    return config


def make_encoder(config: EncoderConfig, dtype: Any = jnp.float32, remat: bool = False) -> Bert | T5:
    """The encoder of a config."""
    return Bert(config, dtype, remat) if isinstance(config, BertConfig) else T5(config, dtype, remat)


def stored_tensors(config: EncoderConfig) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Parameter path -> (the tensors it is made of, the shape of each): one, or one per layer, to be stacked. Kernels
    are stored transposed, [out, in]."""
    names = dict(ARCHITECTURES[config.model_type].names)
    if isinstance(config, T5Config) and config.gated:
        names |= _T5_GATED
    tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
    shapes = jax.eval_shape(make_encoder(config).init, jax.random.key(0), tokens)["params"]
    tensors = {}
    for path, leaf in traverse_util.flatten_dict(shapes, sep="/").items():
        parent, _, suffix = path.rpartition("/")
        name = names[path] if path in names else f"{names[parent]}.{_SUFFIXES[suffix]}"
        shape = leaf.shape[1:] if path.startswith("layers/") else leaf.shape
        layers = range(config.num_layers if path.startswith("layers/") else 1)
        tensors[path] = tuple(name.format(i) for i in layers), shape[::-1] if suffix == "kernel" else shape
    return tensors
