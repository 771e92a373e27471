"""Option names of other libraries are answered with jaxret's names."""

from __future__ import annotations

import subprocess

import pytest

from jaxret.configs import all_keys, load_config
from jaxret.configs.synonyms import _NAMES, similar_name, suggest_name
from tests.pipeline import REPOSITORY, command, environment

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
def test_keys_of_other_libraries_suggest_ours(name: str, meant: str) -> None:
    assert similar_name(name, KEYS) == meant


def test_only_existing_names_are_suggested() -> None:
    assert suggest_name("top_k", ["workdir", "k"]) == "; did you mean k?"
    assert suggest_name("top_k", ["workdir", "top"]) == ""
    assert suggest_name("output-dir", ["workdir", "k"]) == "; did you mean workdir?"
    assert suggest_name("learning_rate", ["k", "config.optimizer.learning_rate"]).endswith("n config.optimizer.learning_rate?")


def run_verb(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = command("-m", "jaxret", *arguments)
    return subprocess.run(words, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)


@pytest.mark.parametrize(
    ("verb", "name", "hint"),
    [
        ("search", "output", "did you mean --workdir?"),
        ("search", "n", "did you mean --k?"),
        ("search", "batch_size", "a batch holds as many texts as fit into the run's encode.tokens_per_batch tokens"),
        ("bm25", "out", "did you mean --workdir?"),
        ("export", "output_path", "did you mean --out?"),
        ("mine", "n", "did you mean --keep?"),
        ("keywords", "n", "did you mean --count?"),
        ("encode", "batch_size", "did you mean --tokens_per_batch?"),
        ("compare", "batch_size", ""),
    ],
)
def test_flags_of_other_libraries_are_hints_of_the_verb(verb: str, name: str, hint: str) -> None:
    done = run_verb(verb, f"--{name}=1")
    assert done.returncode == 1
    assert done.stderr == f"error: --{name} is not a flag{'; ' * bool(hint)}{hint} (--help lists them)\n"


def test_every_key_of_the_table_exists() -> None:
    assert {name for name in _NAMES if "." in name} <= set(KEYS)
