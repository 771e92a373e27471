"""Backends: the contract with search.py, how one is chosen, and that the self-check refuses a faulty one."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxret.search import proof, rounding
from jaxret.search.backends import faiss_backend
from jaxret.search.backends.late_interaction import PaddedLists
from jaxret.search.backends.precision import FLOAT32, Precision
from jaxret.search.backends.select import BACKENDS, select_backend
from jaxret.search.backends.xla_backend import Xla
from jaxret.search.proof import BlockHits, BlockSearch
from jaxret.search.vectors.self_check import self_check


def data(n: int, n_vectors: int, dimension: int = 16) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    queries = random.standard_normal((9, dimension), dtype=np.float32)
    return queries, random.standard_normal((n, n_vectors, dimension), dtype=np.float32)


@pytest.mark.parametrize("name", ["faiss-cpu", "xla"])
@pytest.mark.parametrize(("n", "n_vectors", "k"), [(50, 1, 1), (50, 1, 50), (50, 3, 7), (50, 3, 80), (700, 1, 5)])
def test_candidates_are_the_best_and_the_bound_holds(name: str, n: int, n_vectors: int, k: int) -> None:
    queries, vectors = data(n, n_vectors)
    result = select_backend(name).load(vectors)(queries, k)
    exact = np.einsum("qd,nvd->qnv", queries.astype(np.float64), vectors.astype(np.float64)).max(axis=-1)
    order = np.argsort(-exact, axis=1)
    np.testing.assert_array_equal(result.rows, order[:, :k])  # no ties in this data
    np.testing.assert_allclose(result.scores, np.take_along_axis(exact, order[:, :k], axis=1), rtol=1e-5, atol=1e-6)
    assert (result.scores.dtype.name, result.rows.dtype.name) == ("float32", "int64")
    if k >= n:
        assert (result.bound == -np.inf).all()
    else:
        assert (result.bound >= np.take_along_axis(exact, order[:, k : k + 1], axis=1)[:, 0] - 1e-5).all()
        assert (result.bound <= result.scores[:, -1]).all()


@pytest.mark.parametrize("name", ["faiss-cpu", "xla"])
def test_self_check_passes(name: str) -> None:
    self_check(select_backend(name))


@dataclass(frozen=True)
class Faulty:
    """A backend with one fault."""

    fault: str
    name: str = "faulty"
    description: str = "faulty backend"
    max_rows: int | None = None
    multi_vector: bool = False
    precision: Precision = FLOAT32

    def load(self, vectors: np.ndarray | PaddedLists) -> BlockSearch:
        assert isinstance(vectors, np.ndarray)
        if self.fault == "tf32":
            vectors = (vectors.view(np.int32) & ~0x1FFF).view(np.float32)  # 10 bits of mantissa
        if self.fault == "wrong metric":
            vectors = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
        inner = select_backend("xla").load(vectors)

        def top(queries: np.ndarray, k: int) -> BlockHits:
            scores, passages, bound = (np.array(x) for x in inner(queries, k))
            if self.fault == "twice":
                passages[0, 1], scores[0, 1] = passages[0, 0], scores[0, 0]
            if self.fault == "order":
                scores, passages = scores[:, ::-1], passages[:, ::-1]
            if self.fault == "outside":
                passages[0, 0] = len(vectors)
            if self.fault == "misses the best" and k < len(vectors):
                scores, passages, bound = inner(queries, k + 1)
                scores, passages = scores[:, 1:], passages[:, 1:]
            return BlockHits(scores, passages, bound)

        return top


def test_self_check_control_without_a_fault_it_passes() -> None:
    self_check(Faulty("none"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("tf32", "less exact than float32"),
        ("wrong metric", "less exact than float32"),
        ("twice", "a passage twice"),
        ("order", "not descending"),
        ("outside", "outside 0 to"),
        ("misses the best", "above its bound"),
    ],
)
def test_self_check_refuses_a_faulty_backend(fault: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        self_check(Faulty(fault))


def test_auto_takes_faiss_on_a_cpu_and_says_why() -> None:
    backend = select_backend("auto")
    assert backend.name == "faiss-cpu"
    assert backend.description.startswith("FAISS 1.")
    assert re.search(r"\(auto: JAX runs on cpu, not faiss-gpu: FAISS 1\.\S+ sees no GPU\)$", backend.description)


def test_a_description_names_the_devices_that_are_used() -> None:
    """Lists of vectors are on the first device only."""
    assert " on 8 x cpu (as requested)" in select_backend("xla").description
    assert (
        " on cpu, candidates in int8 (as requested)"
        in select_backend("xla", multi_vector=True, precision="int8").description
    )


def test_auto_prefers_an_accelerator_that_jax_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.default_backend", lambda: "tpu")
    assert select_backend("auto").name == "xla"


def test_without_faiss_auto_takes_xla_and_a_named_faiss_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)  # makes `import faiss` raise
    backend = select_backend("auto")
    assert backend.name == "xla"
    assert "FAISS cannot be imported" in backend.description
    for name, requirements in (("faiss-cpu", "requirements.txt"), ("faiss-gpu", "requirements-gpu.txt")):
        with pytest.raises(ValueError, match=f"{name} is not available.*pip install -r {requirements}"):
            select_backend(name)


def test_faiss_gpu_without_a_gpu_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"sees no GPU.*requirements-gpu.txt"):
        select_backend("faiss-gpu")
    with pytest.raises(ValueError, match=r"unknown search backend 'annoy'.*faiss-cpu"):
        select_backend("annoy")


class FakeGpuFaiss:
    """FAISS's GPU interface, computed on the CPU: it tests the arguments and shapes of calls, not the kernels."""

    __version__ = "1.15.1"

    def get_num_gpus(self) -> int:
        return 2

    def StandardGpuResources(self) -> object:  # noqa: N802
        return object()

    def GpuIndexFlatConfig(self) -> Any:  # noqa: N802
        return SimpleNamespace(device=0)

    def GpuIndexFlatIP(self, resources: object, dimension: int, config: Any) -> Any:  # noqa: N802
        import faiss

        assert 0 <= config.device < 2
        return faiss.IndexFlatIP(dimension)


