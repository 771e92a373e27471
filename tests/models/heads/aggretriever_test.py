"""Aggretriever's aggregation against golden values of its definition, and against loops in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.heads.aggretriever import prune
from jaxret.models.heads.vocabulary import one_hot_maximum, strongest
from tests.tiny import AGGRETRIEVER, WITHOUT_DROPOUT, distance, make_params, make_retriever, make_tokens

VOCABULARY = 30522


def vector(values: dict[int, float]) -> jax.Array:
    return jnp.zeros((1, VOCABULARY)).at[0, jnp.array(list(values))].set(jnp.array(list(values.values())))


def test_the_golden_vector() -> None:
    pruned = np.asarray(prune(vector({2054: 1.0, 2055: 0.5, 30521: 0.7, 1: 0.2, 1281: 0.9}), 640, "full"))[0]
    expected = np.zeros(640, np.float32)
    expected[[387, 540, 0]] = 1.0, -0.7, -0.9
    np.testing.assert_array_equal(pruned, expected)


def by_hand(values: np.ndarray, d: int, mode: str) -> np.ndarray:
    """Compute the definition token by token."""
    width = 2 * d if mode == "full" else d
    surplus = len(values) % width
    padded = values[surplus:] if surplus <= 1000 else np.append(values, np.zeros(width - surplus))
    slots = np.full(width, -np.inf)
    for token, value in enumerate(padded):
        slots[token % width] = max(slots[token % width], value)
    if mode == "semi":
        return slots
    return np.array([slots[2 * i] if slots[2 * i] > slots[2 * i + 1] else -slots[2 * i + 1] for i in range(d)])


@pytest.mark.parametrize("mode", ["full", "semi"])
@pytest.mark.parametrize(
    ("d", "full", "semi"),
    [(640, (24, -198), (47, 442)), (768, (20, -198), (39, 570)), (512, (29, 826), None), (256, (59, 314), None)],
)
def test_vocabulary_slices_by_hand(d: int, full: tuple[int, int], semi: tuple[int, int] | None, mode: str) -> None:
    """`full` and `semi` have the number of slices, and the number of ids that are dropped at the start; a negative one
    is that of appended zeros."""
    values = np.random.default_rng(0).permutation(VOCABULARY).astype(np.float32) / VOCABULARY
    np.testing.assert_array_equal(prune(jnp.asarray(values)[None], d, mode)[0], by_hand(values, d, mode))
    expected = full if mode == "full" else semi
    if expected:
        slices, dropped = expected
        assert slices * (2 * d if mode == "full" else d) == VOCABULARY - dropped


def test_ties_are_negative_and_zeros_have_no_sign() -> None:
    pruned = np.asarray(prune(vector({2000: 0.5, 2001: 0.5}), 640, "full"))[0]
    assert pruned[2000 % 1280 // 2] == -0.5
    assert pruned[np.arange(640) != 360].tolist() == [0.0] * 639


def case() -> tuple[np.ndarray, ...]:
    """hidden [3,11,4], weights and mask [3,11], and a matrix to 23 words. The first row has no padding, the second only
    negative weights."""
    generator = np.random.default_rng(1)
    hidden = generator.standard_normal((3, 11, 4)).astype(np.float32)
    weights = generator.standard_normal((3, 11)).astype(np.float32)
    weights[1] = -np.abs(weights[1])
    mask = np.arange(11) < np.array([11, 5, 8])[:, None]
    return hidden, weights, mask, generator.standard_normal((4, 23)).astype(np.float32)


@pytest.mark.table
@pytest.mark.parametrize("chunk", [1, 4, 11, 16])
def test_the_chunked_maximum_and_its_gradient_equal_the_whole_tensors(chunk: int) -> None:
    hidden, weights, mask, matrix = (jnp.asarray(x) for x in case())
    cotangent = jnp.asarray(np.random.default_rng(2).standard_normal((3, 23)), jnp.float32)

    def whole(h: jax.Array, w: jax.Array, m: jax.Array) -> jax.Array:
        values = jnp.where(mask[..., None], w[..., None] * jax.nn.softmax(h @ m), 0.0)
        return jnp.maximum(values.max(axis=1), 0.0)

    def chunked(h: jax.Array, w: jax.Array, m: jax.Array, train: bool = True) -> jax.Array:
        return strongest(lambda part: jax.nn.softmax(part @ m), h, w, mask, chunk, train)

    expected = whole(hidden, weights, matrix)
    np.testing.assert_allclose(chunked(hidden, weights, matrix), expected, atol=1e-6)
    np.testing.assert_allclose(chunked(hidden, weights, matrix, train=False), expected, atol=1e-6)
    assert float(expected[1].max()) == 0.0, "negative weights are cut at 0"
    gradients = [
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a) * cotangent), (0, 1, 2)))(hidden, weights, matrix)
        for f in (chunked, whole)
    ]
    assert distance(*gradients) <= 1e-6
    assert min(float(jnp.abs(g).max()) for g in gradients[0]) > 0.01, "control: gradients are not 0"


@pytest.mark.table
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_the_first_of_equal_tokens_gets_the_gradient(chunk: int) -> None:
    """The result is the same in one chunk and in several."""
    hidden = jnp.tile(jnp.asarray([[0.5, -1.0, 2.0]]), (1, 4, 1)).reshape(1, 4, 3)
    ones, mask = jnp.ones((1, 4)), jnp.array([[False, True, True, True]])
    gradient = jax.grad(lambda h: jnp.sum(strongest(jax.nn.sigmoid, h, ones, mask, chunk, True)))(hidden)
    assert (np.asarray(gradient)[0] != 0).all(axis=1).tolist() == [False, True, False, False]


def test_the_whole_tensor_is_never_in_memory() -> None:
    """Gradient and encoding need less memory than one [B,T,vocabulary] array, and less with smaller chunks."""
    B, T, V = 4, 64, 1000
    mask = jnp.ones((B, T), bool)

    def temporary(chunk: int, train: bool = True) -> int:
        def loss(h: jax.Array, w: jax.Array, m: jax.Array) -> jax.Array:
            return strongest(lambda part: jax.nn.softmax(part @ m), h, w, mask, chunk, train).sum()

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((B, T, 8), (B, T), (8, V))]
        compiled = jax.jit(jax.grad(loss, (0, 1, 2)) if train else loss).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]

    whole = B * T * V * 4
    assert temporary(4) < whole / 2
    assert temporary(T) > whole, "control: one chunk is the plain computation"
    assert temporary(4, train=False) < whole / 4
    assert temporary(T, train=False) > whole / 2, "control: one chunk needs more memory"


def test_without_the_mlm_head_a_token_has_its_own_word() -> None:
    ids = jnp.array([[5, 7, 5, 7], [3, 0, 0, 0]])
    weights = jnp.array([[0.5, -1.0, 0.9, -2.0], [-1.0, 4.0, 4.0, 4.0]])
    mask = jnp.array([[True] * 4, [True, False, False, False]])
    maximum = np.asarray(one_hot_maximum(ids, weights, mask, 9))
    assert maximum[0].tolist() == [0, 0, 0, 0, 0, np.float32(0.9), 0, 0, 0]
    assert not maximum[1].any(), "padding has no weight, and a negative weight is cut at 0"


def encode(overrides: dict[str, Any], params: Any = None) -> tuple[np.ndarray, Any, Any]:
    retriever = make_retriever(AGGRETRIEVER | overrides, WITHOUT_DROPOUT)
    params = params or make_params(retriever)
    vectors = jax.jit(lambda p: retriever.encode(p, make_tokens(3, 7), "passage").vectors)(params)
    return np.asarray(vectors)[:, 0], params, retriever


@pytest.mark.slow
def test_explained_words_are_pruned_to_the_vector() -> None:
    vectors, params, retriever = encode({})
    words = jax.jit(lambda p: retriever.word_values(p, make_tokens(3, 7), "passage"))(params)
    assert words.shape == (3, 1, WITHOUT_DROPOUT.vocab_size)
    np.testing.assert_allclose(prune(words[:, 0], 8, "full"), vectors[:, :8], atol=1e-6)
    parts = retriever.module.head.vector_parts()
    assert parts == {"words": (0, 8), "[CLS]": (8, 12)}


def test_the_vector_from_every_hidden_state_by_hand() -> None:
    """Both parts of the vector, from only the encoder's states and parameters, in float64."""
    vectors, params, retriever = encode({})
    tokens = make_tokens(3, 7)
    states = np.asarray(jax.jit(lambda p: retriever.hidden_states(p, tokens, "passage").states[-1])(params), np.float64)
    encoder = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    mlm, table = encoder["encoder"]["mlm_head"], encoder["encoder"]["embeddings"]["word"]["embedding"]
    x = states @ mlm["dense"]["kernel"] + mlm["dense"]["bias"]
    x = np.asarray(jax.nn.gelu(jnp.asarray(x), approximate=False), np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
    logits = (x * mlm["norm"]["scale"] + mlm["norm"]["bias"]) @ table.T + mlm["bias"]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    term = encoder["head"]["term_weight"]
    w = (states @ term["kernel"] + term["bias"])[..., 0]
    for row, length in enumerate(np.asarray(tokens.mask).sum(1)):
        v = np.maximum((w[row, 1:length, None] * p[row, 1:length]).max(0, initial=0.0), 0.0)
        agg = by_hand(v, 8, "full")
        cls = states[row, 0] @ encoder["head"]["cls"]["kernel"] + encoder["head"]["cls"]["bias"]
        np.testing.assert_allclose(vectors[row], np.concatenate([agg, cls]), atol=2e-5)


def test_the_average_by_hand() -> None:
    """AVERAGE of Table 8: the mean over real tokens without [CLS], projected, next to the projected [CLS]."""
    vectors, params, retriever = encode({"head.aggretriever.pruning": "average"})
    tokens = make_tokens(3, 7)
    states = np.asarray(jax.jit(lambda p: retriever.hidden_states(p, tokens, "passage").states[-1])(params), np.float64)
    head = jax.tree.map(lambda x: np.asarray(x, np.float64), params["head"])
    assert set(head) == {"average", "cls"}
    assert "mlm_head" not in params["encoder"]
    assert retriever.module.head.word_values("passage") == ""
    lengths = np.asarray(tokens.mask).sum(1)
    assert len(set(lengths)) > 1
    for row, length in enumerate(lengths):
        mean = sum(states[row, i] for i in range(1, length)) / (length - 1)
        average = mean @ head["average"]["kernel"] + head["average"]["bias"]
        cls = states[row, 0] @ head["cls"]["kernel"] + head["cls"]["bias"]
        np.testing.assert_allclose(vectors[row], np.concatenate([average, cls]), atol=2e-5)
        with_cls = states[row, :length].mean(0) @ head["average"]["kernel"] + head["average"]["bias"]
        assert np.abs(with_cls - average).max() > 1e-3, "control: with [CLS], the mean differs"


def test_parts_can_be_left_out() -> None:
    whole, params, _ = encode({})
    assert whole.shape == (3, 12)
    no_cls = {**params, "head": {name: part for name, part in params["head"].items() if name != "cls"}}
    np.testing.assert_allclose(encode({"head.aggretriever.cls_dim": 0}, no_cls)[0], whole[:, :8], atol=1e-6)
    only_cls = {**params, "head": {"cls": params["head"]["cls"]}}
    vectors, _, retriever = encode({"head.aggretriever.lexical_dim": 0}, only_cls)
    np.testing.assert_allclose(vectors, whole[:, 8:], atol=1e-6)
    assert retriever.module.head.loss_settings() == {}


@pytest.mark.table
@pytest.mark.parametrize(
    "change",
    [
        {"head.aggretriever.pruning": "semi"},
        {"head.aggretriever.pruning": "linear"},
        {"head.aggretriever.term_weights": False},
        {"head.aggretriever.mlm": False},
    ],
)
def test_ablations_give_other_vectors(change: dict[str, Any]) -> None:
    whole, params, _ = encode({})
    retriever = make_retriever(AGGRETRIEVER | change, WITHOUT_DROPOUT)
    own = make_params(retriever)
    own["encoder"] = {name: params["encoder"][name] for name in own["encoder"]}
    own["head"] = {name: params["head"].get(name, part) for name, part in own["head"].items()}
    vectors = encode(change, own)[0]
    assert vectors.shape == whole.shape
    assert np.abs(vectors - whole)[:, :8].max() > 1e-3
    np.testing.assert_allclose(vectors[:, 8:], whole[:, 8:], atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            {"head.aggretriever.pruning": "none"},
            r"head.aggretriever.pruning .*'none'; .*linear",
        ),
        ({"head.aggretriever.lexical_dim": 0, "head.aggretriever.cls_dim": 0}, r"one must be above 0"),
        ({"head.aggretriever.chunk": 0}, r"head.aggretriever.chunk is 0"),
    ],
)
def test_impossible_settings(overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_retriever(AGGRETRIEVER | overrides)
