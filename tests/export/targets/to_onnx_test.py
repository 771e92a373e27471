"""ONNX graphs: every hidden state equals PyTorch's, and the pooled states equal numpy's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import pytest

from jaxret.export.export import export
from jaxret.export.targets import onnx_graph
from jaxret.export.targets.to_onnx import run_graph
from jaxret.models.encoders.attention import ACTIVATIONS
from jaxret.models.encoders.pretrained import load_pretrained
from tests.export.export_test import MLR, make_run
from tests.pipeline import GOLDENS

ENCODERS = ("tiny_bert", "tiny_distilbert", "tiny_roberta", "tiny_xlm_roberta")
IGNORE = ("pooler", "cls", "vocab_", "lm_head")


def write(name: str, path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Write the graph of a golden encoder with all its states; return (ids, mask, PyTorch's states)."""
    config, params = load_pretrained(GOLDENS / name, IGNORE)
    graph = onnx_graph.Graph()
    hidden = onnx_graph.hidden_states(graph, onnx_graph.require_bert(config), params)
    graph("Concat", *(graph("Unsqueeze", state, graph.integers(0)) for state in hidden), name="states", axis=0)
    for token in ("mean", "last", "mean_without_first"):
        graph("Identity", onnx_graph.pooled_state(graph, hidden[-1], token), name=token)
    graph(
        "Identity", onnx_graph.add_normalization(graph, onnx_graph.pooled_state(graph, hidden[-1], "cls")), name="cls"
    )
    graph("Identity", onnx_graph.mixed_layers(graph, hidden, {0: 0.25, 1: 0.75}), name="mixed")
    H: Any = config.hidden_size
    outputs: dict[str, list[int | str]] = {"states": [len(hidden), "batch", "sequence", H], "mean": ["batch", H]}
    outputs |= {"last": ["batch", H], "mean_without_first": ["batch", H]}
    graph.save(path, outputs | {"cls": ["batch", H], "mixed": ["batch", "sequence", H]})
    with np.load(GOLDENS / name / "hidden_states.npz", allow_pickle=False) as file:
        return file["ids"], file["mask"].astype(bool), file["states"]


@pytest.mark.parametrize("name", ENCODERS)
def test_states_equal_pytorch(name: str, tmp_path: Path) -> None:
    ids, mask, expected = write(name, tmp_path / "model.onnx")
    outputs = run_graph(tmp_path / "model.onnx", ids, mask)
    np.testing.assert_allclose(outputs["states"][:, mask], expected[:, mask], atol=1e-5)
    other = run_graph(tmp_path / "model.onnx", ids, np.ones_like(mask))
    assert np.abs(other["states"] - expected)[:, mask].max() > 1e-3, "control: padding changes the states"

    last = expected[-1].astype(np.float64)
    mean = np.stack([row[real].mean(0) for row, real in zip(last, mask)])
    np.testing.assert_allclose(outputs["mean"], mean, atol=1e-5)
    final = np.stack([row[real][-1] for row, real in zip(last, mask)])
    np.testing.assert_allclose(outputs["last"], final, atol=1e-5)
    later = np.stack([row[real][min(1, real.sum() - 1) :].mean(0) for row, real in zip(last, mask)])
    np.testing.assert_allclose(outputs["mean_without_first"], later, atol=1e-5)
    np.testing.assert_allclose(
        outputs["cls"], last[:, 0] / np.linalg.norm(last[:, 0], axis=1, keepdims=True), atol=1e-5
    )
    np.testing.assert_allclose(outputs["mixed"][mask], (0.25 * expected[0] + 0.75 * expected[1])[mask], atol=1e-5)
    shorter = run_graph(tmp_path / "model.onnx", ids[:1, :3], np.ones((1, 3), bool))
    assert shorter["states"].shape == (len(expected), 1, 3, expected.shape[-1]), "axes are dynamic"


@pytest.mark.parametrize("activation", ["relu", "gelu_new"])
def test_activations(activation: str, tmp_path: Path) -> None:
    graph, config = onnx_graph.Graph(), onnx_graph.require_bert(load_pretrained(GOLDENS / "tiny_bert", IGNORE)[0])
    x = np.linspace(-4, 4, 41, dtype=np.float32)
    constant = graph.weight("x", x)
    graph("Identity", onnx_graph._activation(graph, replace(config, hidden_act=activation), constant), name="y")
    graph.save(tmp_path / "y.onnx", {"y": [len(x)]})
    outputs = run_graph(tmp_path / "y.onnx", np.ones((1, 1)), np.ones((1, 1)))["y"]
    np.testing.assert_allclose(outputs, jax.jit(ACTIVATIONS[activation])(x), atol=2e-6)
    assert np.abs(outputs - np.asarray(jax.jit(ACTIVATIONS["gelu"])(x))).max() > 1e-4, (
        "control: gelu gives other numbers"
    )


def test_large_weights_are_in_a_separate_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graph, "IN_ONE_FILE", 1000)
    ids, mask, expected = write("tiny_bert", tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").stat().st_size > (tmp_path / "model.onnx").stat().st_size
    outputs = run_graph(tmp_path / "model.onnx", ids, mask)
    np.testing.assert_allclose(outputs["states"][:, mask], expected[:, mask], atol=1e-5)


def test_an_encoder_without_a_graph_is_named() -> None:
    config, _ = load_pretrained(GOLDENS / "tiny_t5", IGNORE)
    with pytest.raises(ValueError, match=r"t5 .*written .*: .*--to=hf"):
        onnx_graph.require_bert(config)


RUNS: dict[str, dict[str, Any]] = {
    "cls": {"encoder__dtype": "bfloat16", "normalize": True},
    "untied mean": {"encoder__tied": False, "head__token": "mean"},
    "scalar mix": MLR | {"pooling": "scalar_mix"},
    "several vectors": MLR,
    "projected": {"head__name": "colbert", "head__colbert__projection": 6, "pooling": "self_contrastive"},
    "every token": {"head__name": "colbert", "head__colbert__projection": 6, "normalize": True,
                    "head__colbert__late": True, "head__colbert__query_marker": 60,
                    "head__colbert__passage_marker": 61, "head__colbert__expansion": "unattended",
                    "head__colbert__mask_id": 4, "head__colbert__skiplist": (8, 9, 10)},
}  # fmt: skip


@pytest.mark.daily("cls")
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
def test_exported_runs_equal_the_run(name: str, tmp_path: Path) -> None:
    run, out = make_run(tmp_path, **RUNS[name]), tmp_path / "out"
    report = export(run, "onnx", out)
    files = sorted(path.name for path in out.glob("*.onnx"))
    assert files == (["model.onnx"] if name in ("cls", "projected", "every token") else ["passage.onnx", "query.onnx"])
    assert "read back, numbers of 64 texts differ by " in report
    outputs = {output.name for output in onnx.load(out / files[0]).graph.output}
    kind = {"several vectors": "hidden_states", "every token": "token_embeddings"}.get(name, "sentence_embedding")
    assert outputs == {"last_hidden_state", kind}
    assert ("For passage texts, the graph computes hidden states" in report) == (name == "several vectors")
