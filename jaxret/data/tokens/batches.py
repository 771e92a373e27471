"""Training batches. A batch is a pure function of (seeds, its number in the run), so a resumed run needs only its
step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxret.data.records import Example, Passage, Query
from jaxret.data.tokens.known_positives import KnownPositives
from jaxret.data.tokens.packing import SAMPLE_BATCHES, USUAL, Packer, Placement, RowShape, choose_row_shape
from jaxret.data.tokens.teacher_scores import TeacherScores, row_subset
from jaxret.data.tokens.tokenizer import TextTokenizer, Truncation, concatenate_blocks
from jaxret.storage.atomic import sha256_json_lists
from jaxret.types import Batch, BatchT, Packing, Ragged, Tokens


@dataclass(frozen=True)
class TrainingSet:
    """Tokenized examples; E examples, P passages.

    A passage is stored once, even if several queries share it. Its row serves as its id.
    """

    queries: Ragged  # token ids [E]
    passages: Ragged  # token ids [P]
    positives: np.ndarray  # int32 [E], row of the target passage
    known_positives: KnownPositives  # [E]
    negatives: Ragged  # [E], passage rows of each example's hard negatives
    query_ids: Sequence[str]
    pad_id: int
    marker_ids: tuple[int, ...]  # [CLS] and [SEP]
    digest: str  # SHA-256 of the texts and of their relations
    # Pseudo-queries of the passages [P] (I3), "" for a passage without one. With `imagine_queries` this is None, and
    # the pseudo-query of a positive is its training query.
    pseudo_queries: Ragged | None = None
    imagine_queries: bool = False
    truncations: tuple[Truncation, ...] = ()  # truncation of queries and of passages
    teacher: TeacherScores | None = None
    subset_of: dict[str, Any] | None = None  # record of the whole set, if this set is a random part of it

    def __len__(self) -> int:
        return len(self.positives)

    @property
    def record(self) -> dict[str, Any]:
        """Sizes and digests of the set, stored in data.json of a run."""
        sizes = {"examples": len(self), "passages": len(self.passages), "sha256": self.digest}
        sizes |= {"scores": self.teacher.digest} if self.teacher else {}
        return sizes | ({"subset_of": self.subset_of} if self.subset_of else {})

    @cached_property
    def query_numbers(self) -> np.ndarray:
        """Number of the query of each example [E], from 0 in the order of the examples. A query has an example for each
        of its positives."""
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(key, len(numbers)) for key in self.query_ids])

    @property
    def first_examples(self) -> np.ndarray:
        """Row of the first example of each query."""
        return np.unique(self.query_numbers, return_index=True)[1]

    @cached_property
    def queries_without_markers(self) -> Ragged:
        """The queries without [CLS] and [SEP]."""
        is_text = np.isin(self.queries.flat, self.marker_ids, invert=True)
        return Ragged(self.queries.flat[is_text], np.concatenate([[0], np.cumsum(is_text)])[self.queries.offsets])


@runtime_checkable
class Examples(Protocol):
    """Tokenized examples to train on: a TrainingSet, or the examples of another task."""

    def __len__(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def record(self) -> dict[str, Any]:
        """Sizes and digests, stored in data.json of a run."""
        ...


def tokenize_examples(
    examples: Sequence[Example],
    tokenizer: TextTokenizer,
    progress: bool = False,
    pseudo_queries: Mapping[str, str] | None = None,
    write_column: Callable[[str, Iterator[Ragged]], Ragged] = lambda _, blocks: concatenate_blocks(blocks),
) -> TrainingSet:
    """Return the examples as a TrainingSet, in their order.

    Args:
        examples: one or more examples.
        tokenizer: tokenizer with the length limits.
        pseudo_queries: pseudo-query of each passage id; passages without one get an empty text. None: not used.
        write_column: function of a column's name and its blocks of ids, which writes the blocks and returns the column
            for reading. Default: keeps it in memory.
    Raises:
        ValueError: there is no example.
    """
    if not examples:
        raise ValueError("there is no training example")
    rows: dict[str, int] = {}
    passages: list[Passage] = []

    def row(passage: Passage) -> int:
        if passage.id not in rows:
            rows[passage.id] = len(passages)
            passages.append(passage)
        return rows[passage.id]

    positives = [[row(p) for p in example.positives] for example in examples]
    negatives = [[row(p) for p in example.negatives] for example in examples]
    text: list[Iterable[Any]] = [(e.query.text for e in examples), ([p.title, p.text] for p in passages)]
    text += [positives, negatives]
    if any(example.query.instruction for example in examples):
        text.append(example.query.instruction for example in examples)
    pseudo_query_tokens = None
    if pseudo_queries is not None:
        queries = [pseudo_queries.get(passage.id, "") for passage in passages]
        text.append(queries)
        pseudo_query_tokens = tokenizer.without_markers(queries, partial(write_column, "pseudo_queries"))
    cut = Truncation("queries", tokenizer.query_length), Truncation("passages", tokenizer.passage_length)
    numbers: dict[Query, int] = {}  # a query has an example for each of its positives
    query_rows = np.array([numbers.setdefault(example.query, len(numbers)) for example in examples])
    query_tokens = tokenizer.queries(numbers, progress, cut[0])
    return TrainingSet(
        queries=write_column("queries", iter([query_tokens.take(query_rows)])),
        passages=tokenizer.passages(passages, progress, cut[1], partial(write_column, "passages")),
        positives=np.array([passage_rows[0] for passage_rows in positives], np.int32),
        known_positives=KnownPositives.from_lists(positives),
        negatives=Ragged.from_lists(negatives),
        query_ids=tuple(example.query.id for example in examples),
        pad_id=tokenizer.pad_id,
        marker_ids=tokenizer.marker_ids,
        digest=sha256_json_lists(text),
        pseudo_queries=pseudo_query_tokens,
        truncations=cut,
        teacher=TeacherScores.from_examples(examples),
    )


@dataclass(frozen=True)
class BatchPlan:
    """Makes batches of examples: `batch_size` queries over all processes, each with its positive and negatives.

    If the number of devices does not divide the batch size, empty slots are added, which change no loss.
    """

    batch_size: int  # Queries of a batch over all processes
    negatives: int  # Hard negatives of each query
    length_multiple: int  # Padded lengths are multiples of this number of tokens
    max_query_length: int  # Upper bound of the padded length of queries, in tokens
    max_passage_length: int  # Upper bound of the padded length of passages, in tokens
    pseudo_length: int = 0  # Length of a pseudo-query in tokens; used if the set has pseudo-queries
    data_seed: int = 0  # Seed of the order of examples
    negatives_seed: int = 0  # Seed of the choice of hard negatives
    # Packs the texts of training batches side by side for the encoder. The texts are then in the packer's order, and
    # `Tokens.rows` has their rows in the batch. None: texts are padded.
    packer: Packer | None = None
    devices: int = 1  # Devices over all processes

    @property
    def padded_size(self) -> int:
        """Number of queries of a batch, empty slots included: a multiple of the devices."""
        return padded_batch_size(self.batch_size, self.devices)

    def pad_examples(self, examples: np.ndarray) -> np.ndarray:
        """Return at most `batch_size` rows of examples, filled up with -1 to `padded_size`."""
        return np.concatenate([examples, np.full(self.padded_size - len(examples), -1)])

    def with_packer(self, data: TrainingSet, bins: int, slots: tuple[int, int], hidden_size: int) -> BatchPlan:
        """Return this plan with a packer whose row widths and counts fit the text lengths of the first epoch.

        Args:
            data: training set; a sample of the batches of its first epoch is measured.
            bins: parts of a batch (devices times chunks) that are packed separately.
            slots: positions that replace the first token of a query and of a passage.
            hidden_size: hidden size of the encoder, which decides what a wider row costs.
        """
        batches = -(-len(data) // self.batch_size)
        numbers = np.unique(np.linspace(0, batches - 1, SAMPLE_BATCHES).astype(int))
        sample = [self._lengths(data, int(number)) for number in numbers]
        queries, passages = zip(*sample)
        longest = (
            self._padded_length(int(data.queries.lengths.max()), self.max_query_length),
            self._padded_length(int(data.passages.lengths.max()), self.max_passage_length),
        )
        sides = (
            choose_row_shape(lengths, length, count, bins, hidden_size, usual)
            for lengths, length, count, usual in zip((queries, passages), longest, slots, USUAL.values())
        )
        return replace(self, packer=Packer(bins, *sides))

    def _lengths(self, data: TrainingSet, batch_number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths of the queries and passages of a training batch; 0 for empty slots."""
        examples = self.pad_examples(self.batch_examples(batch_number, len(data)))
        return text_lengths(data.queries, examples), text_lengths(
            data.passages, self.passage_rows(data, examples, batch_number)
        )

    def batch_examples(self, batch_number: int, total: int) -> np.ndarray:
        """Return the rows of the examples of a batch [batch_size]."""
        return shuffled_rows(self.data_seed, batch_number, self.batch_size, total)

    def draw_negatives(self, data: TrainingSet, examples: np.ndarray, batch_number: int | None) -> np.ndarray:
        """Return positions [examples, negatives] in each example's list of hard negatives, drawn without replacement.

        With batch_number=None these are the first positions. An example with too few negatives is filled up with -1,
        and example -1 has only -1.
        """
        random = None if batch_number is None else np.random.default_rng((self.negatives_seed, batch_number))
        positions = np.full((len(examples), self.negatives), -1, np.int64)
        for i, example in enumerate(examples):
            pool = data.negatives.lengths[example] if example >= 0 else 0
            size = min(self.negatives, pool)
            if example >= 0:
                positions[i, :size] = np.arange(size) if random is None else random.choice(pool, size, replace=False)
        return positions

    def passage_rows(self, data: TrainingSet, examples: np.ndarray, batch_number: int | None) -> np.ndarray:
        """Return passage rows [examples * (1 + negatives)]: each query's positive, then its negatives; -1: empty."""
        targets = np.where(examples >= 0, data.positives[np.maximum(examples, 0)], -1)
        negatives = row_subset(data.negatives, examples, self.draw_negatives(data, examples, batch_number), -1)
        return np.concatenate([targets[:, None], negatives], axis=1).astype(np.int32).reshape(-1)

    def teacher_scores(self, data: TrainingSet, examples: np.ndarray, batch_number: int | None) -> np.ndarray | None:
        """Return teacher scores [examples, 1 + negatives] of the passages of `passage_rows`; NaN: no score.

        None if the set has no teacher.
        """
        if data.teacher is None:
            return None
        targets = np.where(examples >= 0, data.teacher.positives[np.maximum(examples, 0)], np.nan)
        negatives = row_subset(
            data.teacher.negatives, examples, self.draw_negatives(data, examples, batch_number), np.nan
        )
        return np.concatenate([targets[:, None], negatives], axis=1).astype(np.float32)

    def batch(
        self,
        data: TrainingSet,
        examples: np.ndarray,
        batch_number: int | None,
        part: tuple[int, int] = (0, 1),
        packer: Packer | None = None,
    ) -> Batch:
        """Return this process's rows of a batch, as host arrays.

        Lengths and positions are chosen from the whole batch, so every process compiles the same program.

        Args:
            examples: rows of the examples of the whole batch; -1: no query.
            batch_number: number of the batch, which seeds the choice of hard negatives. None: the first negatives of
                each example.
            part: (index of this process, number of processes).
            packer: packs the texts. None: they are padded.
        """
        passage_rows = self.passage_rows(data, examples, batch_number)
        index, count = part
        mine = slice(index * len(examples) // count, (index + 1) * len(examples) // count)
        group = 1 + self.negatives
        my_rows = slice(mine.start * group, mine.stop * group)
        positives = np.where(examples >= 0, np.arange(len(examples)) * group, -1).astype(np.int32)
        if packer is None:
            query_tokens = self._tokens(data, data.queries, examples, mine, self.max_query_length)
            tokens = self._tokens(data, data.passages, passage_rows, my_rows, self.max_passage_length)
        else:
            placements = packer(text_lengths(data.queries, examples), text_lengths(data.passages, passage_rows))
            query_tokens = packed_tokens(data.queries, examples, mine, packer.queries, placements[0], data.pad_id)
            tokens = packed_tokens(data.passages, passage_rows, my_rows, packer.passages, placements[1], data.pad_id)
        rows = np.arange(my_rows.start, my_rows.stop) if tokens.rows is None else tokens.rows
        return Batch(
            queries=query_tokens,
            passages=tokens,
            positives=positives[mine],
            passage_ids=passage_rows[my_rows],
            known_positives=data.known_positives.table(examples[mine]),
            pseudo_queries=self._pseudo_queries(data, examples, passage_rows, rows),
            teacher_scores=None
            if (scores := self.teacher_scores(data, examples, batch_number)) is None
            else scores[mine],
        )

    def _pseudo_queries(
        self, data: TrainingSet, examples: np.ndarray, passage_rows: np.ndarray, rows: np.ndarray
    ) -> np.ndarray | None:
        """Return token ids [rows, pseudo_length] of the pseudo-queries of passages; -1: none."""
        if data.pseudo_queries is not None:
            ids, mask = data.pseudo_queries.padded(passage_rows[rows], self.pseudo_length, -1)
        elif data.imagine_queries:
            queries = np.full(len(passage_rows), -1)
            queries[:: 1 + self.negatives] = examples
            ids, mask = data.queries_without_markers.padded(queries[rows], self.pseudo_length, -1)
        else:
            return None
        return np.where(mask, ids, -1)

    def _padded_length(self, longest: int, limit: int) -> int:
        return min(-(-longest // self.length_multiple) * self.length_multiple, limit)

    def _tokens(self, data: TrainingSet, texts: Ragged, rows: np.ndarray, mine: slice, limit: int) -> Tokens:
        length = self._padded_length(int(texts.lengths_of(rows[rows >= 0]).max()), limit)
        return Tokens(*texts.padded(rows[mine], length, data.pad_id))

    def describe_batch(self, data: TrainingSet, batch_number: int) -> str:
        """Return the ids of a training batch's first queries, for an error message."""
        return f"queries {', '.join(data.query_ids[i] for i in self.batch_examples(batch_number, len(data))[:8])}"

    def training_batch(self, data: TrainingSet, batch_number: int, part: tuple[int, int] = (0, 1)) -> Batch:
        """Return this process's rows of a training batch; `part` as in `batch`."""
        return self.batch(
            data, self.pad_examples(self.batch_examples(batch_number, len(data))), batch_number, part, self.packer
        )


def padded_batch_size(queries: int, devices: int) -> int:
    """Return the least multiple of `devices` that is at least `queries`."""
    return -(-queries // devices) * devices


def text_lengths(texts: Ragged, rows: np.ndarray) -> np.ndarray:
    """Return the lengths of rows of texts; 0 for row -1, an empty slot."""
    return np.where(rows >= 0, texts.lengths_of(np.maximum(rows, 0)), 0)


def packed_tokens(
    texts: Ragged, rows: np.ndarray, mine: slice, side: RowShape, placement: Placement, pad_id: int
) -> Tokens:
    """Return this process's part of the packed texts of a batch, in the order of their positions.

    Args:
        texts: token ids of all texts.
        rows: row in `texts` of each text of the whole batch.
        mine: this process's part of the packed order.
        side: shape of the packed rows of queries or of passages.
        placement: packed positions of the whole batch.
        pad_id: id of padding.
    """
    order = placement.order[mine].astype(np.int32)
    packing = Packing(placement.starts[mine].astype(np.int32), placement.rows, placement.width)
    return Tokens(*texts.padded(rows[order], side.length, pad_id), order, packing)


def stack_batches(batches: Sequence[BatchT], pad_id: int) -> BatchT:
    """Stack host batches of one size to [batches, ...]. A single batch is returned unchanged.

    The batches of type `Batch` get the padded length of the longest of them; packed ones get the largest number of rows
    and the largest width. Batches of other types must have equal shapes.
    """
    if len(batches) == 1:
        return batches[0]
    if not isinstance(batches[0], Batch):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)

    def longest(side: str) -> list[Tokens]:
        tokens = [getattr(batch, side) for batch in batches]
        length = max(side_tokens.ids.shape[1] for side_tokens in tokens)
        pads = [((0, 0), (0, length - side_tokens.ids.shape[1])) for side_tokens in tokens]
        packings = [side_tokens.packing for side_tokens in tokens if side_tokens.packing]
        rows, width = (max((getattr(packing, name) for packing in packings), default=0) for name in ("rows", "width"))
        return [
            replace(
                side_tokens,
                ids=np.pad(side_tokens.ids, pad, constant_values=pad_id),
                mask=np.pad(side_tokens.mask, pad),
                packing=_in_larger_rows(side_tokens.packing, rows, width) if side_tokens.packing else None,
            )
            for side_tokens, pad in zip(tokens, pads, strict=True)
        ]

    sides = [field.name for field in fields(batches[0]) if isinstance(getattr(batches[0], field.name), Tokens)]
    padded_batches = [
        replace(batch, **dict(zip(sides, tokens)))
        for batch, *tokens in zip(batches, *(longest(side) for side in sides), strict=True)
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *padded_batches)


def _in_larger_rows(packing: Packing, rows: int, width: int) -> Packing:
    """Return the packing of the same texts in at least as many rows of at least the same width. Texts without tokens
    come after the last row."""
    row_of, column = np.divmod(packing.starts, packing.width)
    starts = np.where(row_of < packing.rows, row_of * width + column, rows * width)
    return Packing(starts.astype(packing.starts.dtype), rows, width)


def shuffled_rows(seed: int, batch_number: int, size: int, total: int) -> np.ndarray:
    """Return the rows of the examples of a batch [size]. Every epoch is a new permutation of all examples.

    Args:
        seed: seed of the permutations.
        batch_number: number of the batch in the run, from 0.
        size: examples per batch.
        total: examples in the set.
    """
    positions = batch_number * size + np.arange(size)
    epochs = positions // total
    return np.array([_permutation(seed, int(epoch), total)[i % total] for epoch, i in zip(epochs, positions)])


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, total: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(total)
