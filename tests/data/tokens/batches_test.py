"""A batch is a pure function of (seeds, step), for any process and any part of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxret.data.records import Example, Passage, Query
from jaxret.data.tokens.batches import BatchPlan, TrainingSet, stack_batches, tokenize_examples
from jaxret.data.tokens.pairs import PairJoiner, PairPlan
from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.types import Batch, Ragged
from tests.pipeline import write_encoder

EXAMPLES = 20
PLAN = BatchPlan(8, 3, length_multiple=4, max_query_length=10, max_passage_length=16, data_seed=1, negatives_seed=2)
POOL = [0, 2, 3, 9]  # hard negatives of example i: POOL[i % 4]


def example(i: int) -> Example:
    text = " ".join(["river"] * (1 + i % 5))
    positives = (Passage(f"p{i}", text, "stone"), *([Passage(f"p{i - 1}", "x")] if i % 2 else []))
    return Example(Query(f"q{i}", text), positives, tuple(Passage(f"n{i}.{j}", text) for j in range(POOL[i % 4])))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingSet:
    tokenizer = TextTokenizer.load(write_encoder(tmp_path_factory.mktemp("encoder")), 10, 16)
    examples = tokenize_examples([example(i) for i in range(EXAMPLES)], tokenizer)
    return replace(examples, pad_id=7)  # not 0, which is the fill value of arrays


def leaves(batch: Batch) -> list[np.ndarray]:
    return jax.tree.leaves(batch)


def same(one: Batch, two: Batch) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(leaves(one), leaves(two), strict=True))


def test_passages_are_stored_once(data: TrainingSet) -> None:
    assert len(data) == EXAMPLES
    assert len(data.passages) == EXAMPLES + sum(POOL[i % 4] for i in range(EXAMPLES))
    assert data.known_positives.largest_count == 2
    for i in range(EXAMPLES):
        expected = sorted([data.positives[i], *([data.positives[i - 1]] if i % 2 else [])])
        assert data.known_positives[i].tolist() == expected


def test_the_digest_depends_on_the_text(data: TrainingSet, tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(write_encoder(tmp_path), 10, 16)
    examples = [example(i) for i in range(EXAMPLES)]
    assert tokenize_examples(examples, tokenizer).digest == data.digest
    assert tokenize_examples(examples[::-1], tokenizer).digest != data.digest
    examples[3] = replace(examples[3], query=Query("q3", "river."))
    assert tokenize_examples(examples, tokenizer).digest != data.digest
    with pytest.raises(ValueError, match="no training example"):
        tokenize_examples([], tokenizer)


@pytest.mark.parametrize("part", [(0, 1), (1, 2), (3, 4)])
def test_slots_added_for_devices_are_empty(data: TrainingSet, part: tuple[int, int]) -> None:
    """Eight queries on twelve devices: the batch for eight devices, and four empty places; each process has its
    part."""
    few, many = PLAN, replace(PLAN, devices=12)
    assert (few.padded_size, many.padded_size, replace(PLAN, devices=3).padded_size) == (8, 12, 9)
    index, count = part
    whole, actual = few.training_batch(data, 3), many.training_batch(data, 3, part)

    def expected(array: np.ndarray, empty: int) -> np.ndarray:
        more = len(array) // 2
        filled = np.concatenate([array, np.full((more, *array.shape[1:]), empty, array.dtype)])
        return np.split(filled, count)[index]

    np.testing.assert_array_equal(actual.positives, expected(whole.positives, -1))
    np.testing.assert_array_equal(actual.passage_ids, expected(whole.passage_ids, -1))
    np.testing.assert_array_equal(actual.known_positives, expected(whole.known_positives, -1))
    for name in ("queries", "passages"):
        tokens, all_tokens = getattr(actual, name), getattr(whole, name)
        np.testing.assert_array_equal(tokens.mask, expected(all_tokens.mask, False))
        np.testing.assert_array_equal(tokens.ids, expected(all_tokens.ids, data.pad_id))


def test_a_batch_depends_only_on_seeds_and_step(data: TrainingSet) -> None:
    again = replace(PLAN)
    for step in (7, 0, 3, 7):  # batches are made in any order
        assert same(PLAN.training_batch(data, step), again.training_batch(data, step))
    assert not same(PLAN.training_batch(data, 0), PLAN.training_batch(data, 1))


def test_every_example_once_an_epoch() -> None:
    steps = EXAMPLES * 3 // PLAN.batch_size + 1
    stream = np.concatenate([PLAN.batch_examples(step, EXAMPLES) for step in range(steps)])
    epochs = [stream[i * EXAMPLES : (i + 1) * EXAMPLES] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(EXAMPLES))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0], np.arange(EXAMPLES))


def test_the_stream_does_not_depend_on_the_batch_size() -> None:
    small = np.concatenate([replace(PLAN, batch_size=4).batch_examples(step, EXAMPLES) for step in range(10)])
    large = np.concatenate([replace(PLAN, batch_size=20).batch_examples(step, EXAMPLES) for step in range(2)])
    assert np.array_equal(small, large)


def test_each_seed_changes_only_its_part(data: TrainingSet) -> None:
    # A batch of all examples, so that some queries have more negatives than slots.
    whole = replace(PLAN, batch_size=EXAMPLES)
    examples, passages = whole.batch_examples(0, EXAMPLES), whole.passage_rows(data, np.arange(EXAMPLES), 0)
    other_negatives, other_data = replace(whole, negatives_seed=3), replace(whole, data_seed=3)
    assert np.array_equal(other_negatives.batch_examples(0, EXAMPLES), examples)
    assert not np.array_equal(other_negatives.passage_rows(data, np.arange(EXAMPLES), 0), passages)
    assert not np.array_equal(other_data.batch_examples(0, EXAMPLES), examples)
    assert np.array_equal(other_data.passage_rows(data, np.arange(EXAMPLES), 0), passages)


def test_negatives_are_drawn_without_replacement_from_the_pool(data: TrainingSet) -> None:
    examples = np.arange(EXAMPLES)
    drawn = np.stack([PLAN.passage_rows(data, examples, step).reshape(EXAMPLES, 4) for step in range(20)])
    for i in range(EXAMPLES):
        pool = data.negatives[i].tolist()
        assert (drawn[:, i, 0] == data.positives[i]).all()
        for row in drawn[:, i, 1:]:
            real = row[row >= 0].tolist()
            assert len(real) == len(set(real)) == min(3, len(pool))
            assert set(real) <= set(pool)
            assert (row[len(real) :] == -1).all()
        if len(pool) == 9:
            # Over the steps, every negative of the pool is drawn.
            assert set(drawn[:, i, 1:].ravel().tolist()) == set(pool)


def test_validation_takes_the_first_negatives(data: TrainingSet) -> None:
    passages = PLAN.passage_rows(data, np.arange(EXAMPLES), None).reshape(EXAMPLES, 4)
    assert passages[3, 1:].tolist() == data.negatives[3][:3].tolist()
    assert passages[1, 1:].tolist() == [*data.negatives[1].tolist(), -1]


def test_positives_point_to_their_passages(data: TrainingSet) -> None:
    batch = PLAN.training_batch(data, 2)
    examples = PLAN.batch_examples(2, EXAMPLES)
    assert batch.positives.tolist() == [0, 4, 8, 12, 16, 20, 24, 28]
    assert np.array_equal(batch.passage_ids[batch.positives], data.positives[examples])
    assert np.array_equal(batch.known_positives, data.known_positives.table(examples))
    for row, i in enumerate(examples.tolist()):
        assert batch.queries.ids[row][batch.queries.mask[row]].tolist() == data.queries[i].tolist()
    for row, i in enumerate(batch.passage_ids.tolist()):
        actual = batch.passages.ids[row][batch.passages.mask[row]].tolist()
        assert actual == (data.passages[i].tolist() if i >= 0 else [])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_parts_of_all_processes_form_the_batch(count: int, data: TrainingSet) -> None:
    for step in range(3):
        whole = PLAN.training_batch(data, step)
        parts = [PLAN.training_batch(data, step, (index, count)) for index in range(count)]
        joined: Any = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        assert same(joined, whole)
    if count > 1:
        swapped: Any = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts[::-1])
        assert not same(swapped, whole)


def test_lengths_are_the_smallest_sufficient_multiples(data: TrainingSet) -> None:
    seen = set()
    for step in range(10):
        batch = PLAN.training_batch(data, step)
        for tokens, limit in ((batch.queries, 10), (batch.passages, 16)):
            length, longest = tokens.ids.shape[1], tokens.mask.sum(1).max()
            assert length == min(-(-longest // 4) * 4, limit)
            seen.add(length)
    assert 8 in seen


def test_padding_rows_are_no_queries(data: TrainingSet) -> None:
    rows = np.array([3, 0, -1, -1, 5, -1, 2, 1])
    batch = PLAN.batch(data, rows, batch_number=None)
    gone = rows < 0
    assert batch.positives.tolist() == [0, 4, -1, -1, 16, -1, 24, 28]
    assert (batch.known_positives[gone] == -1).all()
    assert (batch.passage_ids.reshape(8, 4)[gone] == -1).all()
    assert not batch.queries.mask[gone].any()
    assert not batch.passages.mask.reshape(8, 4, -1)[gone].any()
    assert (batch.passages.ids.reshape(8, 4, -1)[gone] == data.pad_id).all()
    for tokens in (batch.queries, batch.passages):
        assert (tokens.ids[~tokens.mask] == data.pad_id).all()
    assert batch.queries.mask[~gone].any(axis=1).all()


def test_pseudo_queries_of_a_file_belong_to_their_passages(tmp_path: Path) -> None:
    """For positives and negatives; -1 if a passage has none; truncated at the length; each process gets its rows."""
    tokenizer = TextTokenizer.load(write_encoder(tmp_path), 10, 16)
    texts = {"p0": "river", "p1": "stone music light", "n1.0": "paper", "nowhere": "forest"}
    data = tokenize_examples([example(i) for i in range(EXAMPLES)], tokenizer, pseudo_queries=texts)
    plan = replace(PLAN, pseudo_length=2)
    batch = plan.batch(data, np.arange(8), None)
    assert batch.pseudo_queries is not None
    ids = {text: tokenizer.without_markers([text])[0].tolist() for text in texts.values()}
    assert all(len(actual) == len(text.split()) for text, actual in ids.items())
    rows = {"p0": 0, "p1": 4, "n1.0": 5}  # each query has its positive, then three slots for negatives
    for row, labels in enumerate(batch.pseudo_queries.tolist()):
        expected = [ids[texts[name]] for name, place in rows.items() if place == row]
        assert labels == ((expected[0] if expected else []) + [-1, -1])[:2], row
    halves = [plan.batch(data, np.arange(8), None, (part, 2)).pseudo_queries for part in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves), batch.pseudo_queries)  # type: ignore[arg-type]


def test_the_training_query_is_the_pseudo_query_of_its_positive_only(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(write_encoder(tmp_path), 10, 16)
    data = replace(tokenize_examples([example(i) for i in range(EXAMPLES)], tokenizer), imagine_queries=True)
    plan = replace(PLAN, pseudo_length=6)
    examples = np.array([4, 1, -1, 7, 2, 0, 3, 5])
    batch = plan.batch(data, examples, None)
    river = tokenizer.without_markers(["river"])[0].tolist()
    assert len(river) == 1
    for row, labels in enumerate(batch.pseudo_queries.tolist()):  # type: ignore[union-attr]
        own = examples[row // 4]
        length = 1 + own % 5 if row % 4 == 0 and own >= 0 else 0
        assert labels == river * length + [-1] * (6 - length), row
    second = plan.batch(data, examples, None, (1, 2)).pseudo_queries
    np.testing.assert_array_equal(second, batch.pseudo_queries[16:])  # type: ignore[index]


def test_stacked_batches_are_padded_to_the_longest(data: TrainingSet) -> None:
    batches = [PLAN.training_batch(data, step) for step in range(6)]
    widths = {batch.passages.ids.shape[1] for batch in batches}
    assert len(widths) > 1, "control: some rows are padded"
    whole = stack_batches(batches, 7)
    assert whole.passages.ids.shape == (6, 32, max(widths))
    for number, batch in enumerate(batches):
        for side in ("queries", "passages"):
            actual, expected = getattr(whole, side), getattr(batch, side)
            length = expected.ids.shape[1]
            np.testing.assert_array_equal(actual.ids[number, :, :length], expected.ids)
            np.testing.assert_array_equal(actual.mask[number, :, :length], expected.mask)
            assert (actual.ids[number, :, length:] == 7).all()
            assert not actual.mask[number, :, length:].any()
        for name in ("positives", "passage_ids", "known_positives"):
            np.testing.assert_array_equal(getattr(whole, name)[number], getattr(batch, name))
    assert stack_batches(batches[:1], data.pad_id) is batches[0]


def test_a_known_positive_is_no_negative_of_a_reranker(data: TrainingSet) -> None:
    """The slot of a negative that is a known positive is empty, as for a retriever."""
    plan = PairPlan(BatchPlan(EXAMPLES, 9, 4, 10, 16), PairJoiner((), 24, data.pad_id))
    lists = [own.tolist() for own in data.negatives]
    lists[3][4] = int(data.known_positives[3][0])
    assert lists[3][4] != data.positives[3]
    spoiled = replace(data, negatives=Ragged.from_lists(lists))
    before, after = plan.training_batch(data, 0), plan.training_batch(spoiled, 0)
    row = before.passage_ids[:, 0].tolist().index(data.positives[3])
    changed = np.argwhere(before.passage_ids != after.passage_ids)
    assert [place[0] for place in changed] == [row]
    assert after.passage_ids[tuple(changed[0])] == -1
    pair = row * 10 + changed[0][1]
    assert before.pairs.mask[pair].any()
    assert not after.pairs.mask[pair].any()
    assert (after.passage_ids[:, 0] >= 0).all(), "the target stays"
