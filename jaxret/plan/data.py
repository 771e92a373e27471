"""What the training data makes of a run: its largest batch, its steps, and tokens real, padded and packed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxret.data.batches import BatchPlan, TrainingSet
from jaxret.data.formats import Policy, read_examples
from jaxret.data.packing import Packer, choose
from jaxret.models.retriever import BiEncoder
from jaxret.plan.programs import Shapes, longest_batch
from jaxret.runs.run import load_tokenizer
from jaxret.training.examples import load_examples
from jaxret.training.grad_cache import count_chunks
from jaxret.training.loop import schedule_steps
from jaxret.training.retrieving import batch_plan, packed
from jaxret.types import Batch, Ragged

SAMPLE = 200  # batches looked at


@dataclass(frozen=True)
class Texts:
    """data: the texts of the run, or others of such lengths; None if nothing is known of them. examples: the number of
    them, None without data. note: why something is not known."""

    data: TrainingSet | None
    examples: Sized | None = None
    note: str = ""


@dataclass(frozen=True)
class Data:
    """shapes: the largest batch. steps: of the run, None if the config does not say without data. examples: None
    without data. real, padded, packed: tokens of a step on average, and computed by the encoders without and with
    tokens.packing; None if nothing is known of the texts. share: of the work of `shapes` that a batch is. note: why
    something is not known."""

    shapes: Shapes
    steps: int | None
    examples: int | None = None
    padded: float | None = None
    packed: float | None = None
    real: float | None = None
    share: float = 1.0
    note: str = ""

    def values(self) -> dict[str, Any]:
        """What JSON holds of it."""
        return {name: value for name, value in asdict(self).items() if name not in ("shapes", "share")}


def read_texts(
    config: ConfigDict,
    directory: Path,
    retriever: BiEncoder,
    say: Callable[[str], None],
    lengths: tuple[int | float, ...] = (),
) -> Texts:
    """Reads and tokenises config.data.train, if it is given and the tokenizer is at hand; else, if `lengths` says how
    many tokens queries and passages have on average, draws some. Raises DataError for bad records, as training would.
    """
    if not config.data.train:
        if not lengths:
            return Texts(None, note="data.train is not given: texts are as long as they may be")
        query, passage = lengths
        note = f"lengths are drawn, with {query:g} and {passage:g} tokens on average (--lengths)"
        return Texts(drawn(config, query, passage), note=note)
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
        return Texts(None, examples, note)
    data = load_examples(config, "train", tokenizer, True, say)
    return Texts(data, data)


def parse_lengths(given: list[str]) -> tuple[float, ...]:
    """Mean tokens of queries and passages, or () of nothing. Raises ValueError for anything else."""
    numbers = [float(text) if re.fullmatch(r"\s*\d+(\.\d*)?\s*", text) else 0.0 for text in given]
    if len(numbers) not in (0, 2) or not all(numbers):
        raise ValueError(f"--lengths={','.join(given)}: it must be two numbers above 0, as 10,80")
    return tuple(numbers)


def drawn(
    config: ConfigDict, query_mean: int | float, passage_mean: int | float, examples: int = 10_000
) -> TrainingSet:
    """Texts whose lengths have a gamma distribution of shape 4, as passages of web pages about do; cut where the config
    cuts. Nothing is in them."""
    random = np.random.default_rng(0)

    def texts(mean: int | float, longest: int) -> Ragged:
        lengths = np.clip(random.gamma(4, mean / 4, examples).astype(int), 3, longest)
        return Ragged(np.zeros(int(lengths.sum()), np.int32), np.concatenate([[0], np.cumsum(lengths)]))

    rows, negatives = np.arange(examples, dtype=np.int32), min(config.data.negatives, examples)
    return TrainingSet(
        queries=texts(query_mean, config.tokens.query_length),
        passages=texts(passage_mean, config.tokens.passage_length),
        positives=rows,
        known_positives=rows[:, None],
        negatives=Ragged(
            random.integers(0, examples, examples * negatives, np.int32), np.arange(examples + 1) * negatives
        ),
        query_ids=(),
        pad_id=0,
        marker_ids=(),
        digest="",
    )


def look(config: ConfigDict, retriever: BiEncoder, texts: Texts, devices: int) -> Data:
    """What texts make of a run on so many devices."""
    longest, steps = longest_batch(config, retriever, devices), _steps(config, texts.examples)
    examples = len(texts.examples) if texts.examples is not None else None
    bins = devices * count_chunks(longest.queries, config.train.chunk_size, devices)
    if texts.data is None:
        shapes = in_rows_of_their_own(longest, retriever, bins) if config.tokens.packing else longest
        return Data(shapes, steps, examples, note=texts.note)
    plan = batch_plan(config, retriever, config.train.batch_size, devices)
    packer = packed(plan, texts.data, retriever, bins).packer
    assert packer is not None
    found = from_batches(config, texts.data, plan, longest, steps, packer)
    return replace(found, examples=examples, note=texts.note)


def in_rows_of_their_own(longest: Shapes, retriever: BiEncoder, bins: int) -> Shapes:
    """The longest batch as packing has it: texts that are as long as they may be share no row."""
    head = retriever.module.head

    def rows(texts: int, length: int, slots: int) -> tuple[int, int]:
        side = choose([np.full(texts, length)], length, slots, bins, head.hidden_size)
        return side.sizes[-1], side.width

    return replace(
        longest,
        packed_queries=rows(longest.queries, longest.query_length, head.slots("query")),
        packed_passages=rows(longest.documents, longest.passage_length, head.slots("passage")),
    )


def from_batches(
    config: ConfigDict, data: TrainingSet, plan: BatchPlan, longest: Shapes, steps: int | None, packer: Packer
) -> Data:
    """Looks at SAMPLE batches of the run, evenly spread, both padded and packed."""
    count = steps * config.train.accumulate if steps else len(data) // plan.batch_size
    sample = np.unique(np.linspace(0, max(count, 1) - 1, SAMPLE).astype(int))
    batches = [plan.training_batch(data, int(step)) for step in sample]
    real = np.mean([sum(int(tokens.mask.sum()) for tokens in _texts(batch)) for batch in batches])
    padded = np.mean([sum(tokens.computed(1) for tokens in _texts(batch)) for batch in batches])
    places = [packer(*(tokens.mask.sum(axis=1) for tokens in _texts(batch))) for batch in batches]
    widths = packer.queries.width, packer.passages.width
    in_rows = np.mean([packer.bins * sum(p.rows * width for p, width in zip(both, widths)) for both in places])
    shapes = replace(
        longest,
        query_length=packer.queries.length,
        passage_length=packer.passages.length,
        positives=data.known_positives.shape[1],
    )
    computed = padded
    if config.tokens.packing:
        most = [max(found.rows for found in side) for side in zip(*places)]
        queries, passages = zip(most, widths)
        shapes, computed = replace(shapes, packed_queries=queries, packed_passages=passages), in_rows
    share = computed / shapes.computed(packer.bins)
    of_a_step = [float(tokens * config.train.accumulate) for tokens in (padded, in_rows, real)]
    return Data(shapes, steps, len(data), of_a_step[0], of_a_step[1], of_a_step[2], float(share))


def _texts(batch: Batch) -> tuple[Any, Any]:
    return batch.queries, batch.documents


def _steps(config: ConfigDict, data: Sized | None) -> int | None:
    if data is None and config.train.steps < 0:
        return None
    return schedule_steps(config, data).total  # type: ignore[arg-type]  # it asks for nothing but the length
