"""A run in the files of transformers and sentence-transformers, and read back from them.

Old spellings of sentence-transformers are written, which its versions 5 and 6 read alike. No module of it joins title
and text, or gives a text several vectors.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxret.data.tokenizer import TOKENIZER_FILES
from jaxret.models.encoders.architectures import make_encoder
from jaxret.models.encoders.pretrained import load_pretrained, save_pretrained
from jaxret.models.encoders.sentence_transformers import MODULES, SETTINGS
from jaxret.models.heads.head import Side
from jaxret.runs.run import Run
from jaxret.storage import read_json, write_json
from jaxret.types import Ragged, Tokens

ROUTES: dict[Side, str] = {"query": "query", "passage": "document"}
_TYPES = "sentence_transformers.models."


def layer_weights(run: Run, side: Side) -> dict[int, float]:
    """{layer: what it counts for} where the vector of a text is a mean over layers. Raises ValueError where it is
    anything else, which stock modules cannot say."""
    module, name = run.retriever.module, run.config.head.name
    layers = module.head.layers_of(side)
    pooling = run.params.get("pooling", {}) if side == "passage" else {}
    weights: list[float] | None = [1.0]
    if side == "passage" and layers:
        weights = type(module.pooling).weights(len(layers), pooling)
    if not layers or weights is None:
        several = f"{name!r} with pooling {run.config.pooling!r}" if layers else repr(name)
        raise ValueError(f"head.name {several} has no form in stock modules of sentence-transformers: use --to=hf")
    found = {layer: float(weight) for layer, weight in zip(layers, weights, strict=True) if weight}
    if len(found) > 1 and getattr(module.config, "normalize_intermediate", False):
        raise ValueError(f"{module.config.model_type} gives layers below the last raw in transformers, normed here")
    return found


def write_encoder(run: Run, side: Side, folder: Path, all_layers: bool = False) -> None:
    """The encoder of a side as transformers has it: config.json, model.safetensors, the tokenizer."""
    params = run.params["encoder" if run.config.encoder.tied else f"{side}_encoder"]
    save_pretrained(folder, run.retriever.module.config, params)
    if all_layers:  # without it a mean over layers is silently the last one
        write_json(folder / "config.json", read_json(folder / "config.json") | {"output_hidden_states": True})
    for name in TOKENIZER_FILES:
        if (run.workdir.encoder / name).is_file():
            shutil.copyfile(run.workdir.encoder / name, folder / name)
    settings = folder / "tokenizer_config.json"
    length = {"model_max_length": run.config.tokens[f"{side}_length"]}
    write_json(settings, (read_json(settings) if settings.is_file() else {}) | length)


def write_modules(run: Run, out: Path) -> None:
    """A sentence-transformers directory: with one chain of modules, or, where queries and passages are encoded
    differently, a Router. Raises ValueError for what stock modules cannot say."""
    weights: dict[Side, dict[int, float]] = {side: layer_weights(run, side) for side in ROUTES}
    prompts = {route: run.config.tokens[f"{side}_prompt"] for side, route in ROUTES.items()}
    similarity = "cosine" if run.config.normalize else "dot"
    write_json(out / SETTINGS, {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": similarity})
    if run.config.encoder.tied and weights["query"] == weights["passage"]:
        chain = _write_chain(run, "passage", weights["passage"], out, root="")
        _write_list(out, chain)
        return
    chains = {ROUTES[side]: _write_chain(run, side, weights[side], out, f"{ROUTES[side]}_") for side in ROUTES}
    types = {name: kind for chain in chains.values() for name, kind in chain.items()}
    structure = {route: list(chain) for route, chain in chains.items()}
    parameters = {"default_route": "document", "allow_empty_key": True}
    write_json(out / "router_config.json", {"types": types, "structure": structure, "parameters": parameters})
    _write_list(out, {"": f"{_TYPES}Router"})


def _write_list(out: Path, chain: Mapping[str, str]) -> None:
    lines = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(chain.items())]
    write_json(out / MODULES, lines)


def _write_chain(run: Run, side: Side, weights: Mapping[int, float], out: Path, root: str) -> dict[str, str]:
    """Writes the modules of a side; {folder: type}. root: what their folders begin with."""
    module, size = run.retriever.module, {"word_embedding_dimension": run.retriever.module.config.hidden_size}
    layers, mixed = module.config.num_layers, set(weights) != {module.config.num_layers}
    chain = {f"{root}0_Transformer" if root else "": f"{_TYPES}Transformer"}
    encoder = out / next(iter(chain))
    write_encoder(run, side, encoder, all_layers=mixed)
    length = run.config.tokens[f"{side}_length"]
    write_json(encoder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    if mixed:
        start, folder = min(weights), f"{root}{len(chain)}_WeightedLayerPooling"
        chain[folder] = f"{_TYPES}WeightedLayerPooling"
        write_json(out / folder / "config.json", {**size, "layer_start": start, "num_hidden_layers": layers})
        factors = np.array([weights.get(layer, 0.0) for layer in range(start, layers + 1)], np.float32)
        save_file({"layer_weights": factors}, out / folder / "model.safetensors", {"format": "pt"})
    folder, mean = f"{root}{len(chain)}_Pooling", run.config.head.token == "mean"
    chain[folder] = f"{_TYPES}Pooling"
    write_json(
        out / folder / "config.json", {**size, "pooling_mode_cls_token": not mean, "pooling_mode_mean_tokens": mean}
    )
    if run.config.normalize:
        folder = f"{root}{len(chain)}_Normalize"
        (out / folder).mkdir()
        chain[folder] = f"{_TYPES}Normalize"
    return chain


def read_back(out: Path, side: Side, tokens: Ragged) -> np.ndarray:
    """The vectors [rows,D] that the modules in a written directory give, computed module by module from the files."""
    lines = [(line["type"], line["path"]) for line in read_json(out / MODULES)]
    if lines[0][0] == f"{_TYPES}Router":
        router = read_json(out / "router_config.json")
        lines = [(router["types"][name], name) for name in router["structure"][ROUTES[side]]]
    states, mask = read_states(out / lines[0][1], tokens)
    found = states[-1]
    for kind, path in lines[1:]:
        if kind == f"{_TYPES}WeightedLayerPooling":
            start = read_json(out / path / "config.json")["layer_start"]
            factors = load_file(out / path / "model.safetensors")["layer_weights"]
            found = np.tensordot(factors / factors.sum(), states[start:], 1)
        elif kind == f"{_TYPES}Pooling" and read_json(out / path / "config.json")["pooling_mode_mean_tokens"]:
            found = (found * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        elif kind == f"{_TYPES}Pooling":
            found = found[:, 0]
        else:
            found = found / np.linalg.norm(found, axis=-1, keepdims=True)
    return found


def read_states(folder: Path, tokens: Ragged, ignore: Sequence[str] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Every hidden state [L+1,rows,T,H] float32 of an encoder as it was written, and the mask [rows,T]. ignore: as
    `encoder.ignore`."""
    config, params = load_pretrained(folder, ignore)
    ids, mask = tokens.padded(np.arange(len(tokens)), int(tokens.lengths.max()))
    batch = Tokens(jnp.asarray(ids), jnp.asarray(mask))
    apply = jax.jit(lambda params, batch: make_encoder(config).apply({"params": params}, batch).states)
    return np.asarray(apply(params, batch)), mask
