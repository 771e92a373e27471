"""Validate a retriever: in-batch loss on the dev set, and retrieval from a small pool or from a corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxret.data.records import Judgement
from jaxret.data.tokens.batches import BatchPlan, TrainingSet
from jaxret.data.tokens.tokenizer import concatenate_blocks
from jaxret.evaluation.metrics import evaluate, parse_measure
from jaxret.parallel.mesh import Program, shard_whole_batch
from jaxret.parallel.progress import with_progress
from jaxret.runs.run import LESS_IS_BETTER
from jaxret.storage.atomic import sha256_json
from jaxret.training.data_warnings import row_hashes
from jaxret.training.ranking import Ranker
from jaxret.types import Ragged

POOL_MEASURES = ("RR@10", "Success@5", "Success@20")
CORPUS_MEASURES = (*POOL_MEASURES, "nDCG@10", "R@100")
METRICS = (*LESS_IS_BETTER, *CORPUS_MEASURES)
BEST_CHECKPOINTS = ("metric", "last")  # values of validation.best
_LEAST_BLOCK = 1024  # least number of passages that are hashed at the same time


def check_validation(config: ConfigDict) -> None:
    """Raise ValueError for a metric that is unknown or needs a missing corpus, and for a corpus, rankings or a split
    without data.dev."""
    for key, metric, optional in (("metric", config.validation.metric, ()), ("then", config.validation.then, ("",))):
        if metric not in (*METRICS, *optional):
            raise ValueError(f"validation.{key} is {metric!r}; it must be one of {', '.join(METRICS)}")
        if metric in CORPUS_MEASURES and metric not in POOL_MEASURES and not config.validation.corpus:
            raise ValueError(f"validation.{key} is {metric!r}; it is measured on a corpus: set validation.corpus")
    if config.validation.best not in BEST_CHECKPOINTS:
        names = ", ".join(BEST_CHECKPOINTS)
        raise ValueError(f"validation.best is {config.validation.best!r}; it must be one of {names}")
    if config.validation.corpus and not config.data.dev:
        raise ValueError("validation.corpus is set, but data.dev is empty: there are no queries to retrieve for")
    for key, empty in (("dev_split", "dev"), ("dev_negatives_run", "")):
        if config.data[key] != empty and not config.data.dev:
            raise ValueError(
                f"data.{key} is {config.data[key]!r}, but data.dev is empty, so there is no validation: set data.dev, "
                f"or data.{key}={empty!r}"
            )


@dataclass(frozen=True)
class DevCollection:
    """Queries, passages to retrieve from, and judgements."""

    queries: Ragged  # tokens of the queries
    passages: Ragged  # tokens of the passages
    # ids are numbers of queries and rows of passages; any other passage id is a passage outside the collection
    judgements: tuple[Judgement, ...]
    measures: tuple[str, ...]  # names of the measures of retrieval
    record: dict[str, str] = field(default_factory=dict)  # digests of the collection's files; {} for the dev set

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the passages, the judgements and, if they are not those of the dev records, the queries. It
        distinguishes values measured on different collections."""
        passages = hashlib.sha256(np.ascontiguousarray(self.passages.flat).data)
        passages.update(np.ascontiguousarray(self.passages.offsets).data)
        judgements = [[judgement.query_id, judgement.passage_id, judgement.relevance] for judgement in self.judgements]
        queries = [digest for name, digest in self.record.items() if name == "queries"]
        return sha256_json([passages.hexdigest(), judgements, *queries])

    @property
    def depth(self) -> int:
        """The number of passages of each query that the measures read."""
        return max(parse_measure(name).cutoff or 0 for name in self.measures)


