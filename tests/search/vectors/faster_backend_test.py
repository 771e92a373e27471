"""A large search by `auto` measures two backends on a sample and takes the faster one. The results are the same."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from jaxret.search.backends.faiss_backend import FaissCpu
from jaxret.search.backends.precision import FLOAT32, Precision
from jaxret.search.backends.select import Backend, select_backend, with_many_searches
from jaxret.search.backends.xla_backend import Xla
from jaxret.search.proof import BlockHits, BlockSearch
from jaxret.search.vectors import faster_backend
from jaxret.search.vectors.exact import search
from jaxret.search.vectors.vector_corpus import BlockCorpus
from tests.search.vectors.exact_test import assert_same_bits, gaussian

QUERIES, PASSAGES = gaussian(40, 16, seed=1), gaussian(900, 1, 16, seed=2)
MEASURED = r"auto: a sample of the search took faiss-cpu (\d+\.\d{3}) s, xla (\d+\.\d{3}) s"


def slow(top: BlockSearch) -> BlockSearch:
    def search_block(queries: Any, k: int) -> BlockHits:
        time.sleep(0.3)
        return top(queries, k)

    return search_block


@dataclass(frozen=True)
class SlowFaiss(FaissCpu):
    def load(self, block: Any) -> BlockSearch:
        return slow(super().load(block))


@dataclass(frozen=True)
class SlowXla(Xla):
    @classmethod
    def open(cls, reason: str, precision: Precision = FLOAT32, multi_vector: bool = False) -> Xla:
        return cls(f"slow XLA ({reason})")

    def hold(self, chunks: Any, layout: Any) -> BlockSearch:
        return slow(super().hold(chunks, layout))


@pytest.fixture
def _measure_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faster_backend, "LEAST_OPERATIONS", 0)


def auto() -> FaissCpu:
    backend = select_backend("auto")
    assert isinstance(backend, FaissCpu)
    return backend


@pytest.mark.usefixtures("_measure_all")
def test_a_large_search_takes_the_faster_backend() -> None:
    blocks = [PASSAGES[:300], PASSAGES[300:]]
    expected = search(QUERIES, blocks, 7, select_backend("faiss-cpu"))
    slow_rival = replace(auto(), rival=SlowXla.open)
    slow_faiss = SlowFaiss(**vars(auto()))
    for backend, library in ((slow_rival, "FAISS"), (slow_faiss, "XLA")):
        result = search(QUERIES, blocks, 7, backend)
        assert_same_bits(result, (expected.scores, expected.rows))
        assert result.backend.startswith(library)
        seconds = re.search(MEASURED, result.backend)
        assert seconds is not None
        assert (float(seconds[1]) <= float(seconds[2])) == (library == "FAISS")


def test_a_small_search_measures_nothing() -> None:
    result = search(QUERIES, [PASSAGES], 7, auto())
    assert "auto: JAX runs on cpu" in result.backend


@pytest.mark.usefixtures("_measure_all")
@pytest.mark.parametrize("backend", [select_backend("faiss-cpu"), select_backend("xla"), with_many_searches(auto())])
def test_a_named_backend_and_one_with_loaded_blocks_are_not_replaced(backend: Backend) -> None:
    assert search(QUERIES, [PASSAGES], 7, backend).backend == backend.description


@pytest.mark.usefixtures("_measure_all")
def test_an_error_in_the_sample_names_the_passage() -> None:
    class Named(BlockCorpus):
        def describe(self, row: int) -> str:
            return f"passage 'p{row}'"

    vectors = PASSAGES.copy()
    vectors[411, 0, 3] = np.nan
    with pytest.raises(ValueError, match="passage 'p411'"):
        search(QUERIES, Named([vectors[:200], vectors[200:]]), 7, auto())
