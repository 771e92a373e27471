"""--to=pylate: a run of late interaction in the files of PyLate."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxret.contract import flatten
from jaxret.models.encoders.sentence_transformers import MODULES, SETTINGS
from jaxret.models.heads import pylate
from jaxret.models.heads.head import Side
from jaxret.runs.run import Run, config_json
from jaxret.runs.stock import ROUTES, read_states, vector_form, write_encoder
from jaxret.storage import write_json
from jaxret.tools.exports.compare import compare, padded, vectors
from jaxret.tools.original import late_vectors, real_texts
from jaxret.types import Ragged


def write_pylate(run: Run, out: Path) -> list[str]:
    """Raises ValueError for what PyLate cannot say: no late interaction, prompts, vectors of other lengths than 1, an
    encoder for each side."""
    config, head = run.config, run.retriever.module.head
    lengths = {route: config.tokens[f"{side}_length"] for side, route in ROUTES.items()}
    words = defaultdict(str, {id: word for word, id in run.tokenizer.backend.get_vocab().items()})
    settings = pylate.settings_of(head, lengths, words)
    require_sayable(run)
    form = vector_form(run, "passage")
    assert form is not None  # under late interaction every token's state is a vector
    kernel = np.eye(head.hidden_size, dtype=np.float32) if form.projection is None else form.projection
    write_encoder(run, "passage", out)
    kind, dense = pylate.dense_module(kernel)
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Dense", kind)]
    lines = [{"idx": i, "name": str(i), "path": path, "type": type} for i, (path, type) in enumerate(modules)]
    write_json(out / MODULES, lines)
    write_json(out / SETTINGS, settings)
    length = {"max_seq_length": max(lengths.values()), "do_lower_case": False}
    write_json(out / "sentence_bert_config.json", length)
    write_json(out / "1_Dense" / "config.json", dense)
    weights = {"linear.weight": np.ascontiguousarray(kernel.T)}
    save_file(weights, out / "1_Dense" / "model.safetensors", {"format": "pt"})
    told = compare(run, lambda side, tokens: (vectors(run, side, tokens), read_back(run, out, side, tokens)), "vectors")
    if importlib.util.find_spec("pylate"):
        both = compare(
            run,
            lambda side, tokens: (vectors(run, side, tokens), np.concatenate(late_vectors(out, real_texts(), side))),
            "vectors in PyLate",
        )
        told += f"; {both}"
    return [told]


def require_sayable(run: Run) -> None:
    """Raises ValueError for what no setting of PyLate says."""
    config = run.config
    problems = {
        "encoder.tied is False: PyLate has one encoder": not config.encoder.tied,
        "normalize is False: PyLate scales every vector to length 1": not config.normalize,
        "there are prompts, which PyLate does not put in front by itself": bool(
            config.tokens.query_prompt or config.tokens.passage_prompt
        ),
    }
    if found := [problem for problem, there in problems.items() if there]:
        raise ValueError(f"{found[0]}; use --to=hf")


def read_back(run: Run, out: Path, side: Side, tokens: Ragged) -> np.ndarray:
    """The vectors that the files in `out` give, computed from them alone but for the token ids; the settings must say
    what they were read as."""
    stated = pylate.stated(out)
    meant = flatten(config_json(run.config))
    for key, value in stated.items():
        said = tuple(sorted(set(meant[key]))) if isinstance(value, tuple) else meant[key]
        if said != value:
            raise ValueError(f"read back, {key} is {value!r}, in the run {meant[key]!r}: nothing was exported")
    _, mask, seen = padded(run, side, tokens)
    states = read_states(out, tokens, seen=seen)[0][-1]
    found = states[mask][run.retriever.module.head.kept(tokens, side)] @ pylate.projection(out)
    return found / np.linalg.norm(found, axis=-1, keepdims=True)
