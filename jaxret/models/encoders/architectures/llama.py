"""The Hugging Face files of Llama 2 and 3, Mistral and Qwen3, whose encoder is in decoder.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxret.models.encoders.architectures import rope
from jaxret.models.encoders.architectures.decoder import Decoder, DecoderConfig
from jaxret.models.encoders.stored import Architecture, Key, at_least, one_of, stored_keys

FLAG = one_of(False, True)
LLAMA_KEYS = stored_keys(DecoderConfig)
BIAS = {"attention_bias": Key("attention_bias", FLAG, False)}
WINDOW = {"window": Key("sliding_window", at_least(0))}
DECODER_ONLY = {"partial_rotary_factor": 1.0}
NO_LAYER_TYPES = {"layer_types": None}  # transformers ignores them in these architectures
LLAMA_NAMES = {
    "word": "embed_tokens",
    "final_norm": "norm.weight",
    "layers/attention/query": "layers.{}.self_attn.q_proj",
    "layers/attention/key": "layers.{}.self_attn.k_proj",
    "layers/attention/value": "layers.{}.self_attn.v_proj",
    "layers/attention/output": "layers.{}.self_attn.o_proj",
    "layers/attention/query_norm": "layers.{}.self_attn.q_norm",
    "layers/attention/key_norm": "layers.{}.self_attn.k_norm",
    "layers/gate": "layers.{}.mlp.gate_proj",
    "layers/wide": "layers.{}.mlp.up_proj",
    "layers/narrow": "layers.{}.mlp.down_proj",
    "layers/attention_norm": "layers.{}.input_layernorm",
    "layers/mlp_norm": "layers.{}.post_attention_layernorm",
}
FULL, SLIDING = "full_attention", "sliding_attention"


def translate_llama(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of `LLAMA_KEYS`. Where `num_key_value_heads` or `head_dim` is null or missing,
    it is computed from the other keys."""
    flat = rope.translate_rope(raw)
    heads, size = raw.get("num_attention_heads"), raw.get("hidden_size")
    if flat.get("num_key_value_heads") is None:
        flat["num_key_value_heads"] = heads
    if flat.get("head_dim") is None and isinstance(heads, int) and isinstance(size, int) and heads > 0:
        flat["head_dim"] = size // heads
    return flat


def translate_mistral(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of `translate_llama` and Mistral's defaults: 8 heads of keys, and a window of
    4096 tokens. A window of null becomes 0."""
    return translate_llama({"num_key_value_heads": 8, **raw, "sliding_window": raw.get("sliding_window", 4096) or 0})


def translate_qwen3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of Qwen3. Raises ValueError for `layer_types` other than windows from some layer
    on."""
    flat = translate_llama({"head_dim": 128, **raw})
    window = (flat.get("sliding_window", 4096) or 0) if raw.get("use_sliding_window") else 0
    flat |= {"sliding_window": window, "max_window_layers": flat.get("max_window_layers", 28)}
    types = raw.get("layer_types")
    layers = raw.get("num_hidden_layers")
    if types is None or type(layers) is not int:
        return flat
    count = layers if isinstance(types, list) and len(types) == layers else 0
    first = types.index(SLIDING) if count and SLIDING in types else count
    if not count or types != [FULL] * first + [SLIDING] * (count - first) or (SLIDING in types and not window):
        raise ValueError(
            f"layer_types is {types}; it must have {FULL!r} or {SLIDING!r} for each of the num_hidden_layers layers. "
            f"Only the last layers can be {SLIDING!r}, and only with a window (use_sliding_window, sliding_window)"
        )
    return {**flat, "max_window_layers": first} if SLIDING in types else {**flat, "sliding_window": 0}


def spell_mistral(raw: dict[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers writes it for Mistral: the inverse of `translate_mistral`."""
    return {**rope.nest_rope(raw), "sliding_window": raw["sliding_window"] or None}


def spell_qwen3(raw: dict[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers writes it for Qwen3: the inverse of `translate_qwen3`."""
    return {**spell_mistral(raw), "use_sliding_window": raw["sliding_window"] > 0}


def check_decoder(config: DecoderConfig) -> Iterator[tuple[str, str]]:
    """Yield (field, requirement) of each value that conflicts with another."""
    if config.num_heads % config.num_kv_heads:
        yield "num_kv_heads", f"divide num_attention_heads, {config.num_heads}"
    if config.head_size % 2:
        yield "head_size", "be even: dimensions are rotated in pairs"
    if config.rope_type == "llama3" and config.rope_high <= config.rope_low:
        yield "rope_high", f"be above low_freq_factor, {config.rope_low}"


def decoder_architecture(model_type: str, class_name: str, **options: Any) -> Architecture:
    """Return the architecture of a language model.

    Args:
        model_type: model_type in config.json.
        class_name: name of transformers' class without an output layer.
        options: fields of `Architecture` that differ from Llama's.
    """
    options = {"translate": translate_llama, "spell": rope.nest_rope, **options}
    return Architecture(
        model_type,
        DecoderConfig,
        Decoder,
        options.pop("keys"),
        options.pop("names", lambda _: LLAMA_NAMES),
        class_name=class_name,
        prefix="model.",
        only=DECODER_ONLY | options.pop("only", {}),
        check=check_decoder,
        buffers=("lm_head.",),  # the output layer, which an encoder does not have
        buffer_endings=(".rotary_emb.inv_freq",),  # buffers in old files
        **options,
    )


LLAMA_ARCHITECTURE = decoder_architecture(
    "llama",
    "LlamaModel",
    keys=LLAMA_KEYS | BIAS | {"mlp_bias": Key("mlp_bias", FLAG, False)},
    only=NO_LAYER_TYPES,
)
MISTRAL_ARCHITECTURE = decoder_architecture(
    "mistral",
    "MistralModel",
    keys=LLAMA_KEYS | WINDOW,
    only=NO_LAYER_TYPES,
    translate=translate_mistral,
    spell=spell_mistral,
)
QWEN3_ARCHITECTURE = decoder_architecture(
    "qwen3",
    "Qwen3Model",
    keys=LLAMA_KEYS | BIAS | WINDOW | {"first_window": Key("max_window_layers", at_least(0))},
    translate=translate_qwen3,
    spell=spell_qwen3,
)
