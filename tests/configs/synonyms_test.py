"""Names of other libraries are hints to those here."""

from __future__ import annotations

import pytest

from jaxret.configs import all_keys, load_config
from jaxret.configs.synonyms import _NAMES, similar_name, suggest_name

KEYS = list(all_keys(load_config("base")))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lr", "optimizer.learning_rate"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("train.learning_rate", "optimizer.learning_rate"),
        ("optimizer.learningRate", "optimizer.learning_rate"),
        ("per_device_train_batch_size", "train.batch_size"),
        ("warmup_ratio", "optimizer.warmup_fraction"),
        ("max_seq_length", "tokens.passage_length"),
        ("document_length", "tokens.passage_length"),
        ("q_max_len", "tokens.query_length"),
        ("trian.steps", "train.steps"),
        ("batch_size", "train.batch_size"),
        ("data.trian", "data.train"),
        ("local_files_only", "encoder.download"),
        ("loss.sparsty.query", "loss.sparsity.query"),
        ("top_k", ""),
        ("unheard_of", ""),
    ],
)
def test_a_key_of_another_library_is_a_key_here(name: str, meant: str) -> None:
    assert similar_name(name, KEYS) == meant


def test_only_names_that_the_command_has_are_suggested() -> None:
    assert suggest_name("top_k", ["workdir", "k"]) == "; did you mean k?"
    assert suggest_name("top_k", ["workdir", "top"]) == ""
    assert suggest_name("output-dir", ["workdir", "k"]) == "; did you mean workdir?"
    assert suggest_name("learning_rate", ["k", "config.optimizer.learning_rate"]).endswith("n config.optimizer.learning_rate?")


def test_every_key_of_the_table_exists() -> None:
    assert {name for name in _NAMES if "." in name} <= set(KEYS)
