"""Our BERT against PyTorch's, from stored outputs (tests/goldens): no torch needed. Tolerances are never relaxed."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxret.configs import base
from jaxret.models.encoders.architectures import read_config
from jaxret.models.encoders.architectures.bert import Bert, BertConfig
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.pretrained import load_pretrained, save_pretrained, stores_mlm_head
from jaxret.models.encoders.selection import Selection
from jaxret.types import HiddenStates, Tokens

GOLDENS = Path(__file__).parents[3] / "goldens"
TINY = ("tiny_bert", "tiny_distilbert", "tiny_bert_mlm", "tiny_distilbert_mlm", "tiny_roberta", "tiny_xlm_roberta")
IGNORE = ("pooler", "cls", "vocab_", "lm_head")
TINY_TOLERANCE = 1e-5  # also between two float32 programs that were compiled differently
BASE_TOLERANCE = 5e-5
ALL = Selection()


def load(name: str) -> tuple[Any, Any, Tokens, np.ndarray]:
    """A golden model: config, parameters, input and torch's states [L+1,B,T,H]."""
    config, params = load_pretrained(GOLDENS / name, ignore=IGNORE)
    with np.load(GOLDENS / name / "hidden_states.npz", allow_pickle=False) as file:
        tokens = Tokens(jnp.asarray(file["ids"]), jnp.asarray(file["mask"]))
        return config, params, tokens, file["states"]


@functools.partial(jax.jit, static_argnames=("config", "selection", "dtype"))
def encode(
    config: BertConfig, params: Any, tokens: Tokens, selection: Selection = ALL, dtype: Any = jnp.float32
) -> HiddenStates:
    return Bert(config, Compute(dtype)).apply({"params": params}, tokens, selection=selection)


def distance(states: Any, expected: Any, mask: Any) -> float:
    """Largest absolute difference over layers and real positions."""
    actual = np.asarray(states, np.float32)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    return float(np.abs(actual - np.asarray(expected))[:, np.asarray(mask)].max())


@pytest.mark.parametrize("name", TINY)
def test_every_hidden_state_equals_torch(name: str) -> None:
    config, params, tokens, expected = load(name)
    states = encode(config, params, tokens)
    assert states.states.dtype == jnp.float32
    np.testing.assert_array_equal(states.mask, tokens.mask)
    assert states.states.shape[0] == config.num_layers + 1
    assert distance(states.states, expected, tokens.mask) <= TINY_TOLERANCE


@pytest.mark.parametrize("name", TINY[:2])
def test_control_tanh_gelu_is_not_equal(name: str) -> None:
    config, params, tokens, expected = load(name)
    wrong = encode(dataclasses.replace(config, hidden_act="gelu_new"), params, tokens)
    assert distance(wrong.states, expected, tokens.mask) > TINY_TOLERANCE


@pytest.mark.parametrize("name", TINY[:2])
def test_control_flax_norm_epsilon_is_not_equal(name: str) -> None:
    config, params, tokens, expected = load(name)
    wrong = encode(dataclasses.replace(config, layer_norm_eps=1e-6), params, tokens)
    assert distance(wrong.states, expected, tokens.mask) > TINY_TOLERANCE


@pytest.mark.parametrize("name", TINY)
def test_control_without_the_mask_is_not_equal(name: str) -> None:
    config, params, tokens, expected = load(name)
    wrong = encode(config, params, dataclasses.replace(tokens, mask=jnp.ones_like(tokens.mask)))
    assert distance(wrong.states, expected, tokens.mask) > TINY_TOLERANCE


def test_control_token_type_one_is_not_equal() -> None:
    config, params, tokens, expected = load("tiny_bert")
    types = params["embeddings"]["type"]
    types["embedding"] = types["embedding"][::-1]
    assert distance(encode(config, params, tokens).states, expected, tokens.mask) > TINY_TOLERANCE


