"""Every shipped config fits the chips that it is for; and the computed needs of corpora."""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

import pytest
from ml_collections import ConfigDict

from bench.plan_tables import (
    accelerator_configs,
    config_families,
    config_table,
    corpus_size_table,
    program_key,
    shipped_configs,
)
from jaxret.configs import config_names
from jaxret.configs.base import get_config
from jaxret.configs.recipes import language_models
from jaxret.models.retriever_model import RetrieverModel, encoder_config
from jaxret.parallel.chips import GIB, parse_topology
from jaxret.plan.advice import with_changes
from jaxret.plan.compilation import missing_compiler
from jaxret.plan.estimates import parameter_counts
from jaxret.plan.programs import encoder_directory, longest_batch, retriever_of
from jaxret.training.losses.grad_cache import count_chunks
from tests.pipeline import REPOSITORY, run_script

SCALE = REPOSITORY / "docs" / "scale.md"


def test_every_variant_of_every_file_is_read() -> None:
    """If a config takes a suffix, its module lists the suffixes."""
    names = [name for name, _ in shipped_configs()]
    assert len(set(names)) == len(names)
    for name in config_names():
        module = importlib.import_module(f"jaxret.configs.{name.replace('/', '.')}")
        takes = bool(inspect.signature(module.get_config).parameters)
        variants = [n for n in names if n.partition(":")[0] == name]
        assert variants == ([f"{name}:{suffix}" for suffix in module.SUFFIXES] if takes else [name])
    left_out = {name.partition(":")[0] for name in set(names) - {name for name, _ in accelerator_configs()}}
    assert {name for name in left_out if not name.startswith("pretraining/")} == {"cross_encoder", "demo", "minilm"}


def test_programs_that_differ_in_constants_are_compiled_once() -> None:
    base = get_config()
    same = {
        "optimizer.learning_rate": 1e-3,
        "seed.init": 1,
        "train.epochs": 1.0,
        "encoder.checkpoint": "Shitao/RetroMAE",
    }
    assert program_key(with_changes(base, same)) == program_key(base)
    for change in ({"loss.local_weight": 0.1}, {"data.negatives": 2}, {"train.chunk_size": 8}, {"encoder.tied": True}):
        assert program_key(with_changes(base, change)) != program_key(base)
    assert program_key(with_changes(base, {"encoder.checkpoint": "distilbert-base-uncased"})) != program_key(base)


def test_the_documentation_has_every_config() -> None:
    lines = SCALE.read_text().partition("| config |")[2].splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines if " GiB, " in line}
    assert list(rows) == [name for name, _ in accelerator_configs()]
    assert not [line for line in rows.values() if "does not fit" in line]


def test_recipes_of_language_models_fit_with_a_tenth_to_spare() -> None:
    """This holds for both tables of the documentation: all recipes, and the largest recipes on larger machines."""
    tables = {}
    for title in ("| config |", "| recipe |"):
        head, _, *lines = (title + SCALE.read_text().partition(title)[2]).split("\n\n")[0].splitlines()
        chips = [parse_topology(name.strip()).chip for name in head.strip("| ").split("|")[1:]]
        rows = [line.strip("| ").split(" | ") for line in lines]
        tables[title] = [name for name, *_ in rows]
        for name, *cells in rows:
            for chip, cell in zip(chips, cells, strict=True):
                assert float(cell.split()[0]) * GIB <= 0.9 * chip.memory or "language_models" not in name, (name, chip)
    every = {f"recipes/language_models:{suffix}" for suffix in language_models.SUFFIXES}
    assert every < set(tables["| config |"])
    assert set(tables["| recipe |"]) < every


def test_a_table_marks_programs_that_do_not_fit() -> None:
    def values(total: int, fits: bool) -> dict[str, Any]:
        return {"memory": {"total": total, "fits": fits}, "lower_bound": {"seconds": 0.0204}}

    chips = [parse_topology("h100:1"), parse_topology("v5e:4x4")]
    plans: list[tuple[str, list[dict[str, Any]]]] = [
        ("a", [values(2**30, True), values(2**29, True)]),
        ("b", [values(2**31, False), values(0, True)]),
    ]
    assert list(config_table(chips, iter(plans))) == [
        "| config | h100:1 | v5e:4x4 |",
        "|:--|--:|--:|",
        "| a | 1.00 GiB, 20 ms | 0.50 GiB, 20 ms |",
        "| b | 2.00 GiB, does not fit, 20 ms | 0.00 GiB, 20 ms |",
    ]


