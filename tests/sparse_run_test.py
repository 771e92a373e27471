"""A sparse run from training to search: resumed shards, a search that equals a brute force, explained words, and
appended and deleted passages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.data.formats import Corpus, RankingSource
from jaxret.data.records import Passage
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.update import append_corpus, delete_passages
from jaxret.runs.run import Run, open_run
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.training.loop import train
from jaxret.types import SparseRows
from tests.pipeline import REPOSITORY, contents, environment, tiny_config, untrained_run, write_data, write_encoder

pytestmark = pytest.mark.slow

SPLADE: dict[str, Any] = {"head__name": "splade", "head__splade__special_ids": (0, 2, 3)}


def jaxret(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxret", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, encoded with six words per passage, and its data."""
    root = tmp_path_factory.mktemp("sparse")
    encoder, data = write_encoder(root / "encoder"), write_data(root / "data")
    penalties = {"loss__sparsity__passage": 0.01, "loss__sparsity__query": 0.01, "loss__temperature": 10.0}
    train(tiny_config(encoder, data, **SPLADE, **penalties), root / "run", progress=False)
    encode_corpus(open_run(root / "run"), Corpus.open(data), options=EncodeOptions(words=6), progress=False)
    return root


def test_training_counts_words(root: Path) -> None:
    lines = [json.loads(line) for line in (root / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 6
    assert all(0 < line["passage_words"] <= 99 and 0 < line["query_words"] <= 99 for line in steps)
    assert all(line["passage_sparsity_loss"] > 0 for line in steps)
    assert any("validation/RR@10" in line for line in lines)


def test_encoding_continues_to_the_same_bytes(root: Path) -> None:
    folder = root / "run/embeddings/data"
    encoded_corpus = open_encoded(folder)
    counts = np.concatenate([shard.word_counts for _, shard in encoded_corpus])
    assert encoded_corpus.sparse
    assert counts.max() == 6
    stored = sum(
        path.stat().st_size for name in ("words", "weights", "offsets") for path in folder.glob(f"{name}-*.npy")
    )
    assert encoded_corpus.bytes_per_passage == stored / encoded_corpus.total_rows
    before = contents(folder)
    options = EncodeOptions(words=6)
    assert (
        encode_corpus(
            open_run(root / "run"), Corpus.open(root / "data"), options=options, progress=False
        ).shards_written
        == 0
    )
    (folder / "manifest.json").unlink()
    next(folder.glob("weights-00001*")).unlink()
    assert (
        encode_corpus(
            open_run(root / "run"), Corpus.open(root / "data"), options=options, progress=False
        ).shards_written
        == 1
    )
    assert contents(folder) == before
    result = jaxret("encode", f"--workdir={root}/run", f"--corpus={root}/data", "--words=5")
    assert result.returncode == 1
    assert "fingerprint.encode.words" in result.stderr


def rows_of(run: Run, folder: Path) -> tuple[np.ndarray, list[str]]:
    encoded_corpus = open_encoded(folder)
    return SparseRows.concatenate([shard for _, shard in encoded_corpus]).flat.astype(float), encoded_corpus.ids(
        np.arange(encoded_corpus.total_rows)
    )


def test_search_and_explain_as_processes(root: Path) -> None:
    run = open_run(root / "run")
    searched = jaxret("search", f"--workdir={root}/run", f"--queries={root}/data", f"--qrels={root}/data", "--k=5")
    assert searched.returncode == 0, searched.stderr
    assert "inverted lists (scipy" in searched.stdout
    assert "bytes per passage" in searched.stdout
    passages, ids = rows_of(run, root / "run/embeddings/data")
    (path,) = (root / "run/runs").glob("*.trec")
    rankings = RankingSource.open(path).read()
    texts = {line["_id"]: line["text"] for line in map(json.loads, (root / "data/queries.jsonl").open())}
    assert rankings
    for query, ranking in rankings.items():
        weights = run.embedder()(run.tokenizer.queries([texts[query]]), "query").flat[0].astype(float)
        scores = (passages @ weights).astype(np.float32)
        expected = sorted(range(len(ids)), key=lambda row: (-scores[row], row))[:5]
        assert [passage for passage, _ in ranking] == [ids[row] for row in expected]
    query = next(iter(rankings))
    best = rankings[query][0][0]
    explain = ("explain", f"--workdir={root}/run", f"--query={texts[query]}", "--rank")
    explained = jaxret(*explain, f"--passage_id={best}")
    assert explained.returncode == 0, explained.stderr
    assert f"\n\nrank 1 of {len(ids):,} passages\n\n" in explained.stdout
    last = jaxret(*explain, f"--passage_id={rankings[query][4][0]}")
    assert f"\nrank 5 of {len(ids):,} passages\n" in last.stdout
    header = next(line for line in explained.stdout.splitlines() if "contributes" in line)
    assert header.split() == ["word", "in", "the", "query", "in", "the", "passage", "contributes"]
    again = jaxret("search", f"--workdir={root}/run", f"--queries={root}/data", "--k=5", "--backend=xla")
    assert again.returncode == 0, again.stderr
    assert "lists of words, XLA" in again.stdout
    assert RankingSource.open(path).read() == rankings
    refused = jaxret("search", f"--workdir={root}/run", f"--queries={root}/data", "--precision=int8")
    assert refused.returncode == 1
    assert "has sparse vectors, which inverted lists search: remove --precision=int8" in refused.stderr


def test_appended_and_deleted_passages(root: Path, tmp_path: Path) -> None:
    run, folder = open_run(root / "run"), root / "run/embeddings/changing"
    encode_corpus(run, Corpus.open(root / "data"), "changing", EncodeOptions(words=6), progress=False)
    more = tmp_path / "more.jsonl"
    more.write_text('{"_id": "new", "text": "garden bridge window"}\n')
    append_corpus(run, Corpus.open(more), folder, progress=False)
    gone = tmp_path / "gone.txt"
    gone.write_text("p1\np2\nn50\n")
    assert delete_passages(folder, gone)[0] == 3
    passages, ids = rows_of(run, folder)
    assert "new" in ids
    assert not {"p1", "p2", "n50"} & set(ids)
    searcher = Searcher(run, folder, many=True)
    assert searcher.vectors.location == "memory"
    vectors = run.embedder()(run.tokenizer.passages([Passage("x", "garden bridge window")]), "passage")
    result, (best,) = searcher.nearest(vectors, len(ids) + 4)
    scores = (passages @ vectors.flat[0].astype(float)).astype(np.float32)
    assert best == [ids[row] for row in sorted(range(len(ids)), key=lambda row: (-scores[row], row))]
    assert searcher.scores(vectors, [[3, 0]]) == [[pytest.approx(scores[3]), pytest.approx(scores[0])]]
    assert result.backend == searcher.vectors.description


def test_latency_passages_searches_the_first_passages(root: Path) -> None:
    run, folder = open_run(root / "run"), root / "run/embeddings/data"
    searcher = Searcher(run, folder)
    first = searcher.first(30)
    vectors = run.embedder()(run.tokenizer.queries(["garden bridge"]), "query")
    _, (ids,) = first.nearest(vectors, 1000)
    assert sorted(ids) == sorted(searcher.encoded_corpus.ids(np.arange(30)))
    _, (every,) = searcher.nearest(vectors, 1000)
    assert ids == [id for id in every if id in set(ids)]


def test_words_of_dense_vectors_are_an_error(root: Path) -> None:
    run = untrained_run(root / "dense", root / "encoder", root / "data")
    with pytest.raises(ValueError, match=r"words=3: .*vectors .*'dual_encoder'"):
        encode_corpus(run, Corpus.open(root / "data"), options=EncodeOptions(words=3), progress=False)


def test_options_of_other_searches_are_named() -> None:
    SearchOptions().require_plain("here")
    with pytest.raises(ValueError, match="here: remove --precision=int8 and --candidates=mean:9"):
        SearchOptions(precision="int8", candidates="mean:9").require_plain("here")
