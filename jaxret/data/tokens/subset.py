"""Random subsets of training queries, chosen by query id, so that every file with these ids has the same subset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from jaxret.data.formats import hash_id
from jaxret.data.tokens.batches import TrainingSet
from jaxret.data.tokens.teacher import TeacherScores
from jaxret.storage.atomic import sha256_json


def choose_ids(ids: Iterable[str], count: int, seed: int) -> set[str]:
    """Return the `count` ids with the least hashes for the seed.

    A larger subset contains a smaller one, and the choice depends neither on the order of ids nor on other ids in
    between. Raises ValueError if there are fewer.
    """
    every = set(ids)
    if count > len(every):
        raise ValueError(f"data.subset is {count:,}, but there are {len(every):,} training queries; ask for fewer")
    return set(sorted(every, key=lambda key: (hash_id(f"{seed} {key}"), key))[:count])


def take_random_queries(data: TrainingSet, count: int, seed: int) -> TrainingSet:
    """Return the training set with only the examples of `count` random queries.

    All passages stay; the digest identifies the subset.
    """
    ids = choose_ids(data.query_ids, count, seed)
    rows = np.array([row for row, key in enumerate(data.query_ids) if key in ids])
    teacher = data.teacher
    return replace(
        data,
        queries=data.queries.take(rows),
        positives=data.positives[rows],
        known_positives=data.known_positives.take(rows),
        negatives=data.negatives.take(rows),
        query_ids=[data.query_ids[row] for row in rows],
        teacher=teacher and TeacherScores(teacher.positives[rows], teacher.negatives.take(rows)),
        digest=sha256_json([data.digest, count, seed]),
        subset_of=data.record,
    )
