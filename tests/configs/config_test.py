"""Every key is read, and every shipped config builds."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxret.data.formats import Corpus
from jaxret.configs import NOT_CONFIGS, load_config, load_stages
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.runs.mismatch import ContractError
from jaxret.parallel.mesh import make_mesh
from jaxret.models.encoders.architectures import EncoderConfig
from jaxret.models.encoders.architectures.bert import BertConfig
from jaxret.models.encoders.architectures.decoder import DecoderConfig
from jaxret.models.encoders.pretrained import load_pretrained
from jaxret.models.encoders.architectures.t5 import T5Config
from jaxret.models.heads import HEADS
from jaxret.models.heads.head import NOT_KEYS
from jaxret.models.retriever_model import make_retriever_model
from jaxret.index.encoding.encode import encode_corpus
from jaxret.runs.run import open_run
from jaxret.mining.keywords import write_keywords
from jaxret.experiments.searches.search_files import search_files
from jaxret.training import loop
from jaxret.training import prepare
from jaxret.training.config_check import check_config, check_text_lengths
from jaxret.training.losses.in_batch import loss_settings
from jaxret.training.optimizers import make_optimizer
from jaxret.training.unread_keys import find_reader
from tests.pipeline import REPOSITORY, flat_config, run_script, tiny_config, write_data, write_encoder, write_language_model, write_t5

CONFIGS = REPOSITORY / "configs"


def module(name: str) -> Any:
    return importlib.import_module(f"jaxret.configs.{name.replace('/', '.')}")


SHIPPED = [
    (name, suffix)
    for path in sorted(CONFIGS.rglob("*.py"))
    if path.name not in NOT_CONFIGS
    for name in [path.relative_to(CONFIGS).with_suffix("").as_posix()]
    for suffix in getattr(module(name), "SUFFIXES", ("",))
]
LANGUAGE_MODELS = ("qwen3", "recipes/language_models")
RECIPES = [case for case in SHIPPED if case[0].startswith("recipes/")]


def shipped(name: str, suffix: str) -> ConfigDict:
    return module(name).get_config(suffix) if suffix else module(name).get_config()


class Reads:
    """A recorder of the keys that are read from any ConfigDict; copying a whole config (`to_dict`) reads nothing."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.keys: set[str] = set()
        self._places: dict[int, tuple[str, ConfigDict]] = {}  # a reference to the config, so that its id stays unique
        self._copying = 0
        get, to_dict = ConfigDict.__getitem__, ConfigDict.to_dict

        def reading(config: ConfigDict, key: str) -> Any:
            value = get(config, key)
            name = self._places.get(id(config), ("", config))[0] + key
            if isinstance(value, ConfigDict):
                self._places[id(value)] = (f"{name}.", value)
            elif not self._copying:
                self.keys.add(name)
            return value

        def copying(config: ConfigDict, *arguments: Any, **options: Any) -> Any:
            self._copying += 1
            try:
                return to_dict(config, *arguments, **options)
            finally:
                self._copying -= 1

        patch.setattr(ConfigDict, "__getitem__", reading)
        patch.setattr(ConfigDict, "to_dict", copying)


@pytest.mark.slow
def test_every_key_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module("jaxret.cli.train")
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    viewers = {"head__name": "mvr", "head__mvr__count": 2, "optimizer__head_learning_rate": 1e-3, "lora__rank": 1}
    config = tiny_config(encoder, data, train__steps=-1, train__epochs=0.2, **viewers)
    with config.unlocked():
        config.train.added = 1  # control: a key that nothing reads
    keys = set(flat_config(config))
    with monkeypatch.context() as patch:
        reads = Reads(patch)
        patch.setattr(script, "_CONFIG", SimpleNamespace(value=config))
        patch.setattr(script, "_WORKDIR", SimpleNamespace(value=str(tmp_path / "run")))
        script.main()
        run = open_run(tmp_path / "run")
        encode_corpus(run, Corpus.open(data), progress=False)
        search_files(run, EvaluationSource.open(data, data), EvaluationOptions(k=5, measures=("RR@5",)), progress=False)
    others = {key for key in keys if key.startswith("head.") and key.split(".")[1] in HEADS.keys() - {"mvr"}}
    others |= {key for key in keys if find_reader("retrieval", key)}  # refused keys: tests/training/unread_keys_test.py
    others.remove("pretraining.method")  # read to refuse keys of other methods, and has no other effect
    assert keys - reads.keys == {"train.added"} | others


