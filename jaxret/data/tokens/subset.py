"""Random subsets of training queries, chosen by query id, so that every file with these ids has the same subset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from jaxret.data.formats import hash_id
from jaxret.data.tokens.batches import TrainingSet
from jaxret.data.tokens.teacher_scores import TeacherScores
from jaxret.storage.atomic import sha256_json


def choose_ids(ids: Iterable[str], count: int, seed: int) -> set[str]:
    """Return the `count` ids with the least hashes for the seed.

    A larger subset contains a smaller one. The order of ids does not change the choice. Raises ValueError if there are
    fewer ids.
    """
    unique_ids = set(ids)
    if count > len(unique_ids):
        raise ValueError(f"data.subset is {count:,}, but there are {len(unique_ids):,} training queries; ask for fewer")
    return set(sorted(unique_ids, key=lambda key: (hash_id(f"{seed} {key}"), key))[:count])


def take_random_queries(data: TrainingSet, count: int, seed: int) -> TrainingSet:
    """Return the training set with only the examples of `count` random queries.

    All passages stay. The digest identifies the subset.
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
