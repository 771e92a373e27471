"""--to=onnx: the encoder, and what its states become, as ONNX graphs that onnxruntime reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxret.models.heads.head import EACH, Side
from jaxret.runs.exported import CONFIG, HEAD, write_head
from jaxret.runs.run import Run
from jaxret.runs.stock import Form, vector_form, write_tokenizer
from jaxret.tools.exports import onnx_graph
from jaxret.tools.exports.compare import SIDES, compare, padded, states, vectors
from jaxret.types import Ragged

VECTOR, TOKENS, LAST, ALL = "sentence_embedding", "token_embeddings", "last_hidden_state", "hidden_states"


def write_onnx(run: Run, out: Path) -> list[str]:
    """`model.onnx`, or `query.onnx` and `passage.onnx` where queries and passages are computed otherwise; the
    tokenizer; and what graphs do not compute of the head. Raises ValueError for an encoder whose graph is not
    written, RuntimeError with what to install."""
    config = onnx_graph.require_known(run.retriever.module.config)
    require_runtime()
    forms = {side: vector_form(run, side) for side in SIDES}
    query, passage = forms["query"], forms["passage"]
    alike = query is None if passage is None else query is not None and passage.same(query)
    one = run.config.encoder.tied and alike
    files = {side: out / ("model.onnx" if one else f"{side}.onnx") for side in SIDES}
    for side, path in files.items():
        if side == "passage" or not one:
            write_graph(run, config, side, forms[side], path)
    longest: Side = max(SIDES, key=lambda side: run.config.tokens[f"{side}_length"])
    write_tokenizer(run, longest, out)
    named = ", ".join(f"{side} texts by {path.name}" for side, path in files.items())
    told = compare(run, lambda side, tokens: both(run, side, tokens, forms[side], files[side]), "numbers")
    notes = [f"{told} (onnxruntime; {named})"]
    if any(form is not None and form.token == EACH for form in forms.values()):
        notes.append(
            f"{TOKENS} has a vector for every token given: markers, [MASK]s and what is no vector are the caller's "
            f"({CONFIG})."
        )
    if (one_side := [side for side in SIDES if forms[side] is None]) or run.params.keys() - {"encoder"}:
        own = write_head(run, out)
        if one_side:
            notes.append(
                f"Of {' and '.join(one_side)} texts the graph computes hidden states; vectors are the head's "
                f"({run.config.head.name!r}: parameters {', '.join(own) or 'none'} in {HEAD}, settings in {CONFIG})."
            )
    return notes


def write_graph(run: Run, config: Any, side: Side, form: Form | None, path: Path) -> None:
    """One graph. Its outputs: last_hidden_state, and the vectors, or all hidden states for a head that reads them."""
    graph = onnx_graph.Graph()
    params = run.params["encoder" if run.config.encoder.tied else f"{side}_encoder"]
    found = onnx_graph.hidden_states(graph, config, jax.device_get(params))
    axes: list[int | str] = ["batch", "sequence", config.hidden_size]
    outputs: dict[str, list[int | str]] = {LAST: axes}
    graph("Identity", found[-1], name=LAST)
    if form is not None:
        x = onnx_graph.mixed_layers(graph, found, form.weights)
        if form.token != EACH:
            x = onnx_graph.one_state(graph, x, form.token)
        if form.projection is not None:
            x = graph.dense(x, "projection", {"kernel": form.projection})
        x = onnx_graph.unit(graph, x) if run.config.normalize else x
        name, size = (TOKENS if form.token == EACH else VECTOR), run.retriever.dimension
        graph("Identity", x, name=name)
        outputs[name] = ["batch", "sequence", size] if form.token == EACH else ["batch", size]
    elif run.retriever.module.head.keep(side).layers == "all":
        rows = [graph("Unsqueeze", state, graph.whole(0)) for state in found]
        graph("Concat", *rows, name=ALL, axis=0)
        outputs[ALL] = [len(found), *axes]
    graph.save(path, outputs)


def both(run: Run, side: Side, tokens: Ragged, form: Form | None, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The run's numbers, and onnxruntime's of the file: vectors, or else hidden states."""
    ids, mask, seen = padded(run, side, tokens)
    found = run_graph(path, ids, seen)
    if form is None:
        ours = states(run, side, tokens)
        return (ours, found[ALL][:, mask]) if ALL in found else (ours[-1], found[LAST][mask])
    ours = vectors(run, side, tokens)
    if form.token != EACH:
        return ours, found[VECTOR]
    return ours, found[TOKENS][mask][run.retriever.module.head.kept(tokens, side)]


def require_runtime() -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        remedy = onnx_graph.REMEDY
        raise RuntimeError(f"--to=onnx is read back by onnxruntime, which is missing: {remedy}") from error
    return onnxruntime


def run_graph(path: Path, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """{output: array} of a graph, by onnxruntime on the CPU."""
    session = require_runtime().InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    given = {"input_ids": ids.astype(np.int64), "attention_mask": mask.astype(np.int64)}
    return dict(zip(names, session.run(names, given), strict=True))