def test_a_family_reads_its_own_group_and_no_other() -> None:
    """Every key of a group is a field of the family's class with the same default, and there is no other group."""
    config = importlib.import_module("jaxret.configs.base").get_config()
    shapes = {"num_layers": 12, "hidden_size": 16, "vocab_size": 30522}
    groups = {key for key, value in config.head.items() if isinstance(value, ConfigDict)}
    assert groups == HEADS.keys()
    for name, head in HEADS.items():
        own = {field.name: field.default for field in fields(head) if field.name not in (*NOT_KEYS, "token")}
        assert own == config.head.get(name, ConfigDict()).to_dict(), name
        # The values are those of configs/NAME.py, because a key may have no valid default.
        values = {} if name == "dual_encoder" else shipped(name, "").head[name].to_dict()
        assert set(head(**shapes, **values).contract()) | set(head.NOT_IN_VECTORS) | set(head.FREE) == {*own, "token"}


WORDS = ("MLR", "ME-BERT", "ColBERT", "MVR", "Aggretriever", "I3", "SPLADE", "COIL", "viewer", "lexical", "implicit")


def test_family_names_occur_only_in_their_files() -> None:
    """In code, these are names of the table and of its classes, and the papers' names in messages. Docstrings and
    comments may cite a paper. The demo is an example, like the configs; reproduce is about the papers."""
    classes = {head.__name__ for head in HEADS.values()}
    lines = []
    for path in sorted((REPOSITORY / "jaxret").rglob("*.py")):
        if path.parent.name in ("heads", "demo", "reproduce") or CONFIGS.resolve() in path.parents:
            continue
        tree = ast.parse(path.read_text())
        documented = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
        docs = {id(n.body[0].value) for n in documented if n.body and isinstance(n.body[0], ast.Expr)}
        compared = {id(c) for n in ast.walk(tree) if isinstance(n, ast.Compare) for c in ast.walk(n)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.alias):
                bad = (node.id if isinstance(node, ast.Name) else node.name) in classes
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                # "colbert" is also a data format, so a name of the table only counts in a comparison
                named = node.value in HEADS and id(node) in compared
                bad = named or any(re.search(rf"(?<![A-Z]){word}", node.value) for word in WORDS)
            else:
                continue
            if bad:
                lines.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    assert not lines


@pytest.mark.parametrize(
    ("name", "suffix"),
    [pytest.param(*case, marks=[pytest.mark.exhaustive] if case in RECIPES else []) for case in SHIPPED],
)
def test_a_shipped_config_builds(name: str, suffix: str) -> None:
    config = shipped(name, suffix)
    config.data.train = "somewhere"
    layers = config.encoder.layers or {"minilm": 6, "demo": 6, "qwen3": 28}.get(name, 12)
    encoder: EncoderConfig = BertConfig(
        99, 16, layers, 2, 32, max_positions=512, mlm_head=config.head.name in ("aggretriever", "splade")
    )
    if config.encoder.checkpoint == "t5-base":
        encoder = T5Config(99, 16, layers, 2, 8, 32)
    if name in LANGUAGE_MODELS:
        encoder = DecoderConfig(99, 16, layers, 2, 1, 8, 32, max_positions=512, model_type="qwen3")
    retriever = make_retriever_model(config, encoder)
    check_config(config)
    check_text_lengths(config, retriever)
    loss_settings(config, retriever)
    make_optimizer(config.optimizer, 10)[0].init(jax.eval_shape(retriever.init, jax.random.key(0)))
    assert set(flat_config(config)) == set(flat_config(importlib.import_module("jaxret.configs.base").get_config()))


@pytest.mark.parametrize("name", sorted({name for name, _ in RECIPES}))
def test_a_recipe_is_short(name: str) -> None:
    assert len((CONFIGS / f"{name}.py").read_text().splitlines()) < 70


