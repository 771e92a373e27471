"""Exports a run with late interaction to PyLate."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxret.export.compare_original import pylate_vectors, sample_texts
from jaxret.export.round_trip import check_vectors, padded_inputs
from jaxret.export.targets.stock_modules import ROUTES, read_states, vector_form, write_encoder, write_module_list
from jaxret.models.encoders.sentence_transformers import SETTINGS, TITLE_SEPARATOR
from jaxret.models.heads import pylate
from jaxret.models.heads.head import Side
from jaxret.runs.mismatch import flatten
from jaxret.runs.run import Run, config_json
from jaxret.storage.atomic import write_json
from jaxret.types import Ragged


def write_pylate(run: Run, out: Path) -> list[str]:
    """Write a PyLate directory, and compare its vectors.

    Raises ValueError for a run that PyLate does not support: without late interaction, with prompts, with vectors
    that are not scaled to length 1, or with an encoder for each side.
    """
    config, head = run.config, run.model.module.head
    lengths = {route: config.tokens[f"{side}_length"] for side, route in ROUTES.items()}
    words = defaultdict(str, {id: word for word, id in run.tokenizer.backend.get_vocab().items()})
    settings = pylate.pylate_settings(head, lengths, words)
    require_pylate_form(run)
    form = vector_form(run, "passage")
    assert form is not None  # with late interaction, the state of every token is a vector
    kernel = form.projections[0] if form.projections else np.eye(head.hidden_size, dtype=np.float32)
    write_encoder(run, "passage", out)
    kind, dense = pylate.dense_module(kernel)
    write_module_list(out, {"": "sentence_transformers.models.Transformer", "1_Dense": kind})
    write_json(out / SETTINGS, settings)
    length = {"max_seq_length": max(lengths.values()), "do_lower_case": False}
    write_json(out / "sentence_bert_config.json", length)
    write_json(out / "1_Dense" / "config.json", dense)
    weights = {"linear.weight": np.ascontiguousarray(kernel.T)}
    save_file(weights, out / "1_Dense" / "model.safetensors", {"format": "pt"})
    sentence = check_vectors(run, lambda side, tokens: pylate_file_vectors(run, out, side, tokens), "vectors")
    if importlib.util.find_spec("pylate"):
        library = check_vectors(
            run, lambda side, _: np.concatenate(pylate_vectors(out, sample_texts(), side)), "vectors in PyLate"
        )
        sentence += f"; {library}"
    return [sentence]


def require_pylate_form(run: Run) -> None:
    """Raise ValueError for settings that PyLate does not have."""
    config = run.config
    problems = {
        "encoder.tied is False: PyLate has one encoder": not config.encoder.tied,
        "normalize is False: PyLate scales every vector to length 1": not config.normalize,
        "the run has prompts, which PyLate does not put before texts": bool(
            run.tokenizer.query_prompt or run.tokenizer.passage_prompt
        ),
    }
    if present := [problem for problem, applies in problems.items() if applies]:
        raise ValueError(f"{present[0]}; use --to=hf")


def pylate_file_vectors(run: Run, out: Path, side: Side, tokens: Ragged) -> np.ndarray:
    """Check the settings in a PyLate directory, and return the vectors that are computed from its files.

    Args:
        run: the run, for token ids and expected settings.
        out: the PyLate directory.

    Raises:
        ValueError: a setting, read back, differs from the run's.
    """
    file_keys = pylate.read_pylate_keys(out)
    del file_keys[TITLE_SEPARATOR]  # not in files of PyLate
    run_keys = flatten(config_json(run.config))
    for key, value in file_keys.items():
        expected = tuple(sorted(set(run_keys[key]))) if isinstance(value, tuple) else run_keys[key]
        if expected != value:
            raise ValueError(f"read back, {key} is {value!r}, but in the run {run_keys[key]!r}: nothing was exported")
    _, mask, attention_mask = padded_inputs(run, side, tokens)
    states = read_states(out, tokens, attention_mask=attention_mask)[0][-1]
    token_vectors = states[mask][run.model.module.head.vector_mask(tokens, side)] @ pylate.read_projection(out)
    return token_vectors / np.linalg.norm(token_vectors, axis=-1, keepdims=True)