def test_late_interaction_uses_a_backend_that_supports_it() -> None:
    assert select_backend("auto", multi_vector=True).name == "xla"
    assert "not faiss-cpu: it cannot search lists of vectors" in select_backend("auto", multi_vector=True).description
    with pytest.raises(ValueError, match=r"'faiss-cpu' .*vectors; .*corpus"):
        select_backend("faiss-cpu", multi_vector=True)


def test_a_new_backend_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Xla):
        @classmethod
        def open(cls, reason: str, precision: Precision = FLOAT32, multi_vector: bool = False) -> Mine:
            return cls(f"mine ({reason})", "mine", precision)

    monkeypatch.setitem(BACKENDS, "mine", Mine)
    backend = select_backend("mine")
    assert (backend.name, backend.description) == ("mine", "mine (as requested)")
    self_check(backend)
    with pytest.raises(ValueError, match="one of auto, faiss-gpu, faiss-cpu, xla, mine"):
        select_backend("yours")


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("n", "n_vectors", "k"), [(300, 1, 20), (300, 3, 40), (3000, 2, 1500)])
def test_gpu_backend_calls_and_limit(n: int, n_vectors: int, k: int, gpus: int) -> None:
    backend = faiss_backend.FaissGpu(FakeGpuFaiss(), (object(),) * gpus, "fake")
    self_check(backend)
    queries, vectors = data(n, n_vectors)
    result = backend.load(vectors)(queries, k)
    exact = np.einsum("qd,nvd->qnv", queries.astype(np.float64), vectors.astype(np.float64)).max(axis=-1)
    for row, passages, scores, bound in zip(exact, result.rows, result.scores, result.bound, strict=True):
        row[passages[scores > -np.inf]] = -np.inf  # leaves the passages that were not returned
        assert row.max() <= bound + 1e-5
    assert (result.bound > -np.inf).all()  # some rows were cut, by k or by the limit of 2048 rows


def test_auto_prefers_a_gpu_that_faiss_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_backend, "_import_faiss", lambda: (FakeGpuFaiss(), None))
    backend = select_backend("auto")
    assert backend.name == "faiss-gpu"
    assert "on 2 GPUs (auto" in backend.description


