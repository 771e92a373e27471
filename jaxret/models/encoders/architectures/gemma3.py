"""The Hugging Face files of Gemma 3 (text) and EmbeddingGemma, whose encoder is in decoder.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxret.models.encoders.architectures import rope
from jaxret.models.encoders.architectures.decoder import GATES
from jaxret.models.encoders.architectures.llama import (
    BIAS,
    FULL,
    LLAMA_KEYS,
    LLAMA_NAMES,
    SLIDING,
    decoder_architecture,
    translate_llama,
)
from jaxret.models.encoders.stored import POSITIVE, Key, at_least, one_of

GEMMA_KEYS = (
    LLAMA_KEYS
    | BIAS
    | {
        "hidden_act": Key("hidden_activation", one_of(*GATES), "gelu_pytorch_tanh"),
        "theta": Key("rope_theta", POSITIVE, 1_000_000.0),
        "local_theta": Key("rope_local_base_freq", POSITIVE, 10_000.0),
        "window": Key("sliding_window", default=4096),
        "global_every": Key("sliding_window_pattern", at_least(0)),
        "query_scalar": Key("query_pre_attn_scalar", POSITIVE, 256),
    }
)
GEMMA_NAMES = LLAMA_NAMES | {
    "layers/attention_output_norm": "layers.{}.post_attention_layernorm",
    "layers/mlp_norm": "layers.{}.pre_feedforward_layernorm",
    "layers/mlp_output_norm": "layers.{}.post_feedforward_layernorm",
}


def translate_gemma3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of `GEMMA_KEYS`. Raises ValueError for `layer_types` other than every n-th
    layer global, and for scaled rotary positions of local layers."""
    flat = {"num_key_value_heads": 4, "head_dim": 256, **raw}
    rope_parameters = raw.get("rope_parameters")
    if rope_parameters is not None:
        if not isinstance(rope_parameters, dict) or rope_parameters.keys() - {FULL, SLIDING}:
            raise ValueError(f"rope_parameters is {rope_parameters}; its keys must be {FULL!r} and {SLIDING!r}")
        local = rope.flatten_rope("rope_parameters", rope_parameters.get(SLIDING))
        if local.get("rope_type", "default") != "default":
            raise ValueError(f"rope_parameters is {rope_parameters}; scaling of local layers is not implemented")
        if "rope_theta" in local:
            flat["rope_local_base_freq"] = local["rope_theta"]
        flat["rope_parameters"] = rope_parameters.get(FULL)
    flat = translate_llama(flat)
    flat["is_causal"] = not raw.get("use_bidirectional_attention")
    return flat | {"sliding_window_pattern": _global_every(raw)}


def _global_every(raw: Mapping[str, Any]) -> Any:
    """Return n if every n-th layer is global, or 0 if no layer is."""
    stated_period = raw.get("sliding_window_pattern", 6)
    types, count = raw.get("layer_types"), raw.get("num_hidden_layers")
    if types is None or type(count) is not int:
        return stated_period
    layers = count if isinstance(types, list) and len(types) == count else 0

    def pattern(n: int) -> list[str]:
        return [FULL if n and (i + 1) % n == 0 else SLIDING for i in range(layers)]

    if type(stated_period) is int and stated_period >= 0 and types == pattern(stated_period):
        return stated_period
    period = types.index(FULL) + 1 if isinstance(types, list) and FULL in types else 0
    if not layers or types != pattern(period):
        raise ValueError(
            f"layer_types is {types}; it must have an entry for each of the num_hidden_layers layers: every n-th entry "
            f"is {FULL!r}, all other entries are {SLIDING!r}"
        )
    return period


def spell_gemma3(raw: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys that transformers reads: the inverse of `translate_gemma3`."""
    content, period, layers = rope.nest_rope(raw), raw["sliding_window_pattern"], raw["num_hidden_layers"]
    types = [FULL if period and (i + 1) % period == 0 else SLIDING for i in range(layers)]
    bidirectional = not content.pop("is_causal")
    return {**content, "layer_types": types, "use_bidirectional_attention": bidirectional}


GEMMA3_ARCHITECTURE = decoder_architecture(
    "gemma3_text",
    "Gemma3TextModel",
    keys=GEMMA_KEYS,
    names=lambda _: GEMMA_NAMES,
    only={"attn_logit_softcapping": None, "is_causal": True},
    translate=translate_gemma3,
    spell=spell_gemma3,
)
