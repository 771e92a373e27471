"""An approximate index, from a run's corpus to results that are marked as approximate."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import jaxret
from jaxret.data.formats import Corpus
from jaxret.experiments.build_index import index_corpus
from jaxret.experiments.compare_runs import compare_runs
from jaxret.experiments.searches.answer_question import show_answer
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.search_files import search_files
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.index.encoding.encode import encode_corpus
from jaxret.index.encoding.encode_options import EncodeOptions
from jaxret.index.encoding.update import delete_passages
from jaxret.runs.run import Run
from jaxret.runs.workdir import Workdir
from jaxret.search.search_options import IndexOptions, SearchOptions
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import read_json
from tests.pipeline import untrained_run, write_data, write_encoder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("index")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    opened = untrained_run(folder / "run", folder / "encoder", folder / "data", head__token="mean", normalize=True)
    encode_corpus(opened, Corpus.open(folder / "data"), options=EncodeOptions(shard_rows=40), progress=False)
    options = IndexOptions("IVF4,PQ4x4", "ivf", queries=str(folder / "data"), split="dev")
    index_corpus(opened.workdir, options)
    return opened


def data(run: Run) -> str:
    return str(run.workdir.path.parent / "data")


@pytest.mark.exhaustive
def test_results_of_an_index_are_marked_approximate(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Results without the index are exact: the two searches have two files, which are not compared with each other."""
    for options in (
        SearchOptions(),
        SearchOptions(index="ivf", index_parameters="nprobe=1"),
        SearchOptions(index="ivf"),
    ):
        search_files(
            run,
            EvaluationSource.open(data(run), data(run), "dev"),
            EvaluationOptions(k=10),
            options=options,
            progress=False,
        )
    printed = capsys.readouterr().out
    assert printed.count("exact search of 115 passages (") == 1
    assert printed.count("approximate search of 115 passages (") == 2
    assert "approximate: IVF4,PQ4x4, nprobe=1, 200 candidates scored exactly; recall of exact search @1 " in printed
    exact, stored = (read_json(run.workdir.path / "eval" / f"data.dev{name}.json") for name in ("", ".ivf"))
    assert (exact["provenance"]["search"]["exact"], "index" in exact["provenance"]["search"]) == (True, False)
    made = stored["provenance"]["search"]
    assert not made["exact"]
    assert made["index"].keys() == {"factory", "parameters", "candidates", "recall"}
    assert stored["mean"].keys() == exact["mean"].keys()
    other = read_json(run.workdir.path / "eval" / "data.dev.ivf-nprobe1.json")
    assert other["provenance"]["search"]["index"]["parameters"] == "nprobe=1" != made["index"]["parameters"]
    with pytest.raises(ValueError, match="approximate"):
        compare_runs([str(run.workdir.path / "eval" / f"data.dev{name}.json") for name in ("", ".ivf")])


@pytest.mark.slow
def test_single_questions_and_python(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    options = SearchOptions(index="ivf", index_parameters="nprobe=3")
    searcher = Searcher(run, corpus_folder(run.workdir), options)
    show_answer(searcher, "silver river", 3, progress=False)
    assert "(approximate search of 115 passages" in capsys.readouterr().out.splitlines()[0]
    assert searcher.vectors.index
    line = searcher.vectors.index.describe(3)
    assert line.startswith(
        "IVF4,PQ4x4, nprobe=3, 200 candidates scored exactly; its recall with these settings was not"
    )
    retriever = jaxret.Retriever.open(run.workdir)
    index = jaxret.Index.open(retriever, options=jaxret.SearchOptions(index="ivf"))
    assert "IVF4,PQ4x4" in repr(index)
    exact = jaxret.Index.open(retriever)
    every = {hit.id: hit.score for hit in exact.search(["silver river"], k=115)[0]}
    result = index.search(["silver river"], k=5)[0]
    assert [every[hit.id] for hit in result] == [hit.score for hit in result]
    assert "IVF4" not in repr(exact), "an index is never used by default"


@pytest.mark.slow
def test_an_index_is_refused_after_a_change_and_with_a_filter(run: Run, tmp_path: Path) -> None:
    folder = corpus_folder(run.workdir)
    with pytest.raises(ValueError, match="filters need exact search"):
        Searcher(run, folder, SearchOptions(index="ivf", filters=("kind:a",)))
    with pytest.raises(ValueError, match=r"backend .*precision .*search"):
        jaxret.Index.open(jaxret.Retriever.open(run.workdir), options=jaxret.SearchOptions(backend="xla", index="ivf"))
    with pytest.raises(ValueError, match=r"missing: .*file .*exist"):
        index_corpus(run.workdir, IndexOptions("SQ8", queries=str(tmp_path / "missing")))
    assert not (folder / "indexes" / "SQ8").exists(), "questions are read before the index is built"
    with pytest.raises(ValueError, match=r"found .*mean:3 .*index"):
        Searcher(run, folder, SearchOptions(candidates="mean:3", index="ivf"))
    shutil.copytree(run.workdir.path / "embeddings", tmp_path / "embeddings")
    other = replace(run, workdir=Workdir(tmp_path))
    (tmp_path / "ids.txt").write_text("p1\n")
    folder = corpus_folder(other.workdir)
    Searcher(other, folder, SearchOptions(index="ivf"))
    delete_passages(folder, tmp_path / "ids.txt")
    with pytest.raises(ValueError, match=r"jaxret .*--factory=IVF4,PQ4x4 --name=ivf"):
        Searcher(other, folder, SearchOptions(index="ivf"))
    assert Searcher(other, folder).vectors.index is None