@pytest.mark.parametrize("dimension", [1, 8, 768])
def test_rounding_error_bounds_float32_sums_in_any_order(dimension: int) -> None:
    """Equal terms are added one after another, so that errors add up; the control is a tighter bound."""
    queries = np.ones((200, dimension), np.float32)
    vectors = queries * (1 + np.random.default_rng(0).random((200, 1), dtype=np.float32))
    queries *= vectors
    sums = np.cumsum(queries * vectors, axis=1, dtype=np.float32)[:, -1]
    exact = np.einsum("nd,nd->n", queries.astype(np.float64), vectors.astype(np.float64))
    largest = float(rounding.upper_norms(vectors).max())
    error = rounding.rounding_error(dimension, rounding.upper_norms(queries), largest)
    assert (np.abs(sums - exact) <= error).all()
    assert (np.abs(sums - exact) > error / 50).any()


def test_upper_norms_are_above_the_norm_and_flag_what_is_not_finite() -> None:
    vectors = np.random.default_rng(0).standard_normal((100, 33)).astype(np.float32) * np.float32(1e-3)
    exact = np.linalg.norm(vectors.astype(np.float64), axis=1)
    norms = rounding.upper_norms(vectors)
    assert (norms >= exact).all()
    np.testing.assert_allclose(norms, exact, rtol=1e-4)
    tiny = np.full((1, 4), 1e-30, np.float32)  # the squares underflow in float32
    assert rounding.upper_norms(tiny)[0] >= 2e-30
    for value in (np.nan, np.inf, 1e19, 1e38):
        vectors[3, 5] = value
        assert not np.isfinite(rounding.upper_norms(vectors)[3])


@pytest.mark.parametrize("n", [4 * proof.GROUP * 3 + 1, 1000, 1024])
def test_keep_best_of_long_rows_is_that_of_a_sort(n: int) -> None:
    """The best are chosen by groups, wherever they are: next to each other, in one group, at either end, or equal."""
    scores = np.random.default_rng(n).standard_normal((6, n)).astype(np.float32)
    groups = n // proof.GROUP
    for row, best in enumerate(([0, 1, 2, 3], [n - 1, n - 2, n - 3, 0], [5 + i * groups for i in range(4)])):
        scores[row, best] = [9, 8, 7, 6]
    scores[4] = 1  # all scores of query 4 are equal
    scores[5] = -np.inf
    columns, left_out = proof.keep_best(scores, 3)
    sorted_scores = -np.sort(-scores, axis=1)
    np.testing.assert_array_equal(-np.sort(-np.take_along_axis(scores, columns, 1), axis=1), sorted_scores[:, :3])
    np.testing.assert_array_equal(left_out, sorted_scores[:, 3])
    assert all(len(set(row)) == 3 for row in columns.tolist()), "no column is repeated"


def test_keep_best_bounds_what_is_left_out() -> None:
    scores = np.array([[3, 1, 2, 5], [0, 0, 0, 0]], np.float32)
    columns, left_out = proof.keep_best(scores, 2)
    assert sorted(columns[0].tolist()) == [0, 3]
    np.testing.assert_array_equal(left_out, [2, 0])
    columns, left_out = proof.keep_best(scores, 4)
    assert columns.shape == (2, 4)
    assert (left_out == -np.inf).all()


def test_results_of_several_gpus_equal_one() -> None:
    """The best vectors are on both GPUs."""
    queries, vectors = data(90, 2)
    vectors[30:60] *= 9
    one, two = (faiss_backend.FaissGpu(FakeGpuFaiss(), (object(),) * gpus, "fake") for gpus in (1, 2))
    expected, result = (backend.load(vectors)(queries, 12) for backend in (one, two))
    np.testing.assert_array_equal(result.rows, expected.rows)
    np.testing.assert_allclose(result.scores, expected.scores, rtol=1e-6)
    assert (result.bound <= result.scores[:, -1]).all()
    assert not np.array_equal(result.rows, np.sort(result.rows, axis=1)), (
        "control: the best rows are not in the order of the corpus"
    )
