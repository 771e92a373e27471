"""Training batches. A batch is a pure function of (seeds, step), so a resumed run needs to know only its step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxret.data.packing import SAMPLE, USUAL, Packer, Placed, Side, choose
from jaxret.data.records import Example, Passage
from jaxret.data.teacher import Teacher, picked
from jaxret.data.tokenizer import TextTokenizer, Truncation, joined
from jaxret.storage import sha256_json_lists
from jaxret.types import AnyBatch, Batch, Packing, Ragged, Tokens


@dataclass(frozen=True)
class TrainingSet:
    """Tokenised examples. Passages are stored once, however many queries share them; a passage's row is its id."""

    queries: Ragged  # [E]
    passages: Ragged  # [P]
    positives: np.ndarray  # int32 [E], row of the target passage
    known_positives: np.ndarray  # int32 [E, most positives of a query], rows padded with -1
    negatives: Ragged  # [E], rows of each example's hard negatives
    query_ids: Sequence[str]
    pad_id: int
    marker_ids: tuple[int, ...]  # [CLS] and [SEP]
    digest: str  # of the text
    # Queries to imagine (I3): one for each passage, empty where there is none [P]; or, if `imagine_queries`, the
    # training query for its positive.
    pseudo_queries: Ragged | None = None
    imagine_queries: bool = False
    truncations: tuple[Truncation, ...] = ()  # of queries and of passages
    teacher: Teacher | None = None
    subset_of: dict[str, Any] | None = None  # the record of the whole set, of a random part

    def __len__(self) -> int:
        return len(self.positives)

    @property
    def record(self) -> dict[str, Any]:
        """Its sizes and digests: what data.json of a run holds."""
        found = {"examples": len(self), "passages": len(self.passages), "sha256": self.digest}
        found |= {"scores": self.teacher.digest} if self.teacher else {}
        return found | ({"subset_of": self.subset_of} if self.subset_of else {})

    @cached_property
    def bare_queries(self) -> Ragged:
        """The queries without their markers."""
        kept = np.isin(self.queries.flat, self.marker_ids, invert=True)
        return Ragged(self.queries.flat[kept], np.concatenate([[0], np.cumsum(kept)])[self.queries.offsets])


# A TrainingSet, or what else is trained on: it has `__len__`, `pad_id` and `record`.
AnyExamples: TypeAlias = Any


def tokenize_examples(
    examples: Sequence[Example],
    tokenizer: TextTokenizer,
    progress: bool = False,
    pseudo_queries: Mapping[str, str] | None = None,
    imagine_queries: bool = False,
    keep: Callable[[str, Iterator[Ragged]], Ragged] = lambda _, blocks: joined(blocks),
) -> TrainingSet:
    """Examples -> TrainingSet, in the order given; `pseudo_queries` are by passage id. `keep` is given the name of a
    column and its blocks of ids, to write them where the column is then read from; they stay in memory without it.
    Raises ValueError if there are no examples."""
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
    known = np.full((len(examples), max(map(len, positives))), -1, np.int32)
    for i, found in enumerate(positives):
        known[i, : len(found)] = found
    text: list[Iterable[Any]] = [(e.query.text for e in examples), ([p.title, p.text] for p in passages)]
    text += [positives, negatives]
    imagined = None
    if pseudo_queries is not None:
        queries = [pseudo_queries.get(passage.id, "") for passage in passages]
        text.append(queries)
        imagined = tokenizer.bare(queries, partial(keep, "pseudo_queries"))
    cut = Truncation("queries", tokenizer.query_length), Truncation("passages", tokenizer.passage_length)
    return TrainingSet(
        queries=tokenizer.queries((e.query.text for e in examples), progress, cut[0], partial(keep, "queries")),
        passages=tokenizer.passages(passages, progress, cut[1], partial(keep, "passages")),
        positives=known[:, 0].copy(),
        known_positives=known,
        negatives=Ragged.from_lists(negatives),
        query_ids=tuple(e.query.id for e in examples),
        pad_id=tokenizer.pad_id,
        marker_ids=tokenizer.marker_ids,
        digest=sha256_json_lists(text),
        pseudo_queries=imagined,
        imagine_queries=imagine_queries,
        truncations=cut,
        teacher=Teacher.of(examples),
    )


