"""Model folders that were made to break their reader: the error is one sentence with the file, after little memory and
time."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from jaxret import plan
from jaxret.data.records import Query
from jaxret.data.tokens.backend import load_backend, rules_growth
from jaxret.data.tokens.expressions import check_expressions
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.architectures import ARCHITECTURES, read_config, require_stored_sizes, stored_tensors
from jaxret.models.encoders.pretrained import load_pretrained
from jaxret.models.encoders.sentence_transformers import read_sentence_transformers_keys
from jaxret.models.encoders.weight_files import weight_shapes
from jaxret.storage.foreign_files import MOST_SETTINGS, open_tensors, read_tensors
from tests.pipeline import run_measured, write_encoder, write_language_model, write_t5
from tests.sentence_transformers import write_modules

Damage = Callable[[Path], None]


def edit_json(name: str, **values: Any) -> Damage:
    """Return a function that changes keys of a JSON file of a folder."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def grow(name: str, size: int) -> Damage:
    """Return a function that fills a JSON file up to a size with a value that nothing reads."""

    def change(folder: Path) -> None:
        path = folder / name
        text = json.dumps(json.loads(path.read_text()) | {"unread": "MARK"})
        path.write_text(text.replace("MARK", "x" * (size - len(text) + len("MARK"))))

    return change


