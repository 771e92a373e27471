"""Runs of earlier releases can be resumed: every key that was added to their files later has an entry in ADDED_KEYS.

tests/goldens/keys.json has the keys of the first release, 0.2.0. Before that release a key may change freely; then
write the file again: `python -m tests.runs.added_keys_test`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.cross_encoder import make_cross_encoder_model
from jaxret.models.heads import HEADS
from jaxret.models.model import Model
from jaxret.runs.added_keys import ADDED_KEYS, complete_config, complete_contract
from jaxret.runs.contract import make_contract
from jaxret.runs.mismatch import flatten
from jaxret.storage.atomic import read_json, write_json
from tests.pipeline import GOLDENS, write_encoder
from tests.tiny import (
    AGGRETRIEVER,
    BERT,
    COLBERT,
    DUAL_ENCODER,
    I3,
    ME_BERT,
    MLR,
    MODERNBERT,
    MVR,
    SPLADE,
    T5,
    XLM_ROBERTA,
    make_config,
    make_retriever,
)

GOLDEN = GOLDENS / "keys.json"


def current_keys(folder: Path) -> dict[str, list[str]]:
    """Return the flattened keys of config.json, and of contract.json over all models."""
    tokenizer = TextTokenizer.load(write_encoder(folder), 8, 12)
    families = (DUAL_ENCODER, MLR, ME_BERT, COLBERT, MVR, AGGRETRIEVER, I3, SPLADE)
    assert {make_config(family).head.name for family in families} == set(HEADS)
    models: list[Model] = [
        *map(make_retriever, families),
        *(make_retriever({"head.token": "mean"}, shapes) for shapes in (T5, MODERNBERT, XLM_ROBERTA)),
        make_cross_encoder_model(make_config({"task": "reranking"}), BERT),
    ]
    contracts = {key for model in models for key in flatten(make_contract(model, tokenizer, folder))}
    return {
        "config.json": sorted(flatten(make_config({}).to_dict())),
        "contract.json": sorted(key for key in contracts if not key.startswith("tokenizer.")),  # names of files
    }


@pytest.mark.parametrize("file", sorted(ADDED_KEYS))
def test_every_key_is_of_the_first_release_or_has_an_entry(file: str, tmp_path: Path) -> None:
    current, first = set(current_keys(tmp_path)[file]), set(read_json(GOLDEN)[file])
    assert current - first == set(ADDED_KEYS[file]), "jaxret/runs/added_keys.py needs an entry for every added key"
    assert first <= current, "without a key of the first release, its runs could not be opened"


def test_entries_complete_the_files_of_earlier_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADDED_KEYS, "config.json", {"head.mlr.window": 0, "seed.extra": 1})
    monkeypatch.setitem(ADDED_KEYS, "contract.json", {"head.window": 0, "encoder.bias": True})
    config = {"head": {"name": "mlr"}, "seed": {"init": 7, "extra": 5}}
    assert complete_config(config) == {"head": {"name": "mlr", "mlr": {"window": 0}}, "seed": config["seed"]}
    current = {"version": 2, "head": {"name": "mlr", "window": 3}}
    assert complete_contract({"version": 2, "head": {"name": "mlr"}}, current) == {
        "version": 2,
        "head.name": "mlr",
        "head.window": 0,
    }
    assert complete_contract(current, current) == flatten(current)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_json(GOLDEN, current_keys(Path(folder)))
