"""What is planned: shapes without weights, bytes of a device, the largest batch, and what the data makes of a run."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.base import get_config
from jaxret.data.batches import BatchPlan, TrainingSet
from jaxret.flops import count
from jaxret.plan import programs
from jaxret.plan.data import from_examples
from jaxret.plan.plan import corpus_bytes, parameters
from jaxret.types import Ragged

# Of the published checkpoints, as transformers counts them: their encoders without poolers and heads.
PUBLISHED = {
    "bert-base-uncased": 108_891_648,
    "distilbert-base-uncased": 66_362_880,
    "FacebookAI/xlm-roberta-base": 277_453_056,
    "answerdotai/ModernBERT-base": 149_014_272,
    "t5-base": 109_628_544,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_shapes_have_as_many_parameters_as_was_published(name: str) -> None:
    config = get_config()
    config.encoder.tied = True
    if name == "t5-base":
        config.head.token = "mean"
    retriever = programs.retriever_of(config, programs.ENCODERS / name)
    assert parameters(retriever) == {"encoder": PUBLISHED[name], "total": PUBLISHED[name]}


def test_every_checkpoint_that_a_config_names_can_be_planned() -> None:
    named = {
        line.split('"')[1]
        for path in (Path(__file__).parents[2] / "configs").rglob("*.py")
        for line in path.read_text().splitlines()
        if "encoder.checkpoint =" in line and '"' in line
    }
    assert "Shitao/RetroMAE" in named
    for name in named:
        if not name.startswith("package:"):
            assert (programs.ENCODERS / programs.SAME_SHAPES.get(name, name) / "config.json").is_file()


def test_a_folder_needs_no_weights(tmp_path: Path) -> None:
    known = (programs.ENCODERS / "bert-base-uncased" / "config.json").read_text()
    (tmp_path / "config.json").write_text(json.dumps(json.loads(known) | {"num_hidden_layers": 2}))
    directory, told = programs.encoder_directory(str(tmp_path))
    assert (directory, told) == (tmp_path, str(tmp_path / "config.json"))
    with pytest.raises(FileNotFoundError, match=r"A plan needs no weights: a folder with its config.json is enough"):
        programs.encoder_directory("nobody/knows-this")


@pytest.mark.parametrize(("fsdp", "share"), [(1, 1), (4, 4)])
def test_bytes_of_a_device_follow_the_mesh(fsdp: int, share: int) -> None:
    config = get_config()
    config.mesh.fsdp = fsdp
    directory = programs.ENCODERS / "bert-base-uncased"
    shapes = programs.longest_batch(config, programs.retriever_of(config, directory))
    assert (shapes.queries, shapes.documents, shapes.query_length, shapes.passage_length) == (128, 256, 256, 256)
    state = programs.training(config, directory, shapes, jax.devices()).state
    whole = 2 * 4 * PUBLISHED["bert-base-uncased"]
    split = 2 * 4 * (12 * (4 * 768**2 + 2 * 768 * 3072) + (30522 + 512 + 2) * 768)  # kernels and tables
    assert state["parameters"] == whole - split + split // share
    assert state["moments"] - 2 * state["parameters"] == 8  # two counters


def test_an_average_takes_its_bytes_and_several_batches_their_products() -> None:
    config = get_config()
    directory = programs.ENCODERS / "bert-base-uncased"
    shapes = programs.longest_batch(config, programs.retriever_of(config, directory))
    plain = programs.training(config, directory, shapes, jax.devices())
    config.optimizer.ema, config.train.accumulate = 0.999, 3
    planned = programs.training(config, directory, shapes, jax.devices())
    assert planned.state == {**plain.state, "moving average": plain.state["parameters"]}
    once, thrice = (sum(count(p.program.trace(*p.arguments)).values()) for p in (plain, planned))
    assert thrice == 3 * once


def test_a_plan_is_refused_as_training_would_be() -> None:
    config = get_config()
    config.tokens.passage_length = 1024
    directory = programs.ENCODERS / "bert-base-uncased"
    shapes = programs.longest_batch(config, programs.retriever_of(config, directory))
    with pytest.raises(ValueError, match=r"tokens.passage_length is 1024; the encoder has 512 positions"):
        programs.training(config, directory, shapes, jax.devices())
    config = get_config()
    config.train.batch_size = 12
    with pytest.raises(ValueError, match=r"train.batch_size is 12; it must be a multiple of the number of devices, 8"):
        programs.training(config, directory, shapes, jax.devices())


def test_a_corpus_takes_what_its_vectors_do() -> None:
    config = get_config()
    directory = programs.ENCODERS / "bert-base-uncased"
    retriever = programs.retriever_of(config, directory)
    assert corpus_bytes(config, retriever, 1000) == 1000 * 768 * 4
    config.head.name, config.encode.dtype, config.tokens.passage_length = "all_tokens", "float16", 100
    config.head.all_tokens.projection = 128
    assert corpus_bytes(config, programs.retriever_of(config, directory), 10) == 10 * 100 * 128 * 2


def test_tokens_of_a_run_are_those_of_its_batches() -> None:
    """Every batch of a short run is looked at, so the averages are exact."""
    random = np.random.default_rng(0)
    lengths = {"queries": random.integers(3, 20, 24), "passages": random.integers(3, 90, 48)}
    texts = {name: Ragged.from_lists([[1] * int(n) for n in found]) for name, found in lengths.items()}
    data = TrainingSet(
        queries=texts["queries"],
        passages=texts["passages"],
        positives=np.arange(24, dtype=np.int32),
        known_positives=np.arange(48, dtype=np.int32).reshape(24, 2),
        negatives=Ragged.from_lists([[24 + i] for i in range(24)]),
        query_ids=tuple(map(str, range(24))),
        pad_id=0,
        marker_ids=(),
        digest="",
    )
    config = get_config()
    config.train.batch_size, config.train.epochs = 8, 2.0
    plan = BatchPlan(8, 1, 32, 16, 64)
    longest = programs.Shapes(8, 16, 16, 64)
    found = from_examples(config, data, plan, longest)
    assert (found.steps, found.examples) == (6, 24)
    assert found.real is not None
    assert found.padded is not None
    assert found.shapes == programs.Shapes(8, 16, 16, 64, positives=2)
    real = np.minimum(lengths["queries"], 16).sum() + np.minimum(lengths["passages"], 64).sum()
    assert found.real == pytest.approx(2 * real / 6)  # each text twice, over six batches
    batches = [plan.training_batch(data, step) for step in range(6)]
    padded = [batch.queries.ids.size + batch.documents.ids.size for batch in batches]
    assert found.padded == pytest.approx(np.mean(padded))
    assert found.padded > found.real
