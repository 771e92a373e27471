"""--to=pyserini: the vectors of an encoded corpus as a FAISS index and its ids, as Pyserini reads them.

A folder with `index` (IndexFlatIP as faiss.write_index writes it) and `docid`, an id a line. Both are written shard by
shard: the index's file is a header that FAISS makes of an empty index, with the number of vectors set, and then the
vectors. Beside them lies the query encoder, where Pyserini can compute it.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.records import Query
from jaxret.retrieval.encoded import EncodedCorpus
from jaxret.retrieval.retrieve import Searcher, choose_corpus
from jaxret.runs.run import Run
from jaxret.runs.stock import vector_form, write_encoder
from jaxret.storage import atomic_write
from jaxret.tools.original import real_texts

K = 10  # passages of each query that are compared
TIE = 1e-5  # of scores of about 1: nearer ones may change places in FAISS's float32
_COUNT = 8  # where the number of vectors is in the header: after a name and the size of a vector, four bytes each


def write_pyserini(run: Run, out: Path, corpus: str) -> list[str]:
    """Raises ValueError for a head with several vectors a passage, or ids that Pyserini would read otherwise;
    FileNotFoundError if no corpus is encoded."""
    folder = choose_corpus(run, corpus)
    searcher = Searcher(run, folder)
    shards = searcher.shards
    if (each := run.retriever.vectors_per_passage) != 1:
        several = "a vector for each token" if each is None else f"{each} vectors"
        raise ValueError(
            f"a passage has {several} in {folder}, and Pyserini's dense search has one: use a pooling that leaves one, "
            "or jaxret search"
        )
    write_index(shards, out / "index")
    write_ids(shards, out / "docid")
    told = compare_search(searcher, out)
    form = vector_form(run, "query")
    if form is None or len(form.weights) > 1 or form.projection is not None:
        return [told, "Pyserini's encoders do not compute this model's query vectors: give it stored ones."]
    write_encoder(run, "query", out / "query-encoder")
    notes = [told, "The query encoder is beside it; Pyserini cuts queries at its model_max_length."]
    if prompt := run.config.tokens.query_prompt:
        notes.append(f"Pyserini puts nothing in front of queries: let every topic begin with {prompt!r}.")
    return notes


def write_index(shards: EncodedCorpus, path: Path) -> None:
    """IndexFlatIP, a shard in memory at a time."""
    import faiss

    header = bytearray(faiss.serialize_index(faiss.IndexFlatIP(shards.dimension)).tobytes())
    header[_COUNT : _COUNT + 8] = struct.pack("<q", shards.total_rows)
    header[-8:] = struct.pack("<Q", shards.total_rows * shards.dimension)  # floats that follow
    with atomic_write(path, "wb") as file:
        file.write(header)
        for _, vectors in shards:
            file.write(np.ascontiguousarray(vectors[:, 0], "<f4").tobytes())


def write_ids(shards: EncodedCorpus, path: Path) -> None:
    """An id a line; Pyserini strips white space at their ends."""
    with atomic_write(path) as file:
        for _, ids in shards.id_blocks():
            for id in ids:
                if id != id.rstrip() or len(id.splitlines()) != 1:
                    raise ValueError(f"the passage id {id!r} in {shards.folder} is one that Pyserini reads otherwise")
                file.write(f"{id}\n")


def compare_search(searcher: Searcher, out: Path) -> str:
    """A sentence on 64 searches in the files, as Pyserini makes them, against the run's. Raises ValueError if a score
    differs by more than rounding, or an id where scores are not tied."""
    index = open_index(out)
    texts = [Query(str(number), text) for number, text in enumerate(real_texts())]
    vectors = searcher.embedder(searcher.run.tokenizer.queries([q.text for q in texts]), "query").stacked()[:, 0]
    k = min(K, index.ntotal)
    scores, rows = index.search(vectors, k)
    found = searcher.search(texts, k).rankings
    ours = np.array([[score for _, score in found[q.id]] for q in texts])
    size = max(float(np.abs(ours).max()), 1.0)
    largest = float(np.abs(ours - scores).max()) / size
    other = np.array([[id for id, _ in found[q.id]] for q in texts]) != ids_of(out, rows)
    told = f"read back by FAISS, scores of the {k} best passages of {len(texts)} queries differ by {largest:.1e}"
    if not largest <= TIE:
        raise ValueError(f"{told} at most, more than {TIE:.0e}: nothing was exported")
    gaps = np.abs(np.diff(ours, axis=1)) / size <= TIE
    tied = np.pad(gaps, ((0, 0), (1, 0))) | np.pad(gaps, ((0, 0), (0, 1)), constant_values=True)  # the last: with k + 1
    if (other & ~tied).any():
        raise ValueError(f"{told}, but {(other & ~tied).sum()} passages are others: nothing was exported")
    return f"{told} at most, and the passages are the same" + (
        f" but for {other.sum()} tied ones" if other.any() else ""
    )


def open_index(out: Path) -> Any:
    """The FAISS index of a folder, whose vectors stay on disk, mapped. Raises ValueError if there are other ids."""
    import faiss

    index = faiss.read_index(str(out / "index"), faiss.IO_FLAG_MMAP_IFC)
    with open(out / "docid", encoding="utf-8") as file:
        ids = sum(1 for _ in file)
    if ids != index.ntotal:
        raise ValueError(f"{out}: {ids} ids, but {index.ntotal} vectors")
    return index


def ids_of(out: Path, rows: np.ndarray) -> np.ndarray:
    """The ids of some rows, in their shape; a line in memory at a time."""
    wanted = set(rows.ravel().tolist())
    with open(out / "docid", encoding="utf-8") as file:
        found = {row: line.rstrip() for row, line in enumerate(file) if row in wanted}
    return np.array([[found[row] for row in line] for line in rows.tolist()])
