"""A run in other libraries' files: it is read back, loaded by the library if installed, and removed if its vectors
differ."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard
from safetensors.numpy import load_file, save_file

from jaxret.export.export import export
from jaxret.export.targets import stock_modules
from jaxret.runs.run import open_run
from jaxret.training.loop import train
from tests.pipeline import tiny_config, write_data, write_encoder

PROJECTED = {"head__name": "colbert", "head__colbert__projection": 6}
MLR = {"head__name": "mlr", "head__mlr__chosen": (1, 3)}
RUNS: dict[str, dict[str, Any]] = {
    "cls": {},
    "mean, normalized, prompts": {
        "head__token": "mean",
        "normalize": True,
        "tokens__query_prompt": "river: ",
        "tokens__passage_prompt": "stone: ",
    },
    "untied": {"encoder__tied": False, "train__steps": 2},
    "average": MLR | {"pooling": "average"},
    "scalar mix": MLR | {"pooling": "scalar_mix", "normalize": True, "train__steps": 2},
    "self-contrastive": MLR | {"pooling": "self_contrastive"},
    "projected": PROJECTED | {"pooling": "self_contrastive"},
    "projected mean": PROJECTED | {"pooling": "average", "normalize": True, "encoder__tied": False},
    "bfloat16": {"encoder__dtype": "bfloat16"},
}


def make_run(folder: Path, **overrides: Any) -> Path:
    data, encoder = write_data(folder / "data"), write_encoder(folder / "encoder")
    steps = {"train__steps": 0, "data__dev": "", "train__checkpoint_every": 100}
    train(tiny_config(encoder, data, **steps | overrides), folder / "run", progress=False)
    return folder / "run"


@pytest.mark.daily("cls")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.exhaustive) for name in RUNS])
def test_exported_modules_give_the_same_vectors(tmp_path: Path, name: str) -> None:
    run, out = make_run(tmp_path, **RUNS[name]), tmp_path / "out"
    report = export(run, "sentence-transformers", out)
    assert "read back, vectors of 64 texts differ by " in report
    router = name in ("untied", "average", "scalar mix", "projected mean")
    assert any("Dense" in path.name for path in out.iterdir()) == name.startswith("projected")
    assert ("The run computes in bfloat16" in report) == (name == "bfloat16")
    assert (out / "router_config.json").is_file() == router
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers\n")
    assert "read back, vectors of 64 texts differ by" in card
    if name == "mean, normalized, prompts":
        assert "The vector of a text is the mean over the states of its tokens, of length 1;" in card
    assert ("Not trained further." in card) == ("train__steps" not in RUNS[name])
    assert ("The run cuts queries at 12 tokens and passages at 24" in report) == (not router)


@pytest.mark.slow
def test_exported_encoder_gives_the_same_states(tmp_path: Path) -> None:
    run = make_run(tmp_path, head__name="mvr", head__mvr__count=2)
    report = export(run, "hf", tmp_path / "out")
    assert "read back, hidden states of 64 texts differ by " in report
    assert "do not describe head 'mvr': its parameters (head/table) are in head.safetensors" in report
    written, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "encoder"))
    for key, value in written.items():
        np.testing.assert_array_equal(value, expected[key])


@pytest.mark.exhaustive
def test_transformers_loads_the_trained_weights(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is only needed for live parity")
    transformers = pytest.importorskip("transformers")
    run = make_run(tmp_path, encoder__tied=False, train__steps=2)
    export(run, "hf", tmp_path / "out")
    for side in ("query", "passage"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / side)
        assert tokenizer.model_max_length == {"query": 12, "passage": 24}[side]
        _, info = transformers.BertModel.from_pretrained(tmp_path / "out" / side, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.daily("mlr")
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"head__name": "me_bert", "head__me_bert__count": 2}, "'me_bert'"),
        (MLR, "'mlr' with pooling 'none'"),
        ({"head__name": "colbert", "head__colbert__late": True}, "'colbert' with pooling 'none'"),
    ],
    ids=["me_bert", "mlr", "late interaction"],
)
@pytest.mark.exhaustive
def test_unsupported_heads_are_exported_as_an_encoder(tmp_path: Path, overrides: dict[str, Any], named: str) -> None:
    run, out = make_run(tmp_path, **overrides), tmp_path / "out"
    report = export(run, "sentence-transformers", out)
    assert f"head.name {named} cannot be computed by stock modules" in report
    assert ("--to=pylate exports late interaction" in report) == ("colbert" in named)
    assert "read back, hidden states of 64 texts differ by" in report
    assert [line["type"] for line in json.loads((out / "modules.json").read_text())] == [
        "sentence_transformers.models.Transformer"
    ]
    assert (out / "head.safetensors").is_file()
    with pytest.raises(FileExistsError, match=r"out exists already"):
        export(run, "hf", out)


@pytest.mark.exhaustive
def test_the_model_card_is_valid(tmp_path: Path) -> None:
    """The hub's library can read it; it has measures of only this checkpoint, and only of exact searches with whole
    vectors."""
    run, out = make_run(tmp_path), tmp_path / "out"
    checkpoint = open_run(run).checkpoint
    searches: dict[str, dict[str, Any]] = {
        "nq.test": {},
        "old": {},
        "old.index": {"exact": False, "index": "flat"},
        "old.filtered": {"filter": ["lang:de"]},
        "old.cut": {"dimension": 8},
        "old.documents": {"max_passage": True},
    }
    for name, search in searches.items():
        made = {"step": 7, "digest": "x"} if name == "old" else checkpoint
        provenance = {"checkpoint": made, "search": {"exact": True, **search}}
        values = {"mean": {"nDCG@10": 0.25}, "provenance": provenance}
        (run / "eval").mkdir(exist_ok=True)
        (run / "eval" / f"{name}.json").write_text(json.dumps(values))
    export(run, "hf", out)
    card = ModelCard.load(out / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "feature-extraction")
    assert card.data.model_name == "out"
    assert [(r.dataset_name, r.metric_type, r.metric_value) for r in card.data.eval_results] == [
        ("nq.test", "nDCG@10", 0.25)
    ]
    assert "nq.test: nDCG@10 0.2500" in card.text
    assert "| tokens at most | 12 | 24 |" in card.text
    assert "old" not in card.text.partition("## Measures")[2].partition("## Commands")[0]


@pytest.mark.exhaustive
def test_a_terminated_export_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.setattr("jaxret.export.export.write_card", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        export(run, "hf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.exhaustive
def test_an_export_that_differs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a changed weight in the file, and other weights of layers."""
    run, save = make_run(tmp_path, **RUNS["average"]), stock_modules.save_pretrained

    def damaged(folder: Path, *arguments: Any) -> None:
        save(folder, *arguments)
        tensors = load_file(folder / "model.safetensors")
        tensors["encoder.layer.1.output.LayerNorm.bias"][0] += 0.01
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    for kind in ("hf", "sentence-transformers"):
        with monkeypatch.context() as patch:
            patch.setattr(stock_modules, "save_pretrained", damaged)
            with pytest.raises(ValueError, match=r"1e-04: nothing .*exported"):
                export(run, kind, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    export(run, "sentence-transformers", tmp_path / "out")
    weights = json.loads((tmp_path / "out" / "document_1_WeightedLayerPooling" / "config.json").read_text())
    assert weights == {"word_embedding_dimension": 32, "layer_start": 1, "num_hidden_layers": 3}
