"""Writes a run as an encoder of transformers and stock modules of sentence-transformers, and reads the files back.

Keys and names are those of older sentence-transformers, which versions 5 and 6 both read. No stock module joins title
and text, or computes several vectors of a text.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxret.data.tokens.backend import load_backend
from jaxret.data.tokens.tokenizer import TOKENIZER_FILES, TextTokenizer, added_ids
from jaxret.export.compare_original import sample_texts, sample_tokens
from jaxret.models.encoders.architectures import is_language_model, make_encoder
from jaxret.models.encoders.pretrained import load_pretrained, save_pretrained
from jaxret.models.encoders.sentence_transformers import MODULES, SETTINGS
from jaxret.models.heads.head import EVERY_TOKEN, Side
from jaxret.runs.run import Run
from jaxret.storage.atomic import read_json, write_json
from jaxret.types import Ragged, Tokens

ROUTES: dict[Side, str] = {"query": "query", "passage": "document"}
# Value of head.token -> key of a Pooling module.
POOLING_KEYS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}
_TYPES = "sentence_transformers.models."
_WEIGHTS, _AS_TORCH = "model.safetensors", {"format": "pt"}


class VectorForm(NamedTuple):
    """A vector that stock modules compute from the encoder's states."""

    weights: Mapping[int, float]  # layer -> weight
    token: str  # one of head.TOKENS, or head.EVERY_TOKEN
    projections: tuple[np.ndarray, ...]  # matrices [H,D], which are multiplied last, in order

    def same_modules(self, form: VectorForm) -> bool:
        """Return whether one chain of modules computes both forms, if encoders and projections are equal."""
        return self.weights == form.weights and self.token == form.token


def vector_form(run: Run, side: Side) -> VectorForm | None:
    """Return the form of a side's vectors: states at a token, or a weighted mean of them over layers, with projections.

    Return None for other vectors: several vectors of a passage, or vectors that a head computes differently.
    """
    module, name = run.model.module, "head" if run.config.encoder.tied else f"{side}_head"
    layers, pooling = module.head.layers_of(side), run.config.pooling if side == "passage" else "none"
    if not layers:
        return None
    token, weights = module.head.token_of(side, pooling), [1.0]
    if not token:
        return None
    if side == "passage" and token != EVERY_TOKEN:
        if run.model.vectors_per_passage != 1:
            return None
        weights = type(module.pooling).weights(len(layers), run.params.get("pooling", {}))
    layer_weights = {layer: float(weight) for layer, weight in zip(layers, weights, strict=True) if weight}
    head_params = run.params.get(name, {})
    projections = tuple(np.asarray(head_params[layer]["kernel"]) for layer in module.head.projections())
    return VectorForm(layer_weights, token, projections)


def stock_problem(run: Run) -> str:
    """Return the reason why stock modules cannot compute a run's vectors; "" if they can."""
    module, name = run.model.module, run.config.head.name
    for side in ROUTES:
        form = vector_form(run, side)
        if form is None or form.token == EVERY_TOKEN:
            several = f"{name!r} with pooling {run.config.pooling!r}" if module.head.layers_of(side) else repr(name)
            advice = " (--to=pylate exports late interaction)" if run.model.late_interaction else ""
            return f"head.name {several} cannot be computed by stock modules of sentence-transformers{advice}"
        if form.token not in POOLING_KEYS:
            return f"head.token {form.token!r} is not a pooling of sentence-transformers"
        if len(form.weights) > 1 and getattr(module.config, "normalize_intermediate", False):
            return f"{module.config.model_type} has no norm on layers below the last in transformers, but in this run"
    return ""


def write_encoder(run: Run, side: Side, folder: Path, all_layers: bool = False) -> None:
    """Write the encoder of a side in transformers' files: config.json, model.safetensors, and the tokenizer.

    Args:
        folder: folder to write into.
        all_layers: whether transformers' model returns the hidden states of all layers.
    """
    params = run.params["encoder" if run.config.encoder.tied else f"{side}_encoder"]
    pooler = load_file(run.workdir.pooler) if run.workdir.pooler.is_file() else {}
    save_pretrained(folder, run.model.module.config, params, pooler)
    if all_layers:  # without this key, a mean over layers would silently be the last layer
        write_json(folder / "config.json", read_json(folder / "config.json") | {"output_hidden_states": True})
    write_tokenizer(run, side, folder)


def write_tokenizer(run: Run, side: Side, folder: Path) -> None:
    """Write the tokenizer with the length limit of one side."""
    for name in TOKENIZER_FILES:
        if (run.workdir.encoder / name).is_file():
            shutil.copyfile(run.workdir.encoder / name, folder / name)
    settings = folder / "tokenizer_config.json"
    changes: dict[str, Any] = {"model_max_length": run.config.tokens[f"{side}_length"]}
    if run.tokenizer.ends_texts and is_language_model(run.model.module.config):
        changes |= append_end_token(folder, run.tokenizer)
    write_json(settings, (read_json(settings) if settings.is_file() else {}) | changes)
    require_tokens_of_run(run, side, folder)