def normalize(*rules: normalizers.Normalizer) -> Damage:
    """Return a function that sets the normalizer of tokenizer.json."""

    def change(folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.normalizer = normalizers.Sequence(list(rules))  # type: ignore[assignment]
        tokenizer.save(str(folder / "tokenizer.json"))

    return change


def pad(length: int, multiple: int | None = None) -> Damage:
    strategy = {"Fixed": length} if multiple is None else "BatchLongest"
    padding = {"strategy": strategy, "direction": "Right", "pad_to_multiple_of": multiple, "pad_id": 0}
    return edit_json("tokenizer.json", padding=padding | {"pad_type_id": 0, "pad_token": "[PAD]"})


def overwrite(name: str, change: Callable[[bytes], bytes]) -> Damage:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return apply


def as_float8(data: bytes) -> bytes:
    return data.replace(b'"dtype":"F32"', b'"dtype":"F8_E4M3"', 1)


def surround(count: int) -> Damage:
    """Return a function that makes tokenizer.json put this many tokens in front of a text."""

    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        rules = json.loads(path.read_text())
        piece = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}
        rules["post_processor"]["single"] = [piece] * count + rules["post_processor"]["single"]
        rules["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [2] * count
        rules["post_processor"]["special_tokens"]["[CLS]"]["tokens"] = ["[CLS]"] * count
        path.write_text(json.dumps(rules))

    return change


def undefine(token: str) -> Damage:
    """Return a function that removes a token from the special tokens of tokenizer.json's post-processor."""

    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        rules = json.loads(path.read_text())
        del rules["post_processor"]["special_tokens"][token]
        path.write_text(json.dumps(rules))

    return change


WEIGHTS = "model.safetensors"
TENFOLD = normalizers.Replace("a", "a" * 10)
CASES: dict[str, tuple[Damage, str]] = {
    "a billion layers": (
        edit_json("config.json", num_hidden_layers=10**9),
        r"config.json: num_hidden_layers is 1000000000; it must be a whole number from 1 to 10,000",
    ),
    "more layers than tensors": (
        edit_json("config.json", num_hidden_layers=9_999),
        r"config.json: num_hidden_layers is 9,999, but model.safetensors next to it has \d+ tensors",
    ),
    "a wide layer": (
        edit_json("config.json", hidden_size=2**40),
        r"config.json: hidden_size is 1,099,511,627,776, but model.safetensors next to it has 99 as its largest axis",
    ),
    "many words": (edit_json("config.json", vocab_size=10**12), r"config.json: vocab_size is 1,000,000,000,000, but"),
    "a large config": (
        grow("config.json", 300 * 10**6),
        r"config.json has 300,000,000 bytes; .* at most 8,388,608",
    ),
    "large settings": (grow("tokenizer_config.json", MOST_SETTINGS + 1), r"tokenizer_config.json has 8,388,609 bytes"),
    "a large tokenizer": (grow("tokenizer.json", 300 * 10**6), r"tokenizer.json has 300,000,000 bytes"),
    "a normalizer that multiplies": (
        normalize(*[TENFOLD] * 9),
        r"tokenizer.json: its rules may turn one character into 1,000,000,000, and 100",
    ),
    "an expression that tries every division": (
        normalize(normalizers.Replace(Regex("(a+)+b"), "x")),
        r"tokenizer.json: the regular expression '\(a\+\)\+b' did not end within",
    ),
    "an expression that grows with the third power": (
        normalize(normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(".*.*(?<=0)"), "x")),
        r"tokenizer.json: the regular expression '\.\*\.\*\(\?<=0\)' did not end within",
    ),
    "twenty thousand tokens around a text": (
        surround(20_000),
        r"tokenizer.json puts [\d,]+ tokens around texts; 256 are allowed",
    ),
    "an undefined token around a text": (
        undefine("[CLS]"),
        r"tokenizer.json: post_processor puts '\[CLS\]' around texts, but its special_tokens lack it",
    ),
    "a billion labels": (
        edit_json("config.json", num_labels=10**9),
        r"config.json: num_labels is 1000000000; it must be a whole number from 0 to 100,000",
    ),
    "labels without numbers": (
        edit_json("config.json", id2label={"a": "x"}),
        r"config.json: id2label is .*; it must be an object with numbers as keys",
    ),
    "padding that is no word": (
        edit_json("config.json", pad_token_id=10**12),
        r"config.json: pad_token_id is 1000000000000; it must be an id below vocab_size, 99",
    ),
    "many positions": (
        edit_json("config.json", max_position_embeddings=10**12),
        r"config.json: max_position_embeddings is 1,000,000,000,000, but model.safetensors next to it has 99 as its",
    ),
    "many types": (
        edit_json("config.json", type_vocab_size=10**12),
        r"config.json: type_vocab_size is 1,000,000,000,000",
    ),
    "padding": (pad(10**9), r"tokenizer.json pads texts to 1,000,000,000 tokens"),
    "padding to a multiple": (pad(0, 10**9), r"tokenizer.json pads texts to 1,000,000,000 tokens"),
    "weights cut short": (overwrite(WEIGHTS, lambda data: data[:-100]), r"model.safetensors is damaged, or is no"),
    "no weights": (overwrite(WEIGHTS, lambda data: b""), r"model.safetensors is damaged, or is not a safetensors file"),
    "a header of junk": (overwrite(WEIGHTS, lambda data: data[:8] + b"x" * 200), r"model.safetensors is damaged, or"),
    "a header without end": (overwrite(WEIGHTS, lambda data: b"\xff" * 7 + b"\x0f{}"), r"model.safetensors is damaged"),
    "a type that numpy lacks": (overwrite(WEIGHTS, as_float8), r"model.safetensors(: .* is stored as F8_E4M3| is dam)"),
}
DAILY = ("a billion layers", "a normalizer that multiplies", "weights cut short", "a large config")


def open_both(folder: Path) -> None:
    load_pretrained(folder)
    TextTokenizer.load(folder, 8, 8)


