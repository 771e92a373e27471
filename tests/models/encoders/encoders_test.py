"""Properties of every encoder, and encoders with formulas as weights against the values of transformers."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxret.data.records import Passage
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.architectures import ARCHITECTURES, make_encoder, read_config, stored_tensors
from jaxret.models.encoders.architectures.modernbert import ModernBertConfig
from jaxret.models.encoders.attention import attend, rotate
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.pretrained import load_pretrained
from jaxret.models.encoders.protocol import ABILITIES, EncoderConfig
from jaxret.models.encoders.selection import Selection
from jaxret.parallel.mesh import make_mesh, replicated_sharding, shard_batch
from jaxret.types import HiddenStates, Tokens

GOLDENS = Path(__file__).parents[2] / "goldens"
FOLDERS = {
    "bert": "tiny_bert",
    "distilbert": "tiny_distilbert",
    "gemma3_text": "tiny_gemma3",
    "llama": "tiny_llama",
    "mistral": "tiny_mistral",
    "modernbert": "tiny_modernbert",
    "qwen3": "tiny_qwen3",
    "roberta": "tiny_roberta",
    "t5": "tiny_t5",
    "xlm-roberta": "tiny_xlm_roberta",
}
IGNORE = ("pooler", "cls", "vocab_", "lm_head", "head.", "decoder")
MODERNBERT = {
    "model_type": "modernbert",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "local_attention": 4,
    "pad_token_id": 0,
}
XLM_ROBERTA = {
    "model_type": "xlm-roberta",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 20,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}


def write(folder: Path, raw: dict[str, Any]) -> Path:
    """A directory with weights from a formula: the t-th tensor by name is .2 sin(.7 i + 1.3 t), norms 1 more."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = {name: s.shape for s in stored_tensors(read_config(folder)).values() for name in s.names}
    tensors = {}
    for t, (name, shape) in enumerate(sorted(shapes.items())):
        values = 0.2 * np.sin(0.7 * np.arange(math.prod(shape)) + 1.3 * t)
        values += float("norm" in name.lower() and name.endswith("weight"))
        tensors[name] = values.astype(np.float32).reshape(shape)
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path, **options: Any) -> tuple[Any, Any]:
    config, params = load_pretrained(folder, IGNORE, **options)
    return config, jax.tree.map(jnp.asarray, params)


def rows(texts: list[list[int]], pad: int, length: int | None = None) -> Tokens:
    longest = length or max(map(len, texts))
    ids = np.array([text + [pad] * (longest - len(text)) for text in texts], np.int32)
    mask = np.arange(longest) < np.array([[len(text)] for text in texts])
    return Tokens(jnp.asarray(ids), jnp.asarray(mask))


@functools.partial(jax.jit, static_argnames=("config", "selection", "compute"))
def encode(
    config: Any,
    params: Any,
    tokens: Tokens,
    selection: Selection = Selection(),
    compute: Compute = Compute(),
    prefix: Any = None,
) -> HiddenStates:
    return make_encoder(config, compute).apply({"params": params}, tokens, selection=selection, prefix=prefix)


MODERNBERT_TEXTS = [[1, *(3 + 7 * i % 37 for i in range(12)), 2], [1, *(3 + 5 * i % 37 for i in range(5)), 2]]
XLM_ROBERTA_TEXTS = [[0, *(3 + 7 * i % 37 for i in range(8)), 2], [0, 5, 9, 33, 2]]


def test_modernbert_golden_values(tmp_path: Path) -> None:
    config, params = load(write(tmp_path, MODERNBERT))
    assert isinstance(config, ModernBertConfig)
    tokens = rows(MODERNBERT_TEXTS, 0)
    states = np.asarray(encode(config, params, tokens).states)
    assert np.isfinite(states).all()  # padding that sees no key has finite states, too
    np.testing.assert_allclose(states[-1, 0, 0, :3], [-0.839843, 0.637357, 1.571529], atol=2e-6)
    np.testing.assert_allclose(states[-1, 1, 6, :3], [-1.017393, -1.542853, -0.222703], atol=2e-6)
    np.testing.assert_allclose(states[1, 0, 0, :3], [-0.736101, 0.787793, 2.155575], atol=2e-6)
    wider = encode(dataclasses.replace(config, local_window=6), params, tokens).states
    # Control: a window with one more token on each side.
    np.testing.assert_allclose(wider[-1, 0, 0, 0], -0.827859, atol=2e-6)


