"""Pre-training makes an encoder from a corpus: from scratch or from a checkpoint, resumed, read by fine-tuning and by
transformers."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file

from jaxret.configs.base import get_config
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.architectures import make_encoder, read_config
from jaxret.models.encoders.architectures.bert import BertConfig
from jaxret.models.encoders.pretrained import load_pretrained
from jaxret.models.pretraining import PRETRAINING_HEAD
from jaxret.parallel.processes import join_job
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import open_run
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json
from jaxret.storage.lockfile import LockedError
from jaxret.training.loop import train
from jaxret.training.pretraining import pretrain as pretrain_module
from jaxret.training.pretraining.pretrain import pretrain, write_scratch_encoder
from jaxret.training.pretraining.pretraining_task import make_pretrainer
from jaxret.training.pretraining.wordpiece import train_wordpiece
from jaxret.training.unread_keys import find_reader
from jaxret.types import Tokens
from tests.configs.config_test import SHIPPED, Reads, shipped
from tests.pipeline import REPOSITORY, environment, flat_config, tiny_config, write_data, write_encoder

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "task": "pretraining",
    "encoder.checkpoint": "",
    "encoder.recompute": "none",
    "tokens.length_multiple": 24,
    "pretraining.length": 24,
    "pretraining.shortest": 4,
    "pretraining.skip_from": 1,
    "pretraining.head_layers": 1,
    "pretraining.scratch.vocabulary": 99,
    "pretraining.scratch.hidden_size": 16,
    "pretraining.scratch.layers": 2,
    "pretraining.scratch.heads": 2,
    "pretraining.scratch.intermediate_size": 32,
    "pretraining.scratch.positions": 40,
    "optimizer.learning_rate": 1e-2,
    "optimizer.decay": "none",
    "optimizer.warmup_fraction": 0.0,
    "train.batch_size": 8,
    "train.steps": 24,
    "train.log_every": 1,
    "train.checkpoint_every": 12,
}


def config_of(data: Path, **overrides: Any) -> ConfigDict:
    """overrides: "train__steps" is train.steps."""
    config = get_config().lock()
    more = {key.replace("__", "."): value for key, value in overrides.items()}
    config.update_from_flattened_dict(SMALL | {"data.train": str(data)} | more)
    return config


def logged(workdir: Path, name: str) -> list[float]:
    return [
        line[name] for line in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()) if name in line
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of coCondenser from scratch. Every key that the task allows is read."""
    workdir = tmp_path_factory.mktemp("run") / "cocondenser"
    # The head's rate equals that of all parameters, so nothing changes, but optimizer.head_parameters is read.
    config = config_of(data, pretraining__method="cocondenser", optimizer__head_learning_rate=1e-2)
    with config.unlocked():
        config.pretraining.added = 1  # control: a key that nothing reads
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        join_job(config.mesh)
        result = pretrain(config, workdir, "jaxret pretrain ...")
    assert (result.step, result.programs) == (24, 1)
    own = {key for key in flat_config(config) if not find_reader("pretraining", key)}
    assert own - reads.keys == {"pretraining.added", "train.epochs"}, "train.steps is set"
    return workdir


def test_the_losses_fall(run: Path) -> None:
    for name in ("loss", "mlm_loss", "head_loss"):
        values = logged(run, name)
        assert len(values) == 24
        assert np.mean(values[-5:]) < np.mean(values[:5]) - 0.2, name
    assert 0 <= logged(run, "in_batch_accuracy")[-1] <= 1


def test_the_result_loads_strictly(run: Path) -> None:
    model = run / "model"
    shapes, params = load_pretrained(model, get_config().encoder.ignore)
    assert "mlm_head" not in params
    assert shapes == read_config(model)
    with pytest.raises(ValueError, match=r"unused cls\.predictions"):  # control: the head's tensors are in the file
        load_pretrained(model, ())
    card = (model / "README.md").read_text()
    assert "jaxret pretrain ..." in card
    assert "| `pretraining.method` | 'cocondenser' |" in card
    assert "115 documents" in card