@pytest.mark.table
@pytest.mark.faults(33, refused=True)
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_folder_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    damage, message = CASES[name]
    folder = write_encoder(tmp_path / "model")
    open_both(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message) as raised:
        open_both(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


PUBLISHED = sorted(path.parent for path in Path(plan.__file__).with_name("encoders").rglob("config.json"))


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_published_models_have_the_sizes_of_their_weights(folder: Path) -> None:
    """Llama 3.1 has 131,072 positions and 128,256 words, Mistral 7B v0.1 has 32,768 and 32,000."""
    config = read_config(folder)
    tensors = stored_tensors(config).values()
    shapes = {name: tensor.shape for tensor in tensors for name in tensor.names}
    require_stored_sizes(config, ARCHITECTURES[config.model_type], folder / "config.json", shapes)


@pytest.mark.faults(33, refused=True)
@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ("tiny_qwen3", {"layer_types": ["full_attention"], "num_hidden_layers": 10**9}, "layer_types is"),
        ("tiny_gemma3", {"layer_types": ["full_attention"], "num_hidden_layers": 10**9}, "layer_types is"),
        ("tiny_qwen3", {"head_dim": 10**9}, r"head_dim .*1,000,000,000, .*model.safetensors next to .*99"),
        ("tiny_llama", {"head_dim": 10**9}, r"head_dim .*1,000,000,000, .*model.safetensors next to .*99"),
        ("tiny_qwen3", {"num_hidden_layers": "four"}, r"num_hidden_layers .*'four'; .*number"),
        ("tiny_llama", {"rope_parameters": {"rope_type": ["x"]}}, r"value .*type"),
        ("tiny_gemma3", {"layer_types": {"a": 1}}, "layer_types is {'a': 1}"),
    ],
)
def test_the_config_of_a_language_model_is_refused_before_anything_is_built(
    model: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_language_model(tmp_path / "model", model)
    read_config(folder)
    edit_json("config.json", **values)(folder)
    tracemalloc.start()
    with pytest.raises(ValueError, match=message) as raised:
        read_config(folder)
    assert tracemalloc.get_traced_memory()[1] < 50 * 10**6
    tracemalloc.stop()
    assert str(folder / "config.json") in str(raised.value)


@pytest.mark.faults(33, refused=True)
@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("sentence_bert_config.json", {"max_seq_length": "256"}, "max_seq_length, .* is '256'; a number of tokens"),
        ("sentence_bert_config.json", {"query_length": [1]}, r"query_length is \[1\]; a number of tokens"),
        ("1_Pooling/config.json", {"pooling_mode": 5}, "the pooling is 5; 'cls', 'mean' or 'lasttoken'"),
        ("1_Pooling/config.json", {"pooling_mode": [["mean"]]}, "the pooling is "),
    ],
)
def test_a_setting_of_another_type_is_named(file: str, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "model")
    read_sentence_transformers_keys(folder)
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))
    with pytest.raises(ValueError, match=message):
        read_sentence_transformers_keys(folder)


def test_a_prompt_of_megabytes_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path)
    with pytest.raises(ValueError, match=r"tokens\.passage_prompt has 3,000,000 characters; 65,536 are allowed"):
        TextTokenizer.load(folder, 8, 8, passage_prompt="x" * 3_000_000)


@pytest.mark.parametrize("path", ["../../etc", "/etc", "0_Transformer/../.."])
def test_modules_are_in_the_folder(path: str, tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([modules[0] | {"path": path}, *modules[1:]]))
    with pytest.raises(ValueError, match=rf"modules.json: .*'{path}'; .*folder .*{folder}"):
        read_sentence_transformers_keys(folder)


@pytest.mark.table
@pytest.mark.faults(33, refused=True)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DAILY else pytest.mark.exhaustive) for name in CASES]
)
def test_the_command_refuses_it_in_little_memory(name: str, tmp_path: Path) -> None:
    damage, message = CASES[name]
    folder = write_encoder(tmp_path / "model")
    damage(folder)
    done, used = run_measured("-m", "jaxret", "open", str(folder), f"--workdir={tmp_path}/run")
    assert done.returncode == 1, done.stderr
    sentence = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentence) == 1
    assert re.search(message, sentence[0])
    assert str(folder) in sentence[0]
    assert used < 10**9
    assert not (tmp_path / "run").exists()


def test_a_pipe_in_a_model_folder_does_not_wait(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a file"):
        load_backend(folder)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path), Path.mkdir])
