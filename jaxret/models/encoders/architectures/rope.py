"""Keys of rotary positions in config.json: `rope_theta` and `rope_scaling` of transformers 4, `rope_parameters` of
transformers 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxret.models.encoders.architectures.decoder import DecoderConfig
from jaxret.models.encoders.stored import stored_keys

_SCALINGS: dict[str, dict[str, str]] = {  # rope_type -> {key of config.json: field of DecoderConfig}
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low",
        "high_freq_factor": "rope_high",
        "original_max_position_embeddings": "rope_original",
    },
}
# keys that `flatten_rope` returns
ROPE_KEYS = {name: key for name, key in stored_keys(DecoderConfig).items() if name.startswith("rope_")}


def flatten_rope(name: str, parameters: Any) -> dict[str, Any]:
    """Return rotary parameters under the names of `ROPE_KEYS`, and `rope_theta` if it is among them.

    Args:
        name: key of config.json, for errors.
        parameters: value of the key; None: no scaling.

    Raises:
        ValueError: the kind of scaling, or one of its keys, is not implemented.
    """
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise ValueError(f"{name} is {parameters!r}; a JSON object is needed")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _SCALINGS:
        raise ValueError(f"{name} is {parameters}; rope_type must be {' or '.join(map(repr, _SCALINGS))}")
    keys = {*_SCALINGS[kind], "rope_type", "type", "rope_theta"}
    problems = [f"lacks {key}" for key in _SCALINGS[kind] if key not in parameters]
    problems += [f"has the unknown key {key}" for key in sorted(parameters.keys() - keys)]
    if problems:
        raise ValueError(f"{name} is {parameters}; it {problems[0]}, where rope_type is {kind!r}")
    flat = {key: parameters[key] for key in ("rope_theta", *_SCALINGS[kind]) if key in parameters}
    return {"rope_type": kind, **flat}


def translate_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the rotary parameters at its top level, the same for all layers. Raises ValueError for
    scaling that is not implemented or occurs twice."""
    if raw.get("rope_parameters") is not None and raw.get("rope_scaling") is not None:
        raise ValueError(
            f"rope_scaling is {raw['rope_scaling']}, and rope_parameters exist, too; delete one of the two keys"
        )
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    return {**raw, **flatten_rope(name, raw.get(name))}


def nest_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of `ROPE_KEYS` moved into `rope_scaling`, which transformers 4 and 5 read."""
    flat = {field: raw[key.name] for field, key in ROPE_KEYS.items()}
    names = {key.name for key in ROPE_KEYS.values()}
    scaling = {name: flat[field] for name, field in _SCALINGS[flat["rope_type"]].items()}
    rope_scaling = {"rope_type": flat["rope_type"], **scaling} if scaling else None
    return {**{key: value for key, value in raw.items() if key not in names}, "rope_scaling": rope_scaling}