# The papers' values: learning rate, batch, negatives, epochs, warm-up, clipping, tokens of queries and of passages,
# weight of the local term, one encoder for both sides. None: not recorded.
PAPERS: dict[str, tuple[Any, ...]] = {
    "mlr_open_qa:bert": (2e-5, 128, 1, 40, 0.05, 2.0, 256, 256, 1.0, False),
    "mlr_open_qa:bert_all_layers": (2e-5, 128, 1, 40, 0.05, 2.0, 256, 256, 0.1, False),
    "mlr_open_qa:t5": (5e-4, 128, 1, 40, 0.05, 2.0, 256, 256, 0.0, False),
    "mlr_open_qa:me_bert": (2e-5, 128, 1, 40, 0.05, 2.0, 256, 256, 1.0, False),
    "mlr_open_qa:colbert": (2e-5, 128, 1, 40, 0.05, 2.0, 256, 256, 0.01, False),
    "mlr_open_qa:dual_encoder": (2e-5, 128, 1, 40, 0.05, 2.0, 256, 256, 0.0, False),
    "mlr_open_qa:t5_dual_encoder": (5e-4, 128, 1, 40, 0.05, 2.0, 256, 256, 0.0, False),
    "mlr_open_qa:multi_vector": (2e-5, 128, 1, 40, 0.05, 2.0, 256, 256, 0.0, False),
    "mlr_open_qa:me_bert_multi": (2e-5, 128, 1, 40, 0.05, 2.0, 256, 256, 0.0, False),
    "mlr_open_qa:t5_me_bert": (5e-4, 128, 1, 40, 0.05, 2.0, 256, 256, 0.0, False),
    "mlr_open_qa:t5_me_bert_first": (5e-4, 128, 1, 40, 0.05, 2.0, 256, 256, 0.0, False),
    "mlr_mined:mlr": (5e-06, 128, 1, 40, 0.05, 2.0, 256, 256, 0.1, False),
    "mlr_mined:dual_encoder": (5e-06, 128, 1, 40, 0.05, 2.0, 256, 256, 0.0, False),
    "mlr_msmarco:mlr": (1e-05, 128, 15, 4, 0.05, 2.0, 32, 128, 0.01, False),
    "mlr_msmarco:paper_lengths": (1e-05, 128, 15, 4, 0.05, 2.0, 256, 256, 0.01, False),
    "mlr_msmarco:dual_encoder": (1e-05, 128, 15, 4, 0.05, 2.0, 32, 128, 0.0, False),
    "mlr_msmarco:bert_dual_encoder": (1e-05, 128, 15, 4, 0.05, 2.0, 32, 128, 0.0, False),
    "mlr_msmarco:bert_me_bert": (1e-05, 128, 15, 4, 0.05, 2.0, 32, 128, 0.0, False),
    "mlr_msmarco:bert_colbert": (1e-05, 128, 15, 4, 0.05, 2.0, 32, 128, 0.0, True),
    "mlr_beir:mlr": (3e-05, 128, 15, 10, 0.05, 2.0, 32, 128, 0.01, True),
    "mlr_beir:dual_encoder": (3e-05, 128, 15, 10, 0.05, 2.0, 32, 128, 0.0, True),
    "mvr_open_qa:bert": (2e-05, 128, 1, 40, 1237, 2.0, 256, 256, 0.01, True),
    "mvr_open_qa:cocondenser": (2e-05, 128, 1, 40, 1237, 2.0, 256, 256, 0.01, True),
    "mvr_open_qa:bert_two_encoders": (2e-05, 128, 1, 40, 1237, 2.0, 256, 256, 0.01, False),
    "mvr_open_qa:cocondenser_dual_encoder": (2e-05, 128, 1, 40, 1237, 2.0, 256, 256, 0.0, True),
    "aggretriever_msmarco:bert": (5e-06, 8, 7, 3, 0.1, 1.0, 32, 128, 0.0, True),
    "aggretriever_msmarco:bert_cls": (5e-06, 8, 7, 3, 0.1, 1.0, 32, 128, 0.0, True),
    "aggretriever_msmarco:distilbert": (5e-06, 8, 7, 3, 0.1, 1.0, 32, 128, 0.0, True),
    "aggretriever_msmarco:distilbert_cls": (5e-06, 8, 7, 3, 0.1, 1.0, 32, 128, 0.0, True),
    "aggretriever_msmarco:condenser": (5e-06, 8, 7, 3, 0.1, 1.0, 32, 128, 0.0, True),
    "aggretriever_msmarco:condenser_cls": (5e-06, 8, 7, 3, 0.1, 1.0, 32, 128, 0.0, True),
    "aggretriever_msmarco:cocondenser": (5e-06, 8, 7, 3, 0.1, 1.0, 32, 128, 0.0, True),
    "aggretriever_msmarco:cocondenser_cls": (5e-06, 8, 7, 3, 0.1, 1.0, 32, 128, 0.0, True),
    "aggretriever_msmarco:distilbert_hard": (5e-06, 8, 7, 3, 0.1, 1.0, 32, 128, 0.0, True),
    "aggretriever_open_qa:bert": (2e-05, 128, 1, 40, 1237, 2.0, 32, 156, 0.0, True),
    "aggretriever_open_qa:bert_cls": (2e-05, 128, 1, 40, 1237, 2.0, 32, 156, 0.0, True),
    "aggretriever_open_qa:distilbert": (2e-05, 128, 1, 40, 1237, 2.0, 32, 156, 0.0, True),
    "aggretriever_open_qa:distilbert_cls": (2e-05, 128, 1, 40, 1237, 2.0, 32, 156, 0.0, True),
    "aggretriever_open_qa:condenser": (2e-05, 128, 1, 40, 1237, 2.0, 32, 156, 0.0, True),
    "aggretriever_open_qa:condenser_cls": (2e-05, 128, 1, 40, 1237, 2.0, 32, 156, 0.0, True),
    "aggretriever_open_qa:cocondenser": (2e-05, 128, 1, 40, 1237, 2.0, 32, 156, 0.0, True),
    "aggretriever_open_qa:cocondenser_cls": (2e-05, 128, 1, 40, 1237, 2.0, 32, 156, 0.0, True),
    "i3_msmarco:bert": (2e-5, 16, 127, None, 0.0, 0.0, 32, 140, 0.0, False),
    "i3_msmarco:retromae": (2e-5, 16, 127, None, 0.0, 0.0, 32, 140, 0.0, False),
    "i3_msmarco:distilled": (2e-5, 16, 127, None, 0.0, 0.0, 32, 140, 0.0, False),
    "ance_msmarco:": (1e-6, 64, 1, None, 5000, 1.0, 64, 512, 0.0, True),  # values of its published code
    "splade_msmarco:": (5e-6, 32, 7, 3, 0.1, 1.0, 128, 128, 0.0, True),  # values of Tevatron's example
    "language_models:repllama": (1e-4, 32, 15, 1, 100, 1.0, 32, 196, 0.0, True),
    "language_models:llama3": (1e-4, 32, 15, 1, 100, 1.0, 32, 196, 0.0, True),
    "language_models:mistral": (1e-4, 32, 15, 1, 0.1, 1.0, 32, 156, 0.0, True),
    **{
        f"language_models:qwen3_{size}": (1e-4, 32, 15, 10, 0.1, 1.0, 32, 512, 0.0, True)
        for size in ("0.6b", "4b", "8b")
    },
    "language_models:qwen3_full": (6e-6, 32, 15, 10, 0.1, 1.0, 32, 512, 0.0, True),
    "language_models:gemma_full": (2e-5, 32, 15, 10, 0.1, 1.0, 64, 512, 0.0, True),
}


