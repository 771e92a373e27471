"""Build an approximate index of an encoded corpus, and measure its recall: `jaxret index`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.formats import Policy
from jaxret.experiments.searches.evaluation_queries import EvaluationSource, read_evaluation_queries
from jaxret.index.encoded_corpus import EncodedCorpus, open_encoded
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.shards import ShardError
from jaxret.parallel.events import emit
from jaxret.runs.lock import hold_folder
from jaxret.runs.run import Run, open_run
from jaxret.runs.workdir import Workdir
from jaxret.search.approximate.faiss_build import build_faiss_index, measure_recall, passages_as_queries
from jaxret.search.approximate.faiss_factory import make_index, parse_parameters
from jaxret.search.approximate.faiss_index import require_one_query_vector
from jaxret.search.approximate.index_files import check_index_file, identity_of, index_folder, read_index_manifest
from jaxret.search.approximate.recall import RecallQueries
from jaxret.search.approximate.seismic_build import (
    build_seismic_index,
    measure_seismic_recall,
    sparse_passages_as_queries,
)
from jaxret.search.approximate.seismic_index import SEARCH_SETTINGS, parse_factory, parse_settings
from jaxret.search.latency import spread_evenly
from jaxret.search.search_options import IndexOptions
from jaxret.search.searcher import open_encoded_by
from jaxret.types import SparseRows


def index_corpus(workdir: Workdir, options: IndexOptions, encoded_name: str = "") -> Path:
    """Build an index of an encoded corpus, unless it exists, measure its recall, and return its folder.

    Args:
        workdir: folder of the run that encoded the corpus.
        options: how the index is built and measured.
        encoded_name: the encoded corpus: its name, or the path that was encoded; "" for the only one.

    Raises:
        ValueError: the corpus has fewer than two passages, or an option does not fit its vectors.
    """
    run = open_run(workdir.path, options.checkpoint) if options.queries else None
    folder = corpus_folder(workdir, encoded_name)
    index_path = index_folder(folder, options.name or options.factory)
    encoded_corpus = open_encoded_by(run, folder) if run else open_encoded(folder)
    check_options_of_index(encoded_corpus, options)  # wrong options are errors before an index is built
    if encoded_corpus.total_rows < 2:
        raise ValueError(f"{folder} has {encoded_corpus.total_rows} passages; an index needs at least two")
    queries = _encoded_queries(run.with_dimension(encoded_corpus.dimension), options) if run else None
    build, measure, as_queries = build_faiss_index, measure_recall, passages_as_queries
    if encoded_corpus.sparse:
        build, measure, as_queries = build_seismic_index, measure_seismic_recall, sparse_passages_as_queries
    with hold_folder(index_path, "indexing"):
        if not _is_built(index_path, encoded_corpus, options):
            build(encoded_corpus, index_path, options)
        queries = queries or as_queries(encoded_corpus, options.sample, options.seed)
        print(f"recall of exact search, with {len(queries.vectors):,} {queries.source}:")
        recall = measure(encoded_corpus, index_path, queries, options.parameters)
    print("\n".join(recall_table(recall)))
    print(f"{index_path}: search it with --index={index_path.name} (without, search is exact)")
    emit("index", folder=index_path, factory=options.factory, recall=recall)
    return index_path


def check_options_of_index(encoded_corpus: EncodedCorpus, options: IndexOptions) -> None:
    """Raise ValueError for a factory or search parameters that do not fit the vectors of a corpus."""
    if encoded_corpus.sparse:
        parse_factory(options.factory)
    else:
        require_one_query_vector(encoded_corpus)
        empty = make_index(options.factory, encoded_corpus.dimension)
    for text in options.parameters:
        try:
            if encoded_corpus.sparse:
                parse_settings(text, SEARCH_SETTINGS)
            else:
                parse_parameters(empty, text)
        except ValueError as error:
            raise ValueError(f"parameters={error}") from error


def _is_built(index_path: Path, encoded_corpus: EncodedCorpus, options: IndexOptions) -> bool:
    """Return whether this index of these vectors exists already. Raises ValueError if another index has its name."""
    try:
        manifest = read_index_manifest(index_path)
        check_index_file(index_path, manifest)
    except (FileNotFoundError, ShardError):
        return False
    factory = manifest["factory"]
    if factory != options.factory:
        raise ValueError(f"{index_path} is an index {factory}; choose another name for {options.factory}, or delete it")
    if manifest["corpus"] != identity_of(encoded_corpus):
        print(f"{index_path} was built from other vectors than the corpus has now: it is rebuilt")
        return False
    if (manifest["training"]["sample"], manifest["training"]["seed"]) != (options.train_vectors, options.seed):
        print(f"{index_path} was trained on another sample: it is rebuilt")
        return False
    print(f"{index_path} was built already")
    return True


def _encoded_queries(run: Run, options: IndexOptions) -> RecallQueries:
    """Return the vectors of at most `options.sample` queries, evenly spread over the file."""
    source = EvaluationSource.open(options.queries, options.qrels, options.split)
    queries = read_evaluation_queries(source, Policy("error")).queries
    tokens = run.tokenizer.queries(spread_evenly(queries, options.sample))
    vectors = run.embedder()(tokens, "query")
    rows = vectors if isinstance(vectors, SparseRows) else np.ascontiguousarray(vectors.stacked()[:, 0], np.float32)
    return RecallQueries(rows, f"questions of {options.queries}")


def recall_table(recall: dict[str, Any]) -> list[str]:
    """Return the lines of a table with the recall for each value of the search parameters. A * marks the default."""
    rows = [["", "parameters", *(f"recall@{depth}" for depth in recall["measured"][0]["recall"]), "ms per question"]]
    for row in recall["measured"]:
        default = "*" if row["parameters"] == recall["parameters"] else ""
        recalls = (f"{value:.4f}" for value in row["recall"].values())
        rows.append([default, row["parameters"] or "(none)", *recalls, f"{row['ms']:.2f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
