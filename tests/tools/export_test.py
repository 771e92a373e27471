"""A run in others' files: read back, loaded by their own code where it is installed, and removed if it differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxret.runs import stock
from jaxret.tools.export import export
from jaxret.training.loop import train
from tests.pipeline import tiny_config, write_data
from tests.sentence_transformers import write_bert

MLR = {"head__name": "layers", "head__layers__chosen": (1, 3)}
RUNS: dict[str, dict[str, Any]] = {
    "cls": {},
    "mean, normalised, prompts": {
        "head__token": "mean",
        "normalize": True,
        "tokens__query_prompt": "river: ",
        "tokens__passage_prompt": "stone: ",
    },
    "untied": {"encoder__tied": False, "train__steps": 2},
    "average": MLR | {"pooling": "average"},
    "scalar mix": MLR | {"pooling": "scalar_mix", "normalize": True, "train__steps": 2},
    "self-contrastive": MLR | {"pooling": "self_contrastive"},
}


def make_run(folder: Path, **overrides: Any) -> Path:
    data, encoder = write_data(folder / "data"), write_bert(folder / "encoder")
    steps = {"train__steps": 0, "data__dev": "", "train__checkpoint_every": 100}
    train(tiny_config(encoder, data, **steps | overrides), folder / "run", progress=False)
    return folder / "run"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "cls" else [pytest.mark.exhaustive]) for name in RUNS]
)
def test_vectors_are_those_of_the_modules(tmp_path: Path, name: str) -> None:
    run, out = make_run(tmp_path, **RUNS[name]), tmp_path / "out"
    told = export(run, "sentence-transformers", out)
    assert "read back, vectors of 64 texts differ by " in told
    router = name in ("untied", "average", "scalar mix")
    assert (out / "router_config.json").is_file() == router
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers\n")
    assert "read back, vectors of 64 texts differ by" in card
    assert ("Queries were cut at 12 tokens and passages at 24" in told) == (not router)


@pytest.mark.exhaustive
def test_hidden_states_are_those_of_the_encoder(tmp_path: Path) -> None:
    run = make_run(tmp_path, head__name="viewers", head__viewers__count=2)
    told = export(run, "hf", tmp_path / "out")
    assert "read back, hidden states of 64 texts differ by " in told
    assert "head 'viewers' is not part of it: its parameters (head) are not in these files" in told
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "encoder"))
    for key, value in found.items():
        np.testing.assert_array_equal(value, expected[key])


@pytest.mark.exhaustive
def test_transformers_loads_what_was_trained(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is only needed for live parity")
    transformers = pytest.importorskip("transformers")
    run = make_run(tmp_path, encoder__tied=False, train__steps=2)
    export(run, "hf", tmp_path / "out")
    for side in ("query", "passage"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / side)
        assert tokenizer.model_max_length == {"query": 12, "passage": 24}[side]
        _, info = transformers.BertModel.from_pretrained(
            tmp_path / "out" / side, output_loading_info=True, add_pooling_layer=False
        )
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_what_has_no_stock_form_leaves_nothing(tmp_path: Path) -> None:
    run, out = make_run(tmp_path, head__name="first_tokens", head__first_tokens__count=2), tmp_path / "out"
    with pytest.raises(ValueError, match=r"head.name 'first_tokens' has no form in stock modules .*: use --to=hf"):
        export(run, "sentence-transformers", out)
    assert not out.exists()
    out.mkdir()
    with pytest.raises(FileExistsError, match=r"out is there already"):
        export(run, "hf", out)


def test_several_vectors_have_no_stock_form(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"head.name 'layers' with pooling 'none' has no form"):
        export(make_run(tmp_path, **MLR), "sentence-transformers", tmp_path / "out")


@pytest.mark.exhaustive
def test_an_export_that_differs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a changed weight of the file, and layers that are weighed otherwise."""
    run, save = make_run(tmp_path, **RUNS["average"]), stock.save_pretrained

    def damaged(folder: Path, *arguments: Any) -> None:
        save(folder, *arguments)
        tensors = load_file(folder / "model.safetensors")
        tensors["encoder.layer.1.output.LayerNorm.bias"][0] += 0.01
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    for kind in ("hf", "sentence-transformers"):
        with monkeypatch.context() as patch:
            patch.setattr(stock, "save_pretrained", damaged)
            with pytest.raises(ValueError, match=r"differ by .* more than 1e-04: nothing was exported"):
                export(run, kind, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    export(run, "sentence-transformers", tmp_path / "out")
    weights = json.loads((tmp_path / "out" / "document_1_WeightedLayerPooling" / "config.json").read_text())
    assert weights == {"word_embedding_dimension": 32, "layer_start": 1, "num_hidden_layers": 3}