def test_recipes_have_the_papers_values() -> None:
    warming_up = {f"i3_msmarco:{suffix}" for suffix in ("warm_up", "warm_up_bert", "released", "distilled_released")}
    names = {f"{name.removeprefix('recipes/')}:{suffix}" for name, suffix in RECIPES}
    assert names - warming_up == set(PAPERS)
    for name, expected in PAPERS.items():
        file, suffix = name.split(":")
        c = shipped(f"recipes/{file}", suffix)
        warmup = c.optimizer.warmup_steps if c.optimizer.warmup_steps >= 0 else c.optimizer.warmup_fraction
        values = (
            c.optimizer.learning_rate,
            c.train.batch_size,
            c.data.negatives,
            c.train.epochs,
            warmup,
            c.optimizer.clip_norm,
            c.tokens.query_length,
            c.tokens.passage_length,
            c.loss.local_weight,
            c.encoder.tied,
        )
        assert [f for f, e in zip(values, expected, strict=True) if e is not None] == [
            e for e in expected if e is not None
        ], name
        assert c.optimizer.name == ("lamb" if file in ("i3_msmarco", "ance_msmarco") else "adamw")
        assert set(c.seed.values()) == {12345}
        # MLR's code selects by NLL, and when epoch > 30, counted from 0, by the average rank.
        if file in ("mlr_open_qa", "mlr_mined"):
            v = c.validation
            assert (v.metric, v.then, v.then_from, v.batch_size) == ("nll", "average_rank", 32, 128)
    assert shipped("recipes/mlr_open_qa", "bert").head.mlr.chosen == (10, 12)
    assert shipped("recipes/mlr_open_qa", "bert_all_layers").head.mlr.chosen == tuple(range(1, 13))
    viewers = shipped("recipes/mvr_open_qa", "bert")
    assert (viewers.head.mvr.count, viewers.loss.annealing_rate, viewers.loss.annealing_floor) == (8, 0.1, 0.3)
    lexical = shipped("recipes/aggretriever_msmarco", "bert").head.aggretriever
    assert (lexical.lexical_dim, lexical.cls_dim, lexical.pruning) == (640, 128, "full")
    for suffix, layers in (("bert", (6, 3, 3)), ("retromae", (0, 1, 1))):
        c = shipped("recipes/i3_msmarco", suffix)
        assert (c.encoder.layers, c.head.i3.reconstructor_layers, c.head.i3.interactor_layers) == layers
        assert (c.head.i3.pseudo_length, c.head.i3.reconstruction_decay) == (32, 0.1)
        assert not c.loss.in_batch_negatives
    assert shipped("recipes/i3_msmarco", "released").loss.in_batch_negatives


