"""Is it getting better: in-batch loss on the dev set, and retrieval from a small pool or a whole corpus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxret.data.batches import BatchPlan, TrainingSet
from jaxret.data.records import Judgement
from jaxret.distributed import Program, place_rows
from jaxret.evaluation.metrics import evaluate, parse_measure
from jaxret.runs.run import LESS_IS_BETTER
from jaxret.training.ranking import Ranker
from jaxret.types import Ragged

POOL_MEASURES = ("RR@10", "Success@5", "Success@20")
CORPUS_MEASURES = (*POOL_MEASURES, "nDCG@10", "R@100")
METRICS = (*LESS_IS_BETTER, *CORPUS_MEASURES)


@dataclass(frozen=True)
class Collection:
    """What is retrieved from, and for whom: tokens of queries and passages, and judgements of passage row by query
    number (an id that is no row is of a passage that is not here)."""

    queries: Ragged
    passages: Ragged
    judgements: tuple[Judgement, ...]
    measures: tuple[str, ...]

    @property
    def depth(self) -> int:
        """How many passages of a query the measures look at."""
        return max(parse_measure(name).cutoff or 0 for name in self.measures)


@dataclass
class Validation:
    """The dev set, and the collection to retrieve from. Nothing is drawn at random between two validations, so their
    difference is the model's."""

    dev: TrainingSet
    collection: Collection
    plan: BatchPlan
    eval_step: Program
    ranker: Ranker
    progress: bool = False

    def __call__(self, params: Any) -> dict[str, float]:
        """{"nll", "average_rank", "in_batch_accuracy", "RR@10", ...}; average_rank is inside a batch, from 0."""
        return {**self._in_batch(params), **self._retrieve(params)}

    def _batches(self) -> Iterator[np.ndarray]:
        size = self.plan.batch_size
        starts = range(0, len(self.dev), size)
        for start in tqdm(starts, "validate", unit="batch", delay=1, leave=False, disable=not self.progress):
            yield self.plan.filled(np.arange(start, min(start + size, len(self.dev))))

    def _in_batch(self, params: Any) -> dict[str, float]:
        total = {"nll": 0.0, "average_rank": 0.0, "in_batch_accuracy": 0.0}
        for rows in self._batches():
            batch = place_rows(self.ranker.embedder.mesh, self.plan.batch(self.dev, rows, step=None))
            terms = self.eval_step(params, batch)
            real = int((rows >= 0).sum())
            for name, mean in zip(total, (terms.terms["contrastive"], terms.rank, terms.accuracy), strict=True):
                total[name] += float(mean) * real
        return {name: value / len(self.dev) for name, value in total.items()}

    def _retrieve(self, params: Any) -> dict[str, float]:
        found = self.collection
        run = self.ranker(params, found.queries, found.passages, self.progress)
        return dict(evaluate(run, found.judgements, found.measures).mean)


def make_collection(dev: TrainingSet, train: TrainingSet | None, size: int | None, seed: int) -> Collection:
    """Every dev example and a pool; size None: with all training passages, and as a corpus is measured."""
    whole = len(dev.passages) + (len(train.passages) if train else 0)
    pool, places = make_pool(dev, train, whole if size is None else size, seed)
    judgements = tuple(
        Judgement(str(number), str(row), 1)
        for number, known in enumerate(dev.known_positives)
        for row in places[known[known >= 0]]
    )
    return Collection(dev.queries, pool, judgements, CORPUS_MEASURES if size is None else POOL_MEASURES)


def make_pool(dev: TrainingSet, train: TrainingSet | None, size: int, seed: int) -> tuple[Ragged, np.ndarray]:
    """All relevant dev passages; then, up to `size` in all, the other dev passages (hard negatives) and a sample of the
    training passages whose tokens differ from theirs. Also the row of each dev passage in it, -1 if it is not there."""
    relevant = np.unique(dev.known_positives[dev.known_positives >= 0])
    others = np.setdiff1d(np.arange(len(dev.passages)), relevant)
    chosen = np.concatenate([relevant, others[: max(size - len(relevant), 0)]])
    places = np.full(len(dev.passages), -1)
    places[chosen] = np.arange(len(chosen))
    rows = [dev.passages[i] for i in chosen]
    seen = {row.tobytes() for row in rows}
    more = train.passages if train else Ragged.from_lists([])
    for i in np.random.default_rng(seed).permutation(len(more)):
        if len(rows) >= size:
            break
        row = more[int(i)]
        if row.tobytes() not in seen:
            seen.add(row.tobytes())
            rows.append(row)
    return Ragged.from_lists([row.tolist() for row in rows]), places