LIMITS = {"h100:1": 59.0, "v5e:4x4": 14.0}  # GiB of a device
# These are compiled: every head and architecture, and the largest configs. For the others, a bound is computed, which
# also holds for these.
COMPILED = {
    "h100:1": (
        "base",
        "recipes/aggretriever_msmarco:distilbert",
        "recipes/i3_msmarco:retromae",
        "recipes/language_models:llama3",
        "recipes/mlr_msmarco:mlr",
    ),
    "v5e:4x4": (
        "aggretriever",
        "base",
        "colbert:single",
        "i3",
        "me_bert:t5",
        "mlr",
        "modernbert",
        "mvr",
        "qwen3:last",
        "recipes/language_models:gemma_full",
        "recipes/language_models:qwen3_8b",
        "recipes/language_models:qwen3_full",
        "xlm_roberta",
    ),
}
BYTES = {"bfloat16": 40, "float32": 56}  # limit of activations' bytes, for each number of a chunk's hidden states
# With LoRA: bytes per parameter; bytes of activations with encoder.recompute="layer"; GiB of a word table and two
# layers.
LOW_RANK = 2, 8, 3.0


def bound(config: ConfigDict, devices: int) -> float:
    """Return an upper bound in GiB per device: parameters, moments and gradients; the activations of a chunk; 1 for the
    rest."""
    directory, _ = encoder_directory(config.encoder.checkpoint)
    retriever, encoder = retriever_of(config, directory), encoder_config(config, directory)
    shapes = longest_batch(config, retriever, devices)
    tokens = shapes.computed_tokens(1) / devices / count_chunks(shapes.queries, config.train.chunk_size, devices)
    states = tokens * encoder.num_layers * encoder.hidden_size
    parameters, split = numbers(program_key(config), retriever), config.mesh.fsdp or devices
    if config.lora.rank:
        each, activations, rest = LOW_RANK
        return (each * parameters / split + activations * states) / GIB + rest
    # The gradient of a split parameter, and the gathered parameter, have full size.
    held = 4 * 4 if split == 1 else 3 * 4 / split + 4 + 2
    return (held * parameters + BYTES[config.encoder.dtype] * states) / GIB + 1


KNOWN: dict[str, int] = {}


def numbers(kind: str, retriever: RetrieverModel) -> int:
    """Return the number of parameters, counted once for configs with the same program."""
    if kind not in KNOWN:
        KNOWN[kind] = parameter_counts(retriever)["total"]
    return KNOWN[kind]


@pytest.mark.exhaustive
def test_every_config_is_bounded() -> None:
    above = {}
    for name, config in accelerator_configs():
        for chips, most in LIMITS.items():
            devices = parse_topology(chips).devices
            if bound(config, devices) > most:
                above[name, chips] = bound(config, devices)
    assert above == {}


def test_every_compiled_config_is_shipped() -> None:
    shipped = {name for name, _ in accelerator_configs()}
    assert {name for names in COMPILED.values() for name in names} <= shipped


@pytest.mark.exhaustive
@pytest.mark.parametrize(("chips", "name"), [(chips, name) for chips, names in COMPILED.items() for name in names])
def test_a_config_fits(chips: str, name: str) -> None:
    topology = parse_topology(chips)
    if problem := missing_compiler(topology):
        pytest.skip(problem)
    file, _, suffix = name.partition(":")
    config = dict(accelerator_configs())[name]
    flag = f"--config=configs/{file}.py" + (f":{suffix}" if suffix else "")
    done = run_script("-m", "jaxret", "plan", flag, f"--topology={chips}", "--json", "--advice=false")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)["plan"]
    assert values["memory"]["total"] / GIB < min(LIMITS[chips], bound(config, topology.devices))
    assert values["warnings"] == []


def test_every_family_has_its_vectors() -> None:
    numbers_of = {name: numbers for name, *numbers in config_families()}
    assert numbers_of["base"] == [1, 768, 1]
    assert numbers_of["mvr"] == [8, 768, 1]
    assert numbers_of["colbert:late"] == [80, 128, 32]


def test_bytes_and_seconds_of_a_row() -> None:
    """1,024 queries on 8,841,823 vectors of 768 numbers, over 8 GPUs."""
    rows = [line.split(" | ") for line in corpus_size_table(parse_topology("h100:8"))]
    (row,) = [row for row in rows if row[0].startswith("| base ") and row[1] == "8,841,823"]
    numbers = 8_841_823 * 768
    assert row[2:4] == [f"{numbers * 4 / 2**30:.1f} GiB", f"{numbers * 2 / 2**30:.1f} GiB"]
    memory, time = row[5].split(", ")
    assert float(memory.removesuffix(" GiB")) == pytest.approx(numbers * 2 / 8 / 2**30, rel=0.05)
    assert int(time.removesuffix(" ms")) == pytest.approx(2 * 1024 * numbers / 8 / 989.4e12 * 1e3, abs=0.6)
    (large,) = [row for row in rows if row[0].startswith("| mvr ") and row[1] == "100,000,000"]
    assert "streamed" in large[4]
    (late,) = [row for row in rows if row[0].startswith("| colbert:late ") and row[1] == "1,000,000"]
    cell, time = late[5].split(", ")
    assert cell == "blocks"
    assert float(time.removesuffix(" s")) == pytest.approx(2 * 1024 * 32 * 80 * 128 * 1e6 / 989.4e12, abs=0.06)
