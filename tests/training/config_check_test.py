"""Contradicting settings are reported before anything is loaded, and notices say which settings follow a reference
implementation."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from jaxret.training.config_check import (
    check_config,
    check_retrieval,
    describe_unreached,
    reference_options,
    weak_temperatures,
)
from tests.tiny import BERT, I3, LATE_INTERACTION, MLR, SPLADE, T5, make_config, make_retriever

SOUND: dict[str, Any] = {"data.train": "somewhere", "train.batch_size": 16, "validation.batch_size": 16}


def checked(overrides: dict[str, Any]) -> None:
    check_config(make_config(SOUND | overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optimizer.warmup_fraction": 5.0}, r"optimizer.warmup_fraction is 5.0; it must be at most 1"),
        ({"loss.annealing_floor": 2.0}, r"loss.annealing_floor is 2.0; it must be at most 1"),
        ({"train.profile": ("a", "b")}, r"train.profile .*'a', 'b'.*; .*whole numbers"),
        ({"lora.targets": (3,), "lora.rank": 4}, r"lora.targets .*3.*; .*texts"),
        ({"train.chunk_size": -1}, r"train.chunk_size .*-1; .*least 0"),
        ({"validation.metric": "MRR"}, r"validation.metric .*'MRR'; .*nll, average_rank, RR@10"),
        ({"validation.then": "MRR"}, r"validation.then .*'MRR'; .*nll, average_rank, RR@10"),
        (
            {"validation.metric": "nDCG@10"},
            r"validation.metric .*'nDCG@10'; .*measured",
        ),
        ({"validation.corpus": "there"}, r"validation.corpus is set, but data.dev is empty"),
        ({"data.dev_negatives_run": "ranks.trec"}, r"data.dev_negatives_run .*'ranks.trec', .*data.dev .*empty"),
        ({"data.dev_split": "test"}, r"data.dev_split .*'test', .*data.dev .*empty"),
        ({"train.profile": (20, 25), "train.steps": 19}, r"train.profile .*\(20, 25\), .*train.steps .*19"),
        (
            {"loss.local_weight": 0.1, "loss.contrastive_weight": 0.0, "loss.binary.weight": 1.0},
            r"loss.local_weight .*0.1, .*loss.contrastive_weight, .*0",
        ),
        ({"data.on_error": "ignore"}, r"data.on_error .*'ignore'; .*error, skip, keep"),
        ({"validation.then_from": -1.0}, r"validation.then_from .*-1.0; .*least 0"),
        ({"train.log_every": 0}, r"train.log_every is 0"),
        (
            {"tokens.packing": True, "encoder.attention": "flash"},
            r"tokens.packing .*True .*encoder.attention 'flash', .*kernel",
        ),
        ({"train.batch_size": -8}, r"train.batch_size .*-8; .*least 1"),
        ({"tokens.query_prompt": "query\udcff: "}, r"tokens.query_prompt is 'query\\udcff: '; write it in UTF-8"),
        ({"tokens.length_multiple": 0}, r"tokens.length_multiple .*0; .*least 1"),
        ({"optimizer.b2": 1.0}, r"optimizer.b2 is 1.0; it must be below 1"),
        ({"optimizer.ema": 1.0}, r"optimizer.ema is 1.0; it must be below 1"),
        ({"train.accumulate": 0}, r"train.accumulate .*0; .*least 1"),
        ({"train.skip_nonfinite": -1}, r"train.skip_nonfinite .*-1; .*least 0"),
        ({"seed.data": -1}, r"seed.data .*-1; .*least 0"),
        ({"seed.init": 2**32}, r"seed.init is 4294967296; it must be below 4294967296"),
        ({"loss.temperature": float("nan")}, r"loss.temperature .*finite number"),
        ({"data.train": ""}, r"data.train is empty"),
        ({"data.store": __file__}, r"data.store .*check_test.py, .*folder"),
        ({"train.epochs": -1.0}, r"train.epochs is -1.0"),
        ({"optimizer.learning_rate": 0.0}, r"optimizer.learning_rate is 0.0"),
        (
            {"encoder.attention_dropout": -0.5},
            r"encoder.attention_dropout .*-0.5; .*0 .*below 1",
        ),
        ({"encoder.attention_dropout": 1.0}, r"encoder.attention_dropout .*1.0; .*0 .*below 1, .*-1"),
        ({"encode.dtype": "bfloat16"}, r"encode.dtype .*'bfloat16'; .*float32, float16"),
        ({"encode.shard_rows": 0}, r"encode.shard_rows is 0"),
        ({"encode.words": -1}, r"encode.words is -1; it must be at least 0"),
        ({"encode.tokens_per_batch": -1}, r"encode.tokens_per_batch is -1"),
        (
            I3 | {"loss.contrastive_weight": 0.0, "data.dev": "somewhere"},
            r"loss.contrastive_weight .*0, .*meaningless",
        ),
        (I3 | {"data.pseudo_queries": "", "loss.contrastive_weight": 0.0}, r"there is nothing to learn"),
        ({"loss.in_batch_negatives": False, "data.negatives": 0}, r"positive .*nothing .*compete"),
        ({"validation.best": "first"}, r"validation.best .*'first'; .*metric"),
    ],
)
def test_contradicting_settings_are_errors(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(overrides)


DEV = {"data.dev": "somewhere", "validation.then": "nll"}


@pytest.mark.parametrize(
    ("overrides", "steps", "epochs", "warnings"),
    [
        (SPLADE, 3, 1.0, [r"loss.sparsity.steps is 4, .*3 steps: .* 0.562 "]),
        (SPLADE | {"loss.sparsity.passage": 0.0}, 3, 1.0, ["loss.sparsity.steps"]),
        (DEV, 9, 20.0, [r"validation.then_from is 32, .*20 epochs: .*'nll'"]),
        (SPLADE | DEV, 3, 0.1, ["loss.sparsity.steps", "validation.then_from"]),
        (SPLADE, 4, 1.0, []),
        (SPLADE, 0, 0.0, []),
        (SPLADE | {"loss.sparsity.query": 0.0, "loss.sparsity.passage": 0.0}, 3, 1.0, []),
        (DEV, 9, 32.0, []),
        (DEV | {"validation.best": "last"}, 9, 20.0, []),
        (DEV | {"data.dev": ""}, 9, 20.0, []),
    ],
)
def test_keys_whose_step_or_epoch_is_not_reached(
    overrides: dict[str, Any], steps: int, epochs: float, warnings: list[str]
) -> None:
    texts = list(describe_unreached(make_config(overrides), steps, epochs))
    assert len(texts) == len(warnings)
    assert all(re.search(pattern, text) for pattern, text in zip(warnings, texts))


def test_sound_settings() -> None:
    checked({})
    checked(I3 | {"loss.contrastive_weight": 0.0})
    checked({"train.batch_size": 12, "validation.batch_size": 12, "train.chunk_size": 4})


@pytest.mark.parametrize(
    ("overrides", "encoder", "name"),
    [
        (I3 | {"head.i3.variant": "released"}, BERT, "head.i3.variant=released"),
        ({"optimizer.name": "lamb_reference"}, BERT, "optimizer.name=lamb_reference"),
        ({"optimizer.reference_processes": 4}, BERT, "optimizer.reference_processes=4"),
        ({"data.dev": "somewhere", "validation.metric": "average_rank"}, BERT, "the best checkpoint by average_rank"),
        ({"data.dev": "somewhere", "validation.then": "average_rank"}, BERT, "the best checkpoint by average_rank"),
    ],
)
def test_reference_behaviour_is_named_when_it_is_on(overrides: dict[str, Any], encoder: Any, name: str) -> None:
    (description,) = reference_options(make_config(overrides), make_retriever(overrides, encoder))
    assert description.startswith(name)


def test_no_clipping_is_no_reference_clipping() -> None:
    overrides = {"optimizer.reference_processes": 4, "optimizer.clip_norm": 0.0}
    assert reference_options(make_config(overrides), make_retriever(overrides)) == []


@pytest.mark.parametrize(("overrides", "encoder"), [({}, BERT), (I3, BERT), (MLR | {"head.token": "mean"}, T5)])
def test_reference_behaviour_is_off_by_default(overrides: dict[str, Any], encoder: Any) -> None:
    assert reference_options(make_config(overrides), make_retriever(overrides, encoder)) == []


def test_words_of_dense_vectors_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"encode.words is 8, .*'dual_encoder' .*not weights"):
        check_retrieval(make_config({"encode.words": 8}), make_retriever({}))
    check_retrieval(make_config(SPLADE | SHORT | {"encode.words": 8}), make_retriever(SPLADE))


def test_unused_pseudo_queries_are_errors() -> None:
    overrides = {"data.pseudo_queries": "query"}
    with pytest.raises(ValueError, match=r"data.pseudo_queries .*'dual_encoder' reads .*pseudo-queries"):
        check_retrieval(make_config(overrides), make_retriever(overrides))
    check_retrieval(make_config(I3 | SHORT), make_retriever(I3))


def test_cudnn_needs_the_dropout_of_weights_to_be_off() -> None:
    overrides = SHORT | {"encoder.attention": "cudnn", "encoder.dtype": "bfloat16"}
    with pytest.raises(ValueError, match=r"the encoder's rate is 0.1 .*: set encoder.attention_dropout=0"):
        check_retrieval(make_config(overrides), make_retriever(overrides))
    check_retrieval(make_config(overrides), make_retriever(overrides, replace(BERT, attention_dropout=0.0)))


SHORT = {"tokens.query_length": 8, "tokens.passage_length": 12}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, ""),
        ({"normalize": True}, "loss.temperature is 1, but scores are cosines"),
        ({"normalize": True, "loss.temperature": 0.05}, ""),
        ({"normalize": True, "loss.temperature": 0.05, "loss.kl.weight": 1.0}, "loss.kl.temperature is 1, but scores"),
        ({"normalize": True, "loss.contrastive_weight": 0.0, "loss.kl.weight": 1.0, "loss.kl.temperature": 0.1}, ""),
        (LATE_INTERACTION | {"loss.temperature": 1.0}, ""),
    ],
)
def test_high_temperatures_for_cosines_print_a_notice(overrides: dict[str, Any], expected: str) -> None:
    warning = weak_temperatures(make_config(overrides), make_retriever(overrides))
    assert warning.startswith(expected)
    assert bool(warning) == bool(expected)