def append_end_token(folder: Path, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Change the post-processor in a folder's tokenizer.json so that it appends the run's end token to a text. Return
    the keys that tokenizer_config.json then needs, or {} if nothing was changed."""
    path = folder / "tokenizer.json"
    backend, _ = load_backend(folder)
    if added_ids(backend, folder)[1] == tokenizer.sep_id:
        return {}
    if not path.is_file():  # the tokenizer was loaded from other files
        backend.save(str(path))
    start, end = (
        [] if number is None else [{"SpecialToken": {"id": tokenizer.backend.id_to_token(number), "type_id": 0}}]
        for number in (tokenizer.cls_id, tokenizer.sep_id)
    )
    words = {tokenizer.backend.id_to_token(number): number for number in tokenizer.marker_ids}
    template = {
        "type": "TemplateProcessing",
        "single": [*start, {"Sequence": {"id": "A", "type_id": 0}}, *end],
        "pair": [
            *(*start, {"Sequence": {"id": "A", "type_id": 0}}, *end),
            *(*start, {"Sequence": {"id": "B", "type_id": 0}}, *end),
        ],
        "special_tokens": {word: {"id": word, "ids": [number], "tokens": [word]} for word, number in words.items()},
    }
    rules = read_json(path)
    old = rules.get("post_processor") or {}
    parts = old.get("processors", []) if old.get("type") == "Sequence" else [old] if old else []
    processors = [part for part in parts if part["type"] != "TemplateProcessing"]
    rules["post_processor"] = {"type": "Sequence", "processors": [*processors, template]} if processors else template
    write_json(path, rules)
    return {"add_eos_token": True, "add_bos_token": tokenizer.cls_id is not None}


def require_tokens_of_run(run: Run, side: Side, folder: Path) -> None:
    """Raise ValueError if the tokenizer in a folder and the run tokenize texts with the run's prompt differently.
    Nothing is compared for a head that adds tokens."""
    tokenizer, texts = run.tokenizer, sample_texts()
    if tokenizer.query_marker is not None or tokenizer.passage_marker is not None or tokenizer.expand_queries:
        return
    backend, _ = load_backend(folder)
    backend.no_padding()
    backend.enable_truncation(run.config.tokens[f"{side}_length"])
    for text, ids in zip(texts, sample_tokens(run, side), strict=True):
        exported_ids = backend.encode(tokenizer.prompt(side) + text).ids
        if exported_ids != (run_ids := np.where(ids < 0, ~ids, ids).tolist()):
            raise ValueError(
                f"the exported tokenizer tokenizes a text as {exported_ids[:3]}...{exported_ids[-3:]}, the run as "
                f"{run_ids[:3]}...{run_ids[-3:]}: nothing was exported"
            )


def write_modules(run: Run, out: Path) -> None:
    """Write a sentence-transformers directory: a chain of modules, or a Router if queries and passages need different
    modules. If stock modules cannot compute the vectors, the encoder is the only module."""
    none = bool(stock_problem(run))
    forms: dict[Side, VectorForm | None] = {side: None if none else vector_form(run, side) for side in ROUTES}
    prompts = {route: run.tokenizer.prompt(side) for side, route in ROUTES.items()}
    similarity = "cosine" if run.config.normalize else "dot"
    cut = {"truncate_dim": run.model.cut} if run.model.cut else {}
    settings = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": similarity, **cut}
    write_json(out / SETTINGS, settings)
    if has_one_chain(run):
        write_module_list(out, _write_chain(run, "passage", forms["passage"], out, root=""))
        return
    chains = {ROUTES[side]: _write_chain(run, side, forms[side], out, f"{ROUTES[side]}_") for side in ROUTES}
    types = {name: kind for chain in chains.values() for name, kind in chain.items()}
    structure = {route: list(chain) for route, chain in chains.items()}
    parameters = {"default_route": "document", "allow_empty_key": True}
    write_json(out / "router_config.json", {"types": types, "structure": structure, "parameters": parameters})
    write_module_list(out, {"": f"{_TYPES}Router"})


def has_one_chain(run: Run) -> bool:
    """Return whether queries and passages go through the same modules."""
    query, passage = (vector_form(run, side) for side in ROUTES)
    alike = query is not None and passage is not None and query.same_modules(passage)
    return run.config.encoder.tied and (bool(stock_problem(run)) or alike)


def write_module_list(out: Path, chain: Mapping[str, str]) -> None:
    """Write the list of modules; `chain` is folder -> type."""
    lines = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(chain.items())]
    write_json(out / MODULES, lines)


def _write_chain(run: Run, side: Side, form: VectorForm | None, out: Path, root: str) -> dict[str, str]:
    """Write the modules of a side, and return {folder: type}.

    Args:
        form: form of the vectors; None: only the encoder is written.
        out: folder to write into.
        root: prefix of the modules' folders.
    """
    module, size = run.model.module, {"word_embedding_dimension": run.model.module.config.hidden_size}
    layers, weights = module.config.num_layers, form.weights if form else {module.config.num_layers: 1.0}
    chain, mixes_layers = {f"{root}0_Transformer" if root else "": f"{_TYPES}Transformer"}, set(weights) != {layers}
    encoder = out / next(iter(chain))
    write_encoder(run, side, encoder, all_layers=mixes_layers)
    length = run.config.tokens[f"{side}_length"]
    write_json(encoder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    if form is None:
        return chain

    def add(kind: str, config: Mapping[str, Any] | None = None, **tensors: np.ndarray) -> None:
        folder = out / f"{root}{len(chain)}_{kind}"
        folder.mkdir()
        chain[folder.name] = _TYPES + kind
        if config is not None:
            write_json(folder / "config.json", config)
        if tensors:
            save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / _WEIGHTS, _AS_TORCH)

    if mixes_layers:
        start = min(weights)
        factors = np.array([weights.get(layer, 0.0) for layer in range(start, layers + 1)], np.float32)
        add("WeightedLayerPooling", {**size, "layer_start": start, "num_hidden_layers": layers}, layer_weights=factors)
    skips = {"include_prompt": False} if run.tokenizer.skip_prompt else {}
    add("Pooling", {**size, **{key: token == form.token for token, key in POOLING_KEYS.items()}, **skips})
    for matrix in form.projections:
        add("Dense", dense_config(matrix), **{"linear.weight": matrix.T})
    if run.config.normalize:
        add("Normalize")
    return chain


def dense_config(kernel: np.ndarray) -> dict[str, Any]:
    """Return the config.json of a Dense module that multiplies with `kernel` [in,out]."""
    sizes = {"in_features": kernel.shape[0], "out_features": kernel.shape[1]}
    return {**sizes, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}


def stock_vectors(out: Path, side: Side, tokens: Ragged) -> np.ndarray:
    """Return the output of the modules in a written directory, computed from the files: vectors [rows,D], or states
    [rows,T,H] if the encoder is the only module."""
    lines = [(line["type"], line["path"]) for line in read_json(out / MODULES)]
    if lines[0][0] == f"{_TYPES}Router":
        router = read_json(out / "router_config.json")
        lines = [(router["types"][name], name) for name in router["structure"][ROUTES[side]]]
    states, mask = read_states(out / lines[0][1], tokens)
    values = states[-1]
    for kind, path in lines[1:]:
        if kind == f"{_TYPES}WeightedLayerPooling":
            start = read_json(out / path / "config.json")["layer_start"]
            factors = load_file(out / path / _WEIGHTS)["layer_weights"]
            values = np.tensordot(factors / factors.sum(), states[start:], 1)
        elif kind == f"{_TYPES}Pooling":
            settings = read_json(out / path / "config.json")
            if settings[POOLING_KEYS["mean"]]:
                ids, _ = tokens.padded(np.arange(len(tokens)), mask.shape[1])
                counts = mask & (ids >= 0)  # `TextTokenizer` marks ids of a prompt as negative
                values = (values * counts[..., None]).sum(1) / counts.sum(1, keepdims=True)
            elif settings[POOLING_KEYS["last"]]:
                values = values[np.arange(len(values)), mask.sum(1) - 1]
            else:
                values = values[:, 0]
        elif kind == f"{_TYPES}Dense":
            values = values @ load_file(out / path / _WEIGHTS)["linear.weight"].T
        else:
            values = values / np.linalg.norm(values, axis=-1, keepdims=True)
    return values


def read_states(
    folder: Path, tokens: Ragged, ignore: Sequence[str] = ("pooler",), attention_mask: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return all hidden states [L+1,rows,T,H] float32 of a written encoder, and the mask of real tokens [rows,T].

    Args:
        folder: folder of the encoder.
        ignore: name prefixes of tensors that may be unused, as in `encoder.ignore`.
        attention_mask: mask of the tokens that can be attended to, [rows,T]; None: all real tokens.
    """
    config, params = load_pretrained(folder, ignore)
    ids, mask = tokens.padded(np.arange(len(tokens)), int(tokens.lengths.max()))
    ids = np.where(ids < 0, ~ids, ids)  # marked ids of a prompt that is left out of means
    batch = Tokens(jnp.asarray(ids), jnp.asarray(mask if attention_mask is None else attention_mask))
    apply = jax.jit(lambda params, batch: make_encoder(config).apply({"params": params}, batch).states)
    return np.asarray(apply(params, batch)), mask
