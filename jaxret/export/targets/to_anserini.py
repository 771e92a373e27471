"""Exports word weights of an encoded corpus and of queries to the files of Anserini and Pyserini (impact search).

`corpus/` has a JSON line for each passage, {"id", "contents", "vector": {word: impact}}, which is Anserini's
JsonVectorCollection. `topics.tsv` has a line for each query: its id, and every word as many times as its impact. An
impact is a weight in hundredths, rounded to an integer. Impacts of 0 are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from jaxret.data.formats import QuerySource
from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.runs.run import Run
from jaxret.search.searcher import open_encoded_by
from jaxret.storage.atomic import atomic_write
from jaxret.types import SparseRows

WEIGHT_UNIT = 100  # impact of a weight of 1, as in the files of SPLADE's authors
_BLOCK_ROWS = 16_384  # passages or queries that are in memory at a time
FILE_ROWS = 10 * _BLOCK_ROWS  # passages of a file
INDEX_COMMAND = (
    "python -m pyserini.index.lucene --collection JsonVectorCollection "
    "--generator DefaultLuceneDocumentGenerator --impact --pretokenized --input corpus --index INDEX"
)


def write_anserini(run: Run, out: Path, encoded_name: str, queries: QuerySource | None = None) -> list[str]:
    """Write the corpus and the queries, if there are some, and read the corpus back. Return sentences on the rounding.

    Args:
        run: a run with a sparse head.
        out: folder to write into.
        encoded_name: name of the encoded corpus, required if there are several.
        queries: queries to export; None: none.

    Raises:
        ValueError: the vectors are not weights of words, or the corpus has no passage.
        FileNotFoundError: the run has no encoded corpus.
    """
    folder = corpus_folder(run.workdir, encoded_name)
    if not run.model.sparse:
        raise ValueError(
            f"the vectors in {folder} are dense, and Anserini's impact search needs weights of words: "
            "use --to=pyserini, or a run with a sparse head"
        )
    encoded_corpus = open_encoded_by(run, folder)
    if not encoded_corpus.total_rows:
        raise ValueError(f"{folder} has no passage to export: all were deleted")
    words = vocabulary(run, encoded_corpus.dimension)
    empty = write_corpus(encoded_corpus, words, out / "corpus")
    difference = compare_weights(encoded_corpus, words, out / "corpus")
    notes = [
        f"{encoded_corpus.total_rows:,} passages read back; weights differ by {difference:.4f} at most: impacts "
        f"are integers, {WEIGHT_UNIT} for a weight of 1.",
        f"Index them with: {INDEX_COMMAND}",
    ]
    if empty:
        notes.append(
            f"{empty:,} passages have no impact above 0; they have {words[0]!r}, because Anserini needs a word."
        )
    if queries:
        count = write_topics(run, queries, words, out / "topics.tsv")
        notes.append(f"topics.tsv has {count:,} queries: search with --topics topics.tsv --impact --pretokenized.")
    return notes


def vocabulary(run: Run, size: int) -> list[str]:
    """Return the words of the vocabulary by id. Ids of the encoder that the tokenizer lacks have names like [word7]."""
    return [run.tokenizer.backend.id_to_token(id) or f"[word{id}]" for id in range(size)]


def write_corpus(encoded_corpus: EncodedCorpus, words: list[str], folder: Path) -> int:
    """Write files of FILE_ROWS passages each. Return the number of passages without an impact above 0."""
    folder.mkdir()
    empty, texts = 0, corpus_impacts(encoded_corpus, words)
    for number in range(-(-encoded_corpus.total_rows // FILE_ROWS)):
        with atomic_write(folder / f"{number:05d}.jsonl") as file:
            for id, impacts in islice(texts, FILE_ROWS):
                empty += not impacts
                record = {"id": id, "contents": "", "vector": impacts or {words[0]: 1}}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return empty


def corpus_impacts(encoded_corpus: EncodedCorpus, words: list[str]) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield (id, words with an impact above 0) of all passages, in the order of rows."""
    for first, shard in encoded_corpus:
        for start in range(0, len(shard), _BLOCK_ROWS):
            rows = shard.part(start, min(start + _BLOCK_ROWS, len(shard)))
            ids = encoded_corpus.ids(first + start + np.arange(len(rows)))
            yield from ((id, impacts_of(rows, row, words)) for row, id in enumerate(ids))


def impacts_of(rows: SparseRows, row: int, words: list[str]) -> dict[str, int]:
    """Return the words of a row with an impact above 0, in the order of the vocabulary."""
    part = slice(rows.offsets[row], rows.offsets[row + 1])
    impacts = np.rint(rows.weights[part].astype(np.float64) * WEIGHT_UNIT).astype(np.int64)
    return {words[word]: int(impact) for word, impact in zip(rows.words[part], impacts, strict=True) if impact}


def compare_weights(encoded_corpus: EncodedCorpus, words: list[str], folder: Path) -> float:
    """Read the files back. Return the largest difference of a weight.

    Raises ValueError for a wrong passage in a line, and for a difference beyond rounding.
    """
    number_of = {word: number for number, word in enumerate(words)}
    lines = (line for path in sorted(folder.glob("*.jsonl")) for line in path.open(encoding="utf-8"))
    largest = 0.0
    for first, shard in encoded_corpus:
        ids = encoded_corpus.ids(first + np.arange(len(shard)))
        for row, id in enumerate(ids):
            record = json.loads(next(lines, "{}"))
            if record.get("id") != id:
                raise ValueError(
                    f"{folder}: read back, a line has the passage {record.get('id')!r} instead of {id!r}: nothing was "
                    "exported"
                )
            weights = shard[row][0].astype(np.float64)
            if weights.max() * WEIGHT_UNIT > 0.5:
                for word, impact in record["vector"].items():
                    weights[number_of[word]] -= impact / WEIGHT_UNIT
            largest = max(largest, float(np.abs(weights).max()))
    if next(lines, None) is not None:
        raise ValueError(f"{folder} has more lines than the corpus has passages: nothing was exported")
    if not largest <= 0.5 / WEIGHT_UNIT + 1e-9:
        raise ValueError(f"{folder}: a weight differs by {largest:.4f}, more than rounding: nothing was exported")
    return largest


def write_topics(run: Run, queries: QuerySource, words: list[str], path: Path) -> int:
    """Write queries with every word as many times as its impact. Return the number of queries.

    Args:
        run: a run with a sparse head.
        words: words of the vocabulary, by id.

    Raises:
        ValueError: the impacts of a query are all 0.
    """
    records = queries.read()
    embed = run.embedder()
    with atomic_write(path) as file:
        for start in range(0, len(records), _BLOCK_ROWS):
            part = records[start : start + _BLOCK_ROWS]
            rows = embed(run.tokenizer.queries(part), "query")
            assert isinstance(rows, SparseRows)
            for row, query in enumerate(part):
                impacts = impacts_of(rows, row, words)
                if not impacts:
                    raise ValueError(f"{queries}: query {query.id!r} has no word with an impact above 0")
                text = " ".join(" ".join([word] * impact) for word, impact in impacts.items())
                file.write(f"{query.id}\t{text}\n")
    return len(records)
