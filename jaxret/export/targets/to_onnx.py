"""Exports to ONNX: graphs that compute vectors or hidden states, for onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxret.export.exported import CONFIG, HEAD, write_head
from jaxret.export.round_trip import SIDES, check_round_trip, padded_inputs, run_states, run_vectors
from jaxret.export.targets import onnx_graph
from jaxret.export.targets.stock_modules import VectorForm, vector_form, write_tokenizer
from jaxret.models.heads.head import EVERY_TOKEN, Side
from jaxret.runs.run import Run
from jaxret.types import Ragged

# Names of the outputs of graphs.
VECTOR_OUTPUT, TOKENS_OUTPUT = "sentence_embedding", "token_embeddings"
LAST_OUTPUT, ALL_OUTPUT = "last_hidden_state", "hidden_states"


def write_onnx(run: Run, out: Path) -> list[str]:
    """Write `model.onnx`, or `query.onnx` and `passage.onnx` if the sides differ, with the tokenizer and the part of
    the head that graphs do not compute.

    Raises ValueError for an unsupported encoder, and RuntimeError that names missing packages.
    """
    config = onnx_graph.require_bert(run.model.module.config)
    require_runtime()
    forms = {side: vector_form(run, side) for side in SIDES}
    query, passage = forms["query"], forms["passage"]
    alike = query is None if passage is None else query is not None and passage.same_modules(query)
    one_graph = run.config.encoder.tied and alike
    files = {side: out / ("model.onnx" if one_graph else f"{side}.onnx") for side in SIDES}
    for side, path in files.items():
        if side == "passage" or not one_graph:
            write_graph(run, config, side, forms[side], path)
    longest: Side = max(SIDES, key=lambda side: run.config.tokens[f"{side}_length"])
    write_tokenizer(run, longest, out)
    sides = ", ".join(f"{side} texts by {path.name}" for side, path in files.items())
    sentence = check_round_trip(
        run, lambda side, tokens: run_and_graph_outputs(run, side, tokens, forms[side], files[side]), "numbers"
    )
    notes = [f"{sentence} (onnxruntime; {sides})"]
    if any(form is not None and form.token == EVERY_TOKEN for form in forms.values()):
        notes.append(
            f"{TOKENS_OUTPUT} has a vector for every input token. The caller adds markers and [MASK]s, and removes "
            f"vectors of skipped tokens (settings in {CONFIG})."
        )
    if (head_sides := [side for side in SIDES if forms[side] is None]) or run.params.keys() - {"encoder"}:
        names = write_head(run, out)
        if head_sides:
            notes.append(
                f"For {' and '.join(head_sides)} texts, the graph computes hidden states, and the head vectors "
                f"({run.config.head.name!r}: parameters {', '.join(names) or 'none'} in {HEAD}, settings in {CONFIG})."
            )
    return notes


def write_graph(run: Run, config: Any, side: Side, form: VectorForm | None, path: Path) -> None:
    """Write a graph with the last hidden states, and with vectors or, for a head that reads them, all hidden states.

    Args:
        form: form of the vectors; None: hidden states.

    Raises:
        ValueError: the run leaves prompts out of means, which a graph cannot compute.
    """
    if run.tokenizer.skip_prompt:
        raise ValueError(
            "--to=onnx: this run leaves tokens of the prompt out of means (tokens.prompt_in_mean), but a graph "
            "does not know where a prompt ends; use --to=sentence-transformers"
        )
    graph = onnx_graph.Graph()
    params = run.params["encoder" if run.config.encoder.tied else f"{side}_encoder"]
    hidden = onnx_graph.hidden_states(graph, config, jax.device_get(params))
    axes: list[int | str] = ["batch", "sequence", config.hidden_size]
    outputs: dict[str, list[int | str]] = {LAST_OUTPUT: axes}
    graph("Identity", hidden[-1], name=LAST_OUTPUT)
    if form is not None:
        x = onnx_graph.mixed_layers(graph, hidden, form.weights)
        if form.token != EVERY_TOKEN:
            x = onnx_graph.pooled_state(graph, x, form.token)
        for number, matrix in enumerate(form.projections):
            x = graph.dense(x, f"projection{number or ''}", {"kernel": matrix})
        x = onnx_graph.add_normalization(graph, x) if run.config.normalize else x
        name, size = (TOKENS_OUTPUT if form.token == EVERY_TOKEN else VECTOR_OUTPUT), run.model.uncut.dimension
        graph("Identity", x, name=name)
        outputs[name] = ["batch", "sequence", size] if form.token == EVERY_TOKEN else ["batch", size]
    elif run.model.module.head.selection(side).layers == "all":
        rows = [graph("Unsqueeze", state, graph.integers(0)) for state in hidden]
        graph("Concat", *rows, name=ALL_OUTPUT, axis=0)
        outputs[ALL_OUTPUT] = [len(hidden), *axes]
    graph.save(path, outputs)


def run_and_graph_outputs(
    run: Run, side: Side, tokens: Ragged, form: VectorForm | None, path: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the run and of onnxruntime: vectors, or hidden states without a form.

    Args:
        form: form of the vectors; None: hidden states.
        path: file of the graph.
    """
    ids, mask, attention_mask = padded_inputs(run, side, tokens)
    outputs = run_graph(path, ids, attention_mask)
    if form is None:
        run_numbers = run_states(run, side, tokens)
        if ALL_OUTPUT in outputs:
            return run_numbers, outputs[ALL_OUTPUT][:, mask]
        return run_numbers[-1], outputs[LAST_OUTPUT][mask]
    run_numbers = run_vectors(run, side, tokens)
    if form.token != EVERY_TOKEN:
        return run_numbers, outputs[VECTOR_OUTPUT]
    return run_numbers, outputs[TOKENS_OUTPUT][mask][run.model.module.head.vector_mask(tokens, side)]


def require_runtime() -> Any:
    """Return the package onnxruntime. Raises RuntimeError with the packages to install."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        remedy = onnx_graph.INSTALL
        raise RuntimeError(f"--to=onnx reads the graph back with onnxruntime, which is missing: {remedy}") from error
    return onnxruntime


def run_graph(path: Path, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Run a graph with onnxruntime on the CPU. Return {name of an output: array}."""
    session = require_runtime().InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    inputs = {"input_ids": ids.astype(np.int64), "attention_mask": mask.astype(np.int64)}
    return dict(zip(names, session.run(names, inputs), strict=True))
