"""I3's reconstructor and interactor: their inputs and losses, and equality with PyTorch's layer where torch is
installed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.models.encoders.architectures import make_encoder
from jaxret.models.encoders.architectures.bert import BertAttention, BertLayer
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.layout import TokenLayout
from jaxret.models.encoders.selection import Selection
from jaxret.models.heads.head import HeadInput
from jaxret.models.heads.i3 import I3Head, ReconstructorLayer
from jaxret.parallel.mesh import make_mesh
from jaxret.training.optimizers import make_optimizer
from jaxret.training.starting_weights import init_state
from jaxret.types import HiddenStates, Tokens
from tests.tiny import (
    I3,
    WITHOUT_DROPOUT,
    make_config,
    make_params,
    make_retriever,
    make_tokens,
)

ROWS, LENGTH, U = 3, 7, 4
LAYOUT = TokenLayout(jnp.ones((2, U), bool))


def make(variant: str, **changes: Any) -> tuple[Any, Any]:
    retriever = make_retriever(I3 | {"head.i3.variant": variant} | changes, WITHOUT_DROPOUT)
    return retriever, make_params(retriever)


def encode(retriever: Any, params: Any, tokens: Tokens, labels: Any = None) -> Any:
    return jax.jit(lambda p: retriever.encode(p, tokens, "passage", labels=labels))(params)


@pytest.mark.table
@pytest.mark.parametrize("variant", ["paper", "released"])
def test_a_passage_is_one_vector_and_a_query_is_the_last_layer(variant: str) -> None:
    retriever, params = make(variant)
    tokens = make_tokens(ROWS, LENGTH)
    embeddings = encode(retriever, params, tokens)
    assert embeddings.vectors.shape == (ROWS, 1, WITHOUT_DROPOUT.hidden_size)
    assert embeddings.auxiliary_loss is None
    query = jax.jit(lambda p: retriever.encode(p, tokens, "query").vectors)(params)
    states = jax.jit(lambda p: retriever.hidden_states(p, tokens, "query").states)(params)
    np.testing.assert_allclose(query[:, 0], states[-1][:, 0], atol=1e-5)


@pytest.mark.slow
def test_explained_words_equal_those_of_the_reconstruction_loss() -> None:
    """The loss of a pseudo-query is minus the sum of the log probabilities of its tokens, taken from these word
    values."""
    retriever, params = make("paper")
    tokens, labels = make_tokens(ROWS, LENGTH), jnp.array([[5, 6, 7, 8], [9, 4, -1, -1], [30, -1, -1, -1]])
    words = np.asarray(jax.jit(lambda p: retriever.word_values(p, tokens, "passage"))(params), np.float64)
    assert words.shape == (ROWS, U, WITHOUT_DROPOUT.vocab_size)
    np.testing.assert_allclose(words.sum(axis=-1), 1, atol=1e-5)
    for row, (loss, count) in enumerate(np.asarray(encode(retriever, params, tokens, labels).auxiliary_loss)):
        real_labels = [label for label in labels[row].tolist() if label >= 0]
        assert count == len(real_labels)
        assert loss == pytest.approx(
            -sum(np.log(words[row, j, label]) for j, label in enumerate(real_labels)), abs=1e-4
        )
    assert retriever.module.head.word_values("query") == ""


def moves(variant: str, token: int) -> float:
    """Return how far a passage's vector moves when only the last layer's state at `token` changes."""
    retriever, params = make(variant)
    head: I3Head = retriever.module.head
    encoder = make_encoder(WITHOUT_DROPOUT)
    tokens = make_tokens(ROWS, LENGTH)

    def vectors(change: float) -> jax.Array:
        def run(module: Any) -> jax.Array:
            hidden = module(tokens, head.selection("passage"))
            states = hidden.states
            if token < states.shape[2]:
                states = states.at[-1, :, token].add(change)
            return head.apply(
                {"params": params["passage_head"]},
                HiddenStates(states, hidden.mask),
                HeadInput("passage", tokens, module),
            ).vectors

        return jax.jit(lambda p: encoder.apply({"params": p}, method=run))(params["passage_encoder"])

    return float(jnp.abs(vectors(1.0) - vectors(0.0))[0].max())


@pytest.mark.exhaustive
def test_the_paper_variant_reads_all_tokens_the_released_one_cls() -> None:
    assert moves("paper", 0) > 1e-3
    assert moves("paper", 3) > 1e-4
    assert moves("released", 0) > 1e-3
    assert moves("released", 3) == 0


@pytest.mark.table
@pytest.mark.parametrize("variant", ["paper", "released"])
def test_the_vector_depends_on_the_reconstruction(variant: str) -> None:
    """The test has no labels. The vector can depend on this bias only through the pseudo-tokens Z."""
    retriever, params = make(variant)
    tokens = make_tokens(ROWS, LENGTH)
    before = np.asarray(encode(retriever, params, tokens).vectors)
    layers = params["passage_head"]["reconstructor_layers"]
    layers["output_norm"]["bias"] = layers["output_norm"]["bias"] + 1.0
    assert float(np.abs(np.asarray(encode(retriever, params, tokens).vectors) - before).max()) > 1e-2


@pytest.mark.exhaustive
def test_the_released_interactor_reads_cls_and_the_mean_of_z() -> None:
    """The interactor has one layer, which the test computes from the module's parts."""
    retriever, params = make("released", **{"head.i3.reconstructor_layers": 1, "head.i3.interactor_layers": 1})
    head, tokens = retriever.module.head, make_tokens(ROWS, LENGTH)
    encoder = make_encoder(WITHOUT_DROPOUT)
    own = {"params": params["passage_encoder"]}
    state = encoder.apply(own, tokens, head.selection("passage")).states[-1]  # [B,1,H]
    assert state.shape[1] == 1
    pseudo_tokens = head.pseudo_tokens(HeadInput("passage", tokens))
    pseudo = encoder.apply(own, pseudo_tokens, False, method="embed")
    one = jax.tree.map(lambda leaf: leaf[0], params["passage_head"])
    layer = ReconstructorLayer(WITHOUT_DROPOUT, Compute())
    layout, mask = TokenLayout(pseudo_tokens.mask), jnp.ones((ROWS, 1), bool)
    imagined, _ = layer.apply({"params": one["reconstructor_layers"]}, pseudo, layout, state, mask)
    together = jnp.concatenate([state, imagined.mean(axis=1, keepdims=True)], axis=1)
    interactor = BertLayer(WITHOUT_DROPOUT, Compute(), Selection(1, layers="last"))
    both = TokenLayout(jnp.ones((ROWS, 2), bool))
    expected, _ = interactor.apply({"params": one["interactor_layers"]}, together, both)
    vectors = encode(retriever, params, tokens).vectors
    np.testing.assert_allclose(vectors[:, 0], expected[:, 0], atol=1e-5)