def minilm_kept(config: Any, params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Our and torch's [CLS], token 1, last real token and masked mean of every layer, [7,6,4,384]."""
    with np.load(GOLDENS / "minilm" / "hidden_states.npz", allow_pickle=False) as file:
        ids, mask, expected = file["ids"], file["mask"], file["kept"]
    tokens = Tokens(jnp.asarray(ids), jnp.asarray(mask))
    states = np.asarray(encode(config, params, tokens).states)
    last = states[:, np.arange(len(ids)), mask.sum(1) - 1]
    mean = np.stack([states[:, row, real].mean(axis=1) for row, real in enumerate(mask)], axis=1)
    return np.stack([states[:, :, 0], states[:, :, 1], last, mean], axis=2), expected


def test_minilm_equals_torch_and_flax_norm_epsilon_does_not(minilm_dir: Path) -> None:
    config, params = load_pretrained(minilm_dir)
    actual, expected = minilm_kept(config, params)
    assert actual.shape == expected.shape == (7, 6, 4, 384)
    assert np.abs(actual - expected).max() <= BASE_TOLERANCE
    actual, expected = minilm_kept(dataclasses.replace(config, layer_norm_eps=1e-6), params)
    assert np.abs(actual - expected).max() > BASE_TOLERANCE


def test_more_padding_changes_nothing() -> None:
    config, params, tokens, _ = load("tiny_bert")
    extra = ((0, 0), (0, 9))
    ids = jnp.pad(tokens.ids, extra, constant_values=7)  # ids of padding must not matter
    wide = encode(config, params, Tokens(ids, jnp.pad(tokens.mask, extra))).states
    narrow = encode(config, params, tokens).states
    length = tokens.ids.shape[1]
    assert distance(wide[:, :, :length], narrow, tokens.mask) <= TINY_TOLERANCE
    unmasked = encode(config, params, Tokens(ids, jnp.pad(tokens.mask, extra, constant_values=True))).states
    assert distance(unmasked[:, :, :length], narrow, tokens.mask) > TINY_TOLERANCE


@pytest.mark.slow
def test_a_row_of_nothing_but_padding_is_finite() -> None:
    config, params, tokens, _ = load("tiny_bert")
    empty = Tokens(tokens.ids.at[2].set(0), tokens.mask.at[2].set(False))

    def loss(p: Any) -> tuple[jax.Array, list[HiddenStates]]:
        kept = [
            Bert(config).apply({"params": p}, empty, selection=selection)
            for selection in (ALL, Selection(2), Selection(0, mean=True))
        ]
        return sum((jnp.sum(k.states**2) for k in kept), jnp.zeros(())), kept

    gradients, kept = jax.jit(jax.grad(loss, has_aux=True))(params)
    for states in kept:
        assert np.isfinite(states.states).all()
        assert not states.mask[2].any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("count", [1, 3])
def test_keep_first_is_a_slice_of_all(count: int) -> None:
    config, params, tokens, _ = load("tiny_bert")
    everything, first = encode(config, params, tokens), encode(config, params, tokens, Selection(count))
    np.testing.assert_allclose(first.states, everything.states[:, :, :count], atol=TINY_TOLERANCE, rtol=0)
    np.testing.assert_array_equal(first.mask, tokens.mask[:, :count])
    assert first.states.shape[2] == count


def test_keep_mean_is_the_mean_of_the_real_positions() -> None:
    config, params, tokens, expected = load("tiny_bert")
    mean = encode(config, params, tokens, Selection(0, mean=True))
    mask = np.asarray(tokens.mask)
    by_hand = np.stack([expected[:, row, real].mean(axis=1) for row, real in enumerate(mask)], axis=1)
    assert mean.states.shape == (config.num_layers + 1, len(mask), 1, config.hidden_size)
    assert mean.mask.all()
    np.testing.assert_allclose(mean.states[:, :, 0], by_hand, atol=TINY_TOLERANCE, rtol=0)
    assert np.abs(by_hand - expected.mean(axis=2)).max() > TINY_TOLERANCE  # control: a mean that includes padding


@pytest.mark.parametrize("selection", [ALL, Selection(3), Selection(0, mean=True)])
def test_keep_last_layer_is_a_slice_of_all_layers(selection: Selection) -> None:
    config, params, tokens, _ = load("tiny_bert")
    layers = encode(config, params, tokens, selection)
    last = encode(config, params, tokens, dataclasses.replace(selection, layers="last"))
    np.testing.assert_allclose(last.states, layers.states[-1:], atol=TINY_TOLERANCE, rtol=0)
    np.testing.assert_array_equal(last.mask, layers.mask)


def test_bfloat16_stays_near_float32() -> None:
    config, params, tokens, expected = load("tiny_bert")
    states = encode(config, params, tokens, dtype=jnp.bfloat16).states
    assert states.dtype == jnp.float32, "hidden states are summed in float32"
    mask = np.asarray(tokens.mask)
    for rounded, exact in zip(np.asarray(states, np.float32), expected):
        error = np.linalg.norm((rounded - exact)[mask]) / np.linalg.norm(exact[mask])
        assert error <= 3e-2
    for dtype, wide in ((jnp.bfloat16, False), (jnp.float32, True)):  # no product has float32 operands
        traced = encode.trace(config, params, tokens, dtype=dtype)
        program = traced.lower(lowering_platforms=("tpu",)).as_text()
        products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
        assert len(products) == 8  # attention: query, key, value, scores, mix, output; two dense layers
        operands = [line.split(" : (")[1].split(") -> ")[0] for line in products]
        assert {"xf32>" in pair for pair in operands} == {wide}


@pytest.mark.daily("layer-0.6")
@pytest.mark.slow
@pytest.mark.parametrize(("policy", "most"), [pytest.param("cheap", 0.8, marks=pytest.mark.exhaustive), ("layer", 0.6)])
def test_recomputation_gives_the_same_values_and_gradients(policy: str, most: float) -> None:
    config, params, tokens, _ = load("tiny_bert")
    weights = jnp.asarray(np.random.default_rng(0).normal(size=config.hidden_size), jnp.float32)

    def loss(p: Any, policy: str, tokens: Tokens = tokens) -> jax.Array:
        states = Bert(config, Compute(recompute=policy)).apply({"params": p}, tokens, selection=Selection(1)).states
        return jnp.sum(jnp.tanh(states) @ weights)

    both = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    (value, plain), (value_again, again) = both(params, "none"), both(params, policy)
    np.testing.assert_allclose(value_again, value, rtol=TINY_TOLERANCE)
    for leaf, expected in zip(jax.tree.leaves(again), jax.tree.leaves(plain)):
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(leaf, expected, rtol=0, atol=TINY_TOLERANCE * scale)

    def held(policy: str) -> int:
        """Return the bytes of temporary arrays, for a batch that is larger than the model."""
        tokens = jax.tree.map(lambda x: jnp.tile(x, (32, 1)), load("tiny_bert")[2])
        gradient = jax.jit(jax.grad(functools.partial(loss, policy=policy, tokens=tokens)))
        return gradient.lower(params).compile().memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]

    assert held(policy) < most * held("none")  # control: the option has an effect


