"""Packed texts: every token occurs once, on the device of its text; sizes are few, and padding is little."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxret.data.formats import Policy, TrainingSource
from jaxret.data.records import Example, Passage, Query
from jaxret.data.tokens.batches import BatchPlan, TrainingSet, stack_batches, tokenize_examples
from jaxret.data.tokens.packing import (
    Packer,
    Placement,
    RowShape,
    RowsSize,
    assign_in_snake_order,
    assign_to_smallest,
    choose_row_shape,
    fit_into_rows,
    place_texts,
)
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.types import Batch
from tests.data.tokens.batches_test import EXAMPLES, PLAN, example
from tests.packed import texts_of
from tests.pipeline import write_encoder


def lengths_like(mean: float, count: int, seed: int, longest: int = 256) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).gamma(4, mean / 4, count).astype(int), 3, longest)


def places(placed: Placement, lengths: np.ndarray, bins: int, width: int) -> list[tuple[int, int]]:
    """(bin, place) of every token, after checking that texts do not leave their row."""
    actual = []
    for i, (text, start) in enumerate(zip(placed.order.tolist(), placed.starts.tolist())):
        if lengths[text]:
            assert start // width == (start + lengths[text] - 1) // width < placed.rows
        actual += [(i * bins // len(lengths), start + token) for token in range(lengths[text])]
    return actual


@pytest.mark.parametrize("bins", [1, 2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_packed_positions_do_not_overlap(bins: int, seed: int) -> None:
    lengths = lengths_like(80, 64, seed)
    lengths[seed::5] = 0  # texts without tokens: empty slots
    placed = place_texts(lengths, bins, 256)
    assert sorted(placed.order) == list(range(64)), "each device has the same number of texts"
    actual = places(placed, lengths, bins, 256)
    assert len(set(actual)) == len(actual) == lengths.sum()
    for starts, texts in zip(np.split(placed.starts, bins), np.split(placed.order, bins)):
        assert (np.diff(starts) >= 0).all(), "an encoder assumes that texts are in order"
        taken = lengths[texts] > 0
        assert (np.diff(starts[taken]) > 0).all()
        assert not taken[int(taken.sum()) :].any(), "texts without tokens come last"


def test_texts_are_distributed_evenly() -> None:
    lengths = lengths_like(80, 128, 0)
    for assign, most in ((assign_to_smallest, 1.02), (assign_in_snake_order, 1.1)):
        assigned = assign(lengths, 8)
        assert sorted(assigned.ravel()) == list(range(128))
        sums = lengths[assigned].sum(axis=1)
        assert sums.max() / sums.min() < most
    in_order = lengths.reshape(8, 16).sum(axis=1)
    assert in_order.max() / in_order.min() > 1.2, "control: without a distribution, sums differ more"


def test_the_better_distribution_is_used() -> None:
    """Texts that fill a row, and short texts."""
    full, short = np.array([256] * 8 + [40] * 24), lengths_like(80, 128, 2)
    assert place_texts(full, 8, 256).rows == 2
    rows = {
        assign: max(fit_into_rows(short[texts], 256).rows for texts in assign(short, 8))
        for assign in (assign_in_snake_order, assign_to_smallest)
    }
    assert place_texts(short, 8, 256).rows == min(rows.values())


def test_best_fit_by_hand() -> None:
    placed = fit_into_rows(np.array([3, 6, 4, 7, 0]), 10)
    assert placed.rows == 2  # the lengths 7 and 3 share a row, and 6 and 4
    assert placed.order.tolist() == [3, 0, 1, 2, 4]
    assert placed.starts.tolist() == [0, 7, 10, 16, 20]
    with pytest.raises(ValueError, match=r"11 tokens .*10"):
        fit_into_rows(np.array([11]), 10)


@pytest.mark.parametrize("mean", [40, 80, 120])
def test_little_space_stays_empty(mean: float) -> None:
    lengths = lengths_like(mean, 256, 1)
    assert place_texts(lengths, 1, 256).rows * 256 / lengths.sum() < 1.05


def test_prefix_slots_have_room() -> None:
    """If 8 slots replace the first token, a text needs 7 more places; an empty text needs none."""
    side = choose_row_shape([np.array([25, 25, 0, 10])], length=25, slots=8, bins=1, hidden_size=16)
    placed = side.place(np.array([25, 25, 0, 10]), 1, side.sizes[0].width)
    taken = {int(text): int(start) for text, start in zip(placed.order, placed.starts)}
    starts = sorted(taken[text] for text in (0, 1, 3))
    assert side.sizes[0].width >= 32
    assert all(b - a >= 17 for a, b in itertools.pairwise(starts))


def test_every_batch_fits_into_a_size() -> None:
    sample = [lengths_like(80, 64, seed) for seed in range(10)]
    side = choose_row_shape(sample, 256, 1, 4, 768)
    assert side.sizes[-1] == (16, 256)
    assert sorted(side.sizes, key=lambda size: size.rows * size.width) == list(side.sizes)
    packer = Packer(4, side, side)
    longest = np.full(64, 256)
    assert [placed.rows for placed in packer(sample[0], longest)] == [16, 16], (
        "the sizes of queries and passages belong together"
    )
    assert packer(sample[0], sample[0])[0].rows < 16


@pytest.mark.table
@pytest.mark.parametrize(("bins", "most"), [(8, 1.09), (16, 1.12)])
def test_bins_of_few_texts_are_filled(bins: int, most: float) -> None:
    """Rows of several widths fill them: rows of 256 are too coarse for a bin of a thousand tokens."""
    sample = [lengths_like(131, 128, seed) for seed in range(40)]
    side = choose_row_shape(sample, 256, 1, bins, 768)
    assert len({size.width for size in side.sizes[:3]}) > 1
    packer = Packer(bins, side, side)

    def computed_for_each(packer: Packer) -> float:
        tokens = [packer(lengths, lengths)[1] for lengths in sample]
        return sum(bins * placed.rows * placed.width for placed in tokens) / np.sum(sample)

    assert computed_for_each(packer) <= most
    one = choose_row_shape(sample, 256, 1, bins, 768, 0.95)
    assert computed_for_each(Packer(bins, one, one)) > computed_for_each(packer) + 0.02, (
        "control: rows of one width compute more"
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingSet:
    tokenizer = TextTokenizer.load(write_encoder(tmp_path_factory.mktemp("encoder")), 10, 16)
    return replace(tokenize_examples([example(i) for i in range(EXAMPLES)], tokenizer), imagine_queries=True)


@pytest.mark.parametrize("bins", [1, 4])
def test_a_packed_batch_has_the_texts_of_the_padded_one(bins: int, data: TrainingSet) -> None:
    plan = replace(PLAN, pseudo_length=3)
    packed = plan.with_packer(data, bins, (1, 1), 16)
    for step in (3, 0):
        expected, actual = plan.training_batch(data, step), packed.training_batch(data, step)
        for name in ("positives", "passage_ids", "known_positives"):
            np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
        for side in ("queries", "passages"):
            padded, tokens = getattr(expected, side), getattr(actual, side)
            rows = [row.tolist() for row in texts_of(padded)]
            assert [rows[i] for i in tokens.rows] == [row.tolist() for row in texts_of(tokens)]
        np.testing.assert_array_equal(actual.pseudo_queries, expected.pseudo_queries[actual.passages.rows])  # type: ignore[index]
        assert actual.passages.rows is not None
        assert actual.passages.rows.tolist() != sorted(actual.passages.rows), "control: the packed order differs"


@pytest.mark.parametrize("count", [2, 4])
def test_the_parts_of_all_processes_form_the_packed_batch(count: int, data: TrainingSet) -> None:
    plan = replace(PLAN, pseudo_length=3).with_packer(data, 4, (1, 1), 16)
    for step in range(3):
        whole = plan.training_batch(data, step)
        parts = [plan.training_batch(data, step, (index, count)) for index in range(count)]
        joined: Any = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        jax.tree.map(np.testing.assert_array_equal, joined, whole)


def test_validation_is_not_packed(data: TrainingSet) -> None:
    batch = PLAN.with_packer(data, 1, (1, 1), 16).batch(data, np.arange(8), None)
    assert batch.passages.packing is None


def computed(batch: Batch, bins: int) -> tuple[int, int]:
    """Return the number of tokens that the encoders compute for a batch, and of those that are real."""
    texts = batch.queries, batch.passages
    packed = [t.packing for t in texts if t.packing is not None]
    size = sum(bins * p.rows * p.width for p in packed) if packed else sum(t.ids.size for t in texts)
    return size, sum(int(t.mask.sum()) for t in texts)


SOURCES = {"nq-qed": "nq-qed/train.json", "medquad": "medquad"}


def generated_data(encoder: Path) -> TrainingSet:
    """2,560 examples whose numbers of words are distributed like those of real texts."""
    lengths = zip(lengths_like(12, 20 * 128, 0), lengths_like(80, 20 * 128, 1))
    texts = [("river " * query, "stone " * passage) for query, passage in lengths]
    examples = [Example(Query(f"q{i}", query), (Passage(f"p{i}", text),), ()) for i, (query, text) in enumerate(texts)]
    return tokenize_examples(examples, TextTokenizer.load(encoder, 256, 256))


def real_data(name: str, request: pytest.FixtureRequest) -> TrainingSet:
    data_dir, minilm_dir = (request.getfixturevalue(fixture) for fixture in ("data_dir", "minilm_dir"))
    examples = TrainingSource.open(data_dir / SOURCES[name], "train").read(Policy("skip"))
    return tokenize_examples(examples, TextTokenizer.load(minilm_dir, 256, 256))


@pytest.mark.daily("generated-1.45-1-1.08")
@pytest.mark.exhaustive
@pytest.mark.parametrize(("bins", "most"), [(1, 1.08), (8, 1.08), (16, 1.09)])
@pytest.mark.parametrize(("name", "before"), [("generated", 1.45), ("nq-qed", 1.9), ("medquad", 1.45)])
def test_padding_of_an_epoch(
    name: str, before: float, bins: int, most: float, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Queries and passages, 128 queries at a time: the table in docs/scale.md (pytest -rP prints it)."""
    data = real_data(name, request) if name in SOURCES else generated_data(write_encoder(tmp_path))
    padded = BatchPlan(128, 0, length_multiple=32, max_query_length=256, max_passage_length=256)
    packed = padded.with_packer(data, bins, (1, 1), 384)
    ratios = []
    for plan in (padded, packed):
        batches = [plan.training_batch(data, step) for step in range(len(data) // 128)]
        tokens, real = np.array([computed(batch, bins) for batch in batches]).sum(axis=0)
        ratios.append(tokens / real)
    programs = {
        (jax.tree.structure(batch), *(leaf.shape for leaf in jax.tree.leaves(batch))) for batch in batches
    }  # the number of rows of packed texts is part of the structure
    print(f"{name}: padded {ratios[0]:.2f}, packed on {bins} devices {ratios[1]:.2f}")
    assert len(programs) <= (4 if bins == 1 else 5)
    assert ratios[1] <= most
    assert ratios[0] > before, "control: padded texts"


def test_batches_of_one_step_have_the_same_rows(data: TrainingSet) -> None:
    """They have the rows of the largest batch; then they can be stacked."""
    side = RowShape(length=16, slots=1, sizes=tuple(RowsSize(rows, 16) for rows in (2, 3, 4, 32)))
    plan = replace(PLAN, packer=Packer(1, replace(side, length=10), side))
    batches = [plan.training_batch(data, step) for step in range(4)]
    rows = [batch.passages.packing.rows for batch in batches if batch.passages.packing]
    stacked = stack_batches(batches, data.pad_id)
    assert stacked.passages.packing is not None
    assert stacked.passages.packing.rows == max(rows)
    assert stacked.passages.packing.starts.shape == (4, 32)
    assert stacked.passages.computed_tokens(1) == 4 * max(rows) * 16


def test_batches_of_one_step_have_rows_of_one_width(data: TrainingSet) -> None:
    """They have the width of the widest batch; every text still fits into a row."""
    sizes = (RowsSize(6, 48), RowsSize(9, 32), RowsSize(32, 16))
    batches = []
    for size in sizes[:2]:
        shape = RowShape(length=16, slots=1, sizes=(size, sizes[2]))
        packer = Packer(1, RowShape(length=10, slots=1, sizes=(sizes[2], sizes[2])), shape)
        batches.append(replace(PLAN, packer=packer).training_batch(data, 0))
    assert [batch.passages.packing and batch.passages.packing.width for batch in batches] == [48, 32]
    stacked = stack_batches(batches, data.pad_id).passages
    assert stacked.packing is not None
    assert (stacked.packing.rows, stacked.packing.width) == (9, 48)
    for number, batch in enumerate(batches):
        assert batch.passages.packing is not None
        starts, before = stacked.packing.starts[number], batch.passages.packing
        taken = batch.passages.mask.any(axis=1)
        assert (starts[taken] // 48).tolist() == (before.starts[taken] // before.width).tolist()
        assert (starts[taken] % 48).tolist() == (before.starts[taken] % before.width).tolist()
        lengths = batch.passages.mask.sum(axis=1)[taken]
        assert (starts[taken] % 48 + lengths <= 48).all()
        assert (np.diff(starts) >= 0).all()