# The only values that are replaced by small ones: those about a model or about text.
SHRUNKEN = {
    "encoder.layers": 0,
    "head.mlr.chosen": (1, 3),
    "head.i3.reconstructor_layers": 1,
    "head.i3.interactor_layers": 1,
    "head.i3.pseudo_length": 4,
    "head.i3.mask_id": 4,
    "head.mvr.count": 3,
    "head.me_bert.count": 3,
    "head.mvr.first_id": 95,  # the tests' tokenizer has fewer tokens
    "head.aggretriever.lexical_dim": 12,
    "head.aggretriever.cls_dim": 4,
    "tokens.query_length": 12,
    "tokens.passage_length": 24,
    "tokens.length_multiple": 24,
    "data.negatives": 1,
    "train.batch_size": 4,
    "train.chunk_size": 2,
    "train.steps": 1,
}


def distinct_when_shrunken() -> list[tuple[str, str]]:
    """The recipes, with one of those that become equal by SHRUNKEN: they differ in their start weights."""
    cases: dict[str, tuple[str, str]] = {}
    for name, suffix in RECIPES:
        config = shipped(name, suffix).lock()
        config.update_from_flattened_dict(SHRUNKEN)
        config.encoder.checkpoint = "t5" if config.encoder.checkpoint == "t5-base" else "bert"
        cases.setdefault(config.to_json(sort_keys=True), (name, suffix))
    return list(cases.values())


