"""From many texts to vectors: every text once, few shapes, little padding, and the vectors of each text alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.architectures.bert import BertConfig
from jaxret.models.encoders.pretrained import load_pretrained
from jaxret.models.heads.head import Side
from jaxret.models.retriever_model import RetrieverModel, make_retriever_model, with_pretrained
from jaxret.parallel.mesh import make_mesh
from jaxret.runs.embedder import Embedder, padded_length, plan_batches
from jaxret.runs.run import make_embedder
from jaxret.types import Params, Ragged, Tokens
from tests.pipeline import TINY_BERT, tiny_config
from tests.tiny import SPLADE, WITHOUT_DROPOUT, make_params, make_retriever

PAD, LIMIT = 0, 30


def passage_lengths(count: int, limit: int = 256) -> np.ndarray:
    """Return log-normal lengths, like those of texts: the median is 90 tokens, a few percent are cut at the limit."""
    return np.clip(np.random.default_rng(0).lognormal(4.5, 0.6, count).astype(int), 3, limit)


@pytest.mark.parametrize("multiple", [1, 3, 8])
def test_every_text_once_in_few_shapes(multiple: int) -> None:
    lengths = passage_lengths(3000)
    batches = list(plan_batches(lengths, 16384, multiple))
    rows = np.concatenate([rows for rows, _, _ in batches])
    assert sorted(rows.tolist()) == list(range(3000))
    assert (np.diff(lengths[rows]) <= 0).all()
    for rows, size, length in batches:
        assert lengths[rows].max() <= length
        assert len(rows) <= size
        assert size % multiple == 0
        assert size * length <= 16384
    shapes = {(size, length) for _, size, length in batches}
    assert len(shapes) <= 20  # each shape is a program to compile
    per_length = [size for size, length in shapes if length == batches[0][2]]
    assert len(per_length) == 1  # all batches of a length have one size; only the last one may be smaller


@pytest.mark.parametrize(("mean", "limit"), [(4.5, 256), (3.8, 128), (5.2, 512)])
def test_little_padding(mean: float, limit: int) -> None:
    lengths = np.clip(np.random.default_rng(1).lognormal(mean, 0.5, 5000).astype(int), 3, limit)
    batches = list(plan_batches(lengths, 8192, 1))
    computed = sum(size * min(length, limit) for _, size, length in batches)
    assert computed / lengths.sum() <= 1.10
    # Control: the same texts in their original order.
    unsorted = sum(32 * padded_length(int(lengths[i : i + 32].max())) for i in range(0, len(lengths), 32))
    assert unsorted / lengths.sum() > 1.5


def test_few_texts_make_one_small_batch() -> None:
    ((rows, size, length),) = plan_batches(np.array([5, 9, 9]), 16384, 1)
    assert (rows.tolist(), size, length) == ([1, 2, 0], 8, 16)
    assert list(plan_batches(np.array([], int), 16384, 1)) == []


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_text_alone_is_a_batch_of_its_own_size(multiple: int) -> None:
    """A question is computed once per device, not eight times."""
    ((rows, size, length),) = plan_batches(np.array([9]), 16384, multiple)
    assert (rows.tolist(), size, length) == ([0], multiple, 16)
    assert [size for _, size, _ in plan_batches(np.array([9, 9]), 16384, multiple)] == [8], (
        "control: two texts are a batch of eight"
    )


def test_padded_lengths() -> None:
    lengths = [padded_length(n) for n in range(1, 600)]
    assert all(n <= padded <= max(n * 1.125 + 1, n + 7) for n, padded in enumerate(lengths, 1))
    assert [padded_length(n) for n in (1, 8, 9, 128, 129, 256, 257)] == [8, 8, 16, 128, 144, 256, 288]


@pytest.fixture(scope="module")
def model() -> tuple[RetrieverModel, Params]:
    bert, encoder = load_pretrained(TINY_BERT)
    config = tiny_config(Path("unused"), "unused", head__name="mlr", head__mlr__chosen=(1, 3), normalize=True)
    retriever = make_retriever_model(config, bert)
    return retriever, with_pretrained(jax.eval_shape(retriever.init, jax.random.key(0)), encoder)


def embedder(model: tuple[RetrieverModel, Params]) -> Embedder:
    retriever, params = model
    return Embedder(retriever, params, make_mesh(), PAD, {"query": LIMIT, "passage": LIMIT}, tokens_per_batch=512)


def some_texts(count: int = 45) -> Ragged:
    random = np.random.default_rng(3)
    return Ragged.from_lists([random.integers(5, 99, random.integers(2, LIMIT)).tolist() for _ in range(count)])


@pytest.mark.table
@pytest.mark.parametrize("side", ["query", "passage"])
def test_vectors_equal_those_of_single_texts(model: tuple[RetrieverModel, Params], side: Side) -> None:
    retriever, params = model
    texts = some_texts()
    actual = embedder(model)(texts, side).stacked()
    encode = jax.jit(lambda tokens: retriever.encode(params, tokens, side).vectors)
    for i in range(len(texts)):
        ids = np.zeros((1, LIMIT), np.int32)
        ids[0, : texts.lengths[i]] = texts[i]
        alone = encode(Tokens(jnp.asarray(ids), jnp.arange(LIMIT)[None] < int(texts.lengths[i])))[0]
        np.testing.assert_allclose(actual[i], alone, atol=1e-6, rtol=0)  # the vectors have length 1
    assert actual.dtype == np.float32
    assert actual.shape == (45, retriever.vectors_per_passage if side == "passage" else 1, 32)
    assert np.abs(actual[1:] - actual[:-1]).max(axis=(1, 2)).min() > 1e-3  # control: the texts differ


def test_weights_of_words_are_in_the_order_of_the_texts() -> None:
    """Texts are encoded in the order of their lengths, in several batches."""
    retriever, limit = make_retriever(SPLADE, WITHOUT_DROPOUT), 12
    params, random = make_params(retriever), np.random.default_rng(0)
    lengths = random.permutation([4, 5, 6, 7, 9, 10, 11, 12] * 3)
    texts = Ragged.from_lists([random.integers(4, 40, length).tolist() for length in lengths])
    limits: dict[Side, int] = {"query": limit, "passage": limit}
    ours = Embedder(retriever, params, make_mesh(devices=jax.devices()[:1]), PAD, limits, tokens_per_batch=96)
    actual = ours(texts, "passage").stacked()[:, 0]
    assert ours.counts.padded_tokens > 2 * 96, "control: texts have several batches"
    ids, mask = texts.padded(np.arange(len(texts)), limit)
    expected = jax.jit(lambda tokens: retriever.encode(params, tokens, "passage").vectors)(Tokens(ids, mask))[:, 0]
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert np.abs(actual[1:] - actual[:-1]).max(axis=1).min() > 1e-2, "control: the texts differ"


def test_a_second_pass_compiles_nothing_and_is_the_same(model: tuple[RetrieverModel, Params]) -> None:
    texts, once = some_texts(), embedder(model)
    first = once(texts, "passage").stacked()
    programs = once.programs
    assert programs == len({(size, min(length, LIMIT)) for _, size, length in plan_batches(texts.lengths, 512, 8)})
    order = np.random.default_rng(0).permutation(len(texts))
    shuffled = Ragged.from_lists([texts[i].tolist() for i in order.tolist()])
    np.testing.assert_allclose(once(shuffled, "passage").stacked(), first[order], atol=1e-6, rtol=0)
    assert once.programs == programs
    once(some_texts(), "query")
    assert once.programs > programs  # control: queries need more programs


@pytest.mark.slow
def test_other_parameters_use_the_same_programs(model: tuple[RetrieverModel, Params]) -> None:
    texts, once = some_texts(), embedder(model)
    first = once(texts, "passage").stacked()
    programs = once.programs
    moved = jax.tree.map(lambda leaf: leaf + 0.1, once.params)
    other = once.with_params(moved)(texts, "passage").stacked()
    assert once.programs == programs
    assert np.abs(other - first).max() > 1e-3
    np.testing.assert_array_equal(once(texts, "passage").stacked(), first)
    np.testing.assert_array_equal(embedder((model[0], moved))(texts, "passage").stacked(), other)


@pytest.mark.slow
def test_an_embedder_is_frozen_and_a_copy_uses_its_own_retriever(
    model: tuple[RetrieverModel, Params],
) -> None:
    once = embedder(model)
    with pytest.raises(FrozenInstanceError):
        once.retriever = model[0].unpooled()  # type: ignore[misc]
    config = tiny_config(Path("unused"), "unused", head__name="mlr", head__mlr__chosen=(1, 3), pooling="average")
    pooled = make_retriever_model(config, load_pretrained(TINY_BERT)[0])
    texts, first = some_texts(), replace(once, retriever=pooled)
    assert first(texts, "passage").stacked().shape == (45, 1, 32)
    assert replace(first, retriever=pooled.unpooled())(texts, "passage").stacked().shape == (45, 2, 32)


def test_padding_is_counted(model: tuple[RetrieverModel, Params]) -> None:
    texts, once = some_texts(), embedder(model)
    assert once(Ragged.from_lists([]), "passage").stacked().shape == (0, 1, 32)
    once(texts, "passage")
    computed = sum(size * min(length, LIMIT) for _, size, length in plan_batches(texts.lengths, 512, 8))
    assert once.counts.real_tokens == texts.lengths.sum()
    assert once.padding_ratio == computed / texts.lengths.sum()


def test_a_text_with_fewer_tokens_than_vectors_repeats_its_first() -> None:
    """ME-BERT: a missing vector must not win a maximum."""
    encoder_config, encoder = load_pretrained(TINY_BERT)
    config = tiny_config(Path("unused"), "unused", head__name="me_bert", head__me_bert__count=6)
    retriever = make_retriever_model(config, encoder_config)
    params = with_pretrained(jax.eval_shape(retriever.init, jax.random.key(0)), encoder)
    texts = Ragged.from_lists([[5, 9, 7], list(range(10, 20))])
    short, whole = embedder((retriever, params))(texts, "passage").stacked()
    assert short.shape == (6, 32)
    np.testing.assert_array_equal(short[3:], np.broadcast_to(short[0], (3, 32)))
    assert np.abs(short[1:3] - short[0]).max(axis=1).min() > 1e-3
    assert np.abs(whole[1:] - whole[0]).max(axis=1).min() > 1e-3, "control: a long text has different vectors"


def test_padding_uses_the_tokenizers_pad_id() -> None:
    """RoBERTa pads with 1, others with 0: a run's embedder must read it from the tokenizer."""
    config = tiny_config(Path("unused"), "unused")
    retriever = make_retriever_model(config, BertConfig(99, 32, 1, 2, 64, max_positions=40))
    tokenizer = TextTokenizer(None, cls_id=2, sep_id=3, pad_id=7, query_length=8, passage_length=8)
    mesh = make_mesh(devices=jax.devices()[:1])
    assert make_embedder(retriever, {}, mesh, tokenizer, config).pad_id == 7


def test_parts_are_streamed(model: tuple[RetrieverModel, Params]) -> None:
    """The vectors of each part equal those of the part alone; the next part is sent to the device before they are
    ready."""
    ours, texts = embedder(model), some_texts()
    parts = [texts.part(0, 20), texts.part(20, 21), texts.part(21, 45)]
    alone = [ours(part, "passage") for part in parts]
    order: list[str] = []

    def requested() -> Iterator[Ragged]:
        for number, part in enumerate(parts):
            order.append(f"asked {number}")
            yield part

    for number, actual in enumerate(ours.encode_stream(requested(), "passage")):
        order.append(f"got {number}")
        np.testing.assert_array_equal(actual.flat, alone[number].flat)
        np.testing.assert_array_equal(actual.offsets, alone[number].offsets)
        assert not np.array_equal(actual.flat[:1], alone[number - 1].flat[:1])  # control: two parts differ
    assert all(order.index(f"asked {number + 1}") < order.index(f"got {number}") for number in range(2))
    assert len(ours(texts.part(3, 3), "passage")) == 0
    assert list(ours.encode_stream(iter([]), "passage")) == []
