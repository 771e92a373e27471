"""DistilBERT: BERT without token types, under other names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from jaxret.models.encoders.architectures import bert
from jaxret.models.encoders.attention import ACTIVATIONS
from jaxret.models.encoders.stored import DROPOUT, LAYER_COUNT, SPREAD, Key, one_of

DISTILBERT_KEYS = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("dim"),
    "num_layers": Key("n_layers", LAYER_COUNT),
    "num_heads": Key("n_heads"),
    "intermediate_size": Key("hidden_dim"),
    "max_positions": Key("max_position_embeddings"),
    "hidden_act": Key("activation", one_of(*ACTIVATIONS), "gelu"),
    "hidden_dropout": Key("dropout", DROPOUT, 0.1),
    "attention_dropout": Key("attention_dropout", DROPOUT, 0.1),
    "initializer_range": Key("initializer_range", SPREAD, 0.02),
}
DISTILBERT_NAMES = {
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
    "mlm_head/dense": "vocab_transform",
    "mlm_head/norm": "vocab_layer_norm",
    "mlm_head/bias": "vocab_projector.bias",
}

ARCHITECTURE = replace(
    bert.ARCHITECTURE,
    model_type="distilbert",
    config=partial(bert.BertConfig, type_vocab_size=0),
    keys=DISTILBERT_KEYS,
    names=lambda _: DISTILBERT_NAMES,
    class_name="DistilBertModel",
    prefix="distilbert.",
    mlm_class="DistilBertForMaskedLM",
    mlm_output="vocab_projector.weight",
    classifier=None,  # transformers' class for it has ReLU instead of tanh, which is not implemented
)