@dataclass
class RetrievalValidation:
    """Measures parameters on a dev set and a collection. Nothing is random, so equal parameters have equal results."""

    dev: TrainingSet  # examples for the in-batch loss
    collection: DevCollection  # collection to retrieve from
    plan: BatchPlan  # how dev examples become batches
    eval_step: Program  # (parameters, batch) -> LossTerms
    ranker: Ranker  # retrieves the best passages
    progress: bool = False  # whether progress is printed

    def __call__(self, params: Any) -> dict[str, float]:
        """Return {"nll", "average_rank", "in_batch_accuracy", "RR@10", ...}; average_rank is within a batch, from 0."""
        return {**self._in_batch(params), **self._retrieve(params)}

    def measured_on(self, metric: str) -> str:
        """Return a digest of the collection or, for a metric inside a batch, of the batch size."""
        if metric in CORPUS_MEASURES:
            return self.collection.digest[:16]
        return sha256_json({"batch_size": self.plan.batch_size})[:16]

    def _dev_batches(self) -> Iterator[np.ndarray]:
        size = self.plan.batch_size
        starts = range(0, len(self.dev), size)
        for start in with_progress(starts, "validate", len(starts), "batch", self.progress):
            yield self.plan.pad_examples(np.arange(start, min(start + size, len(self.dev))))

    def _in_batch(self, params: Any) -> dict[str, float]:
        total = {"nll": 0.0, "average_rank": 0.0, "in_batch_accuracy": 0.0}
        for rows in self._dev_batches():
            batch = shard_whole_batch(self.ranker.embedder.mesh, self.plan.batch(self.dev, rows, batch_number=None))
            terms = self.eval_step(params, batch)
            real = int((rows >= 0).sum())
            for name, mean in zip(total, (terms.terms["contrastive"], terms.rank, terms.accuracy), strict=True):
                total[name] += float(mean) * real
        return {name: value / len(self.dev) for name, value in total.items()}

    def _retrieve(self, params: Any) -> dict[str, float]:
        collection = self.collection
        run = self.ranker(params, collection.queries, collection.passages, self.progress)
        return dict(evaluate(run, collection.judgements, collection.measures).mean)


def make_collection(dev: TrainingSet, train: TrainingSet | None, size: int | None, seed: int) -> DevCollection:
    """Return the dev queries with a pool of passages. A query with several positives is one query.

    Args:
        dev: examples whose queries search the pool.
        train: examples whose passages fill the pool; None if the config names none.
        size: number of passages in the pool; None: all, with the measures of a corpus.
        seed: seed that draws training passages.
    """
    passage_count = len(dev.passages) + (len(train.passages) if train else 0)
    pool, rows = make_passage_pool(dev, train, passage_count if size is None else size, seed)
    examples = zip(dev.query_numbers, dev.known_positives, strict=True)
    pairs = dict.fromkeys((number, row) for number, positives in examples for row in rows[positives])
    judgements = tuple(Judgement(str(number), str(row), 1) for number, row in pairs)
    return DevCollection(
        dev.queries.take(dev.first_examples), pool, judgements, CORPUS_MEASURES if size is None else POOL_MEASURES
    )


def make_passage_pool(dev: TrainingSet, train: TrainingSet | None, size: int, seed: int) -> tuple[Ragged, np.ndarray]:
    """Return a pool of passages, and the row of each dev passage in the pool (-1 if it is not there).

    The pool has all relevant dev passages. It is filled up to `size` with the other dev passages (hard negatives), and
    then with a sample of the training passages that have other tokens.

    Args:
        dev: dev examples.
        train: examples to draw more passages from, or None.
        size: number of passages in the pool; all relevant passages are kept even if there are more.
        seed: seed of the draw.
    """
    relevant = dev.known_positives.passages
    other_rows = np.setdiff1d(np.arange(len(dev.passages)), relevant)
    pool_rows = np.concatenate([relevant, other_rows[: max(size - len(relevant), 0)]])
    dev_rows = np.full(len(dev.passages), -1)
    dev_rows[pool_rows] = np.arange(len(pool_rows))
    pool = dev.passages.take(pool_rows)
    if train and len(pool) < size:
        training_rows = draw_passages(train.passages, size - len(pool), row_hashes(pool), seed)
        pool = concatenate_blocks([pool, train.passages.take(training_rows)])
    return pool, dev_rows


def draw_passages(passages: Ragged, count: int, other_hashes: np.ndarray, seed: int) -> np.ndarray:
    """Return the rows of randomly drawn passages, no two of which have the same tokens.

    Args:
        passages: tokens of the passages to draw from.
        count: largest number of passages.
        other_hashes: hashes (`row_hashes`) of passages that are not drawn.
        seed: seed of the draw.
    """
    order, parts = np.random.default_rng(seed).permutation(len(passages)), [np.zeros(0, np.int64)]
    block_rows = max(count, _LEAST_BLOCK)
    for start in range(0, len(order), block_rows):  # in blocks, because few of many passages may be needed
        rows = order[start : start + block_rows]
        hashes = row_hashes(passages.take(rows))
        fresh = np.flatnonzero(np.isin(hashes, other_hashes, invert=True))
        _, first = np.unique(hashes[fresh], return_index=True)
        fresh = fresh[np.sort(first)][:count]
        parts.append(rows[fresh])
        other_hashes, count = np.concatenate([other_hashes, hashes[fresh]]), count - len(fresh)
        if not count:
            break
    return np.concatenate(parts)