def test_the_initial_inputs_are_the_encoders_masks() -> None:
    """The inputs are the norm of the embedding of [MASK] plus that of its position, in float64; this encoder has no
    types."""
    retriever, params = make("paper")
    weights = params["passage_encoder"]
    tables = {k: np.asarray(v["embedding"], np.float64) for k, v in weights["embeddings"].items() if "embedding" in v}
    norm = {k: np.asarray(v, np.float64) for k, v in weights["embeddings"]["norm"].items()}
    started = retriever.initial_head(weights)["pseudo_inputs"]
    assert started.shape == params["passage_head"]["pseudo_inputs"].shape == (U, WITHOUT_DROPOUT.hidden_size)
    for j in range(U):
        x = tables["word"][I3["head.i3.mask_id"]] + tables["position"][j]
        x = (x - x.mean()) / np.sqrt(x.var() + WITHOUT_DROPOUT.layer_norm_eps)
        np.testing.assert_allclose(started[j], x * norm["scale"] + norm["bias"], atol=1e-5)
    released, params = make("released")
    assert released.initial_head(params["passage_encoder"]) == {}
    assert "pseudo_inputs" not in params["passage_head"]
    mesh = make_mesh(devices=jax.devices()[:1])
    config = make_config(I3)
    optimizer, _ = make_optimizer(config.optimizer, 9)
    state = init_state(config, mesh, retriever, weights, optimizer)
    np.testing.assert_allclose(state.params["passage_head"]["pseudo_inputs"], started, atol=1e-6)


def test_initial_weights_of_the_reconstructor() -> None:
    mask = jnp.arange(5)[None] < jnp.array([4, 3])[:, None]
    tokens = Tokens(jnp.array([[7, 9, 11, 8, 0], [7, 9, 8, 0, 0]]), mask)
    text = HeadInput("passage", tokens)
    paper = I3Head(2, 16, 40, mask_id=3, pseudo_length=5)
    released = I3Head(2, 16, 40, mask_id=3, pseudo_length=5, variant="released")
    np.testing.assert_array_equal(paper.pseudo_tokens(text).ids, np.full((2, 5), 3))
    np.testing.assert_array_equal(released.pseudo_tokens(text).ids, [[7, 3, 3, 3, 8]] * 2)