@pytest.mark.daily("recipes/mvr_open_qa-cocondenser_dual_encoder")
@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "suffix"), distinct_when_shrunken())
def test_a_shrunken_recipe_runs(name: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "make_mesh", lambda fsdp=1, tensor=1: make_mesh(fsdp, jax.devices()[:1]))
    config = shipped(name, suffix).lock()
    write = write_t5 if config.encoder.checkpoint == "t5-base" else write_encoder
    write = write_language_model if name in LANGUAGE_MODELS else write
    encoder, data = write(tmp_path / "encoder"), write_data(tmp_path / "data", train=8, dev=2)
    config.update_from_flattened_dict(SHRUNKEN | {"encoder.checkpoint": str(encoder), "data.train": str(data)})
    if name in LANGUAGE_MODELS:  # with a token per character, prompts take most of a text
        config.tokens.query_length = config.tokens.passage_length = 120
        shapes = json.loads((encoder / "config.json").read_text())
        (encoder / "config.json").write_text(json.dumps(shapes | {"max_position_embeddings": 120}))
    if config.lora.rank:  # the rank may not exceed the width of the tiny encoder
        config.lora.rank = 4
    if config.loss.kl.weight:  # a teacher's scores of each query's positive and negative
        scores = tmp_path / "teacher.trec"
        scores.write_text("".join(f"q{i} Q0 p{i} 1 2.0 t\nq{i} Q0 n{i} 2 1.0 t\n" for i in range(8)))
        config.data.teacher_run = str(scores)
    assert loop.train(config, tmp_path / "run", progress=False).step == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [1, 4, 8])
def test_i3_trains_and_validates_in_chunks_of_one_query(
    devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "make_mesh", lambda fsdp=1, tensor=1: make_mesh(fsdp, jax.devices()[:devices]))
    config = shipped("recipes/i3_msmarco", "retromae").lock()
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data", train=16, dev=9)
    places = {"encoder.checkpoint": str(encoder), "data.train": str(data), "data.dev": str(data)}
    small = {key: value for key, value in SHRUNKEN.items() if key != "train.batch_size"}
    config.update_from_flattened_dict(small | places | {"validation.batch_size": 8, "train.chunk_size": 1})
    assert config.train.batch_size == 16
    result = loop.train(config, tmp_path / "run", progress=False)
    assert result.step == 1
    assert np.isfinite(result.metrics["nll"])


