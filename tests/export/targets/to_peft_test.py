"""`jaxret export --to=peft`: in PEFT, the adapters of a run give its vectors, and a new run can start from them."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxret.experiments.verify import verify_folder
from jaxret.export.export import export
from jaxret.export.exported import read_export
from jaxret.export.import_model import import_model
from jaxret.models.lora import choose_layers
from jaxret.models.peft_files import ADAPTER_CONFIG, load_adapters, target_modules
from jaxret.runs.run import open_run
from jaxret.storage.atomic import read_json, sha256_file, write_json
from jaxret.training.loop import train
from tests.pipeline import run_script, tiny_config, write_data, write_encoder, write_language_model
from tests.tiny import BERT, LLAMA, MODERNBERT, T5, make_config

pytestmark = pytest.mark.slow

LORA = {"lora__rank": 2, "lora__alpha": 4.0, "lora__targets": ("query", "output.dense"), "lora__base_dtype": "float32"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with adapters, and its export. Its config has paths of encoder and data relative to the
    folder."""
    folder = tmp_path_factory.mktemp("peft")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    with contextlib.chdir(folder):
        train(tiny_config("encoder", "data", data__dev="", **LORA), folder / "run", progress=False)
        note = export(folder / "run", "peft", folder / "adapters")
    assert "vectors of the base with these adapters of 64 texts differ by" in note
    return folder