@pytest.mark.parametrize("name", TINY)
def test_layer_parameters_have_a_leading_axis(name: str) -> None:
    config, params, tokens, _ = load(name)
    leaves = jax.tree.leaves(params["layers"])
    assert len(leaves) == 16  # query, key, value, output, two dense, two norms; each with a bias
    assert {leaf.shape[0] for leaf in leaves} == {config.num_layers}
    abstract = jax.eval_shape(lambda: Bert(config).init(jax.random.key(0), tokens))["params"]
    shapes = jax.tree.map(lambda leaf: (leaf.shape, jnp.dtype(leaf.dtype)), params)
    assert jax.tree.map(lambda leaf: (leaf.shape, jnp.dtype(leaf.dtype)), abstract) == shapes


def test_a_batch_longer_than_the_position_table_is_an_error() -> None:
    config, params, _, _ = load("tiny_bert")
    tokens = Tokens(jnp.zeros((1, 41), jnp.int32), jnp.ones((1, 41), bool))
    with pytest.raises(ValueError, match=r"41 tokens .* 40 positions"):
        encode(config, params, tokens)


def broken_copy(directory: Path, change: dict[str, np.ndarray | None]) -> Path:
    """tiny_bert with some tensors replaced, added, or (None) removed."""
    tensors = load_file(GOLDENS / "tiny_bert" / "model.safetensors") | change
    save_file({name: t for name, t in tensors.items() if t is not None}, directory / "model.safetensors")
    (directory / "config.json").write_bytes((GOLDENS / "tiny_bert" / "config.json").read_bytes())
    return directory


