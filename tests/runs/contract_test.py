"""A contract holds what changes a vector and nothing else, and older ones are understood."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from jaxret.contract import ContractError, flatten
from jaxret.data.tokenizer import TextTokenizer
from jaxret.models.encoders.bert import BertConfig
from jaxret.models.retriever import BiEncoder, build_retriever
from jaxret.runs import upgrade as tables
from jaxret.runs.contract import make_contract, require_same, understood
from jaxret.runs.upgrade import ABSENT, upgrade
from jaxret.storage import read_json
from tests.pipeline import REPOSITORY, write_encoder
from tests.tiny import AGGRETRIEVER, BERT, COLBERT, I3, MLR, make_config, make_retriever

FAMILIES = read_json(REPOSITORY / "tests" / "older_run" / "families.json")
BASE = BertConfig(
    vocab_size=30522,
    hidden_size=768,
    num_layers=12,
    num_heads=12,
    intermediate_size=3072,
    max_positions=512,
    type_vocab_size=2,
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("contract") / "encoder")


@functools.cache
def loaded(encoder: Path) -> TextTokenizer:
    return TextTokenizer.load(encoder, 3, 3)


def tokenizer(encoder: Path, query_length: int = 32, passage_length: int = 156) -> TextTokenizer:
    return replace(loaded(encoder), query_length=query_length, passage_length=passage_length)


def contract(encoder: Path, retriever: BiEncoder, **lengths: int) -> dict[str, Any]:
    return make_contract(retriever, tokenizer(encoder, **lengths), encoder)


def test_it_names_files_ids_and_the_whole_encoder(encoder: Path) -> None:
    found = contract(encoder, make_retriever(MLR))
    assert found["version"] == 2
    assert set(found["tokenizer"]) == {"tokenizer.json", "tokenizer_config.json"}
    assert found["special_ids"] == {"cls": 2, "sep": 3, "pad": 0, "mask": 4}
    assert found["encoder"]["layer_norm_eps"] == 1e-12
    assert found["encoder"]["num_heads"] == 2
    assert found["head"] == {"name": "layers", "token": "cls", "chosen": [0, 1, 2]}
    assert (found["query_length"], found["passage_length"]) == (32, 156)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (MLR, MLR | {"head.layers.chosen": (1, 2)}, False),
        (MLR, MLR | {"encoder.tied": True}, False),
        (MLR, MLR | {"encoder.dtype": "bfloat16"}, False),
        (MLR, MLR | {"normalize": True}, False),
        (MLR, MLR | {"pooling": "average"}, False),
        (AGGRETRIEVER, AGGRETRIEVER | {"head.lexical.lexical_dim": 10}, False),
        (AGGRETRIEVER, AGGRETRIEVER | {"head.lexical.chunk": 4}, True),  # memory
        (MLR, MLR | {"encoder.recompute": "cheap"}, True),
        (MLR, MLR | {"encoder.attention": "flash"}, True),
        (MLR, MLR | {"head.all_tokens.projection": 4, "head.implicit.mask_id": 9}, True),  # of other families
        (COLBERT, COLBERT | {"head.all_tokens.projection": 4}, False),
        (I3, I3 | {"head.implicit.mask_id": 9}, False),
    ],
)
def test_what_changes_a_vector_changes_it(
    one: dict[str, Any], other: dict[str, Any], same: bool, encoder: Path
) -> None:
    assert (contract(encoder, make_retriever(one)) == contract(encoder, make_retriever(other))) is same


def test_the_encoder_and_the_tokenizer_count_to_the_last_constant(encoder: Path, tmp_path: Path) -> None:
    before = contract(encoder, make_retriever(MLR))
    assert contract(encoder, make_retriever(MLR, replace(BERT, layer_norm_eps=1e-2))) != before
    assert contract(encoder, make_retriever(MLR), query_length=31) != before
    other = write_encoder(tmp_path / "encoder")
    assert contract(other, make_retriever(MLR)) == before, "control"
    settings = (other / "tokenizer_config.json").read_text()
    (other / "tokenizer_config.json").write_text(settings.replace('"cls_token": "[CLS]"', '"cls_token": "[MASK]"'))
    loaded.cache_clear()
    changed = contract(other, make_retriever(MLR))
    assert changed["special_ids"]["cls"] == 4
    assert changed["tokenizer"] != before["tokenizer"]


def older(family: str, encoder: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """A contract of the first version, the one that its config makes today, and the tokenizer's digest."""
    return copy.deepcopy(_older(family, encoder))