def test_modernbert_states_below_the_last_are_raw_unless_normalized(tmp_path: Path) -> None:
    config, params = load(write(tmp_path, MODERNBERT))
    assert isinstance(config, ModernBertConfig)
    tokens = rows(MODERNBERT_TEXTS, 0)
    raw = np.asarray(encode(config, params, tokens).states, np.float64)
    normalized = encode(dataclasses.replace(config, normalize_intermediate=True), params, tokens).states
    centred = raw - raw.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_eps)
    normed = normed * np.asarray(params["final_norm"])
    normed[0], normed[-1] = raw[0], raw[-1]
    np.testing.assert_allclose(normalized, normed, atol=1e-5)
    assert np.abs(normed - raw)[1:-1].max() > 0.1, "control: the norm changes the states"


def test_xlm_roberta_golden_values(tmp_path: Path) -> None:
    config, params = load(write(tmp_path, XLM_ROBERTA))
    assert config.longest == 18
    tokens = rows(XLM_ROBERTA_TEXTS, 1)
    last = np.asarray(encode(config, params, tokens).states)[-1]
    np.testing.assert_allclose(last[0, 0, :3], [0.124279, -0.414713, -0.530930], atol=2e-6)
    np.testing.assert_allclose(last[1, 4, :3], [1.868254, -0.059909, -0.810023], atol=2e-6)
    from_zero = encode(dataclasses.replace(config, first_position=0), params, tokens).states  # type: ignore[call-arg]
    np.testing.assert_allclose(from_zero[-1, 0, 0, 0], -0.382185, atol=2e-6)  # control: the first position matters


@pytest.mark.table
@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
def test_roberta_counts_positions_by_ids_not_by_the_mask(tmp_path: Path, kind: str) -> None:
    """In a text that spells <pad> in its middle, that token has padding's position, and the next one the next
    number."""
    config, params = load(write(tmp_path, XLM_ROBERTA | {"model_type": kind}))
    encoder = make_encoder(config)
    embedded = encoder.apply({"params": params}, row(0, 5, 1, 9, 2), method="embed", train=False)
    straight = encoder.apply({"params": params}, row(0, 5, 9, 2), method="embed", train=False)
    np.testing.assert_allclose(embedded[:, [0, 1, 3, 4]], straight, atol=1e-6)
    alone = encoder.apply({"params": params}, row(1), method="embed", train=False)
    np.testing.assert_allclose(embedded[:, 2], alone[:, 0], atol=1e-6)


def row(*ids: int) -> Tokens:
    return Tokens(jnp.array([ids]), jnp.ones((1, len(ids)), bool))


def loaded(kind: str) -> tuple[Any, Any, Tokens]:
    config, params = load(GOLDENS / FOLDERS[kind])
    with np.load(GOLDENS / FOLDERS[kind] / "hidden_states.npz", allow_pickle=False) as file:
        return config, params, Tokens(jnp.asarray(file["ids"]), jnp.asarray(file["mask"]))


def test_every_architecture_is_covered() -> None:
    assert FOLDERS.keys() == ARCHITECTURES.keys()
    assert all(name == architecture.model_type for name, architecture in ARCHITECTURES.items())