@pytest.mark.exhaustive
def test_fine_tuning_starts_from_the_result(run: Path, data: Path, tmp_path: Path) -> None:
    params = load_pretrained(run / "model", get_config().encoder.ignore)[1]
    for head in ("dual_encoder", "aggretriever"):  # aggretriever also reads the MLM head
        config = tiny_config(run / "model", data, data__dev="", train__steps=0, head__name=head)
        train(config, tmp_path / head, progress=False)
        encoder_params = jax.device_get(open_run(tmp_path / head).params["encoder"])
        assert ("mlm_head" in encoder_params) == (head == "aggretriever")
        jax.tree.map(np.testing.assert_array_equal, {name: encoder_params[name] for name in params}, params)


def test_the_layout_of_public_checkpoints_loads_too(run: Path, data: Path, tmp_path: Path) -> None:
    """Luyu/co-condenser-* have the output matrix of the decoder, positions and a pooler, and some have the head."""
    public = tmp_path / "public"
    shutil.copytree(run / "model", public)
    (public / PRETRAINING_HEAD).unlink()
    tensors = load_file(public / "model.safetensors")
    words = tensors["bert.embeddings.word_embeddings.weight"]
    tensors |= {
        "cls.predictions.decoder.weight": words,
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"],
        "bert.embeddings.position_ids": np.arange(40)[None],
        "bert.pooler.dense.weight": np.eye(16, dtype=np.float32),
        "c_head.0.output.dense.bias": np.zeros(16, np.float32),
    }
    save_file(tensors, public / "model.safetensors")
    ignore = get_config().encoder.ignore
    loaded, expected = (load_pretrained(folder, ignore)[1] for folder in (public, run / "model"))
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    more = {"pretraining__method": "retromae", "encoder__checkpoint": str(public), "train__steps": 0}
    pretrain(config_of(data, **more), tmp_path / "run")
    weights = [load_file(folder / "model.safetensors") for folder in (tmp_path / "run" / "model", run / "model")]
    assert weights[0].keys() == weights[1].keys()
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[1])
    save_file(tensors | {"more": words}, public / "model.safetensors")
    with pytest.raises(ValueError, match="unused more"):  # control: other names are refused
        load_pretrained(public, ignore)


