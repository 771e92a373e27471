"""A random part of the training queries, the same of every file that has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from jaxret.data.batches import TrainingSet
from jaxret.data.formats import hash_id
from jaxret.data.teacher import Teacher
from jaxret.storage import sha256_json


def subset_of(ids: Iterable[str], count: int, seed: int) -> set[str]:
    """`count` of the ids, those whose hash with the seed is least: a larger subset holds a smaller one, and neither the
    order of the ids nor what other queries there are decides between two. Raises ValueError if there are fewer."""
    every = set(ids)
    if count > len(every):
        raise ValueError(f"data.subset is {count:,}, but there are {len(every):,} training queries; ask for fewer")
    return set(sorted(every, key=lambda key: (hash_id(f"{seed} {key}"), key))[:count])


def take_queries(data: TrainingSet, count: int, seed: int) -> TrainingSet:
    """The examples of `count` of the queries. The passages stay as they are; the digest says which they are."""
    chosen = subset_of(data.query_ids, count, seed)
    rows = np.array([row for row, key in enumerate(data.query_ids) if key in chosen])
    teacher = data.teacher
    return replace(
        data,
        queries=data.queries.take(rows),
        positives=data.positives[rows],
        known_positives=data.known_positives[rows],
        negatives=data.negatives.take(rows),
        query_ids=[data.query_ids[row] for row in rows],
        teacher=teacher and Teacher(teacher.positives[rows], teacher.negatives.take(rows)),
        digest=sha256_json([data.digest, count, seed]),
        subset_of=data.record,
    )
