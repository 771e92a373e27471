"""Shapes without weights, bytes per device, the largest batch, and the work of a run, computed from its data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxret.configs.base import get_config
from jaxret.data.tokens.batches import BatchPlan, TrainingSet
from jaxret.data.tokens.known_positives import KnownPositives
from jaxret.parallel.chips import parse_topology
from jaxret.parallel.flops import count_flops
from jaxret.plan import programs
from jaxret.plan.estimates import corpus_bytes, parameter_counts, plan_searching, plan_training, program_work
from jaxret.plan.plan_report import plan_report
from jaxret.plan.workload import PlanTexts, measure_workload, read_plan_texts
from jaxret.types import Ragged

# Parameters of published checkpoints as counted by transformers: their encoders without poolers and heads.
PUBLISHED = {
    "bert-base-uncased": 108_891_648,
    "distilbert-base-uncased": 66_362_880,
    "FacebookAI/roberta-base": 124_055_040,
    "FacebookAI/xlm-roberta-base": 277_453_056,
    "answerdotai/ModernBERT-base": 149_014_272,
    "t5-base": 109_628_544,
    "Qwen/Qwen3-Embedding-0.6B": 595_776_512,
    "Qwen/Qwen3-Embedding-4B": 4_021_774_336,
    "Qwen/Qwen3-Embedding-8B": 7_567_295_488,
    "google/embeddinggemma-300m": 307_581_696 - 2 * 768 * 3072,  # without its two dense modules
    "meta-llama/Llama-2-7b-hf": 6_738_415_616 - 32_000 * 4096,
    "meta-llama/Llama-3.1-8B": 8_030_261_248 - 128_256 * 4096,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096 - 32_000 * 4096,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_built_in_shapes_have_the_published_number_of_parameters(name: str) -> None:
    config = get_config()
    config.encoder.tied = True
    config.head.token = "mean"
    retriever = programs.retriever_of(config, programs.ENCODERS / name)
    assert parameter_counts(retriever) == {"encoder": PUBLISHED[name], "total": PUBLISHED[name]}


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
    shapes = (programs.ENCODERS / "bert-base-uncased" / "config.json").read_text()
    (tmp_path / "config.json").write_text(json.dumps(json.loads(shapes) | {"num_hidden_layers": 2}))
    directory, description = programs.encoder_directory(str(tmp_path))
    assert (directory, description) == (tmp_path, str(tmp_path / "config.json"))
    with pytest.raises(FileNotFoundError, match=r"A .*weights: .*config.json"):
        programs.encoder_directory("nobody/knows-this")


@pytest.mark.parametrize(("fsdp", "share"), [(1, 1), (4, 4)])
def test_bytes_of_a_device_follow_the_mesh(fsdp: int, share: int) -> None:
    config = get_config()
    config.mesh.fsdp = fsdp
    directory = programs.ENCODERS / "bert-base-uncased"
    shapes = programs.longest_batch(config, programs.retriever_of(config, directory))
    assert (shapes.queries, shapes.documents, shapes.query_length, shapes.passage_length) == (128, 256, 256, 256)
    state = programs.training_program(config, directory, shapes, jax.devices()).state
    whole = 2 * 4 * PUBLISHED["bert-base-uncased"]
    split = 2 * 4 * (12 * (4 * 768**2 + 2 * 768 * 3072) + (30522 + 512 + 2) * 768)  # kernels and tables
    assert state["parameters"] == whole - split + split // share
    assert state["moments"] - 2 * state["parameters"] == 8  # the optimizer has two counters


@pytest.mark.slow
def test_a_checkpoint_with_adapters_holds_no_base(tmp_path: Path) -> None:
    shapes = json.loads((programs.ENCODERS / "bert-base-uncased" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shapes | {"num_hidden_layers": 2}))
    config = get_config()
    config.encoder.tied = True
    config.lora.rank, config.lora.targets = 4, ("query",)
    batch = programs.Shapes(8, 16, 32, 32)
    values = plan_training(config, tmp_path, batch, None)
    adapters = 2 * 4 * (768 + 768)
    assert values["checkpoint_bytes"] == 3 * 4 * adapters + 13, (
        "weights and moments; the counters are those without adapters"
    )
    base = parameter_counts(programs.retriever_of(config, tmp_path))
    assert values["parameters"]["total"] == base["total"] + adapters
    optimizer = next(kind for kind in values["flops"] if kind["part"] == "optimizer")
    assert adapters < optimizer["flops"] < 100 * adapters


@pytest.mark.exhaustive
def test_moving_average_and_accumulation_are_counted() -> None:
    config = get_config()
    directory = programs.ENCODERS / "bert-base-uncased"
    shapes = programs.longest_batch(config, programs.retriever_of(config, directory))
    plain = programs.training_program(config, directory, shapes, jax.devices())
    config.optimizer.ema, config.train.accumulate = 0.999, 3
    planned = programs.training_program(config, directory, shapes, jax.devices())
    assert planned.state == {**plain.state, "moving average": plain.state["parameters"]}
    once, thrice = (sum(count_flops(p.program.trace(*p.arguments)).values()) for p in (plain, planned))
    assert thrice == 3 * once


def test_a_plan_is_refused_as_training_would_be() -> None:
    config = get_config()
    config.tokens.passage_length = 1024
    directory = programs.ENCODERS / "bert-base-uncased"
    shapes = programs.longest_batch(config, programs.retriever_of(config, directory))
    with pytest.raises(ValueError, match=r"tokens.passage_length is 1024; the encoder has 512 positions"):
        programs.training_program(config, directory, shapes, jax.devices())


def test_a_batch_has_slots_for_all_devices() -> None:
    config = get_config()
    config.train.batch_size = 12
    retriever = programs.retriever_of(config, programs.ENCODERS / "bert-base-uncased")
    batches = [programs.longest_batch(config, retriever, devices) for devices in (1, 8, 16)]
    assert [(shapes.queries, shapes.documents) for shapes in batches] == [(12, 24), (16, 32), (16, 32)]


def test_memory_of_a_corpus_is_that_of_its_vectors() -> None:
    config = get_config()
    directory = programs.ENCODERS / "bert-base-uncased"
    retriever = programs.retriever_of(config, directory)
    assert corpus_bytes(config, retriever, 1000) == 1000 * 768 * 4
    config.head.name, config.encode.dtype, config.tokens.passage_length = "colbert", "float16", 100
    config.head.colbert.projection = 128
    assert corpus_bytes(config, programs.retriever_of(config, directory), 10) == 10 * 100 * 128 * 2


def test_tokens_of_a_plan_equal_those_of_the_batches() -> None:
    """The plan counts every batch of a short run, so the averages are exact."""
    random = np.random.default_rng(0)
    lengths = {"queries": random.integers(3, 20, 24), "passages": random.integers(3, 90, 48)}
    texts = {name: Ragged.from_lists([[1] * int(n) for n in numbers]) for name, numbers in lengths.items()}
    data = TrainingSet(
        queries=texts["queries"],
        passages=texts["passages"],
        positives=np.arange(24, dtype=np.int32),
        known_positives=KnownPositives.from_lists(np.arange(48).reshape(24, 2).tolist()),
        negatives=Ragged.from_lists([[24 + i] for i in range(24)]),
        query_ids=tuple(map(str, range(24))),
        pad_id=0,
        marker_ids=(),
        digest="",
    )
    config = get_config()
    config.train.batch_size, config.train.epochs = 8, 2.0
    config.tokens.query_length, config.tokens.passage_length = 16, 64
    retriever = programs.retriever_of(config, programs.ENCODERS / "bert-base-uncased")
    plan = BatchPlan(8, 1, 32, 16, 64, data_seed=config.seed.data, negatives_seed=config.seed.negatives)
    workload = measure_workload(config, retriever, PlanTexts(data, data), devices=2)
    assert (workload.steps, workload.examples) == (6, 24)
    assert workload.real is not None
    assert workload.padded is not None
    assert workload.shapes == programs.Shapes(8, 16, 16, 64, positives=2)
    real = np.minimum(lengths["queries"], 16).sum() + np.minimum(lengths["passages"], 64).sum()
    assert workload.real == pytest.approx(2 * real / 6)  # each text twice, over six batches
    batches = [plan.training_batch(data, step) for step in range(6)]
    padded = [batch.queries.ids.size + batch.passages.ids.size for batch in batches]
    assert workload.padded == pytest.approx(np.mean(padded))
    assert workload.packed is not None
    assert workload.padded > workload.real
    assert workload.share == pytest.approx(workload.padded / (8 * 16 + 16 * 64))

    config.train.accumulate = 2
    several = measure_workload(config, retriever, PlanTexts(data, data), devices=2)
    assert several.steps == 3
    assert (several.real, several.padded) == pytest.approx((2 * workload.real, 2 * workload.padded)), (
        "a step has two batches"
    )
    assert several.share == pytest.approx(workload.share)

    config.train.accumulate, config.tokens.packing = 1, True
    packed = measure_workload(config, retriever, PlanTexts(data, data), devices=2)
    packer = plan.with_packer(data, 2, (1, 1), 768).packer
    assert packer is not None
    rows = [packer(*(tokens.mask.sum(axis=1) for tokens in (b.queries, b.passages))) for b in batches]
    assert packed.packed is not None
    assert packed.packed == pytest.approx(np.mean([2 * (q.rows * q.width + p.rows * p.width) for q, p in rows]))
    assert packed.packed == workload.packed
    assert workload.real < packed.packed < workload.padded
    largest = max((p for _, p in rows), key=lambda placed: placed.rows * placed.width)
    assert packed.shapes.packed_passages == (largest.rows, largest.width)
    assert packed.share == pytest.approx(packed.packed / packed.shapes.computed_tokens(2))


def test_without_data_a_packed_run_has_the_longest_texts_in_rows() -> None:
    config = get_config()
    config.tokens.query_length, config.tokens.packing, config.train.chunk_size = 30, True, 32
    retriever = programs.retriever_of(config, programs.ENCODERS / "bert-base-uncased")
    shapes = measure_workload(config, retriever, PlanTexts(None), devices=4).shapes
    assert (shapes.packed_queries, shapes.packed_passages) == ((8, 32), (16, 256)), "the rows of each of 16 parts"
    assert shapes.computed_tokens(16) == 128 * 32 + 256 * 256


@pytest.mark.slow
def test_lengths_may_be_given_instead_of_data() -> None:
    config = get_config()
    config.tokens.query_length = 32
    directory = programs.ENCODERS / "bert-base-uncased"
    retriever = programs.retriever_of(config, directory)
    texts = read_plan_texts(config, directory, retriever, print, (10, 80))
    assert texts.data is not None
    assert texts.data.passages.lengths.mean() == pytest.approx(80, rel=0.03)
    assert "80 tokens on average" in texts.note
    workload = measure_workload(config, retriever, texts, devices=16)
    assert workload.examples is None
    assert workload.real is not None
    assert workload.real == pytest.approx(128 * 10 + 256 * 80, rel=0.05)
    assert workload.padded is not None
    assert workload.packed is not None
    assert workload.packed < 1.3 * workload.real < 0.6 * workload.padded
    assert read_plan_texts(config, directory, retriever, print).data is None


@pytest.mark.slow
def test_a_packed_program_counts_its_rows() -> None:
    """FLOPs decrease with the number of computed tokens. The token is "mean", because for [CLS] the last layer of
    padded texts is cheaper."""
    config = get_config()
    config.head.token = "mean"
    config.encoder.layers, config.train.batch_size, config.tokens.query_length = 2, 16, 32
    directory = programs.ENCODERS / "bert-base-uncased"
    padded = programs.longest_batch(config, programs.retriever_of(config, directory))
    packed = dataclasses.replace(padded, packed_queries=(3, 64), packed_passages=(12, 256))
    flops = []
    for shapes in (padded, packed):
        planned = programs.training_program(config, directory, shapes, jax.devices()[:1])
        flops.append(sum(kind["flops"] for kind in program_work(planned) if kind["part"] in ("queries", "passages")))
    assert planned.arguments[1].passages.packing.rows == 12
    assert flops[1] / flops[0] == pytest.approx(packed.computed_tokens(1) / padded.computed_tokens(1), rel=0.03)


@pytest.mark.parametrize(("topology", "precision", "pieces"), [("h100:8", "int8", 1), ("v5e:1x1", "float32", 6)])
def test_a_search_plan_covers_vectors_on_all_chips(topology: str, precision: str, pieces: int) -> None:
    """MS MARCO has 27 GB in float32, a quarter of it in int8; empty places add a few per cent of products."""
    config, directory = get_config(), programs.ENCODERS / "bert-base-uncased"
    chips = parse_topology(topology)
    load = programs.SearchLoad(8_841_823, 6_980, 1000, precision)
    values = plan_searching(config, directory, load, chips)
    assert values["pieces"] == pieces
    whole = 2 * 7 * 1024 * 8_841_823 * 768
    assert whole <= values["flops_total"] <= 1.07 * whole
    assert {kind["precision"] for kind in values["flops"]} == {"int8" if precision == "int8" else "float32 exact"}
    number = 8_841_823 * 768 * (1 if precision == "int8" else 4)
    assert number <= values["memory"]["by_kind"]["documents"] * chips.devices * pieces <= 1.1 * number
    assert values["memory"]["fits"] is not False


@pytest.mark.parametrize(
    ("topology", "hosts", "chips", "precision"), [("v5e:4x4", 4, 4, "float32"), ("h100:32", 4, 8, "bfloat16")]
)
def test_a_search_plan_of_several_hosts_adds_the_merge(topology: str, hosts: int, chips: int, precision: str) -> None:
    config, directory = get_config(), programs.ENCODERS / "bert-base-uncased"
    load = programs.SearchLoad(100_000_000, 6_980, 1000, precision)
    values = plan_searching(config, directory, load, parse_topology(topology))
    alone = load._replace(passages=25_000_000)
    of_host = plan_searching(config, directory, alone, dataclasses.replace(parse_topology(topology).of_host))
    assert parse_topology(topology).of_host.devices == chips
    assert of_host["memory"] == values["memory"]
    assert "host" not in of_host
    assert (values["passages"], values["host"]["passages"]) == (100_000_000, 25_000_000)
    assert values["flops_total"] == hosts * of_host["flops_total"]
    assert values["corpus_bytes"] == hosts * values["host"]["vector_bytes"]
    # Each process sends a score of 4 bytes and a row of 8, and the first one sends the vectors of the queries.
    assert values["host"]["received_bytes"] == 6_980 * (1000 * 12 * hosts + 768 * 4)
    merge = values["host"]["merge_seconds"]
    assert merge == values["host"]["received_bytes"] / parse_topology(topology).chip.link
    assert values["search_seconds"] == pytest.approx(of_host["search_seconds"] + merge)
    # Candidates, in addition to the results of the range and of all ranges.
    depth = {"float32": 1032, "bfloat16": 1200}[precision]
    assert values["host"]["memory"] == 6_980 * (768 * 4 + 12 * (depth + 2 * 1000))
    report = plan_report({"verb": "search", "config": "c", "encoder": "e", **values}, parse_topology(topology))
    assert f"each of {hosts} hosts: 25,000,000 passages, {25e6 * 768 * 4 / 2**30:,.2f} GiB of vectors on disk" in report
    assert f"of that the merge of {hosts} hosts: " in report
