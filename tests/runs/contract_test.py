"""A contract has all settings that change a vector, and no others."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.retriever_model import RetrieverModel
from jaxret.runs.contract import make_contract, require_same_contract
from jaxret.runs.mismatch import ContractError
from tests.pipeline import write_encoder
from tests.tiny import AGGRETRIEVER, BERT, COLBERT, I3, MLR, make_retriever


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("contract") / "encoder")


@functools.cache
def loaded(encoder: Path) -> TextTokenizer:
    return TextTokenizer.load(encoder, 3, 3)


def tokenizer(encoder: Path, query_length: int = 32, passage_length: int = 156) -> TextTokenizer:
    return replace(loaded(encoder), query_length=query_length, passage_length=passage_length)


def contract(encoder: Path, retriever: RetrieverModel, **lengths: int) -> dict[str, Any]:
    return make_contract(retriever, tokenizer(encoder, **lengths), encoder)


def test_the_contract_names_files_ids_and_the_encoder(encoder: Path) -> None:
    actual = contract(encoder, make_retriever(MLR))
    assert actual["version"] == 2
    assert set(actual["tokenizer"]) == {"tokenizer.json", "tokenizer_config.json"}
    assert actual["special_ids"] == {"cls": 2, "sep": 3, "pad": 0, "mask": 4}
    assert actual["encoder"]["layer_norm_eps"] == 1e-12
    assert actual["encoder"]["num_heads"] == 2
    assert actual["head"] == {"name": "mlr", "token": "cls", "chosen": [0, 1, 2]}
    assert (actual["query_length"], actual["passage_length"]) == (32, 156)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (MLR, MLR | {"head.mlr.chosen": (1, 2)}, False),
        (MLR, MLR | {"encoder.tied": True}, False),
        (MLR, MLR | {"encoder.dtype": "bfloat16"}, False),
        (MLR, MLR | {"normalize": True}, False),
        (MLR, MLR | {"pooling": "average"}, False),
        (AGGRETRIEVER, AGGRETRIEVER | {"head.aggretriever.lexical_dim": 10}, False),
        (AGGRETRIEVER, AGGRETRIEVER | {"head.aggretriever.chunk": 4}, True),  # changes only memory
        (MLR, MLR | {"encoder.recompute": "cheap"}, True),
        (MLR, MLR | {"encoder.attention": "flash"}, True),
        (MLR, MLR | {"head.colbert.projection": 4, "head.i3.mask_id": 9}, True),  # keys of other families
        (COLBERT, COLBERT | {"head.colbert.projection": 4}, False),
        (I3, I3 | {"head.i3.mask_id": 9}, False),
    ],
)
def test_every_key_that_changes_a_vector_changes_the_contract(
    one: dict[str, Any], other: dict[str, Any], same: bool, encoder: Path
) -> None:
    assert (contract(encoder, make_retriever(one)) == contract(encoder, make_retriever(other))) is same


def test_constants_of_encoder_and_tokenizer_are_in_the_contract(encoder: Path, tmp_path: Path) -> None:
    before = contract(encoder, make_retriever(MLR))
    assert contract(encoder, make_retriever(MLR, replace(BERT, layer_norm_eps=1e-2))) != before
    assert contract(encoder, make_retriever(MLR), query_length=31) != before
    other = write_encoder(tmp_path / "encoder")
    assert contract(other, make_retriever(MLR)) == before, "control: an equal encoder has an equal contract"
    settings = (other / "tokenizer_config.json").read_text()
    (other / "tokenizer_config.json").write_text(settings.replace('"cls_token": "[CLS]"', '"cls_token": "[MASK]"'))
    loaded.cache_clear()
    changed = contract(other, make_retriever(MLR))
    assert changed["special_ids"]["cls"] == 4
    assert changed["tokenizer"] != before["tokenizer"]


def test_lengths_may_differ_by_side(encoder: Path) -> None:
    now, other = (contract(encoder, make_retriever(MLR), passage_length=n) for n in (156, 200))
    require_same_contract(other, now, "there", "here", "", lengths=False)
    with pytest.raises(ContractError, match="passage_length: 200 in there, 156 in here"):
        require_same_contract(other, now, "there", "here", "")
    assert other["passage_length"] == 200, "the arguments are unchanged"


@pytest.mark.parametrize("name", ["query_prompt", "passage_prompt", "title_separator"])
def test_prompts_and_separator_are_in_the_contract(name: str, encoder: Path) -> None:
    retriever, usual = make_retriever(MLR), tokenizer(encoder)
    now = make_contract(retriever, usual, encoder)
    changed: dict[str, Any] = {name: "river "}
    other = make_contract(retriever, replace(usual, **changed), encoder)
    assert (now[name], other[name]) == ("[SEP]" if name == "title_separator" else "", "river ")
    with pytest.raises(ContractError, match=rf"(?m)^  {name}: "):
        require_same_contract(other, now, "there", "here", "")


@pytest.mark.parametrize("stored", [{}, {"version": 2}, {"version": 2, "encoder": 4}])
def test_a_missing_contract_is_an_error(stored: Any, encoder: Path) -> None:
    with pytest.raises(ContractError):
        require_same_contract(stored, contract(encoder, make_retriever(MLR)), "there", "here", "")


def test_another_version_is_refused_in_one_sentence(encoder: Path) -> None:
    current = contract(encoder, make_retriever(MLR))
    with pytest.raises(ContractError) as caught:
        require_same_contract(current | {"version": 3}, current, "run/contract.json", "here", "")
    message = "run/contract.json has contract version 3, and this jaxret has 2: use the version of jaxret that wrote it"
    assert str(caught.value) == message
