"""Weights of words in Anserini's format: its integer products give the run's ranking, except for rounding."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from jaxret.data.formats import Corpus, QuerySource
from jaxret.export.export import export
from jaxret.export.targets import to_anserini
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.update import delete_passages
from jaxret.runs.run import open_run
from jaxret.search.searcher import Searcher
from tests.pipeline import untrained_run, write_data, write_encoder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SPLADE run and its corpus with shards of 20 rows, from which one passage was deleted."""
    root = tmp_path_factory.mktemp("anserini")
    data = write_data(root / "data")
    keys = {"head__name": "splade", "head__splade__special_ids": (0, 2, 3)}
    run = untrained_run(root / "run", write_encoder(root / "encoder"), data, **keys)
    encode_corpus(run, Corpus.open(data), options=EncodeOptions(words=8, shard_rows=20), progress=False)
    gone = root / "gone.txt"
    gone.write_text("p3\n")
    delete_passages(root / "run/embeddings/data", gone)
    return root


@pytest.mark.slow
def test_impacts_give_the_ranking_of_the_run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_anserini, "_BLOCK_ROWS", 7)
    monkeypatch.setattr(to_anserini, "FILE_ROWS", 50)
    report = export(root / "run", "anserini", tmp_path / "out", queries=QuerySource.open(root / "data"))
    run = open_run(root / "run")
    searcher = Searcher(run, root / "run/embeddings/data")
    files = sorted((tmp_path / "out/corpus").iterdir())
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [len(file.read_text().splitlines()) for file in files[:-1]] == [50] * (len(files) - 1)
    assert [record["id"] for record in records] == searcher.encoded_corpus.ids(
        range(searcher.encoded_corpus.total_rows)
    )
    assert "p3" not in {record["id"] for record in records}
    assert f"{len(records)} passages read back; weights differ by 0.00" in report
    assert all(type(impact) is int and impact > 0 for record in records for impact in record["vector"].values())
    assert max(len(record["vector"]) for record in records) == 8
    queries = QuerySource.open(root / "data").read()
    topics = dict(line.split("\t") for line in (tmp_path / "out/topics.tsv").read_text().splitlines())
    assert list(topics) == [query.id for query in queries]
    rankings = searcher.search(queries, len(records)).rankings
    for query, text in topics.items():
        counts = Counter(text.split(" "))
        products = {r["id"]: sum(counts[word] * n for word, n in r["vector"].items()) for r in records}
        largest = max(products.values())
        for id, score in rankings[query]:
            assert products[id] / 100**2 == pytest.approx(score, abs=0.02 * largest / 100**2 + 0.01)


@pytest.mark.slow
def test_a_difference_beyond_rounding_is_an_error(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    impacts_of = to_anserini.impacts_of
    monkeypatch.setattr(
        to_anserini, "impacts_of", lambda *rest: {word: impact + 1 for word, impact in impacts_of(*rest).items()}
    )
    with pytest.raises(ValueError, match=r"rounding: nothing .*exported"):
        export(root / "run", "anserini", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_dense_vectors_have_no_impacts(root: Path, tmp_path: Path) -> None:
    run = untrained_run(tmp_path / "dense", root / "encoder", root / "data")
    encode_corpus(run, Corpus.open(root / "data"), progress=False)
    with pytest.raises(ValueError, match=r"dense, .*Anserini's .*weights"):
        export(tmp_path / "dense", "anserini", tmp_path / "out")
    with pytest.raises(ValueError, match=r"--queries=.*data is for --to=anserini"):
        export(tmp_path / "dense", "pyserini", tmp_path / "out", queries=QuerySource.open(root / "data"))