@pytest.mark.daily("paper")
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["paper", pytest.param("released", marks=pytest.mark.exhaustive)])
def test_the_reconstruction_loss_is_a_cross_entropy_over_real_labels(variant: str) -> None:
    retriever, params = make(variant)
    tokens = make_tokens(ROWS, LENGTH)
    labels = jnp.array([[5, 6, -1, -1], [-1] * 4, [9, 9, 9, 9]])
    losses = np.asarray(encode(retriever, params, tokens, labels).auxiliary_loss)
    assert losses.shape == (ROWS, 2)
    np.testing.assert_array_equal(losses[:, 1], [2, 0, 4])
    assert losses[1, 0] == 0
    single = [
        np.asarray(encode(retriever, params, tokens, labels.at[0].set(jnp.array(row))).auxiliary_loss)[0, 0]
        for row in ([5, -1, -1, -1], [-1, 6, -1, -1])
    ]
    assert losses[0, 0] == pytest.approx(sum(single), rel=1e-5)
    moved = np.asarray(encode(retriever, params, tokens, labels.at[0].set(jnp.array([6, 5, -1, -1]))).auxiliary_loss)
    assert abs(moved[0, 0] - losses[0, 0]) > 1e-3, "control: positions matter"
    assert 0.5 < losses[2, 0] / 4 < 3 * np.log(WITHOUT_DROPOUT.vocab_size)
    bias = params["passage_head"]["vocabulary"]["bias"]
    params["passage_head"]["vocabulary"]["kernel"] *= 0  # the result is the softmax of the bias
    alone = np.asarray(encode(retriever, params, tokens, labels).auxiliary_loss)
    logs = np.asarray(bias, np.float64) - np.log(np.exp(np.asarray(bias, np.float64)).sum())
    np.testing.assert_allclose(alone[:, 0], [-logs[5] - logs[6], 0, -4 * logs[9]], rtol=1e-5)


def test_cross_attention_to_one_state_does_not_depend_on_the_query() -> None:
    """A softmax over one key is 1: the released variant's cross-attention adds a constant."""
    module = BertAttention(WITHOUT_DROPOUT, Compute())
    generator = np.random.default_rng(0)
    hidden = jnp.asarray(generator.standard_normal((2, 5, 16)), jnp.float32)
    state, mask = hidden[:, :1] * 2, jnp.ones((2, 1), bool)
    params = jax.tree.map(lambda x: 20 * x, module.init(jax.random.key(0), hidden, state, mask, LAYOUT))
    one = module.apply(params, hidden, state, mask, LAYOUT)
    other = module.apply(params, hidden * 3 - 1, state, mask, LAYOUT)
    np.testing.assert_allclose(one, other, atol=1e-5)
    np.testing.assert_allclose(one, one[:, :1].repeat(5, axis=1), atol=1e-5)
    two = module.apply(params, hidden, hidden[:, :2], jnp.ones((2, 2), bool), LAYOUT)
    assert float(jnp.abs(two - two[:, :1]).max()) > 0.1, "control: with two keys, the result depends on the query"


def test_a_reconstructor_layer_equals_transformers_cross_attention_layer() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is only needed for live parity")
    transformers = pytest.importorskip("transformers")
    from transformers.models.bert.modeling_bert import BertLayer

    c = WITHOUT_DROPOUT
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_heads,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=1,
        is_decoder=True,
        add_cross_attention=True,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = BertLayer(config, layer_idx=0).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    weights = {name: value.detach().numpy() for name, value in theirs.named_parameters()}

    def linear(name: str) -> dict[str, np.ndarray]:
        return {"kernel": weights[f"{name}.weight"].T, "bias": weights[f"{name}.bias"]}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": weights[f"{name}.weight"], "bias": weights[f"{name}.bias"]}

    def attention(name: str) -> dict[str, Any]:
        parts = {part: linear(f"{name}.self.{part}") for part in ("query", "key", "value")}
        return parts | {"output": linear(f"{name}.output.dense")}

    params = {
        "attention": attention("attention"),
        "attention_norm": norm("attention.output.LayerNorm"),
        "cross_attention": attention("crossattention"),
        "cross_attention_norm": norm("crossattention.output.LayerNorm"),
        "intermediate": linear("intermediate.dense"),
        "output": linear("output.dense"),
        "output_norm": norm("output.LayerNorm"),
    }
    generator = np.random.default_rng(0)
    hidden = generator.standard_normal((2, U, c.hidden_size)).astype(np.float32)
    states = generator.standard_normal((2, 6, c.hidden_size)).astype(np.float32)
    mask = np.array([[True] * 6, [True] * 3 + [False] * 3])
    params, arrays = jax.tree.map(jnp.asarray, (params, (hidden, states, mask)))
    ours, _ = ReconstructorLayer(c, Compute()).apply({"params": params}, arrays[0], LAYOUT, *arrays[1:])
    shut = torch.tensor(np.where(mask, 0.0, -1e30), dtype=torch.float32)[:, None, None]
    with torch.no_grad():
        output = theirs(torch.tensor(hidden), encoder_hidden_states=torch.tensor(states), encoder_attention_mask=shut)
    expected = (output[0] if isinstance(output, tuple) else output).numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"head.i3.variant": "other"}, r"head.i3.variant .*'other'; .*released"),
        ({"head.token": "mean"}, r"interactor's output .*\[CLS\]"),
        ({"head.i3.interactor_layers": 0}, r"at least 1"),
    ],
)
def test_impossible_settings(overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_retriever(I3 | overrides)
