"""Add a teacher's scores to training data, for `jaxret rerank --train` and for the score step of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from jaxret.data.formats import Policy, TrainingSource
from jaxret.data.formats.example_writers import make_tevatron_record
from jaxret.data.formats.outputs import require_other_output
from jaxret.data.formats.writing import write_records
from jaxret.data.records import Example, Query
from jaxret.experiments.teachers import TeacherModel, TeacherScorer
from jaxret.mining.training_queries import require_same_text
from jaxret.parallel.events import emit
from jaxret.parallel.progress import Progress, print_line
from jaxret.runs.scorer import OnProgress
from jaxret.storage.buckets.working_copy import require_writable

# Pairs that are sorted by length and scored together. Without blocks, 100 million pairs of 290 bytes would need 29 GB.
PAIRS_PER_BLOCK = 1 << 18


def score_examples(teacher: TeacherModel, data: TrainingSource, out: str | Path, on_error: str = "error") -> int:
    """Write training examples with a teacher's scores of all their passages, and return the number of pairs.

    The file has Tevatron's format, which every training of jaxret reads (docs/training.md), and the same targets. It is
    written while pairs are scored.

    Args:
        teacher: the model that scores.
        data: the examples.
        out: file to write.
        on_error: "error" or "skip", for bad records.

    Raises:
        DataError: a record is bad.
        ValueError: two queries have the same id, or the output is a file of the training data.
    """
    sources = [("the training data", data.data)]
    sources += [("the run of negatives", data.negatives_run.data)] if data.negatives_run else []
    require_other_output(out, sources, [data.split])
    require_writable(Path(out).absolute().parent)
    policy = Policy(on_error)
    examples = data.read(policy, targets=False)
    queries: dict[str, Query] = {}
    for example in examples:
        require_same_text(queries.setdefault(example.query.id, example.query), example.query, data.source)
    passages = {passage.id: passage for example in examples for passage in (*example.positives, *example.negatives)}
    pairs = sum(len(example.positives) + len(example.negatives) for example in examples)
    print_line(f"scoring {pairs:,} pairs of {len(queries):,} queries of {data}")
    scorer = teacher.scorer_of(queries, passages, progress=True)
    with Progress("score", pairs, "pair") as bar:
        results = attach_scores(examples, scorer, bar.update)
        write_records(Path(out), (make_tevatron_record(example, not data.first_target_only) for example in results))
    print(*scorer.cut, f"training data with scores: {out}", sep="\n")
    emit("file", kind="training data", path=out)
    return pairs


def attach_scores(examples: Iterable[Example], scorer: TeacherScorer, on_progress: OnProgress) -> Iterator[Example]:
    """Yield the examples with the scores of all their passages, in blocks of about PAIRS_PER_BLOCK pairs. Raises
    ValueError for a score that is not a finite number."""
    for block in _example_blocks(examples):
        pairs = [(e.query.id, p.id) for e in block for p in (*e.positives, *e.negatives)]
        values = scorer(pairs, on_progress)
        for row in np.flatnonzero(~np.isfinite(values)):
            query, passage = pairs[row]
            raise ValueError(
                f"the teacher's score of query {query!r} and passage {passage!r} is {values[row]}, but a score must be "
                "finite; use another checkpoint of the teacher"
            )
        scores = iter(values.tolist())
        for example in block:
            positives, negatives = (tuple(islice(scores, len(s))) for s in (example.positives, example.negatives))
            yield replace(example, positive_scores=positives, negative_scores=negatives)


def _example_blocks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    block: list[Example] = []
    pairs = 0
    for example in examples:
        block.append(example)
        pairs += len(example.positives) + len(example.negatives)
        if pairs >= PAIRS_PER_BLOCK:
            yield block
            block, pairs = [], 0
    if block:
        yield block