@pytest.mark.table
@pytest.mark.parametrize("kind", FOLDERS)
def test_every_encoder_implements_the_protocol(kind: str) -> None:
    config, params, tokens = loaded(kind)
    assert isinstance(config, EncoderConfig)
    assert config.model_type == kind
    assert set(config.lacks) <= set(ABILITIES)
    assert hash(config) == hash(dataclasses.replace(config))
    # A contract stores a config in this way.
    assert config == type(config)(**json.loads(json.dumps(dataclasses.asdict(config))))
    encoder = make_encoder(config)
    if "positioned_masks" not in config.lacks:
        embedded = encoder.apply({"params": params}, tokens, False, method="embed")
        np.testing.assert_allclose(embedded, encode(config, params, tokens).states[0], atol=1e-6)
    table = encoder.apply({"params": params}, method=lambda module: module.word_table)
    assert table.shape == (config.vocab_size, config.hidden_size)
    if "mlm_head" not in config.lacks:
        with_head = dataclasses.replace(config, mlm_head=True)
        _, params = load(GOLDENS / FOLDERS[kind], config=with_head)
        hidden = jnp.zeros((3, config.hidden_size))
        encoder = make_encoder(with_head)
        logits = encoder.apply({"params": params}, method=lambda module: module.mlm_head(hidden, module.word_table))
        assert logits.shape == (3, config.vocab_size)
    slots = tokens.ids[0, :1]
    if "prefix_tokens" in config.lacks:
        with pytest.raises(ValueError, match=r"prefix tokens .*no \[CLS\]"):
            encode(config, params, tokens, prefix=slots)


@pytest.mark.table
@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert", "roberta", "xlm-roberta"])
def test_prefix_slots_are_at_the_first_position(kind: str) -> None:
    config, params, tokens = loaded(kind)
    tokens = jax.tree.map(lambda x: x[:1], tokens)  # row 0, which has no padding
    plain = encode(config, params, tokens).states
    same = encode(config, params, tokens, prefix=tokens.ids[0, :1])
    # A single slot with the first token's embedding changes nothing.
    np.testing.assert_allclose(same.states, plain, atol=1e-5)
    twice = encode(config, params, tokens, prefix=jnp.repeat(tokens.ids[0, :1], 2))
    assert twice.states.shape[2] == twice.mask.shape[1] == plain.shape[2] + 1
    np.testing.assert_allclose(twice.states[:, :, 0], twice.states[:, :, 1], atol=1e-5)  # the two slots are equal
    # The positions of the text have not moved.
    np.testing.assert_allclose(twice.states[0, :, 2:], plain[0, :, 1:], atol=1e-5)
    # The text attends to both slots, so its states change.
    assert np.abs(twice.states[-1, :, 2:] - plain[-1, :, 1:]).max() > 1e-4
    words = make_encoder(config).apply({"params": params}, method=lambda module: module.word_table)
    by_vector = encode(config, params, tokens, prefix=words[tokens.ids[0, :1]])
    np.testing.assert_allclose(by_vector.states, plain, atol=1e-5)


@pytest.mark.slow
def test_modernbert_windows_follow_positions_not_slots(tmp_path: Path) -> None:
    """Three slots have position 0: the token at position 2 sees all of them through a window of two in each direction,
    although the first is four places away; the token at position 3 sees none."""
    raw = MODERNBERT | {"num_hidden_layers": 2}
    config, params = load(write(tmp_path, raw))
    silent = np.array([0.0, 1.0])[:, None, None]  # layer 0, which is global, adds nothing
    params["layers"]["attention"]["output"]["kernel"] = params["layers"]["attention"]["output"]["kernel"] * silent
    tokens = rows([MODERNBERT_TEXTS[0]], 0)

    def states(slots: jax.Array) -> jax.Array:
        return make_encoder(config).apply({"params": params}, tokens, prefix=slots).states[-1, 0].sum(axis=-1)

    slots = jax.random.normal(jax.random.key(0), (3, 16))
    gradient = np.abs(jax.jacobian(states)(slots)).max(axis=-1)  # [places, slots]
    assert gradient.shape == (16, 3)
    places = [0, 1, 2, 3, 4]  # the three slots, and positions 1 and 2 of the text
    assert gradient[places].min() > 1e-6
    assert gradient[5:].max() == 0


