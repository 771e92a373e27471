"""Split the passages of a corpus, or of training records, into chunks: `jaxret data chunk`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jaxret.data.chunks import ChunkOptions, split_passage, split_passages
from jaxret.data.errors import Policy
from jaxret.data.formats import Corpus, TrainingSource
from jaxret.data.formats.data_source import DataSource
from jaxret.data.formats.example_writers import make_tevatron_record
from jaxret.data.formats.outputs import require_other_output
from jaxret.data.formats.writers import WRITERS
from jaxret.data.formats.writing import write_records
from jaxret.data.lines import PathLike
from jaxret.data.records import Example, Passage
from jaxret.evaluation.answer_matching import AnswerMatcher
from jaxret.index.passage_records import EmptyPassagesPolicy, has_metadata, is_vector, read_passage_records


@dataclass
class ChunkCounts:
    """Counts of the records of `chunk_data`."""

    records_read: int = 0
    records_written: int = 0
    without_answer: int = 0  # records that are left out, because no chunk of a positive has an answer


def open_texts(source: PathLike) -> Corpus | TrainingSource:
    """Return the training records of a file, or the corpus of a folder or of another file. Raises DataError if the
    source has neither."""
    data = DataSource.open(source)
    records = None if data.is_folder else TrainingSource.find(data, "")
    return records or Corpus.of(data)


def chunk_data(
    source: Corpus | TrainingSource, out: str, options: ChunkOptions, policy: Policy | None = None
) -> ChunkCounts:
    """Write the chunks of a corpus (a line each: docid, title, text, and the passage's metadata if it has some), or
    training records whose passages are chunks.

    In training records, the chunks of positives that contain an answer become the positives, and all chunks of
    negatives become negatives (MVR, section 5.1). A teacher's scores are not written, because they belong to whole
    passages.

    Args:
        source: corpus, or training records with answers.
        out: JSONL file to write (.jsonl, .jsonl.gz or .jsonl.zst).
        options: how passages are split.
        policy: what to do with bad records; None raises an error.

    Raises:
        DataError: a record is bad.
        ValueError: a training record has no answers, no record is left, or the output is a file of the source.
    """
    policy = policy or Policy()
    require_other_output(out, [("what is split", source.data)])
    counts = ChunkCounts()
    if isinstance(source, TrainingSource):
        records = _chunk_examples(source, source.read(policy, targets=False), options, counts)
        write_records(Path(out), map(make_tevatron_record, records))  # streamed, because chunks are larger than texts
    else:
        WRITERS["tevatron.corpus"]["passages"](Path(out), _chunk_passages(source, policy, options, counts))
    return counts


def _require_some(source: Corpus | TrainingSource, counts: ChunkCounts) -> None:
    if not counts.records_read:
        raise ValueError(f"{source} has no record to split; nothing is written")


def _chunk_passages(source: Corpus, policy: Policy, options: ChunkOptions, counts: ChunkCounts) -> Iterator[Passage]:
    for passage in _passages_with_metadata(source, policy):
        counts.records_read += 1
        for chunk in split_passage(passage, options):
            counts.records_written += 1
            yield chunk
    _require_some(source, counts)


def _passages_with_metadata(source: Corpus, policy: Policy) -> Iterator[Passage]:
    """Yield the passages of a corpus with their metadata. Vectors are left out: each chunk would repeat them."""
    passages = source.read(policy)
    if not has_metadata(source.file):
        yield from passages
        return
    # The records include all passages that `policy` accepts, in the same order.
    records = read_passage_records(source.file, EmptyPassagesPolicy("skip"))
    for passage in passages:
        fields = next(record for record in records if record.passage == passage).fields
        yield replace(passage, metadata={name: value for name, value in fields.items() if not is_vector(value)})


def _chunk_examples(
    source: TrainingSource, examples: Iterable[Example], options: ChunkOptions, counts: ChunkCounts
) -> Iterator[Example]:
    matcher = AnswerMatcher()
    for example in examples:
        counts.records_read += 1
        query = example.query
        if not query.answers:
            raise ValueError(
                f"{source}: query {query.id!r} has no answers to choose the chunks of a positive by. Split only the "
                "corpus, and train on whole passages"
            )
        chunks = [chunk for passage in example.positives for chunk in split_passage(passage, options)]
        has_answer = matcher((chunk.text for chunk in chunks), query)
        positives = tuple(chunk for chunk, right in zip(chunks, has_answer, strict=True) if right)
        if not positives:
            counts.without_answer += 1
            continue
        counts.records_written += 1
        yield Example(query, positives, tuple(split_passages(example.negatives, options)))
    if counts.records_read and not counts.records_written:
        raise ValueError(f"{source}: no chunk of a positive has an answer of its query; nothing is written")
    _require_some(source, counts)
