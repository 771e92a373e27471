"""An approximate index from a run's corpus to results that say so."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import jaxret
from jaxret.retrieval.approximate import Chosen
from jaxret.retrieval.change import delete_passages
from jaxret.retrieval.encode import encode_corpus
from jaxret.retrieval.retrieve import Searcher, choose_corpus
from jaxret.runs.run import Run
from jaxret.runs.workdir import Workdir
from jaxret.storage import read_json
from jaxret.tools.compare import compare_runs
from jaxret.tools.index import index_corpus
from jaxret.tools.search_files import answer, search_files
from tests.pipeline import untrained_run, write_data, write_encoder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("index")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    found = untrained_run(folder / "run", folder / "encoder", folder / "data", head__token="mean", normalize=True)
    encode_corpus(found, folder / "data", progress=False, shard_rows=40)
    index_corpus(found.workdir, "IVF4,PQ4x4", "", "ivf", found, str(folder / "data"), "", "dev", progress=False)
    return found


def data(run: Run) -> str:
    return str(run.workdir.path.parent / "data")


@pytest.mark.exhaustive
def test_a_search_says_that_it_is_approximate(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """And is exact without the index: two searches, two files, which are not compared with each other."""
    for index in (None, Chosen("ivf", nprobe=1), Chosen("ivf")):
        search_files(run, data(run), data(run), "dev", 10, progress=False, index=index)
    told = capsys.readouterr().out
    assert told.count("exact search of 115 passages (") == 1
    assert told.count("approximate search of 115 passages (") == 2
    assert "approximate: IVF4,PQ4x4, nprobe 1, 200 candidates scored exactly; recall of exact search @1 " in told
    exact, found = (read_json(run.workdir.path / "eval" / f"data.dev{name}.json") for name in ("", ".ivf"))
    assert (exact["provenance"]["search"]["exact"], "index" in exact["provenance"]["search"]) == (True, False)
    made = found["provenance"]["search"]
    assert not made["exact"]
    assert made["index"].keys() == {"factory", "nprobe", "candidates", "recall"}
    assert found["mean"].keys() == exact["mean"].keys()
    other = read_json(run.workdir.path / "eval" / "data.dev.ivf-nprobe1.json")
    assert other["provenance"]["search"]["index"]["nprobe"] == 1 < made["index"]["nprobe"], "results of its own"
    with pytest.raises(ValueError, match="approximate"):
        compare_runs([str(run.workdir.path / "eval" / f"data.dev{name}.json") for name in ("", ".ivf")])


def test_one_question_and_python(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    answer(run, "silver river", 3, index=Chosen("ivf", candidates=115), progress=False)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("approximate: IVF4,PQ4x4, ")
    assert first.endswith("its recall with these settings was not measured")
    assert "(approximate search of 115 passages by FAISS " in second
    retriever = jaxret.Retriever.open(run.workdir)
    index = jaxret.Index.open(retriever, approximate="ivf")
    assert "IVF4,PQ4x4" in repr(index)
    exact = jaxret.Index.open(retriever)
    every = {hit.id: hit.score for hit in exact.search(["silver river"], k=115)[0]}
    found = index.search(["silver river"], k=5)[0]
    assert [every[hit.id] for hit in found] == [hit.score for hit in found]
    assert "IVF4" not in repr(exact), "never a default"


def test_it_is_refused_after_a_change_and_with_a_filter(run: Run, tmp_path: Path) -> None:
    folder = choose_corpus(run)
    with pytest.raises(ValueError, match="--filter needs exact search"):
        Searcher(run, folder, filters=["kind:a"], index=Chosen("ivf"))
    with pytest.raises(ValueError, match="--backend and --precision are of exact search"):
        jaxret.Index.open(jaxret.Retriever.open(run.workdir), backend="xla", approximate="ivf")
    with pytest.raises(ValueError, match="missing: this file does not exist"):
        index_corpus(run.workdir, "SQ8", run=run, queries=str(tmp_path / "missing"), progress=False)
    assert not (folder / "indexes" / "SQ8").exists(), "questions are read before anything is built"
    with pytest.raises(ValueError, match="found by mean:3 or by the index ivf, not by both"):
        Searcher(run, folder, candidates="mean:3", index=Chosen("ivf"))
    shutil.copytree(run.workdir.path / "embeddings", tmp_path / "embeddings")
    other = replace(run, workdir=Workdir(tmp_path))
    (tmp_path / "ids.txt").write_text("p1\n")
    folder = choose_corpus(other)
    Searcher(other, folder, index=Chosen("ivf"))
    delete_passages(folder, tmp_path / "ids.txt")
    with pytest.raises(
        ValueError, match=r"build it again with jaxret index --factory=IVF4,PQ4x4 --name=ivf, or search ex"
    ):
        Searcher(other, folder, index=Chosen("ivf"))
    assert Searcher(other, folder).index is None