@pytest.mark.table
@pytest.mark.parametrize("kind", ["modernbert", "t5"])
def test_fewer_layers_recomputation_and_bfloat16(kind: str) -> None:
    config, params, tokens = loaded(kind)
    mask = np.asarray(tokens.mask)
    expected = np.asarray(encode(config, params, tokens).states)[:, mask]
    again = np.asarray(encode(config, params, tokens, compute=Compute(recompute="cheap")).states)[:, mask]
    np.testing.assert_allclose(again, expected, atol=1e-5 * max(1, np.abs(expected).max()))
    half = encode(config, params, tokens, compute=Compute(jnp.bfloat16)).states
    assert half.dtype == jnp.float32, "hidden states are summed in float32"
    error = np.linalg.norm(np.asarray(half, np.float32)[:, mask] - expected) / np.linalg.norm(expected)
    assert 1e-4 < error < 5e-2
    for layers in (1, config.num_layers - 1):
        fewer = dataclasses.replace(config, num_layers=layers)
        _, first = load(GOLDENS / FOLDERS[kind], config=fewer)
        states = np.asarray(encode(fewer, first, tokens).states)[:, mask]
        assert states.shape[0] == layers + 1
        scale = max(1, np.abs(expected).max())
        np.testing.assert_allclose(states[:layers], expected[:layers], atol=1e-5 * scale)  # the last state is normed


