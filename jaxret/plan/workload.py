"""The work of a training run on its data: largest batch, steps, and real, padded and packed tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxret.data.formats import Policy
from jaxret.data.tokens.batches import BatchPlan, TrainingSet
from jaxret.data.tokens.known_positives import KnownPositives
from jaxret.data.tokens.packing import Packer, choose_row_shape
from jaxret.models.retriever_model import RetrieverModel
from jaxret.plan.programs import Shapes, longest_batch
from jaxret.runs.run import load_tokenizer
from jaxret.training.config_sources import training_data
from jaxret.training.examples import load_examples
from jaxret.training.loop import schedule_steps
from jaxret.training.losses.grad_cache import count_chunks
from jaxret.training.tasks.retrieval import make_retrieval_plan, pack_plan
from jaxret.types import Batch, Ragged

WORKLOAD_BATCHES = 200  # number of batches to measure


@dataclass(frozen=True)
class PlanTexts:
    """The texts of a run that are known to a plan."""

    data: TrainingSet | None  # data of the run, or random texts with given mean lengths; None: unknown
    examples: Sized | None = None  # examples of the run; None: unknown
    note: str = ""  # reason why a value is unknown or random


@dataclass(frozen=True)
class Workload:
    """The work of a training run. Fields that depend on unknown data are None."""

    shapes: Shapes  # shapes of the largest batch
    steps: int | None
    examples: int | None = None
    padded: float | None = None  # mean number of tokens of a step that encoders compute without tokens.packing
    packed: float | None = None  # mean number of these tokens with tokens.packing
    real: float | None = None  # mean number of real tokens of a step
    share: float = 1.0  # work of a mean batch, relative to the work of `shapes`
    note: str = ""  # reason why a value is unknown

    def values(self) -> dict[str, Any]:
        """Return the fields for the JSON of `jaxret plan`, which lacks `shapes` and `share`."""
        return {name: value for name, value in asdict(self).items() if name not in ("shapes", "share")}


def read_plan_texts(
    config: ConfigDict,
    directory: Path,
    retriever: RetrieverModel,
    log: Callable[[str], None],
    lengths: tuple[int | float, ...] = (),
) -> PlanTexts:
    """Read and tokenize config.data.train, or draw texts of the mean `lengths`.

    Args:
        directory: folder of the encoder, with its tokenizer.
        lengths: mean numbers of tokens of queries and passages, for a config without data.train.

    Raises:
        DataError: a record is bad.
    """
    if not config.data.train:
        if not lengths:
            return PlanTexts(None, note="data.train is not set: the plan assumes texts of the largest length")
        query, passage = lengths
        note = f"lengths are drawn, with {query:g} and {passage:g} tokens on average (--lengths)"
        return PlanTexts(draw_texts(config, query, passage), note=note)
    try:
        tokenizer = load_tokenizer(config, directory, retriever)
    except (FileNotFoundError, ValueError) as error:
        examples = training_data(config).read(Policy(config.data.on_error))
        note = f"the plan assumes texts of the largest length, because they could not be tokenized: {error}"
        return PlanTexts(None, examples, note)
    data = load_examples(config, "train", tokenizer, True, log)
    return PlanTexts(data, data)


def parse_lengths(values: list[str]) -> tuple[float, ...]:
    """Parse the mean numbers of tokens of queries and passages; [] gives (). Raises ValueError for other values."""
    numbers = [float(text) if re.fullmatch(r"\s*\d+(\.\d*)?\s*", text) else 0.0 for text in values]
    if len(numbers) not in (0, 2) or not all(numbers):
        raise ValueError(f"--lengths={','.join(values)}: it must be two numbers above 0, as in 10,80")
    return tuple(numbers)


def draw_texts(config: ConfigDict, query_mean: int | float, passage_mean: int | float) -> TrainingSet:
    """Draw texts (of zeros) whose lengths have a gamma distribution of shape 4, similar to passages of web pages.

    Args:
        config: config, whose token limits cut the lengths.
        query_mean, passage_mean: mean numbers of tokens before the cut.
    """
    examples = 10_000  # queries, with one positive each
    random = np.random.default_rng(0)

    def texts(mean: int | float, longest: int) -> Ragged:
        lengths = np.clip(random.gamma(4, mean / 4, examples).astype(int), 3, longest)
        return Ragged(np.zeros(int(lengths.sum()), np.int32), np.concatenate([[0], np.cumsum(lengths)]))

    rows, negatives = np.arange(examples, dtype=np.int32), min(config.data.negatives, examples)
    return TrainingSet(
        queries=texts(query_mean, config.tokens.query_length),
        passages=texts(passage_mean, config.tokens.passage_length),
        positives=rows,
        known_positives=KnownPositives(Ragged(rows, np.arange(examples + 1)), rows),
        negatives=Ragged(
            random.integers(0, examples, examples * negatives, np.int32), np.arange(examples + 1) * negatives
        ),
        query_ids=(),
        pad_id=0,
        marker_ids=(),
        digest="",
    )


def measure_workload(config: ConfigDict, retriever: RetrieverModel, texts: PlanTexts, devices: int) -> Workload:
    """Measure the work of a run with these texts.

    Args:
        texts: texts of the run.
        devices: number of devices.
    """
    longest, steps = longest_batch(config, retriever, devices), _steps(config, texts.examples)
    examples = len(texts.examples) if texts.examples is not None else None
    bins = devices * count_chunks(longest.queries, config.train.chunk_size, devices)
    if texts.data is None:
        shapes = unshared_rows(longest, retriever, bins) if config.tokens.packing else longest
        return Workload(shapes, steps, examples, note=texts.note)
    plan = make_retrieval_plan(config, retriever, config.train.batch_size, devices)
    packer = pack_plan(plan, texts.data, retriever, bins).packer
    assert packer is not None
    workload = measure_batches(config, texts.data, plan, longest, steps, packer)
    return replace(workload, examples=examples, note=texts.note)


def unshared_rows(longest: Shapes, retriever: RetrieverModel, bins: int) -> Shapes:
    """Return the shapes of the longest batch in packed rows. Texts of the largest length do not share rows."""
    head = retriever.module.head

    def rows(texts: int, length: int, slots: int) -> tuple[int, int]:
        side = choose_row_shape([np.full(texts, length)], length, slots, bins, head.hidden_size)
        return side.sizes[-1].rows, side.sizes[-1].width

    return replace(
        longest,
        packed_queries=rows(longest.queries, longest.query_length, head.prefix_length("query")),
        packed_passages=rows(longest.documents, longest.passage_length, head.prefix_length("passage")),
    )


def measure_batches(
    config: ConfigDict, data: TrainingSet, plan: BatchPlan, longest: Shapes, steps: int | None, packer: Packer
) -> Workload:
    """Measure WORKLOAD_BATCHES evenly spread batches of a run, padded and packed.

    Args:
        plan: plan of the batches.
        longest: shapes of the longest batch.
        steps: number of steps of the run; None: one epoch is measured.
        packer: packs the texts of a batch.
    """
    count = steps * config.train.accumulate if steps else len(data) // plan.batch_size
    sample = np.unique(np.linspace(0, max(count, 1) - 1, WORKLOAD_BATCHES).astype(int))
    batches = [plan.training_batch(data, int(number)) for number in sample]
    real = np.mean([sum(int(tokens.mask.sum()) for tokens in _texts(batch)) for batch in batches])
    padded_tokens = np.mean([sum(tokens.computed_tokens(1) for tokens in _texts(batch)) for batch in batches])
    packings = [packer(*(tokens.mask.sum(axis=1) for tokens in _texts(batch))) for batch in batches]
    packed_tokens = np.mean([packer.bins * sum(side.rows * side.width for side in sides) for sides in packings])
    shapes = replace(
        longest,
        query_length=packer.queries.length,
        passage_length=packer.passages.length,
        positives=data.known_positives.largest_count,
    )
    computed_tokens = padded_tokens
    if config.tokens.packing:
        queries, passages = (
            max(((packing.rows, packing.width) for packing in side), key=lambda size: size[0] * size[1])
            for side in zip(*packings)
        )
        shapes, computed_tokens = replace(shapes, packed_queries=queries, packed_passages=passages), packed_tokens
    share = computed_tokens / shapes.computed_tokens(packer.bins)
    counts = [float(tokens * config.train.accumulate) for tokens in (padded_tokens, packed_tokens, real)]
    return Workload(shapes, steps, len(data), counts[0], counts[1], counts[2], float(share))


def _texts(batch: Batch) -> tuple[Any, Any]:
    return batch.queries, batch.passages


def _steps(config: ConfigDict, data: Sized | None) -> int | None:
    if data is None and config.train.steps < 0:
        return None
    return schedule_steps(config, data).total  # type: ignore[arg-type]  # only the length is used
