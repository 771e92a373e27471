"""Export the vectors of an encoded corpus as a FAISS index with ids, as Pyserini reads them.

The folder has `index` (an IndexFlatIP) and `docid`, an id a line. Both are written shard by shard: the index file is
the header that FAISS writes for an empty index, with the number of vectors changed, followed by the vectors. The query
encoder is exported, too, if Pyserini can compute it.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.records import Query
from jaxret.export.compare_original import sample_texts
from jaxret.export.stock_modules import vector_form, write_encoder
from jaxret.export.stores.compare_store import TIE
from jaxret.index.corpus_folder import corpus_folder
from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.runs.run import Run
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import atomic_write

K = 10  # passages per query that are compared
_COUNT = 8  # offset of the number of vectors in the header, after a name and the vector size of four bytes each


def write_pyserini(run: Run, out: Path, encoded_name: str) -> list[str]:
    """Write the index, and the query encoder if Pyserini can compute it.

    Raises ValueError for several vectors a passage, or ids that Pyserini would read differently, and FileNotFoundError
    if no corpus is encoded.
    """
    folder = corpus_folder(run.workdir, encoded_name)
    searcher = Searcher(run, folder)
    shards = searcher.encoded_corpus
    if run.model.sparse:
        raise ValueError(
            f"the vectors in {folder} are weights of words, and Pyserini's dense search has others; use jaxret search"
        )
    if (each := run.model.vectors_per_passage) != 1:
        several = "a vector for each token" if each is None else f"{each} vectors"
        raise ValueError(
            f"a passage has {several} in {folder}, and Pyserini's dense search has one: use a pooling that leaves one, "
            "or jaxret search"
        )
    write_index(shards, out / "index")
    write_ids(shards, out / "docid")
    sentence = compare_search(searcher, out)
    form = vector_form(run, "query")
    pooled = form is not None and form.token in ("cls", "mean") and not searcher.run.model.cut
    pooled = pooled and not run.tokenizer.skip_prompt
    if form is None or not pooled or len(form.weights) > 1 or form.projections:
        return [sentence, "Pyserini's encoders do not compute this model's query vectors: give it stored ones."]
    write_encoder(run, "query", out / "query-encoder")
    notes = [sentence, "The query encoder is beside it; Pyserini cuts queries at its model_max_length."]
    if prompt := run.tokenizer.prompt("query"):
        notes.append(f"Pyserini puts nothing in front of queries: let every topic begin with {prompt!r}.")
    return notes


def write_index(encoded_corpus: EncodedCorpus, path: Path) -> None:
    """Write an IndexFlatIP with one shard in memory at a time."""
    import faiss

    header = bytearray(faiss.serialize_index(faiss.IndexFlatIP(encoded_corpus.dimension)).tobytes())
    header[_COUNT : _COUNT + 8] = struct.pack("<q", encoded_corpus.total_rows)
    header[-8:] = struct.pack("<Q", encoded_corpus.total_rows * encoded_corpus.dimension)  # floats that follow
    with atomic_write(path, "wb") as file:
        file.write(header)
        for _, vectors in encoded_corpus:
            file.write(np.ascontiguousarray(vectors[:, 0], "<f4").tobytes())


def write_ids(encoded_corpus: EncodedCorpus, path: Path) -> None:
    """Write an id a line. Raises ValueError for an id with white space at its end, which Pyserini strips."""
    with atomic_write(path) as file:
        for _, ids in encoded_corpus.id_blocks():
            for id in ids:
                if id != id.rstrip() or len(id.splitlines()) != 1:
                    raise ValueError(
                        f"the passage id {id!r} in {encoded_corpus.folder} is one that Pyserini reads otherwise"
                    )
                file.write(f"{id}\n")


def compare_search(searcher: Searcher, out: Path) -> str:
    """Compare 64 searches of the files with the run's; return a sentence on the difference.

    Raises ValueError if a score differs by more than rounding, or an id where scores are not tied.
    """
    index = open_pyserini_index(out)
    texts = [Query(str(number), text) for number, text in enumerate(sample_texts())]
    vectors = searcher.embedder(searcher.run.tokenizer.queries([q.text for q in texts]), "query").stacked()[:, 0]
    k = min(K, index.ntotal)
    scores, rows = index.search(vectors, k)
    rankings = searcher.search(texts, k).rankings
    ours = np.array([[score for _, score in rankings[query.id]] for query in texts])
    size = max(float(np.abs(ours).max()), 1.0)
    largest = float(np.abs(ours - scores).max()) / size
    other = np.array([[id for id, _ in rankings[query.id]] for query in texts]) != docids_of_rows(out, rows)
    sentence = f"read back by FAISS, scores of the {k} best passages of {len(texts)} queries differ by {largest:.1e}"
    if not largest <= TIE:
        raise ValueError(f"{sentence} at most, more than {TIE:.0e}: nothing was exported")
    gaps = np.abs(np.diff(ours, axis=1)) / size <= TIE
    ties = np.pad(gaps, ((0, 0), (1, 0))) | np.pad(gaps, ((0, 0), (0, 1)), constant_values=True)  # the last: with k + 1
    if (other & ~ties).any():
        raise ValueError(f"{sentence}, but {(other & ~ties).sum()} passages are others: nothing was exported")
    return f"{sentence} at most, and the passages are the same" + (
        f" but for {other.sum()} tied ones" if other.any() else ""
    )


def open_pyserini_index(out: Path) -> Any:
    """Open the FAISS index of a folder with memory-mapped vectors. Raises ValueError if the number of ids differs."""
    import faiss

    index = faiss.read_index(str(out / "index"), faiss.IO_FLAG_MMAP_IFC)
    with open(out / "docid", encoding="utf-8") as file:
        ids = sum(1 for _ in file)
    if ids != index.ntotal:
        raise ValueError(f"{out}: {ids} ids, but {index.ntotal} vectors")
    return index


def docids_of_rows(out: Path, rows: np.ndarray) -> np.ndarray:
    """Return the ids of rows, in the shape of `rows`."""
    row_set = set(rows.ravel().tolist())
    with open(out / "docid", encoding="utf-8") as file:
        docids = {row: line.rstrip() for row, line in enumerate(file) if row in row_set}
    return np.array([[docids[row] for row in line] for line in rows.tolist()])