@pytest.mark.parametrize(
    ("name", "tensor", "what"),
    [
        ("encoder.layer.1.attention.self.query.weight", None, "missing"),
        ("embeddings.LayerNorm.bias", None, "missing"),
        ("encoder.layer.3.output.dense.bias", np.zeros(32, np.float32), "unused"),
        ("lm_head.weight", np.zeros((99, 32), np.float32), "unused"),
        ("embeddings.position_embeddings.weight", np.zeros((41, 32), np.float32), r"shape \(41, 32\).*\(40, 32\)"),
        ("encoder.layer.2.intermediate.dense.weight", np.zeros((32, 64), np.float32), r"shape \(32, 64\).*\(64, 32\)"),
    ],
)
def test_loading_names_the_tensor_that_does_not_fit(
    tmp_path: Path, name: str, tensor: np.ndarray | None, what: str
) -> None:
    with pytest.raises(ValueError, match=what) as error:
        load_pretrained(broken_copy(tmp_path, {name: tensor}))
    assert name in str(error.value)
    load_pretrained(broken_copy(tmp_path, {}))  # control: the unchanged copy loads


def test_ignored_tensors_are_ignored_by_name_only() -> None:
    with pytest.raises(ValueError, match=r"unused cls\.predictions") as error:
        load_pretrained(GOLDENS / "tiny_bert_mlm")  # the pooler is ignored by default, the MLM head is not
    assert "pooler" not in str(error.value).split("Unused tensors")[0]
    with pytest.raises(ValueError, match=r"unused pooler\.dense\.bias; unused pooler\.dense\.weight"):
        load_pretrained(GOLDENS / "tiny_bert", ignore=())
    load_pretrained(GOLDENS / "tiny_bert_mlm", ignore=IGNORE)


@pytest.mark.parametrize("name", TINY)
def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    config, params = load_pretrained(GOLDENS / name, ignore=IGNORE)
    save_pretrained(tmp_path, config, params)
    original, saved = load_file(GOLDENS / name / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    renamed = {
        key.removeprefix("bert.")
        .removeprefix("distilbert.")
        .removeprefix("roberta.")
        .replace("gamma", "weight")
        .replace("beta", "bias"): value
        for key, value in original.items()
    }
    dropped = renamed.keys() - saved.keys()
    assert all(key.startswith((*IGNORE, "embeddings.position_ids")) for key in dropped)
    assert len(saved) == len(renamed) - len(dropped)
    for key, value in saved.items():
        assert (value.dtype, value.shape) == (renamed[key].dtype, renamed[key].shape)
        assert value.tobytes() == renamed[key].tobytes(), key
    again, params_again = load_pretrained(tmp_path, ignore=())
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, params_again, params)


MLM = ("tiny_bert_mlm", "tiny_distilbert_mlm", "tiny_roberta", "tiny_xlm_roberta")


def with_head(name: str) -> Any:
    config = read_config(GOLDENS / name)
    assert isinstance(config, BertConfig)
    return dataclasses.replace(config, mlm_head=True)


@pytest.mark.parametrize("name", MLM)
def test_mlm_logits_equal_torch(name: str) -> None:
    config, params = load_pretrained(GOLDENS / name, IGNORE, with_head(name))
    _, _, tokens, _ = load(name)
    with np.load(GOLDENS / name / "hidden_states.npz", allow_pickle=False) as file:
        expected = file["mlm_logits"]

    def logits(module: Bert) -> jax.Array:
        return module.mlm_head(module(tokens, Selection(layers="last")).states[-1], module.word_table)

    actual = np.asarray(jax.jit(lambda p: Bert(config).apply({"params": p}, method=logits))(params))
    assert actual.shape == expected.shape
    real = np.asarray(tokens.mask)
    assert np.abs(actual - expected)[real].max() <= 1e-4
    params["mlm_head"]["bias"] = params["mlm_head"]["bias"] * 0
    other = np.asarray(jax.jit(lambda p: Bert(config).apply({"params": p}, method=logits))(params))
    assert np.abs(other - expected)[real].max() > 1e-2, "control: the bias matters"