@dataclass(frozen=True)
class BatchPlan:
    """How examples become batches: `batch_size` queries over all processes, each with its positive and `negatives`
    hard negatives, padded to a multiple of `length_multiple` tokens. Where `devices` do not divide it, empty places
    follow, which count for nothing. With a `packer` those of training are also laid side by side for the encoder; they
    then come in its order, and say their rows."""

    batch_size: int
    negatives: int
    length_multiple: int
    max_query_length: int
    max_passage_length: int
    pseudo_length: int = 0  # tokens of a pseudo-query, in a batch of a set that has them
    data_seed: int = 0
    negatives_seed: int = 0
    packer: Packer | None = None
    devices: int = 1

    @property
    def places(self) -> int:
        """Queries of a batch, with empty places: a multiple of the devices."""
        return places(self.batch_size, self.devices)

    def filled(self, examples: np.ndarray) -> np.ndarray:
        """Rows of examples [places]: at most batch_size of them, then -1."""
        return np.concatenate([examples, np.full(self.places - len(examples), -1)])

    def packed(self, data: TrainingSet, bins: int, slots: tuple[int, int], hidden_size: int) -> BatchPlan:
        """The same batches, packed for so many bins: widths and sizes from the lengths of some batches of the first
        epoch. slots: of a query and of a passage."""
        steps = -(-len(data) // self.batch_size)
        sample = [self._lengths(data, int(step)) for step in np.unique(np.linspace(0, steps - 1, SAMPLE).astype(int))]
        queries, passages = zip(*sample)
        longest = (
            self._padded_length(int(data.queries.lengths.max()), self.max_query_length),
            self._padded_length(int(data.passages.lengths.max()), self.max_passage_length),
        )
        sides = (
            choose(lengths, length, count, bins, hidden_size, usual)
            for lengths, length, count, usual in zip((queries, passages), longest, slots, USUAL.values())
        )
        return replace(self, packer=Packer(bins, *sides))

    def _lengths(self, data: TrainingSet, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the queries and documents of a training batch; 0 for empty slots."""
        examples = self.filled(self.examples_of(step, len(data)))
        return lengths_of(data.queries, examples), lengths_of(data.passages, self.documents_of(data, examples, step))

    def examples_of(self, step: int, total: int) -> np.ndarray:
        """Rows of the examples of a step [batch_size], of `stream`."""
        return stream(self.data_seed, step, self.batch_size, total)

    def drawn(self, data: TrainingSet, examples: np.ndarray, step: int | None) -> np.ndarray:
        """Which of an example's hard negatives go with it [examples, negatives], by their places among them, drawn
        without replacement (step=None: the first ones). An example with too few leaves its slots empty, -1; so are all
        of example -1."""
        random = None if step is None else np.random.default_rng((self.negatives_seed, step))
        found = np.full((len(examples), self.negatives), -1, np.int64)
        for i, example in enumerate(examples):
            pool = data.negatives.lengths[example] if example >= 0 else 0
            size = min(self.negatives, pool)
            if example >= 0:
                found[i, :size] = np.arange(size) if random is None else random.choice(pool, size, replace=False)
        return found

    def documents_of(self, data: TrainingSet, examples: np.ndarray, step: int | None) -> np.ndarray:
        """Passage rows [examples * (1 + negatives)]: each query's positive, then its hard negatives; -1: an empty
        slot."""
        targets = np.where(examples >= 0, data.positives[np.maximum(examples, 0)], -1)
        negatives = picked(data.negatives, examples, self.drawn(data, examples, step), -1)
        return np.concatenate([targets[:, None], negatives], axis=1).astype(np.int32).reshape(-1)

    def teacher_scores(self, data: TrainingSet, examples: np.ndarray, step: int | None) -> np.ndarray | None:
        """A teacher's scores [examples, 1 + negatives] of the same documents, NaN where there is none; None of a set
        without."""
        if data.teacher is None:
            return None
        targets = np.where(examples >= 0, data.teacher.positives[np.maximum(examples, 0)], np.nan)
        negatives = picked(data.teacher.negatives, examples, self.drawn(data, examples, step), np.nan)
        return np.concatenate([targets[:, None], negatives], axis=1).astype(np.float32)

    def batch(
        self,
        data: TrainingSet,
        examples: np.ndarray,
        step: int | None,
        part: tuple[int, int] = (0, 1),
        packer: Packer | None = None,
    ) -> Batch:
        """The rows of a batch that belong to process `part[0]` of `part[1]`, as host arrays.

        Lengths and places are chosen from the whole batch, so every process compiles the same program. Example -1 is no
        query.
        """
        documents = self.documents_of(data, examples, step)
        index, count = part
        mine = slice(index * len(examples) // count, (index + 1) * len(examples) // count)
        group = 1 + self.negatives
        my_documents = slice(mine.start * group, mine.stop * group)
        real = np.where(examples >= 0, examples, 0)
        positives = np.where(examples >= 0, np.arange(len(examples)) * group, -1).astype(np.int32)
        known = np.where((examples >= 0)[:, None], data.known_positives[real], -1)
        if packer is None:
            query_tokens = self._tokens(data, data.queries, examples, mine, self.max_query_length)
            tokens = self._tokens(data, data.passages, documents, my_documents, self.max_passage_length)
        else:
            places = packer(lengths_of(data.queries, examples), lengths_of(data.passages, documents))
            query_tokens = packed_tokens(data.queries, examples, mine, packer.queries, places[0], data.pad_id)
            tokens = packed_tokens(data.passages, documents, my_documents, packer.passages, places[1], data.pad_id)
        encoded = np.arange(my_documents.start, my_documents.stop) if tokens.rows is None else tokens.rows
        return Batch(
            queries=query_tokens,
            documents=tokens,
            positives=positives[mine],
            document_ids=documents[my_documents],
            known_positives=known[mine],
            pseudo_queries=self._pseudo_queries(data, examples, documents, encoded),
            teacher_scores=None if (scores := self.teacher_scores(data, examples, step)) is None else scores[mine],
        )

    def _pseudo_queries(
        self, data: TrainingSet, examples: np.ndarray, documents: np.ndarray, rows: np.ndarray
    ) -> np.ndarray | None:
        """Token ids [rows, pseudo_length] of the pseudo-queries of some documents, -1 where there is none."""
        if data.pseudo_queries is not None:
            ids, mask = data.pseudo_queries.padded(documents[rows], self.pseudo_length, -1)
        elif data.imagine_queries:
            queries = np.full(len(documents), -1)
            queries[:: 1 + self.negatives] = examples
            ids, mask = data.bare_queries.padded(queries[rows], self.pseudo_length, -1)
        else:
            return None
        return np.where(mask, ids, -1)

    def _padded_length(self, longest: int, limit: int) -> int:
        return min(-(-longest // self.length_multiple) * self.length_multiple, limit)

    def _tokens(self, data: TrainingSet, texts: Ragged, rows: np.ndarray, mine: slice, limit: int) -> Tokens:
        length = self._padded_length(int(texts.lengths_of(rows[rows >= 0]).max()), limit)
        return Tokens(*texts.padded(rows[mine], length, data.pad_id))

    def named(self, data: TrainingSet, number: int) -> str:
        """What a training batch begins with, for an error."""
        return f"queries {', '.join(data.query_ids[i] for i in self.examples_of(number, len(data))[:8])}"

    def training_batch(self, data: TrainingSet, step: int, part: tuple[int, int] = (0, 1)) -> Batch:
        """The batch of a training step."""
        return self.batch(data, self.filled(self.examples_of(step, len(data))), step, part, self.packer)


def places(queries: int, devices: int) -> int:
    """The least multiple of `devices` that has room for so many queries."""
    return -(-queries // devices) * devices


def lengths_of(texts: Ragged, rows: np.ndarray) -> np.ndarray:
    """0 for row -1, an empty slot."""
    return np.where(rows >= 0, texts.lengths_of(np.maximum(rows, 0)), 0)


def packed_tokens(texts: Ragged, rows: np.ndarray, mine: slice, side: Side, placed: Placed, pad_id: int) -> Tokens:
    """A process's part of the texts of a batch, in the order of their places."""
    order = placed.order[mine].astype(np.int32)
    packing = Packing(placed.starts[mine].astype(np.int32), placed.rows, side.width)
    return Tokens(*texts.padded(rows[order], side.length, pad_id), order, packing)


def stack(batches: Sequence[AnyBatch], pad_id: int) -> AnyBatch:
    """Host batches of one size as one, [batches, ...], texts padded to the longest, or in as many rows as the most; of
    one batch, that batch. Others than `Batch` have one shape."""
    if len(batches) == 1:
        return batches[0]
    if not isinstance(batches[0], Batch):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)

    def longest(side: str) -> list[Tokens]:
        tokens = [getattr(batch, side) for batch in batches]
        length = max(some.ids.shape[1] for some in tokens)
        pads = [((0, 0), (0, length - some.ids.shape[1])) for some in tokens]
        rows = max(some.packing.rows if some.packing else 0 for some in tokens)
        return [
            replace(
                some,
                ids=np.pad(some.ids, pad, constant_values=pad_id),
                mask=np.pad(some.mask, pad),
                packing=replace(some.packing, rows=rows) if some.packing else None,
            )
            for some, pad in zip(tokens, pads, strict=True)
        ]

    sides = [field.name for field in fields(batches[0]) if isinstance(getattr(batches[0], field.name), Tokens)]
    padded = [
        replace(batch, **dict(zip(sides, tokens)))
        for batch, *tokens in zip(batches, *(longest(side) for side in sides), strict=True)
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *padded)


def stream(seed: int, step: int, size: int, total: int) -> np.ndarray:
    """The `size` examples of a step, of `total`: an endless stream of epochs, each a new permutation."""
    place = step * size + np.arange(size)
    epochs = place // total
    return np.array([_permutation(seed, int(e), total)[i % total] for e, i in zip(epochs, place)])


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, total: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(total)