@functools.cache
def _older(family: str, encoder: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    config = ConfigDict(upgrade(FAMILIES[family]["config"]))
    bert = BASE
    if config.head.name == "lexical":
        bert = BertConfig(**{**vars(BASE), "mlm_head": True})
    reader = tokenizer(encoder, config.tokens.query_length, config.tokens.passage_length)
    stored = FAMILIES[family]["contract"] | {"tokenizer": reader.digest}
    return stored, make_contract(build_retriever(config, bert), reader, encoder), reader.digest


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_older_contract_is_understood(family: str, encoder: Path) -> None:
    stored, now, digest = older(family, encoder)
    assert understood(stored, now, digest) == now
    require_same(stored, now, digest, "there", "here", "")
    stored["head"]["brand_new"] = 3  # of another family: nobody reads it
    require_same(stored, now, digest, "there", "here", "")


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pooling": "scalar_mix"}, "pooling"),
        ({"normalize": "other"}, "normalize"),
        ({"text": "text"}, "text"),
        ({"tokenizer": "00"}, "tokenizer"),
        ({"query_length": 7}, "query_length"),
        ({"encoder.layers": 7}, "encoder.num_layers"),
        ({"encoder.hidden_size": 7}, "encoder.hidden_size"),
        ({"encoder.type": "t5"}, "encoder.model_type"),
        ({"encoder.tied": "neither"}, "encoder.tied"),
        ({"encoder.dtype": "bfloat16"}, "encoder.dtype"),
        ({"head.name": "other"}, "head.name"),
    ],
)
def test_a_difference_to_an_older_contract_is_refused(
    family: str, change: dict[str, Any], named: str, encoder: Path
) -> None:
    stored, now, digest = older(family, encoder)
    stored = tables.nested(flatten(stored) | change)
    with pytest.raises(ContractError, match=rf"(?m)^  {named}"):
        require_same(stored, now, digest, "there", "here", "")


def test_what_an_older_head_recorded_counts(encoder: Path) -> None:
    for family, key, value in (("mlr", "layers", [3, 12]), ("me_bert", "count", 5), ("colbert", "projection", 9)):
        stored, now, digest = older(family, encoder)
        stored["head"][key] = value
        with pytest.raises(ContractError, match=r"(?m)^  head\."):
            require_same(stored, now, digest, "there", "here", "")
    stored, now, digest = older("mlr", encoder)
    with pytest.raises(ContractError, match=r"(?m)^  query_prompt: '' in there, 'river ' in here"):
        require_same(stored, {**now, "query_prompt": "river "}, digest, "there", "here", "")


def test_lengths_may_be_each_sides_own(encoder: Path) -> None:
    now, other = (contract(encoder, make_retriever(MLR), passage_length=n) for n in (156, 200))
    require_same(other, now, "", "there", "here", "", lengths=False)
    with pytest.raises(ContractError, match="passage_length: 200 in there, 156 in here"):
        require_same(other, now, "", "there", "here", "")
    assert other["passage_length"] == 200, "the arguments stay as they were"


@pytest.mark.parametrize("name", ["query_prompt", "passage_prompt", "title_separator"])
def test_prompts_and_separator_count_and_there_were_none_before(name: str, encoder: Path) -> None:
    retriever, usual = make_retriever(MLR), tokenizer(encoder)
    now = make_contract(retriever, usual, encoder)
    changed: dict[str, Any] = {name: "river "}
    other = make_contract(retriever, replace(usual, **changed), encoder)
    assert (now[name], other[name]) == ("[SEP]" if name == "title_separator" else "", "river ")
    stored = {key: value for key, value in now.items() if key != name}
    require_same(stored, now, "", "there", "here", "")
    for one, two in ((stored, other), (other, now)):
        with pytest.raises(ContractError, match=rf"(?m)^  {name}: "):
            require_same(one, two, "", "there", "here", "")


@pytest.mark.parametrize("stored", [{}, {"version": 3}, {"version": 2, "encoder": 4}, {"encoder": [], "head": 3}])
def test_no_contract_is_a_contract_error(stored: Any, encoder: Path) -> None:
    with pytest.raises(ContractError):
        require_same(stored, contract(encoder, make_retriever(MLR)), "", "there", "here", "")


def test_every_key_of_today_is_known_of_older_configs() -> None:
    """Who adds a key says in ABSENT what the code did without it; who moves one, in RENAMED where it went."""
    for family in FAMILIES.values():
        found = set(flatten(upgrade(family["config"])))
        assert found == set(flatten(make_config({}).to_dict())), "jaxret/runs/upgrade.py"


def test_the_tables_move_share_drop_and_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RENAMED", {"head.count": ("head.a.count", "head.b.count"), "gone": ()})
    monkeypatch.setattr(tables, "ABSENT", {"head.a.window": 0, "seed": 1})
    old = {"head": {"count": 3, "name": "a"}, "gone": True, "seed": 7}
    new = {"head": {"name": "a", "a": {"count": 3, "window": 0}, "b": {"count": 3}}, "seed": 7}
    assert upgrade(old) == new
    assert upgrade(new) == new


def test_a_key_that_has_other_values_now() -> None:
    for before, now in ((True, "layer"), (False, "none")):
        assert upgrade({"encoder": {"remat": before}})["encoder"]["recompute"] == now
    assert upgrade({"encoder": {"recompute": "cheap"}})["encoder"]["recompute"] == "cheap"


def test_a_key_that_came_later_means_what_the_code_did_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new key of the run's own family, and a new field of its encoder with a default: older contracts lack them."""
    retriever = make_retriever(MLR)
    now = {"version": 2, **json.loads(json.dumps(retriever.contract()))}
    stored = json.loads(json.dumps(now))
    now["head"]["window"] = 0
    del stored["encoder"]["hidden_act"]
    with pytest.raises(ContractError, match=r"head.window: '\(absent\)'"):
        require_same(stored, now, "", "contract.json", "the files", "")
    monkeypatch.setitem(ABSENT, "head.layers.window", 0)
    require_same(stored, now, "", "contract.json", "the files", "")
    for group, key, value in (("head", "window", 1), ("encoder", "hidden_act", "relu")):
        other = {**now, group: {**now[group], key: value}}
        with pytest.raises(ContractError, match=rf"{group}.{key}"):
            require_same(stored, other, "", "contract.json", "the files", "")