@pytest.mark.parametrize("name", MLM)
def test_an_mlm_head_is_saved_as_it_was_loaded(tmp_path: Path, name: str) -> None:
    config, params = load_pretrained(GOLDENS / name, IGNORE, with_head(name))
    save_pretrained(tmp_path, config, params)
    assert stores_mlm_head(tmp_path)
    _, again = load_pretrained(tmp_path, (), config)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_a_file_without_an_mlm_head_gets_a_new_one() -> None:
    assert not stores_mlm_head(GOLDENS / "tiny_bert")
    assert not stores_mlm_head(GOLDENS / "tiny_t5")
    config = with_head("tiny_bert")
    _, params = load_pretrained(GOLDENS / "tiny_bert", ("pooler",), config, seed=3)
    head = params["mlm_head"]
    assert head["dense"]["kernel"].shape == (32, 32)
    assert not head["bias"].any()
    _, same = load_pretrained(GOLDENS / "tiny_bert", ("pooler",), config, seed=3)
    _, other = load_pretrained(GOLDENS / "tiny_bert", ("pooler",), config, seed=4)
    np.testing.assert_array_equal(same["mlm_head"]["dense"]["kernel"], head["dense"]["kernel"])
    assert np.abs(other["mlm_head"]["dense"]["kernel"] - head["dense"]["kernel"]).max() > 1e-3


def test_only_the_first_layers() -> None:
    whole, _, tokens, expected = load("tiny_bert")
    config = dataclasses.replace(whole, num_layers=2)
    _, params = load_pretrained(GOLDENS / "tiny_bert", ("pooler",), config)
    assert distance(encode(config, params, tokens).states, expected[:3], tokens.mask) <= TINY_TOLERANCE


def with_tensors(folder: Path, name: str, more: dict[str, np.ndarray]) -> Path:
    """A copy of a golden directory whose file holds more tensors."""
    folder.mkdir()
    shutil.copyfile(GOLDENS / name / "config.json", folder / "config.json")
    save_file(load_file(GOLDENS / name / "model.safetensors") | more, folder / "model.safetensors")
    return folder


def test_extra_tensors_of_condenser_and_retromae_are_ignored(tmp_path: Path) -> None:
    """Condenser and RetroMAE store additional layers with BERT: a head, a decoder. An unknown tensor is still an
    error."""
    extra: dict[str, np.ndarray] = {"c_head.0.attention.self.query.weight": np.zeros((32, 32), np.float32)}
    extra |= {"decoder_embeddings.weight": np.zeros(4, np.float32), "decoder.bias": np.zeros(4, np.float32)}
    ignore = base.get_config().encoder.ignore
    _, expected = load_pretrained(GOLDENS / "tiny_bert_mlm", ignore)
    _, loaded = load_pretrained(with_tensors(tmp_path / "known", "tiny_bert_mlm", extra), ignore)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    other = with_tensors(tmp_path / "other", "tiny_bert_mlm", {"adapter.weight": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match=r"unused adapter\.weight"):
        load_pretrained(other, ignore)


def test_an_output_matrix_that_is_not_the_word_table_is_an_error(tmp_path: Path) -> None:
    """Our MLM head multiplies with the word table, so a file in which the two matrices differ is another model."""
    words = load_file(GOLDENS / "tiny_bert_mlm" / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    name = "cls.predictions.decoder.weight"
    config = with_head("tiny_bert_mlm")
    load_pretrained(with_tensors(tmp_path / "same", "tiny_bert_mlm", {name: words}), IGNORE, config)
    untied = with_tensors(tmp_path / "untied", "tiny_bert_mlm", {name: words + 1})
    with pytest.raises(ValueError, match=r"cls\.predictions\.decoder\.weight differs from bert\.embeddings\.word_emb"):
        load_pretrained(untied, IGNORE, config)
    load_pretrained(untied, IGNORE)  # without the head it is not used