def test_logits_equal_transformers(run: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model, loading = transformers.BertForMaskedLM.from_pretrained(run / "model", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = np.random.default_rng(0).integers(5, 99, (3, 9))
    mask = np.arange(9) < np.array([[9], [4], [7]])
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(ids), torch.tensor(mask.astype(int))).logits.numpy()
    shapes: Any = dataclasses.replace(read_config(run / "model"), mlm_head=True)  # type: ignore[type-var]
    _, params = load_pretrained(run / "model", (), shapes)
    encoder = make_encoder(shapes)

    def logits(params: Any) -> Any:
        def computed(encoder: Any, tokens: Tokens) -> Any:
            return encoder.mlm_head(encoder(tokens).states[-1], encoder.word_table)

        return encoder.apply(
            {"params": params}, Tokens(jnp.asarray(ids, jnp.int32), jnp.asarray(mask)), method=computed
        )

    ours = np.asarray(jax.jit(logits)(params))
    assert np.abs(ours - theirs)[mask].max() < 1e-5
    moved = jax.tree.map(lambda x: x * 1.01, params)
    assert (
        np.abs(np.asarray(jax.jit(logits)(moved)) - theirs)[mask].max() > 1e-3
    )  # control: other weights have other logits


@pytest.mark.exhaustive
def test_an_interrupted_run_ends_with_the_same_bytes(run: Path, data: Path, tmp_path: Path) -> None:
    halves = {"pretraining__method": "cocondenser", "encoder__checkpoint": str(run / "start")}
    pretrain(config_of(data, train__steps=12, **halves), tmp_path / "run")
    first = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    result = pretrain(config_of(data, **halves), tmp_path / "run")
    assert result.resumed_from == 12
    for name in ("model.safetensors", PRETRAINING_HEAD, "tokenizer.json"):
        assert (tmp_path / "run" / "model" / name).read_bytes() == (run / "model" / name).read_bytes(), name
    assert first != (run / "model" / "model.safetensors").read_bytes()  # control: training changed the weights
    assert logged(tmp_path / "run", "loss") == logged(run, "loss")
    with pytest.raises(ContractError, match=r"pretraining\.mask_rate"):
        pretrain(config_of(data, pretraining__mask_rate=0.2, **halves), tmp_path / "run")
    with pytest.raises(ContractError, match="sha256"):
        pretrain(config_of(write_data(tmp_path / "other", seed=1), train__steps=30, **halves), tmp_path / "run")


def test_a_head_of_the_same_shapes_is_reused(run: Path, data: Path, tmp_path: Path) -> None:
    more = {"pretraining__method": "condenser", "encoder__checkpoint": str(run / "model"), "train__steps": 0}
    pretrain(config_of(data, **more), tmp_path / "same")
    assert (tmp_path / "same" / "model" / PRETRAINING_HEAD).read_bytes() == (
        run / "model" / PRETRAINING_HEAD
    ).read_bytes()
    shapes = read_config(run / "model")
    for other in ({"pretraining__head_layers": 2}, {"pretraining__method": "retromae"}, {"pretraining__method": "mlm"}):
        # Control: heads of other forms do not read the file.
        assert make_pretrainer(config_of(data, **{**more, **other}), shapes).stored_head(run / "model") == {}


PAPERS: dict[str, tuple[Any, ...]] = {  # method, rate, batch, tokens, masks, epochs, warm-up, weight decay
    "pretraining/mlm": ("mlm", 1e-4, 256, 256, 0.15, 8, 0.1, 0.01),
    "pretraining/condenser": ("condenser", 1e-4, 1024, 512, 0.15, 8, 0.1, 0.01),
    "pretraining/cocondenser": ("cocondenser", 1e-4, 1024, 128, 0.15, 8, 0.1, 0.01),
    "pretraining/retromae:general": ("retromae", 1e-4, 256, 512, 0.3, 8, 0.1, 0.01),
    "pretraining/retromae:msmarco": ("retromae", 1e-4, 1024, 150, 0.3, 20, 0.1, 0.01),
}


def test_shipped_configs_have_the_papers_values() -> None:
    values = {}
    for name, suffix in SHIPPED:
        if name.startswith("pretraining/"):
            c = shipped(name, suffix)
            p, o = c.pretraining, c.optimizer
            shape = p.method, o.learning_rate, c.train.batch_size, p.length, p.mask_rate, c.train.epochs
            values[f"{name}:{suffix}" if suffix else name] = (*shape, o.warmup_fraction, o.weight_decay)
            make_pretrainer(c, BertConfig(99, 16, 12, 2, 32, max_positions=512))
    assert values == PAPERS


def test_a_pre_training_run_is_no_retriever(run: Path) -> None:
    with pytest.raises(ValueError, match=r"pre-training .*encoder, .*folder"):
        open_run(run)


def test_invalid_settings_are_errors(data: Path, tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder")
    for overrides, message in (
        ({"pretraining__method": "bert"}, "pretraining.method is 'bert'; it must be one of mlm, condenser"),
        ({"pretraining__mask_rate": 1.0}, "pretraining.mask_rate is 1.0; it must be above 0 and below 1"),
        ({"pretraining__length": 41}, "pretraining.length is 41; it must be 3 to 40"),
        ({"pretraining__shortest": 23}, "pretraining.shortest is 23, but spans have at most 22 tokens"),
        ({"pretraining__shortest": 0}, "pretraining.shortest is 0; it must be at least 1"),
        ({"pretraining__method": "condenser", "pretraining__skip_from": 5}, "skip_from is 5, and the layers"),
        ({"data__dev": str(data)}, "data.dev is .*, .*jaxret train .*'pretraining'"),
        ({"task": "retrieval"}, "task is 'retrieval'; pre-training needs"),
    ):
        with pytest.raises(ValueError, match=re.escape(message) if "*" not in message else message):
            pretrain(config_of(data, **{"encoder__checkpoint": str(encoder), **overrides}), tmp_path / "run")
    for overrides, message in (
        ({"pretraining__scratch__heads": 3}, "pretraining.scratch.heads is 3; it must divide hidden_size, 16"),
        ({"pretraining__scratch__vocabulary": 20}, "pretraining.scratch.vocabulary is 20; it must be above"),
        ({"pretraining__length": 41}, "pretraining.length is 41; it must be at most pretraining.scratch.positions, 40"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            pretrain(config_of(data, **overrides), tmp_path / "run")
    for overrides in ({"pretraining__mask_rate": 1.5}, {"pretraining__shortest": 23}, {"data__subset": 3}):
        # The error comes before the corpus is read.
        with pytest.raises(ValueError, match=f"{next(iter(overrides)).replace('__', '.')} is"):
            pretrain(config_of(tmp_path / "nowhere", **overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_start_is_made_again_until_the_first_checkpoint(data: Path, run: Path, tmp_path: Path) -> None:
    """The first start may come from a failed job with other settings."""
    folder = Workdir(tmp_path / "run")
    for layers in (2, 3):
        start = write_scratch_encoder(config_of(data, pretraining__scratch__layers=layers), folder)
        assert read_json(start / "config.json")["num_hidden_layers"] == layers
    write_scratch_encoder(config_of(data, pretraining__scratch__layers=3), Workdir(run))
    assert read_json(run / "start" / "config.json")["num_hidden_layers"] == 2, "a run with checkpoints keeps its start"


def test_the_same_corpus_gives_the_same_vocabulary(data: Path, tmp_path: Path) -> None:
    texts = ["the river and the stone rivers", "a rivered stone", "stones und Flüsse"] * 3
    first, second = (train_wordpiece(lambda: texts, 60, True).get_vocab() for _ in range(2))
    assert first == second
    assert "river" in first
    assert "ü" not in first  # accents are stripped, as in BERT
    # Control: other texts have another vocabulary.
    assert train_wordpiece(lambda: texts[:1], 60, True).get_vocab() != first


def test_transformers_loads_the_tokenizer_of_a_run(run: Path) -> None:
    tokenizer = TextTokenizer.load(run / "model", 12, 24)
    assert tokenizer.special_ids == {"pad": 0, "cls": 2, "sep": 3, "mask": 4}
    assert read_json(run / "model" / "tokenizer_config.json")["model_max_length"] == 40
    assert tokenizer.queries(["river zebra"])[0][0] == 2


@pytest.mark.exhaustive
def test_a_killed_run_ends_with_the_same_bytes(run: Path, data: Path, tmp_path: Path) -> None:
    """The killed run uses the command line; the other run was not interrupted and saved less often."""
    flat = flat_config(config_of(data, pretraining__method="cocondenser", train__checkpoint_every=3))
    base, killed = flat_config(get_config()), tmp_path / "killed"
    changed = [f"--config.{key}={value}" for key, value in flat.items() if value != base[key]]
    command = [sys.executable, "-m", "jaxret", "pretrain", "--config=base", f"--workdir={killed}", *changed]
    quiet: dict[str, Any] = {"cwd": REPOSITORY, "env": environment(), "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **quiet)
    deadline = time.monotonic() + 120
    while not list(killed.glob("checkpoints/[0-9]*")):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "model").exists()
    subprocess.run(command, check=True, stderr=subprocess.PIPE, timeout=240, **quiet)
    for name in ("model.safetensors", PRETRAINING_HEAD, "tokenizer.json"):
        assert (killed / "model" / name).read_bytes() == (run / "model" / name).read_bytes(), name


def test_two_jobs_do_not_pretrain_in_one_folder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second job is refused at any time: before and after the encoder is written, and during training."""
    config, seen = config_of(data, train__steps=1), []

    def trying(name: str) -> None:
        call = getattr(pretrain_module, name)

        def then(*args: Any, **more: Any) -> Any:
            monkeypatch.setattr(pretrain_module, name, call)
            result = None
            for moment in ("before", "after"):
                with pytest.raises(LockedError, match="is in use: pre-training"):
                    pretrain(config, tmp_path / "run")
                seen.append((name, moment))
                result = call(*args, **more) if moment == "before" else result
            return result

        monkeypatch.setattr(pretrain_module, name, then)

    for name in ("write_scratch_encoder", "train", "write_final_encoder"):
        trying(name)
    assert pretrain(config, tmp_path / "run").step == 1
    assert len(seen) == 6
    monkeypatch.undo()
    assert pretrain(config, tmp_path / "run").step == 1, "the folder is complete"
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
