"""Validation against plain numpy: the in-batch loss, retrieval from the pool, and what the pool is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxret.data.batches import TrainingSet, tokenize_examples
from jaxret.data.formats import read_examples
from jaxret.runs.embedder import Embedder
from jaxret.runs.run import Run
from jaxret.training.loop import make_validation
from jaxret.training.losses import LossSettings
from jaxret.training.step import Objective
from jaxret.training.validation import Validation, make_pool
from jaxret.types import Ragged
from tests.pipeline import untrained_run, write_data, write_encoder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("validation")
    data = write_data(root / "data", train=30, dev=11)
    return untrained_run(root / "run", write_encoder(root / "encoder"), data, validation__pool_size=45)


@pytest.fixture(scope="module")
def validation(run: Run) -> Validation:
    folder = Path(run.config.data.train)
    train = tokenize_examples(read_examples(folder, "train"), run.tokenizer)
    dev = tokenize_examples(read_examples(folder, "dev"), run.tokenizer)
    objective = Objective(run.retriever, LossSettings(), run.mesh)
    return make_validation(run.config, objective, run.params, dev, train, run.tokenizer)


def vectors(run: Run, validation: Validation) -> tuple[np.ndarray, np.ndarray]:
    """Queries [E,D] and pool [P,D] in float64."""
    embedder = run.embedder()
    queries, pool = embedder(validation.dev.queries, "query"), embedder(validation.pool, "passage")
    return tuple(found.stacked()[:, 0].astype(np.float64) for found in (queries, pool))  # type: ignore[return-value]


def test_retrieval_from_the_pool(run: Run, validation: Validation) -> None:
    found = validation(run.params)
    queries, pool = vectors(run, validation)
    reciprocal, top5, top20 = [], [], []
    for query, known in zip(queries, validation.dev.known_positives, strict=True):
        order = np.argsort(-(pool @ query).astype(np.float32), kind="stable")
        rank = 1 + min(int(np.flatnonzero(order == validation.places[row])[0]) for row in known if row >= 0)
        reciprocal.append(1 / rank if rank <= 10 else 0)
        top5.append(rank <= 5)
        top20.append(rank <= 20)
    assert found["RR@10"] == pytest.approx(np.mean(reciprocal), abs=1e-9)
    assert found["Success@5"] == pytest.approx(np.mean(top5), abs=1e-9)
    assert found["Success@20"] == pytest.approx(np.mean(top20), abs=1e-9)
    moved = jax.tree.map(lambda leaf: leaf * 1.5, run.params)
    assert validation(moved)["nll"] != pytest.approx(found["nll"], abs=1e-3), "control: another model"


def test_in_batch_loss(run: Run, validation: Validation) -> None:
    """The last batch is not full: its empty rows count for nothing. A known positive is no negative."""
    dev, plan = validation.dev, validation.plan
    queries, pool = vectors(run, validation)
    pool = pool[validation.places]  # by dev passage: all of them are in it
    losses, ranks = [], []
    for start in range(0, len(dev), plan.batch_size):
        rows = range(start, min(start + plan.batch_size, len(dev)))
        documents = [d for row in rows for d in (dev.positives[row], *dev.negatives[row][: plan.negatives])]
        for row in rows:
            others = [d for d in documents if d not in dev.known_positives[row]]
            scores = pool[[dev.positives[row], *others]] @ queries[row]
            losses.append(np.log(np.exp(scores - scores[0]).sum()))
            ranks.append((scores > scores[0]).sum())
    found = validation(run.params)
    assert found["nll"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert found["average_rank"] == pytest.approx(np.mean(ranks), abs=1e-6)
    assert len(dev) % plan.batch_size, "control: there is a batch that is not full"


def test_the_pool(run: Run, validation: Validation) -> None:
    folder = Path(run.config.data.train)
    train = tokenize_examples(read_examples(folder, "train"), run.tokenizer)
    dev = validation.dev
    assert len(validation.pool) == 45
    assert sorted(validation.places) == list(range(len(dev.passages)))
    for row, place in enumerate(validation.places):
        assert np.array_equal(validation.pool[place], dev.passages[row])
    distinct = {validation.pool[row].tobytes() for row in range(len(validation.pool))}
    assert len(distinct) == 45
    again, _ = make_pool(dev, train, 45, seed=run.config.seed.data)
    assert np.array_equal(again.flat, validation.pool.flat)
    assert not np.array_equal(make_pool(dev, train, 45, seed=1)[0].flat, again.flat)
    relevant = {row for known in dev.known_positives for row in known if row >= 0}
    few, places = make_pool(dev, train, 5, seed=1)
    assert len(few) == len(relevant) > 5, "relevant passages are never left out"
    assert {row for row, place in enumerate(places) if place >= 0} == relevant
    assert (places[sorted(relevant)] == np.arange(len(relevant))).all()


def passages_only(*rows: list[int]) -> TrainingSet:
    """A set with one query, whose positive is the first passage."""
    return TrainingSet(
        queries=Ragged.from_lists([[2, 9, 3]]),
        passages=Ragged.from_lists(list(rows)),
        positives=np.zeros(1, np.int32),
        known_positives=np.zeros((1, 1), np.int32),
        negatives=Ragged.from_lists([[]]),
        query_ids=("q",),
        pad_id=0,
        marker_ids=(2, 3),
        digest="",
    )


def test_no_passage_is_twice_in_the_pool() -> None:
    """A copy of the positive, under another id, would be found in its place."""
    dev, train = passages_only([7], [8, 5]), passages_only([7], [4], [8, 5], [4], [6], [8])
    pool, places = make_pool(dev, train, 20, seed=0)
    assert sorted(row.tolist() for row in pool) == [[4], [6], [7], [8], [8, 5]]
    assert places.tolist() == [0, 1]
    alone, _ = make_pool(dev, None, 20, seed=0)
    assert [row.tolist() for row in alone] == [[7], [8, 5]]


def test_of_equal_scores_the_first_comes_first(validation: Validation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower row of the pool."""

    def all_the_same(self: Embedder, texts: Ragged, side: str, progress: bool = False) -> Ragged:
        return Ragged(np.ones((len(texts), 2), np.float32), np.arange(len(texts) + 1))

    monkeypatch.setattr(Embedder, "__call__", all_the_same)
    dev = passages_only([7], [8])
    pool = Ragged.from_lists([[n] for n in range(10, 18)])
    for place in (0, 2, 6):
        equal = replace(validation, dev=dev, pool=pool, places=np.array([place, -1]))
        assert equal._retrieve(validation.embedder.params)["RR@10"] == pytest.approx(1 / (1 + place))
