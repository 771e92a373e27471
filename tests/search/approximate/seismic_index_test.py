"""Approximate search of sparse vectors: candidates have the scores and the order of exact search, and recall is
measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxret.data.formats import Corpus
from jaxret.experiments.build_index import index_corpus
from jaxret.experiments.verify import verify_folder
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.update import delete_passages
from jaxret.index.shards import ShardError
from jaxret.runs.run import Run, open_run
from jaxret.search.approximate.faiss_index import MappedCorpus
from jaxret.search.approximate.seismic_index import SEARCH_SETTINGS, open_seismic_index, parse_settings
from jaxret.search.search_options import IndexOptions, SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.search.vectors.inverted_lists import InvertedLists
from jaxret.storage.atomic import read_json
from jaxret.types import SparseRows
from tests.pipeline import untrained_run, write_data, write_encoder

pytest.importorskip("seismic", reason="Seismic has wheels for some platforms only")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A SPLADE run with an index: its corpus has shards of 20 rows, and one passage is deleted."""
    root = tmp_path_factory.mktemp("seismic")
    keys = {"head__name": "splade", "head__splade__special_ids": (0, 2, 3)}
    run = untrained_run(root / "run", write_encoder(root / "encoder"), write_data(root / "data"), **keys)
    encode_corpus(run, Corpus.open(root / "data"), options=EncodeOptions(words=8, shard_rows=20), progress=False)
    (root / "gone.txt").write_text("p3\n")
    delete_passages(run.workdir.embeddings("data"), root / "gone.txt")
    index_corpus(run.workdir, IndexOptions("seismic", sample=30))
    return run


def queries_of(run: Run) -> SparseRows:
    texts = ["garden bridge window", "silver river", "stone", "a lamp in the garden", "unheard"]
    vectors = run.embedder()(run.tokenizer.queries(texts), "query")
    assert isinstance(vectors, SparseRows)
    empty = SparseRows.from_dense(np.zeros((1, vectors.dimension), np.float32))
    return SparseRows.concatenate([vectors, empty])


@pytest.mark.slow
def test_an_exhaustive_search_equals_the_exact_result(run: Run) -> None:
    searcher = Searcher(run, run.workdir.embeddings("data"), SearchOptions(index="seismic"))
    everything = "query_cut=1000,heap_factor=1.0,k_factor_rf=50"
    index = open_seismic_index(searcher.encoded_corpus, "seismic", everything)
    queries = queries_of(run)
    exact = InvertedLists(searcher.encoded_corpus).search(queries, 10)
    result = index.search(queries, MappedCorpus(searcher.encoded_corpus), 10)
    np.testing.assert_array_equal(result.scores, exact.scores)
    np.testing.assert_array_equal(result.rows, exact.rows)
    few = replace(index, parameters="query_cut=1,heap_factor=0.1,k_factor_rf=1")
    other = few.search(queries, MappedCorpus(searcher.encoded_corpus), 10)
    assert (other.rows != exact.rows).any(), "control: a shorter search finds other passages"
    products = queries.flat.astype(float) @ np.concatenate([s.flat for _, s in searcher.encoded_corpus]).astype(float).T
    own = np.take_along_axis(products, other.rows, axis=1).astype(np.float32)
    np.testing.assert_array_equal(other.scores, own)
    assert (np.diff(other.scores, axis=1) <= 0).all()


@pytest.mark.slow
def test_recall_is_stored_and_stated(run: Run) -> None:
    searcher = Searcher(run, run.workdir.embeddings("data"), SearchOptions(index="seismic"))
    manifest = read_json(searcher.folder / "indexes/seismic/manifest.json")
    measured = manifest["recall"]["measured"]
    assert measured[0]["parameters"] == "query_cut=5,heap_factor=0.7"
    assert all(0 < row["recall"]["10"] <= 1 for row in measured)
    assert measured[0]["recall"]["10"] <= measured[-1]["recall"]["10"]
    result, ids = searcher.nearest(queries_of(run), 5)
    assert result.backend.startswith("Seismic, seismic")
    assert "p3" not in {id for row in ids for id in row}
    assert searcher.vectors.index is not None
    assert "recall of exact search @1" in searcher.vectors.index.describe(5)
    assert not [v for v in verify_folder(searcher.folder) if v.problem]


@pytest.mark.slow
def test_an_index_of_other_vectors_or_a_damaged_one_is_refused(run: Run, tmp_path: Path) -> None:
    data = run.workdir.path.parent / "data"
    encode_corpus(run, Corpus.open(data), "other", EncodeOptions(words=8), progress=False)
    folder = index_corpus(run.workdir, IndexOptions("seismic,n_postings=50", "few"), "other")
    (tmp_path / "gone.txt").write_text("p5\n")
    path = folder / "index.seismic"
    kept = path.read_bytes()
    path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    searcher = SearchOptions(index="few")
    with pytest.raises(ShardError, match="damaged"):
        Searcher(run, run.workdir.embeddings("other"), searcher)
    path.write_bytes(kept)
    Searcher(run, run.workdir.embeddings("other"), searcher)
    delete_passages(run.workdir.embeddings("other"), tmp_path / "gone.txt")
    with pytest.raises(ValueError, match=r"index .*vectors"):
        Searcher(run, run.workdir.embeddings("other"), searcher)


@pytest.mark.slow
def test_wrong_settings_are_errors(run: Run) -> None:
    for factory, message in (
        ("IVF4,Flat", "for sparse vectors it must be 'seismic'"),
        ("seismic,postings=3", "Seismic has no setting 'postings'"),
        ("seismic,n_postings=0", "a whole number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            index_corpus(run.workdir, IndexOptions(factory), "data")
    with pytest.raises(ValueError, match=r"must be heap_factor=NUMBER"):
        parse_settings("heap_factor=much", SEARCH_SETTINGS)
    with pytest.raises(ValueError, match=r"k_factor_rf is 0.5; .*at least 1"):
        parse_settings("k_factor_rf=0.5", SEARCH_SETTINGS)
    with pytest.raises(ValueError, match=r"index_parameters=nprobe=4: Seismic has no setting 'nprobe'"):
        open_seismic_index(open_searcher(run).encoded_corpus, "seismic", "nprobe=4")


def open_searcher(run: Run) -> Searcher:
    return Searcher(open_run(run.workdir), run.workdir.embeddings("data"))