@pytest.mark.exhaustive
def test_i3_fine_tuning_starts_from_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "make_mesh", lambda fsdp=1, tensor=1: make_mesh(fsdp, jax.devices()[:1]))
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data", train=8, dev=2)
    queries = tmp_path / "keywords.jsonl"  # pseudo-queries from a file, for a user without a generator
    assert write_keywords(Corpus.open(data), queries, count=3)[0] > 8

    def run(suffix: str, workdir: Path, **more: Any) -> Any:
        config = shipped("recipes/i3_msmarco", suffix).lock()
        paths = {"encoder.checkpoint": str(encoder), "data.train": str(data), "data.pseudo_queries": str(queries)}
        longer = {"train.steps": 8, "train.log_every": 1, "optimizer.head_learning_rate": 0.05}
        config.update_from_flattened_dict(SHRUNKEN | paths | longer | more)
        loop.train(config, workdir, progress=False)
        return jax.device_get(open_run(workdir, "last").params)

    warm = run("warm_up", tmp_path / "warm")
    _, loaded = load_pretrained(encoder, ("pooler",))
    for side in ("query", "passage"):
        jax.tree.map(np.testing.assert_array_equal, warm[f"{side}_encoder"], loaded)
    logged = [json.loads(line) for line in (tmp_path / "warm" / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["reconstruction_loss"] < logged[0]["reconstruction_loss"]
    assert logged[0]["loss"] > logged[0]["reconstruction_loss"], "both losses of eq. 11"
    initial = run("warm_up", tmp_path / "initial", **{"train.steps": 0})
    for part in ("pseudo_inputs", "reconstructor_layers", "interactor_layers"):
        moved = [
            float(np.abs(after - before).max())
            for before, after in zip(
                jax.tree.leaves(initial["passage_head"][part]), jax.tree.leaves(warm["passage_head"][part])
            )
        ]
        assert max(moved) > 1e-3, part
    started = run("retromae", tmp_path / "started", **{"train.start_from": str(tmp_path / "warm"), "train.steps": 0})
    jax.tree.map(np.testing.assert_array_equal, started, warm)
    strangers = tmp_path / "strangers.jsonl"
    strangers.write_text('{"_id": "nobody", "text": "river"}\n')
    with pytest.raises(ValueError, match=r"strangers.jsonl: .*training passage"):
        run("warm_up", tmp_path / "strange", **{"data.pseudo_queries": str(strangers)})
    other = {"train.start_from": str(tmp_path / "warm"), "train.steps": 0, "head.i3.variant": "released"}
    with pytest.raises(ContractError, match=r"head\.variant"):
        run("retromae", tmp_path / "other", **other)


@pytest.mark.parametrize("name", sorted({name for name, suffix in SHIPPED if suffix}))
def test_an_unknown_suffix(name: str) -> None:
    allowed = ", ".join(module(name).SUFFIXES)
    with pytest.raises(ValueError, match=rf"configs/{name}.py:mrl: .*suffix .*{allowed}"):
        shipped(name, "mrl")


def test_an_unknown_key_on_the_command_line_is_an_error(tmp_path: Path) -> None:
    done = run_script("train.py", "--config=configs/base.py", f"--workdir={tmp_path}", "--config.nope=1")
    assert done.returncode != 0
    assert "nope" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("load", [load_config, load_stages])
def test_a_config_file_that_raises_an_error_without_a_message(load: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("assert False\n")
    with pytest.raises(ValueError, match=r"--config=.*mine.py: .*AssertionError"):
        load(str(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.train.batchsize = 64", "mine.py has a key that does not exist, train.batchsize; did you mean train.batch_size?"),
        ("config.lose = 1", "mine.py has a key that does not exist, lose"),
        ("config.loss = ConfigDict()", "mine.py lacks keys, such as loss.annealing_floor, "),
        ('config.train.batch_size = "64"', "mine.py: line 4: batch_size cannot be '64': it must be a whole number"),
        ("config.train.batch_size = 32.5", "mine.py: line 4: batch_size cannot be 32.5: it must be a whole number"),
        ('config.lora.targets = "query"', "mine.py: line 4: targets cannot be 'query': it must be a tuple, such as (1, 2)"),
        ("config.train.steps = missing", "mine.py: line 4: name 'missing' is not defined"),
        ("open('nothing.json')", "mine.py: line 4: [Errno 2] No such file or directory: 'nothing.json'"),
        ("return", "mine.py returns None; end it with return config"),
        ("config.train.steps = 6x4", "(mine.py, line 4)"),
    ],
)
def test_a_mistake_in_a_config_file_names_the_key_or_the_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    lines = ("from jaxret.configs.base import ConfigDict, get_config as base", "def get_config():", "    config = base()")
    path.write_text("\n".join((*lines, f"    {line}", "    return config")))
    with pytest.raises(ValueError, match=r"mine\.py") as caught:
        load_config(str(path))
    assert message in str(caught.value)
    # Control: a correct line is read.
    path.write_text("\n".join((*lines, "    config.train.batch_size = 64", "    return config")))
    assert load_config(str(path)).train.batch_size == 64


def test_a_config_file_without_its_function(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("config = None\n")
    with pytest.raises(ValueError, match=r"mine\.py has no function get_config"):
        load_config(str(path))


def test_a_changed_config_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's cache takes a file for unchanged whose size and time, in seconds, are those of the cached one."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    text = "from jaxret.configs.base import get_config as base\ndef get_config():\n    config = base()\n"
    for size in (64, 32):
        path.write_text(f"{text}    config.train.batch_size = {size}\n    return config\n")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        assert load_config(str(path)).train.batch_size == size
    assert list(tmp_path.iterdir()) == [path]


def test_a_config_file_may_define_a_dataclass(tmp_path: Path) -> None:
    """With postponed annotations, dataclasses look for the module of the file in sys.modules."""
    lines = (
        "from __future__ import annotations",
        "from dataclasses import dataclass",
        "from jaxret.configs import load_config",
        "@dataclass",
        "class Length:",
        "    steps: int = 3",
        "def get_config():",
        "    config = load_config('mlr')",
        "    config.train.steps = Length().steps",
        "    return config",
    )
    (tmp_path / "own.py").write_text("\n".join(lines))
    assert load_config(str(tmp_path / "own.py")).train.steps == 3