@pytest.fixture
def root(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


@pytest.mark.parametrize("config", [BERT, MODERNBERT, T5, LLAMA], ids=lambda config: config.model_type)
def test_files_name_exactly_the_layers_with_adapters(config: Any) -> None:
    every = choose_layers(config, ("all-linear",))
    for chosen in (*((layer,) for layer in every), every[:2], every[2:], every):
        written = target_modules(config, [f"layers/{layer}" for layer in chosen])
        read = choose_layers(config, [written] if isinstance(written, str) else written)
        assert sorted(read) == sorted(chosen)
    if config is BERT:
        assert target_modules(config, ["layers/attention/output"]) == ["attention.output.dense"]
        assert isinstance(target_modules(config, ["layers/output"]), str), (
            "PEFT would also match attention.output.dense by output.dense"
        )


def test_an_error_names_the_file_that_has_a_target(tmp_path: Path) -> None:
    described = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query", "pooler.dense"]}
    write_json(tmp_path / ADAPTER_CONFIG, described)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    settings = make_config({"lora.rank": 2, "lora.alpha": 4.0}).lora
    with pytest.raises(ValueError, match=r"^target_modules of .*config.json has 'pooler.dense', which matches"):
        load_adapters(tmp_path, BERT, settings)


def test_peft_reads_the_files(root: Path) -> None:
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


def test_base_and_config_are_written_with_the_adapters(root: Path) -> None:
    """PEFT's file has the base as the user named it; jaxret's has the keys that determine vectors, including those of
    adapters."""
    described = read_json(root / "adapters" / ADAPTER_CONFIG)
    assert described["base_model_name_or_path"] == "encoder"
    written = read_json(root / "adapters" / "jaxret.json")
    run = open_run(root / "run")
    digest = sha256_file(root / "encoder" / "model.safetensors")
    assert written["encoder"] == run.config.encoder.to_dict() | {"sha256": digest}
    assert (written["lora"]["rank"], list(written["lora"]["targets"])) == (2, ["query", "output.dense"])
    with pytest.raises(ValueError, match="--to=peft, adapters without"):
        read_export(root / "adapters")


@pytest.mark.exhaustive
def test_each_side_of_an_untied_run_has_adapters_of_its_own(root: Path) -> None:
    keys = {**LORA, "encoder__tied": False}
    train(tiny_config("encoder", "data", data__dev="", **keys), root / "untied", progress=False)
    note = export(root / "untied", "peft", root / "untied-adapters")
    assert "vectors of the base with these adapters of 64 texts differ by" in note
    run = open_run(root / "untied")
    sides = {
        side: load_adapters(root / "untied-adapters" / side, run.model.module.config, run.config.lora)
        for side in ("query", "passage")
    }
    ours = sides["query"]["layers"]["attention"]["query"]["lora_b"]
    assert np.abs(ours - sides["passage"]["layers"]["attention"]["query"]["lora_b"]).max() > 1e-4
    assert read_json(root / "untied-adapters" / "query" / ADAPTER_CONFIG)["base_model_name_or_path"] == "encoder"


def test_adapters_of_some_layers_round_trip(root: Path) -> None:
    """The control is the run with adapters of all layers, whose vectors differ."""
    keys = {**LORA, "lora__layers": (2,)}
    train(tiny_config("encoder", "data", data__dev="", **keys), root / "second-layer", progress=False)
    export(root / "second-layer", "peft", root / "second-adapters")
    described = read_json(root / "second-adapters" / ADAPTER_CONFIG)
    names = ("attention.output.dense", "attention.self.query", "output.dense")
    assert described["target_modules"] == [f"encoder.layer.1.{name}" for name in names]
    more = {"data__dev": "", "train__steps": 0, "lora__adapters": str(root / "second-adapters")}
    with pytest.raises(ValueError, match=r"lora.layers is \(\), but .* in layers 2 \(from 1\): set lora.layers=\(2,\)"):
        train(tiny_config("encoder", "data", **LORA, **more), root / "refused", progress=False)
    train(tiny_config("encoder", "data", **keys, **more), root / "again", progress=False)
    vectors = {}
    for name in ("run", "second-layer", "again"):
        run = open_run(root / name)
        vectors[name] = run.embedder()(run.tokenizer.queries(["river stone music"]), "query").flat
    np.testing.assert_allclose(vectors["again"], vectors["second-layer"], rtol=1e-5, atol=1e-5)
    assert np.abs(vectors["run"] - vectors["second-layer"]).max() > 1e-3


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_verify_compares_the_base(damage: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(root / "encoder", tmp_path / "encoder")
    assert not [result.problem for result in verify_folder(root / "run") if result.problem]
    weights = tmp_path / "encoder" / "model.safetensors"
    if damage == "gone":
        shutil.rmtree(tmp_path / "encoder")
    else:
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    (broken,) = [result for result in verify_folder(root / "run") if result.problem]
    assert broken.name == "encoder"
    expected = {"changed": "adapters fit only that base: restore it", "gone": "of an encoder that cannot be read"}
    assert expected[damage] in broken.problem


def test_a_run_starts_from_exported_adapters(root: Path) -> None:
    """The control is a run that starts with new adapters: it has the vectors of the encoder."""
    vectors = {}
    for name, more in (("adapters", {"lora__adapters": str(root / "adapters")}), ("new", {})):
        config = tiny_config("encoder", "data", data__dev="", train__steps=0, **LORA, **more)
        train(config, root / f"run-{name}", progress=False)
        run = open_run(root / f"run-{name}")
        vectors[name] = run.embedder()(run.tokenizer.queries(["river stone music"]), "query").flat
    start = read_json(root / "run-adapters" / "data.json")["start"]
    assert start["adapters"] == sha256_file(root / "adapters" / "adapter_model.safetensors")
    run = open_run(root / "run")
    trained = run.embedder()(run.tokenizer.queries(["river stone music"]), "query").flat
    np.testing.assert_allclose(vectors["adapters"], trained, rtol=1e-5, atol=1e-5)
    assert np.abs(vectors["new"] - trained).max() > 1e-3


def test_adapters_of_another_base_are_refused(root: Path, tmp_path: Path) -> None:
    """Exports of jaxret have the digest of the base; files of other libraries only have its name."""
    shutil.copytree(root / "encoder", tmp_path / "other")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][9] += 1
    save_file(tensors, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    shutil.copytree(root / "adapters", tmp_path / "adapters")

    def begin(encoder: Path, **more: Any) -> None:
        keys = {"data__dev": "", "train__steps": 0, "lora__adapters": str(tmp_path / "adapters"), **LORA, **more}
        train(tiny_config(encoder, "data", **keys), tmp_path / f"run-{encoder.name}", progress=False)

    with pytest.raises(ValueError, match=r"adapters .*'encoder' .*SHA-256"):
        begin(tmp_path / "other")
    (tmp_path / "adapters" / "jaxret.json").unlink()
    with pytest.raises(ValueError, match=r"has adapters of 'encoder', and .* set lora.base='encoder'"):
        begin(tmp_path / "other")
    begin(tmp_path / "other", lora__base="encoder")
    begin(root / "encoder")

    weights = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    name = sorted(weights)[0]
    weights[name][0, 0] = np.nan
    save_file(weights, tmp_path / "adapters" / "adapter_model.safetensors")
    shutil.rmtree(tmp_path / "run-encoder")
    with pytest.raises(
        ValueError, match=rf"adapter_model.safetensors .*{name.removeprefix('base_model.model.')} holds a NaN"
    ):
        begin(root / "encoder")
    for keys, message in (
        ({"lora__rank": 1000}, "lora.rank is 1000, more than the hidden size"),
        ({"lora__layers": (2, 2)}, "lora.layers is .* must name different layers"),
    ):
        with pytest.raises(ValueError, match=message):
            begin(root / "encoder", **keys)

    shutil.copytree(root / "encoder", tmp_path / "both")
    shutil.copyfile(root / "adapters" / "adapter_config.json", tmp_path / "both" / "adapter_config.json")
    with pytest.raises(ValueError, match=r"adapters .*PEFT .*'encoder'"):
        import_model(str(tmp_path / "both"), tmp_path / "opened")


def test_the_card_loads_the_base_as_the_run_keeps_it(root: Path) -> None:
    """The code in the model card gives the vectors of a run whose base is in bfloat16."""
    torch = pytest.importorskip("torch", reason="PyTorch is what the encoders are compared with")
    pytest.importorskip("peft", reason="PEFT is what adapters are compared with")
    config = tiny_config("encoder", "data", data__dev="", **LORA | {"lora__base_dtype": "bfloat16"})
    train(config, root / "rounded", progress=False)
    export(root / "rounded", "peft", root / "rounded-adapters")
    code = (root / "rounded-adapters" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    run = open_run(root / "rounded")
    tokens = run.tokenizer.queries(["river stone music", "garden"])
    ids, mask = tokens.padded(np.arange(2), int(tokens.lengths.max()), run.tokenizer.pad_id)
    model = names["model"].eval()
    with torch.no_grad():
        states = model(input_ids=torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long()).last_hidden_state
    np.testing.assert_allclose(run.embedder()(tokens, "query").flat, states[:, 0].numpy(), rtol=1e-4, atol=1e-5)


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
def test_settings_missing_in_pefts_files_are_printed(root: Path) -> None:
    write_language_model(root / "decoder")
    keys = {"lora__rank": 2, "encoder__layers": 1, "encoder__direction": "bidirectional", "head__token": "last"}
    config = tiny_config(root / "decoder", root / "data", data__dev="", train__steps=0, **keys)
    train(config, root / "short", progress=False)
    note = export(root / "short", "peft", root / "short-adapters")
    assert "load it with num_hidden_layers=1." in note
    assert "The run's attention is bidirectional, which PEFT's files do not say." in note


@pytest.mark.exhaustive
def test_a_run_without_adapters_has_none_to_export(root: Path) -> None:
    config = tiny_config(root / "encoder", root / "data", data__dev="", train__steps=0)
    train(config, root / "whole", progress=False)
    done = run_script("-m", "jaxret", "export", f"--workdir={root}/whole", "--to=peft", f"--out={root}/none")
    assert done.returncode == 1
    problem = f"--to=peft: {root}/whole was trained without adapters (lora.rank is 0)"
    assert done.stderr == f"error: {problem}; --to=hf exports the full encoder\n"
    assert not (root / "none").exists()