@pytest.mark.table
@pytest.mark.parametrize("kind", ["modernbert", "xlm-roberta", "gemma3_text"])
def test_gradients_on_eight_devices(kind: str) -> None:
    """Gradients of all parameters are finite, equal those on one device, and are not zero (except keys' biases, which
    softmax ignores, and rows that no token reads)."""
    config, _, _ = loaded(kind)
    off = {f.name: 0.0 for f in dataclasses.fields(config) if "dropout" in f.name}
    config = dataclasses.replace(config, **off)
    if "mlm_head" not in config.lacks:
        config = dataclasses.replace(config, mlm_head=True)
    random = np.random.default_rng(0)
    lengths = random.integers(2, 13, 16)
    mask = np.arange(12) < lengths[:, None]
    ids = np.where(mask, random.integers(2, 99, (16, 12)), 1).astype(np.int32)
    tokens = Tokens(jnp.asarray(ids), jnp.asarray(mask))
    shapes = jax.eval_shape(lambda: make_encoder(config).init(jax.random.key(0), tokens)["params"])
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            float("norm" in str(path) and "bias" not in str(path)) + 0.2 * random.normal(size=leaf.shape)
        ).astype(np.float32),
        shapes,
    )
    weights = random.normal(size=(config.num_layers + 1, config.hidden_size)).astype(np.float32)

    def loss(p: Any, tokens: Tokens) -> jax.Array:
        def value(module: Any) -> jax.Array:
            kept = module(tokens, Selection(2, mean=True))
            total = jnp.einsum("lbkh,lh->", kept.states, weights, precision="highest")
            if "mlm_head" in config.lacks:
                return total
            return total + jnp.sum(jnp.sin(module.mlm_head(kept.states[-1], module.word_table)))

        return make_encoder(config).apply({"params": p}, method=value)

    mesh = make_mesh()
    assert mesh.size == 8
    gradient = jax.jit(jax.grad(loss))
    actual = gradient(jax.device_put(params, replicated_sharding(mesh)), shard_batch(mesh, Tokens(ids, mask)))  # type: ignore[arg-type]
    expected = gradient(params, tokens)
    leaves = jax.tree_util.tree_leaves_with_path(actual)
    largest = max(float(jnp.abs(leaf).max()) for _, leaf in leaves)
    for (path, leaf), one in zip(leaves, jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all(), name
        np.testing.assert_allclose(leaf, one, atol=5e-5 * largest, err_msg=name)
        if "'key']['bias']" not in name:  # softmax ignores what all keys share
            per_layer = np.abs(np.asarray(leaf)).reshape(leaf.shape[0], -1).max(axis=1) if "layers" in name else [1.0]
            assert np.abs(leaf).max() > 1e-6 * largest, name
            assert min(per_layer) > 0, f"{name}: a layer without a gradient"


RATES = {"modernbert": ("embedding_dropout", "attention_dropout", "mlp_dropout"), "t5": ("dropout",)}


@pytest.mark.table
@pytest.mark.parametrize(("kind", "rate"), [(kind, rate) for kind, rates in RATES.items() for rate in rates])
def test_every_dropout_rate_acts_only_in_training(kind: str, rate: str) -> None:
    config, params, tokens = loaded(kind)
    off = dict.fromkeys(RATES[kind], 0.0)
    still = encode(dataclasses.replace(config, **off), params, tokens).states
    for value in (0.0, 0.3):
        encoder = make_encoder(dataclasses.replace(config, **(off | {rate: value})))

        @jax.jit
        def train(key: jax.Array, encoder: Any = encoder) -> jax.Array:
            return encoder.apply({"params": params}, tokens, train=True, rngs={"dropout": key}).states

        one, other = train(jax.random.key(0)), train(jax.random.key(1))
        assert (np.abs(one - still).max() > 1e-3) == (value > 0)
        assert (np.abs(one - other).max() > 1e-3) == (value > 0)


@pytest.mark.slow
def test_modernbert_drops_where_transformers_does() -> None:
    """embedding_dropout: after the embeddings' norm. mlp_dropout: before the last product. attention_dropout: on the
    weights and on attention's output."""
    config, params, tokens = loaded("modernbert")
    rates = {"attention_dropout": 0.0, "mlp_dropout": 0.0, "embedding_dropout": 0.5}
    encoder = make_encoder(dataclasses.replace(config, **rates))
    kept = encoder.apply({"params": params}, tokens, train=True, rngs={"dropout": jax.random.key(0)}).states[0]
    plain = encode(config, params, tokens).states[0]
    survived = np.asarray(kept != 0)
    assert 0.4 < survived.mean() < 0.6
    np.testing.assert_allclose(np.asarray(kept)[survived], 2 * np.asarray(plain)[survived], rtol=1e-5)

    rates = {"attention_dropout": 0.5, "mlp_dropout": 0.0, "embedding_dropout": 0.0}
    encoder = make_encoder(dataclasses.replace(config, **rates))
    silent = {**params, "layers": {**params["layers"], "narrow": {"kernel": 0 * params["layers"]["narrow"]["kernel"]}}}
    alone = Tokens(tokens.ids[:, :1], tokens.mask[:, :1])  # with a single key, an attention weight is 1 or dropped

    def written(**options: Any) -> np.ndarray:
        """Return the sum that attention adds in layer 0."""
        states = encoder.apply({"params": silent}, alone, **options).states
        return np.asarray(states[1] - states[0])

    plain, dropped = written(), written(train=True, rngs={"dropout": jax.random.key(0)})
    assert 0.4 < (np.abs(dropped) < 1e-6).mean() < 0.7  # dropout removes single numbers of attention's output
    kept = np.abs(dropped) > 1e-6
    # Control: a dropped attention weight removes a whole head.
    assert np.abs(dropped[kept] - 2 * plain[kept]).max() > 1e-2


CHARACTERS = "abcdefghijklmnopqrstuvwxyz"


def write_xlm_roberta_tokenizer(folder: Path) -> Tokenizer:
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [*special, "▁", *CHARACTERS, "▁river", "<mask>"]
    scores = [(piece, -10.0 + len(piece) if piece not in special else 0.0) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=3))  # type: ignore[call-arg]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    tokenizer.add_special_tokens([*special, "<mask>"])
    names = {"bos_token": "<s>", "cls_token": "<s>", "sep_token": "</s>", "eos_token": "</s>"}
    names |= {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "XLMRobertaTokenizer", **names}))
    return tokenizer


