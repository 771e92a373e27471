"""An Index in a server: many threads, many searches, and many openings."""

from __future__ import annotations

import gc
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxret.api import Hit, Index, Retriever, SearchOptions
from jaxret.experiments.build_index import index_corpus
from jaxret.runs.workdir import Workdir
from jaxret.search.search_options import IndexOptions
from tests.pipeline import resources, untrained_run, words, write_data, write_encoder

PASSAGES = 600


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a corpus whose passages have colours, and two approximate indexes of it."""
    folder = tmp_path_factory.mktemp("server")
    write_encoder(folder / "encoder")
    write_data(folder / "data")
    generator = np.random.default_rng(0)
    rows = [
        {"_id": f"p{n}", "text": words(generator, 12), "metadata": {"colour": ["red", "blue", "green"][n % 3]}}
        for n in range(PASSAGES)
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    untrained_run(folder / "run", folder / "encoder", folder / "data", head__token="mean", normalize=True)
    Index.build(Retriever.open(folder / "run"), folder / "corpus.jsonl", progress=False)
    for factory in ("IVF16,Flat", "HNSW8"):
        index_corpus(Workdir(folder / "run"), IndexOptions(factory, sample=20))
    return folder / "run"


QUESTIONS = ["river stone music", "silver garden", "paper light forest", "winter market"]
SIZES = (1, 10, 90, 500)  # numbers of results


@pytest.mark.daily("few")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounds", "sizes"),
    [(1, (1, 10)), (2, SIZES), pytest.param(40, SIZES, marks=pytest.mark.exhaustive)],
    ids=["few", "2", "40"],
)
def test_threads_give_the_results_of_one(rounds: int, sizes: tuple[int, ...], run: Path) -> None:
    """32 threads with several k, filters, backends, exact and approximate: each search keeps its own parameters."""
    retriever = Retriever.open(run)
    every = [SearchOptions(), SearchOptions(backend="xla")]
    every += [SearchOptions(filters=("colour:red",)), SearchOptions(filters=("colour:red", "colour:blue"))]
    every += [
        SearchOptions(index=name, index_parameters=parameters)
        for name, several in {"IVF16,Flat": ("nprobe=1", "nprobe=4,k_factor_rf=2"), "HNSW8": ("efSearch=16",)}.items()
        for parameters in several
    ]
    indexes = [Index.open(retriever, options=options) for options in every]
    calls = [
        (index, questions, k)
        for index in indexes
        for k in sizes
        for questions in (QUESTIONS[:1], QUESTIONS[1:2], QUESTIONS)
    ]
    calls = [call for call in calls if call[2] <= len(call[0])]

    def search(call: tuple[Index, list[str], int]) -> list[list[Hit]]:
        index, questions, k = call
        return index.search(questions, k)

    alone = [search(call) for call in calls]
    assert len({tuple(hit.id for hit in hits[0]) for hits in alone}) > 8, "control: other calls have other results"
    order = [number for _ in range(rounds) for number in random.Random(0).sample(range(len(calls)), len(calls))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(32) as threads:
            together = list(threads.map(lambda number: search(calls[number]), order))
    finally:
        sys.setswitchinterval(interval)
    wrong = [number for number, hits in zip(order, together, strict=True) if hits != alone[number]]
    assert wrong == []


@pytest.mark.daily("60-6")
@pytest.mark.slow
@pytest.mark.faults(31)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize(("searches", "openings"), [(60, 6), pytest.param(20_000, 100, marks=pytest.mark.exhaustive)])
def test_searches_and_openings_leak_no_resources(searches: int, openings: int, run: Path) -> None:
    """The number of open files does not change, nor that of threads except a few that libraries start late. Memory
    grows by less than a quarter of a megabyte per opening, which compiles programs, and does not grow with searches.
    The control keeps the indexes that it opens."""
    every = [SearchOptions(), SearchOptions(index="IVF16,Flat")]
    retriever = Retriever.open(run)
    indexes = [Index.open(retriever, options=options) for options in every]

    def search(count: int) -> None:
        for number in range(count):
            indexes[number % 2].search([QUESTIONS[number % 4]], [1, 10, 100][number % 3])

    def open_again(count: int) -> None:
        for number in range(count):
            Index.open(Retriever.open(run), options=every[number % 2]).search(QUESTIONS[:1])

    search(24)
    open_again(4)
    files, threads, memory = resources()
    search(searches)
    after = resources()
    assert after[0] == files
    assert after[1] <= threads + 4
    assert after[2] - memory < 16 * 2**20
    open_again(openings)
    last = resources()
    assert last[0] == files
    assert last[1] <= threads + 4
    assert last[2] - after[2] < 16 * 2**20 + openings * 2**18
    kept = [Index.open(retriever, options=every[1]) for _ in range(2)]
    assert resources()[0] > files, "control: an index that is kept has open files"
    assert len(kept) == 2


@pytest.mark.slow
def test_opening_an_index_leaks_no_objects(run: Path) -> None:
    """The number of Python's memory blocks is nearly constant. TensorStore keeps a few for each array that Orbax reads;
    JAX would keep traced functions. The control counts the blocks of an open index."""

    def open_again(count: int) -> int:
        for _ in range(count):
            Index.open(Retriever.open(run))
        gc.collect()
        return sys.getallocatedblocks()

    before = open_again(3)
    left = (open_again(8) - before) / 8
    assert left < 600
    index = Index.open(Retriever.open(run))
    assert sys.getallocatedblocks() - before - left * 8 > 2000, "control: an open index needs more blocks"
    assert index.retriever.run.workdir.path == run
