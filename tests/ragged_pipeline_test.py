"""Late interaction on T5 from training to a ranking, and the diversity of a run: through files, like a user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxret.data.formats import Corpus, QuerySource
from jaxret.experiments.vector_diversity import JudgedSource, read_judged_texts
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.shard_set import open_shards
from jaxret.runs.run import open_run
from jaxret.search.search_options import SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import read_json
from jaxret.training.loop import train
from tests.pipeline import (
    REPOSITORY,
    contents,
    environment,
    tiny_config,
    untrained_run,
    write_data,
    write_encoder,
    write_t5,
)


@pytest.mark.exhaustive
def test_late_interaction_end_to_end(tmp_path: Path) -> None:
    encoder, data = write_t5(tmp_path / "t5"), write_data(tmp_path / "data")
    config = tiny_config(
        encoder,
        data,
        head__name="colbert",
        head__token="mean",
        head__colbert__late=True,
        head__colbert__projection=8,
        normalize=True,
        train__steps=2,
        encode__dtype="float16",
    )
    done = train(config, tmp_path / "run", progress=False)
    assert done.step == 2
    assert 0 < done.metrics["RR@10"] <= 1
    run = open_run(tmp_path / "run")
    encoded = encode_corpus(run, Corpus.open(data), progress=False)
    shards = open_shards(encoded.folder)
    assert shards.ragged
    assert len(shards.shards) > 1
    tokens = run.tokenizer.passages(Corpus.open(data).read())
    assert [int(count) for _, block in shards for count in block.lengths] == tokens.lengths.tolist()
    before = contents(encoded.folder)
    next(encoded.folder.glob("offsets-00001*")).unlink()
    assert encode_corpus(run, Corpus.open(data), progress=False).shards_written == 1
    assert contents(encoded.folder) == before

    shards = open_shards(encoded.folder)  # one of the open files has been replaced
    queries = QuerySource.open(data).read()[:6]
    hits = Searcher(run, encoded.folder).search(queries, 10)
    vectors = run.embedder()(run.tokenizer.queries(q.text for q in queries), "query")
    passages = [block[i].astype(np.float64) for _, block in shards for i in range(len(block))]
    ids = shards.ids(range(shards.total_rows))
    for i, query in enumerate(queries):
        scores = [float((passage @ vectors[i].astype(np.float64).T).max(axis=0).sum()) for passage in passages]
        best = np.argsort(-np.array(scores, np.float32), kind="stable")[:10]
        assert [passage for passage, _ in hits.rankings[query.id]] == [ids[row] for row in best]
    with pytest.raises(ValueError, match="cannot search lists of vectors"):
        Searcher(run, encoded.folder, SearchOptions("faiss-cpu")).search(queries, 10)


@pytest.mark.exhaustive
def test_the_diversity_of_a_checkpoint(tmp_path: Path) -> None:
    encoder, data = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data")
    layers = {"head__name": "mlr", "head__mlr__chosen": (1, 2, 3), "pooling": "self_contrastive"}
    untrained_run(tmp_path / "run", encoder, data, **layers)
    command = [sys.executable, "-m", "jaxret", "diversity", f"--workdir={tmp_path / 'run'}", f"--data={data}"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "  layer 3 " in done.stdout
    written = read_json(tmp_path / "run" / "eval" / "data.test.diversity.json")
    assert set(written["wins"]) == {"layer 3", "layer 2", "layer 1"}
    assert sum(written["wins"].values()) == written["pairs"] > 10
    (data / "qrels" / "none.tsv").write_text("query-id\tcorpus-id\tscore\nq0\tp0\t0\n")
    with pytest.raises(ValueError, match=r"relevant passage .*'none'"):
        read_judged_texts(JudgedSource.open(data, "none"))
    (data / "qrels" / "gone.tsv").write_text("query-id\tcorpus-id\tscore\nq0\tp0\t1\nq0\tgone\t1\n")
    with pytest.raises(ValueError, match=r"1 relevant .*'gone'"):
        read_judged_texts(JudgedSource.open(data, "gone"))
    untrained_run(tmp_path / "one", encoder, data)
    one = [*command[:-2], f"--workdir={tmp_path / 'one'}", f"--data={data}"]
    done = subprocess.run(one, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "has one vector of a passage; diversity needs a head with several vectors" in done.stderr