def write_modernbert_tokenizer(folder: Path) -> Tokenizer:
    special = ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"]
    vocabulary = {piece: i for i, piece in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *special])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))  # type: ignore[call-arg]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.add_special_tokens(special)
    names = dict(zip(("cls_token", "sep_token", "pad_token", "unk_token", "mask_token"), special, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "tokenizer", "markers"),
    [
        ("xlm-roberta", write_xlm_roberta_tokenizer, ("<s>", "</s>", "<pad>", "<mask>")),
        ("modernbert", write_modernbert_tokenizer, ("[CLS]", "[SEP]", "[PAD]", "[MASK]")),
    ],
)
def test_tokenizers_of_every_architecture(tmp_path: Path, kind: str, tokenizer: Any, markers: tuple[str, ...]) -> None:
    backend = tokenizer(tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_bytes((GOLDENS / FOLDERS[kind] / "config.json").read_bytes())
    loaded = TextTokenizer.load(tmp_path, 16, 32)
    cls, sep, pad, mask = (backend.token_to_id(marker) for marker in markers)
    assert (loaded.cls_id, loaded.sep_id, loaded.pad_id, loaded.mask_id) == (cls, sep, pad, mask)
    title, text = (backend.encode(words, add_special_tokens=False).ids for words in ("a title", "the river"))
    ids = loaded.passages([Passage("p", "the river", "a title")])
    assert ids.flat.tolist() == [cls, *title, sep, *text, sep]


def test_attention_masks_per_query() -> None:
    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.normal(size=(2, n, 2, 4)), jnp.float32) for n in (3, 5, 5))
    mask = jnp.asarray(random.random((2, 5)) < 0.7).at[:, 0].set(True)
    same = attend(query, key, value, jnp.broadcast_to(mask[:, None], (2, 3, 5)), lambda x: x)
    np.testing.assert_allclose(same, attend(query, key, value, mask, lambda x: x), atol=1e-6)
    own = attend(query, key, value, jnp.broadcast_to(jnp.eye(3, 5, dtype=bool), (2, 3, 5)), lambda x: x)
    np.testing.assert_allclose(own, value[:, :3].reshape(2, 3, 8), atol=1e-6)
    assert np.isfinite(attend(query, key, value, jnp.zeros((2, 3, 5), bool), lambda x: x)).all()


def test_grouped_heads_equal_copied_keys() -> None:
    random = np.random.default_rng(0)
    query = jnp.asarray(random.normal(size=(2, 3, 6, 4)), jnp.float32)
    key, value = (jnp.asarray(random.normal(size=(2, 5, 2, 4)), jnp.float32) for _ in range(2))
    mask = jnp.asarray(random.random((2, 3, 5)) < 0.7).at[..., 0].set(True)
    copies = (jnp.repeat(x, 3, axis=2) for x in (key, value))
    expected = attend(query, next(copies), next(copies), mask, lambda x: x)
    np.testing.assert_allclose(attend(query, key, value, mask, lambda x: x), expected, atol=1e-6)
    wrong = (jnp.tile(x, (1, 1, 3, 1)) for x in (key, value))
    assert np.abs(attend(query, next(wrong), next(wrong), mask, lambda x: x) - expected).max() > 0.1, (
        "control: copies in another order give another result"
    )


@pytest.mark.slow
def test_rotary_products_depend_only_on_the_distance() -> None:
    random = np.random.default_rng(0)
    x, y = (jnp.asarray(random.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))
    rates = jnp.asarray(10_000.0 ** -(np.arange(4) / 4), jnp.float32)

    def product(i: int, j: int) -> float:
        return float(jnp.sum(rotate(x, jnp.array([i]), rates) * rotate(y, jnp.array([j]), rates)))

    np.testing.assert_allclose(product(7, 3), product(104, 100), rtol=1e-4)
    np.testing.assert_allclose(product(0, 0), float(jnp.sum(x * y)), rtol=1e-6)
    assert abs(product(7, 3) - product(3, 7)) > 1e-3
