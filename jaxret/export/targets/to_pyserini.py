"""Exports the vectors of an encoded corpus as a FAISS index with ids, for Pyserini.

The folder has `index` (an IndexFlatIP) and `docid`, with one id in each line. Both are written shard by shard. The
index file is the header that FAISS writes for an empty index, with another number of vectors, and the vectors. The
query encoder is exported, too, if Pyserini supports it.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.records import Query
from jaxret.export.compare_original import sample_texts
from jaxret.export.round_trip import TIE
from jaxret.export.targets.stock_modules import vector_form, write_encoder
from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.runs.run import Run
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import atomic_write

MOST_PASSAGES = 10  # passages of a query that are compared
# Offset of the number of vectors in the header, after a name and the vector size, which have four bytes each.
_COUNT = 8


def write_pyserini(run: Run, out: Path, encoded_name: str) -> list[str]:
    """Write the index, and the query encoder if Pyserini supports it. Return sentences on the result.

    Raises ValueError for passages with several vectors, and for ids that Pyserini would change. Raises
    FileNotFoundError if the run has no encoded corpus.
    """
    folder = corpus_folder(run.workdir, encoded_name)
    searcher = Searcher(run, folder)
    shards = searcher.encoded_corpus
    if run.model.sparse:
        raise ValueError(
            f"the vectors in {folder} are weights of words, but Pyserini's dense search needs dense vectors; use "
            "--to=anserini"
        )
    if (count := run.model.vectors_per_passage) != 1:
        several = "a vector for each token" if count is None else f"{count} vectors"
        raise ValueError(
            f"a passage has {several} in {folder}, but Pyserini's dense search needs one: use a pooling to one vector, "
            "or jaxret search"
        )
    write_index(shards, out / "index")
    write_ids(shards, out / "docid")
    sentence = compare_search(searcher, out)
    form = vector_form(run, "query")
    pooled = form is not None and form.token in ("cls", "mean") and not searcher.run.model.cut
    pooled = pooled and not run.tokenizer.skip_prompt
    if form is None or not pooled or len(form.weights) > 1 or form.projections:
        return [sentence, "Pyserini's encoders cannot compute this model's query vectors: give it encoded queries."]
    write_encoder(run, "query", out / "query-encoder")
    notes = [sentence, "The query encoder is in query-encoder; Pyserini cuts queries at its model_max_length."]
    if prompt := run.tokenizer.prompt("query"):
        notes.append(f"Pyserini adds no prompt to queries: let every topic begin with {prompt!r}.")
    return notes


def write_index(encoded_corpus: EncodedCorpus, path: Path) -> None:
    """Write an IndexFlatIP, with only one shard in memory at a time."""
    import faiss

    header = bytearray(faiss.serialize_index(faiss.IndexFlatIP(encoded_corpus.dimension)).tobytes())
    header[_COUNT : _COUNT + 8] = struct.pack("<q", encoded_corpus.total_rows)
    header[-8:] = struct.pack("<Q", encoded_corpus.total_rows * encoded_corpus.dimension)  # number of floats
    with atomic_write(path, "wb") as file:
        file.write(header)
        for _, vectors in encoded_corpus:
            file.write(np.ascontiguousarray(vectors[:, 0], "<f4").tobytes())


def write_ids(encoded_corpus: EncodedCorpus, path: Path) -> None:
    """Write one id in each line. Raises ValueError for an id that Pyserini would change: it removes white space at the
    end."""
    with atomic_write(path) as file:
        for _, ids in encoded_corpus.id_blocks():
            for id in ids:
                if id != id.rstrip() or len(id.splitlines()) != 1:
                    raise ValueError(
                        f"Pyserini would change the passage id {id!r} in {encoded_corpus.folder}; use ids without line "
                        "ends, and without white space at the end"
                    )
                file.write(f"{id}\n")


def compare_search(searcher: Searcher, out: Path) -> str:
    """Compare 64 searches of the files with the run's. Return a sentence on the difference.

    Raises ValueError if scores differ by more than rounding, or if ids differ where scores are not tied.
    """
    index = open_pyserini_index(out)
    texts = [Query(str(number), text) for number, text in enumerate(sample_texts())]
    vectors = searcher.embedder(searcher.run.tokenizer.queries([q.text for q in texts]), "query").stacked()[:, 0]
    k = min(MOST_PASSAGES, index.ntotal)
    scores, rows = index.search(vectors, k)
    rankings = searcher.search(texts, k).rankings
    run_scores = np.array([[score for _, score in rankings[query.id]] for query in texts])
    size = max(float(np.abs(run_scores).max()), 1.0)
    largest = float(np.abs(run_scores - scores).max()) / size
    ids_differ = np.array([[id for id, _ in rankings[query.id]] for query in texts]) != docids_of_rows(out, rows)
    sentence = f"read back by FAISS, scores of the {k} best passages of {len(texts)} queries differ by {largest:.1e}"
    if not largest <= TIE:
        raise ValueError(f"{sentence} at most, more than {TIE:.0e}: nothing was exported")
    gaps = np.abs(np.diff(run_scores, axis=1)) / size <= TIE
    # Rank k may tie with rank k + 1, which is not compared.
    ties = np.pad(gaps, ((0, 0), (1, 0))) | np.pad(gaps, ((0, 0), (0, 1)), constant_values=True)
    if (ids_differ & ~ties).any():
        raise ValueError(f"{sentence}, but {(ids_differ & ~ties).sum()} passages differ: nothing was exported")
    return f"{sentence} at most, and the passages are the same" + (
        f" but for {ids_differ.sum()} tied ones" if ids_differ.any() else ""
    )


def open_pyserini_index(out: Path) -> Any:
    """Open the FAISS index in a folder with memory-mapped vectors. Raises ValueError for a wrong number of ids."""
    import faiss

    index = faiss.read_index(str(out / "index"), faiss.IO_FLAG_MMAP_IFC)
    with open(out / "docid", encoding="utf-8") as file:
        ids = sum(1 for _ in file)
    if ids != index.ntotal:
        raise ValueError(f"{out}: {ids} ids, but {index.ntotal} vectors")
    return index


def docids_of_rows(out: Path, rows: np.ndarray) -> np.ndarray:
    """Return an array of the ids of `rows`, with the same shape."""
    row_set = set(rows.ravel().tolist())
    with open(out / "docid", encoding="utf-8") as file:
        docids = {row: line.rstrip() for row, line in enumerate(file) if row in row_set}
    return np.array([[docids[row] for row in line] for line in rows.tolist()])
