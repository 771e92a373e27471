"""What the training data makes of a run: its largest batch, its steps, and tokens real and padded."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxret.data.batches import BatchPlan, TrainingSet
from jaxret.data.formats import Policy, read_examples
from jaxret.models.retriever import Retriever
from jaxret.plan.programs import Shapes, longest_batch
from jaxret.runs.run import load_tokenizer
from jaxret.training.examples import load_examples
from jaxret.training.loop import batch_plan, schedule_steps

SAMPLE = 200  # batches looked at


@dataclass(frozen=True)
class Data:
    """shapes: the largest batch. steps: of the run, None if the config does not say without data. examples: None
    without data. padded, real: tokens of a batch on average, None if the texts could not be read as tokens. note: why
    something is not known."""

    shapes: Shapes
    steps: int | None
    examples: int | None = None
    padded: float | None = None
    real: float | None = None
    note: str = ""

    def values(self) -> dict[str, Any]:
        """What JSON holds of it."""
        return {name: getattr(self, name) for name in ("steps", "examples", "padded", "real", "note")}


def read_data(config: ConfigDict, directory: Path, retriever: Retriever, say: Callable[[str], None]) -> Data:
    """Reads and tokenises config.data.train, if it is given and the tokenizer is at hand. Raises DataError for bad
    records, as training would."""
    longest = longest_batch(config, retriever)
    if not config.data.train:
        return Data(longest, _steps(config, None), note="data.train is not given: texts are as long as they may be")
    try:
        tokenizer = load_tokenizer(config, directory, retriever)
    except (FileNotFoundError, ValueError) as error:
        examples = read_examples(
            config.data.train,
            config.data.train_split,
            Policy(config.data.on_error),
            negatives_run=config.data.negatives_run or None,
        )
        note = f"texts are as long as they may be, because they could not be tokenised: {error}"
        return Data(longest, _steps(config, examples), len(examples), note=note)
    data = load_examples(config, "train", tokenizer, True, say)
    assert data is not None
    return from_examples(config, data, batch_plan(config, retriever, config.train.batch_size), longest)


def from_examples(config: ConfigDict, data: TrainingSet, plan: BatchPlan, longest: Shapes) -> Data:
    """Looks at SAMPLE batches of the run, evenly spread."""
    steps = _steps(config, data)
    batches = max(steps or 1, 1) * config.train.accumulate
    sample = np.unique(np.linspace(0, batches - 1, SAMPLE).astype(int))
    real = padded = 0
    for step in sample:
        batch = plan.training_batch(data, int(step))
        for tokens in (batch.queries, batch.documents):
            real += int(tokens.mask.sum())
            padded += tokens.mask.size
    multiple = plan.length_multiple

    def up(texts: Any, limit: int) -> int:
        return min(-(-int(texts.lengths.max()) // multiple) * multiple, limit)

    shapes = replace(
        longest,
        query_length=up(data.queries, longest.query_length),
        passage_length=up(data.passages, longest.passage_length),
        positives=data.known_positives.shape[1],
    )
    return Data(shapes, steps, len(data), padded / len(sample), real / len(sample))


def _steps(config: ConfigDict, data: Sized | None) -> int | None:
    if data is None and config.train.steps < 0:
        return None
    return schedule_steps(config, data).total  # type: ignore[arg-type]  # it asks for nothing but the length
