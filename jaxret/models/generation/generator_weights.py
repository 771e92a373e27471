"""Reads T5 models with their decoders from Hugging Face directories. Every tensor of the files must be used."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxret.models.encoders.architectures import StoredTensors, match_tensors, require_stored_sizes, stored_tensors, t5
from jaxret.models.encoders.weight_files import open_weights
from jaxret.models.generation.t5_decoder import GeneratorConfig, T5Generator
from jaxret.storage.foreign_files import read_settings
from jaxret.types import Params, Tokens

WORD_TABLE, OUTPUT = "shared.weight", "lm_head.weight"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # where the word table may be stored again
# A tensor in files of T5 v1.0 that no code of T5 reads.
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_BLOCK = "decoder.block.{}.layer."
DECODER_NAMES = {
    "position_bias": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "final_norm": "decoder.final_layer_norm.weight",
    "vocabulary": OUTPUT,
    "layers/attention_norm": f"{_BLOCK}0.layer_norm",
    "layers/query": f"{_BLOCK}0.SelfAttention.q",
    "layers/key": f"{_BLOCK}0.SelfAttention.k",
    "layers/value": f"{_BLOCK}0.SelfAttention.v",
    "layers/output": f"{_BLOCK}0.SelfAttention.o",
    "layers/cross_norm": f"{_BLOCK}1.layer_norm",
    "layers/cross_query": f"{_BLOCK}1.EncDecAttention.q",
    "layers/cross_output": f"{_BLOCK}1.EncDecAttention.o",
    "source_layers/key": f"{_BLOCK}1.EncDecAttention.k",
    "source_layers/value": f"{_BLOCK}1.EncDecAttention.v",
    "layers/feed_forward_norm": f"{_BLOCK}2.layer_norm",
    "layers/gate": f"{_BLOCK}2.DenseReluDense.wi_1",
    "layers/narrow": f"{_BLOCK}2.DenseReluDense.wo",
}


def read_generator_config(directory: str | Path, own_output: bool) -> GeneratorConfig:
    """Return the config in a directory's config.json.

    `scale_decoder_outputs` (transformers 5), or else `tie_word_embeddings` (older versions), says whether states are
    scaled before the output matrix. T5 v1.0 ties and scales; v1.1 and Flan-T5 do neither.

    Args:
        directory: a Hugging Face directory.
        own_output: whether the weights have an output matrix that differs from the word table.

    Raises:
        ValueError: a key is missing, invalid or not implemented.
    """
    path = Path(directory) / "config.json"
    raw = read_settings(path)
    if (kind := raw.get("model_type")) != "t5":
        raise ValueError(f"{path}: model_type is {kind!r}; queries are generated only by 't5' (T5, Flan-T5, doc2query)")
    layers = raw.get("num_decoder_layers")
    try:
        encoder = t5.ARCHITECTURE.read(raw)
        decoder = encoder if layers is None else t5.ARCHITECTURE.read({**raw, "num_layers": layers})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if decoder.max_distance <= decoder.buckets // 2:
        raise ValueError(
            f"{path}: relative_attention_max_distance is {decoder.max_distance}; the decoder needs more than "
            f"{decoder.buckets // 2}: smaller distances have buckets of their own"
        )
    ids = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    for key, default in ids.items():
        ids[key] = default if raw.get(key) is None else raw[key]
        if type(ids[key]) is not int or not 0 <= ids[key] < encoder.vocab_size:
            raise ValueError(f"{path}: {key} is {ids[key]!r}; it must be a token id below {encoder.vocab_size}")
    scaled = raw.get("scale_decoder_outputs", raw.get("tie_word_embeddings") is not False)
    if type(scaled) is not bool:
        raise ValueError(f"{path}: scale_decoder_outputs is {scaled!r}; it must be true or false")
    return GeneratorConfig(encoder, decoder, scaled, own_output, *ids.values())


def generator_tensors(config: GeneratorConfig) -> dict[str, StoredTensors]:
    """Return {parameter path: stored tensors}."""
    tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
    shapes = jax.eval_shape(T5Generator(config).init, jax.random.key(0), tokens, jnp.zeros((1, 2), jnp.int32))
    wide = f"{_BLOCK}2.DenseReluDense.{'wi_0' if config.decoder.gated else 'wi'}"
    decoder = match_tensors(
        shapes["params"]["decoder"], DECODER_NAMES | {"layers/wide": wide}, config.decoder.num_layers
    )
    parts = {"encoder": stored_tensors(config.encoder), "decoder": decoder}
    return {f"{part}/{path}": tensor for part, tensors in parts.items() for path, tensor in tensors.items()}


def load_generator(directory: str | Path) -> tuple[GeneratorConfig, Params]:
    """Read a T5 model with its decoder. Return the config and float32 parameters on the host.

    Raises:
        FileNotFoundError: config.json or the weights are missing.
        ValueError: tensors are missing, unused or of a wrong shape, or a tensor holds NaN or infinity.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} has no config.json; a Hugging Face directory is needed")
    with open_weights(directory) as weights:
        files, tensor = weights.files, weights.array
        copies = [name for name in (*COPIES, OUTPUT) if name in files and WORD_TABLE in files]
        differing = {name for name in copies if not np.array_equal(tensor(name), tensor(WORD_TABLE))}
        config = read_generator_config(directory, own_output=OUTPUT in differing)
        shapes = {name: weights.shape(name) for name in files}
        for part in (config.encoder, config.decoder):
            require_stored_sizes(part, t5.ARCHITECTURE, directory / "config.json", shapes)
        tensors = generator_tensors(config)
        required_names = {name for entry in tensors.values() for name in entry.names}
        problems = [f"missing {name}" for name in sorted(required_names - files.keys())]
        problems += [f"unused {name}" for name in sorted(files.keys() - required_names - {*copies, UNUSED})]
        problems += [f"{name} differs from {WORD_TABLE}" for name in sorted(differing - {OUTPUT})]
        for entry in tensors.values():
            for name in set(entry.names) & files.keys():
                if shapes[name] != entry.shape:
                    problems.append(f"{name} has shape {shapes[name]}, config.json requires {entry.shape}")
        if problems:
            raise ValueError(f"{directory}: the weights do not fit config.json: {'; '.join(problems)}")
        flat = {}
        for path, entry in tensors.items():
            arrays = [tensor(name).T if path.endswith("kernel") else tensor(name) for name in entry.names]
            flat[path] = np.stack(arrays) if entry.stacked else arrays[0]
    return config, traverse_util.unflatten_dict(flat, sep="/")
