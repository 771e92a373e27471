"""Files of Gemma 3 (text) and EmbeddingGemma, whose encoder is in decoder.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxret.models.encoders import rope
from jaxret.models.encoders.decoder import GATES
from jaxret.models.encoders.llama import BIAS, FULL, KEYS, NAMES, SLIDING, decoder_architecture, translate_llama
from jaxret.models.encoders.stored import POSITIVE, Key, at_least, one_of

GEMMA_KEYS = (
    KEYS
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
GEMMA_NAMES = NAMES | {
    "layers/attention_output_norm": "layers.{}.post_attention_layernorm",
    "layers/mlp_norm": "layers.{}.pre_feedforward_layernorm",
    "layers/mlp_output_norm": "layers.{}.post_feedforward_layernorm",
}


def translate_gemma3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json in the keys of `GEMMA_KEYS`: every n-th layer is global. Raises ValueError for other
    `layer_types`, and for scaling of local layers."""
    flat = {"num_key_value_heads": 4, "head_dim": 256, **raw}
    both = raw.get("rope_parameters")
    if both is not None:
        if not isinstance(both, dict) or both.keys() - {FULL, SLIDING}:
            raise ValueError(f"rope_parameters is {both}; it must have {FULL!r} and {SLIDING!r}")
        local = rope.flatten_rope("rope_parameters", both.get(SLIDING))
        if local.get("rope_type", "default") != "default":
            raise ValueError(f"rope_parameters is {both}; local layers have no scaling here")
        if "rope_theta" in local:
            flat["rope_local_base_freq"] = local["rope_theta"]
        flat["rope_parameters"] = both.get(FULL)
    flat = translate_llama(flat)
    flat["is_causal"] = not raw.get("use_bidirectional_attention")
    return flat | {"sliding_window_pattern": _global_every(raw)}


def _global_every(raw: Mapping[str, Any]) -> Any:
    """Return n, where every n-th layer is global; 0: none is."""
    every = raw.get("sliding_window_pattern", 6)
    types, count = raw.get("layer_types"), raw.get("num_hidden_layers")
    if types is None or type(count) is not int:
        return every
    layers = count if isinstance(types, list) and len(types) == count else 0

    def pattern(n: int) -> list[str]:
        return [FULL if n and (i + 1) % n == 0 else SLIDING for i in range(layers)]

    if type(every) is int and every >= 0 and types == pattern(every):
        return every
    own = types.index(FULL) + 1 if isinstance(types, list) and FULL in types else 0
    if not layers or types != pattern(own):
        raise ValueError(
            f"layer_types is {types}; it must name each of the num_hidden_layers layers, every n-th {FULL!r}, the "
            f"others {SLIDING!r}"
        )
    return own


def spell_gemma3(raw: dict[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers reads it."""
    content, every, layers = rope.nest_rope(raw), raw["sliding_window_pattern"], raw["num_hidden_layers"]
    types = [FULL if every and (i + 1) % every == 0 else SLIDING for i in range(layers)]
    both = not content.pop("is_causal")
    return {**content, "layer_types": types, "use_bidirectional_attention": both}


GEMMA3 = decoder_architecture(
    "gemma3_text",
    "Gemma3TextModel",
    keys=GEMMA_KEYS,
    names=lambda _: GEMMA_NAMES,
    only={"attn_logit_softcapping": None, "is_causal": True},
    translate=translate_gemma3,
    spell=spell_gemma3,
)