def test_weights_that_are_not_a_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    make(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors is not a file"):
        weight_shapes(folder)


@pytest.mark.parametrize(
    ("rules", "growth"),
    [
        ([normalizers.BertNormalizer()], 1),
        ([normalizers.NFKC(), normalizers.Lowercase(), normalizers.StripAccents()], 1),
        # Rules of ALBERT and of XLM-R.
        ([normalizers.Replace("``", '"'), normalizers.Replace(Regex(" {2,}"), " ")], 1),
        ([normalizers.Replace(Regex("a?"), "bb")], 3),
        ([normalizers.Replace(Regex("(?<=a)"), "bb")], 3),
        ([normalizers.Replace("", "bb")], 3),
        ([normalizers.Replace("ab", "cccc")], 2),
        ([normalizers.Prepend("x" * 99)], 100),
        ([normalizers.Sequence([TENFOLD, TENFOLD]), TENFOLD], 1000),
    ],
)
def test_growth_by_tokenizer_rules_is_bounded(rules: list[Any], growth: float, tmp_path: Path) -> None:
    """A growth of 1 means that the rules never make a text longer."""
    tokenizer = Tokenizer.from_file(str(write_encoder(tmp_path) / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Sequence(rules)
    assert rules_growth(tokenizer) == growth
    for text in ("a" * 50, "ab" * 30, "x  y``" * 9):
        assert len(tokenizer.normalizer.normalize_str(text)) <= growth * (len(text) + 1)


def test_growth_by_pre_tokenizers_is_bounded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_t5(tmp_path) / "tokenizer.json"))
    assert rules_growth(tokenizer) == 2
    split = pre_tokenizers.Split("", "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), split] * 9)  # type: ignore[assignment]
    assert rules_growth(tokenizer) == 2**9


def test_expressions_of_real_tokenizers_are_allowed(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path)
    letters = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    used = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}(?i:'s|'t)?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+"
    normalize(normalizers.Replace(Regex(used), "x"), normalizers.Replace(Regex(r"(^|\W)\d+"), " "))(folder)
    check_expressions(folder / "tokenizer.json")


def test_an_expression_that_fails_on_a_text_is_an_error(tmp_path: Path) -> None:
    """The trial texts do not find this one: none of them has its letter."""
    folder = write_encoder(tmp_path)
    normalize(normalizers.Replace(Regex("(z+)+b"), "x"))(folder)
    tokenizer = TextTokenizer.load(folder, 8, 8)
    tokenizer.queries([Query("0", "a river")])
    with pytest.raises(ValueError, match=r"tokenizer.json: .*1 .*longest .*41"):
        tokenizer.queries([Query("0", "z" * 40 + "!")])


def test_bfloat16_is_read_and_errors_name_the_file(tmp_path: Path) -> None:
    import ml_dtypes

    folder = write_encoder(tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    save_file({name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}, folder / WEIGHTS)
    load_pretrained(folder)
    (tmp_path / "x").write_bytes(b"")
    for read in (read_tensors, lambda path: open_tensors(path).__enter__()):
        with pytest.raises(ValueError, match=r"x .*damaged, .*safetensors"):
            read(tmp_path / "x")


def test_every_architecture_bounds_its_layers() -> None:
    for architecture in ARCHITECTURES.values():
        layers = architecture.keys["num_layers"].values
        assert layers.include(10_000)
        assert not layers.include(10_001)
        assert {"vocab_size", "hidden_size", "intermediate_size"} <= architecture.keys.keys()


def test_sizes_are_compared_only_where_there_are_weights(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path)
    edit_json("config.json", num_hidden_layers=9_999)(folder)
    with pytest.raises(ValueError, match=r"num_hidden_layers is 9,999, but"):
        read_config(folder)
    (folder / WEIGHTS).unlink()
    assert read_config(folder).num_layers == 9_999  # a plan reads only shapes
