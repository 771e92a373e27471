"""`jaxret export --to=peft`: the adapters of a run give its vectors in PEFT, and a new run can begin with them."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxret.export.export import export
from jaxret.runs.run import open_run
from jaxret.training.loop import train
from tests.pipeline import run_script, tiny_config, write_data, write_encoder

LORA = {"lora__rank": 2, "lora__alpha": 4.0, "lora__targets": ("query", "output.dense"), "lora__base_dtype": "float32"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with adapters, and its export."""
    folder = tmp_path_factory.mktemp("peft")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    train(tiny_config(folder / "encoder", folder / "data", data__dev="", **LORA), folder / "run", progress=False)
    note = export(folder / "run", "peft", folder / "adapters")
    assert "vectors of the base with these adapters of 64 texts differ by" in note
    return folder


def test_peft_reads_them(root: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is what the encoders are compared with")
    peft = pytest.importorskip("peft", reason="PEFT is what adapters are compared with")
    transformers = pytest.importorskip("transformers")
    clean = transformers.AutoModel.from_pretrained(root / "encoder", add_pooling_layer=False).eval()
    model = peft.PeftModel.from_pretrained(clean, str(root / "adapters")).eval()
    run = open_run(root / "run")
    tokens = run.tokenizer.queries(["river stone music", "garden"])
    ids, mask = tokens.padded(np.arange(2), int(tokens.lengths.max()), run.tokenizer.pad_id)
    with torch.no_grad():
        states = model(input_ids=torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long()).last_hidden_state
    ours = run.embedder()(tokens, "query").flat
    np.testing.assert_allclose(ours, states[:, 0].numpy(), rtol=1e-4, atol=1e-5)


def test_a_run_begins_with_them(root: Path) -> None:
    """Control: one that begins with new adapters has the vectors of the encoder."""
    vectors = {}
    for name, more in (("adapters", {"lora__adapters": str(root / "adapters")}), ("new", {})):
        config = tiny_config(root / "encoder", root / "data", data__dev="", train__steps=0, **LORA, **more)
        train(config, root / f"run-{name}", progress=False)
        run = open_run(root / f"run-{name}")
        vectors[name] = run.embedder()(run.tokenizer.queries(["river stone music"]), "query").flat
    run = open_run(root / "run")
    trained = run.embedder()(run.tokenizer.queries(["river stone music"]), "query").flat
    np.testing.assert_allclose(vectors["adapters"], trained, rtol=1e-5, atol=1e-5)
    assert np.abs(vectors["new"] - trained).max() > 1e-3


@pytest.mark.exhaustive
def test_the_merged_encoder_is_exported_and_a_run_starts_from_the_run(root: Path) -> None:
    note = export(root / "run", "hf", root / "hf")
    assert "differ by" in note
    config = tiny_config(
        root / "encoder", root / "data", data__dev="", train__steps=2, train__start_from=str(root / "run"), **LORA
    )
    train(config, root / "second", progress=False)
    again = open_run(root / "second")
    shapes = [jax.tree.map(lambda leaf: leaf.shape, opened.params) for opened in (again, open_run(root / "run"))]
    assert shapes[0] == shapes[1]


@pytest.mark.exhaustive
def test_a_run_without_adapters_has_none_to_export(root: Path) -> None:
    config = tiny_config(root / "encoder", root / "data", data__dev="", train__steps=0)
    train(config, root / "whole", progress=False)
    done = run_script("-m", "jaxret", "export", f"--workdir={root}/whole", "--to=peft", f"--out={root}/none")
    assert done.returncode == 1
    assert (
        done.stderr
        == f"error: --to=peft: {root}/whole was trained without adapters (lora.rank is 0); --to=hf has it whole\n"
    )
    assert not (root / "none").exists()
