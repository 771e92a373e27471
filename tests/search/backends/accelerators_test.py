"""A corpus on eight devices, in every precision: results equal those of FAISS to the last bit; and the arrays on the
devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import faiss
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxret.search.backends import accelerators, cpu, precision
from jaxret.search.backends.accelerators import (
    CellLayout,
    DeviceVectors,
    local_mesh,
    plan_cells,
    put_on_devices,
    search_cells,
)
from jaxret.search.backends.precision import FLOAT32, PRECISIONS, Compressed, compress
from jaxret.search.backends.select import select_backend
from jaxret.search.backends.top_k import best, share
from jaxret.search.backends.xla_backend import Xla
from jaxret.search.proof import SearchResult
from jaxret.search.vectors import streaming
from jaxret.search.vectors.exact import search
from jaxret.search.vectors.in_memory import InMemoryCorpus
from jaxret.search.vectors.self_check import self_check
from jaxret.search.vectors.streaming import prefetch
from jaxret.search.vectors.vector_corpus import BlockCorpus

K = 40


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """Set cells of 32 vectors, chunks of a few rows, and pieces of at most 400 rows."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerators, "CELL", 32)
        patch.setattr(accelerators, "CHUNK_BYTES", 2**15)
        patch.setattr(streaming, "HOST_BYTES", 400 * 16 * 4)
        yield
    faiss.omp_set_num_threads(threads)


@pytest.fixture(scope="module")
def texts() -> tuple[np.ndarray, np.ndarray]:
    """Queries and passages. Many consecutive passages are near one query, and some passages are repeated."""
    random = np.random.default_rng(0)
    queries = random.standard_normal((9, 16), dtype=np.float32)
    passages = random.standard_normal((1500, 1, 16), dtype=np.float32)
    passages[300:500, 0] = queries[2] + 0.3 * passages[300:500, 0]
    passages[900:960] = passages[300]
    nearly = 1 + 1e-3 * random.standard_normal((140, 1), dtype=np.float32)
    passages[1000:1140, 0] = nearly * queries[4]  # bfloat16 has only three digits
    return queries, passages


@pytest.fixture(scope="module")
def expected(texts: tuple[np.ndarray, np.ndarray]) -> SearchResult:
    queries, passages = texts
    return search(queries, [passages], K, select_backend("faiss-cpu"))


class Named(BlockCorpus):
    """A corpus with ids, like corpora on disk."""

    def ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        return [f"p{row}" for row in indices]


def assert_same_bits(result: SearchResult, expected: SearchResult) -> None:
    np.testing.assert_array_equal(result.rows, expected.rows)
    np.testing.assert_array_equal(result.scores.view(np.int32), expected.scores.view(np.int32))


@pytest.mark.parametrize("name", PRECISIONS)
def test_results_equal_faiss_in_every_precision(
    name: str, texts: tuple[np.ndarray, np.ndarray], expected: SearchResult
) -> None:
    queries, passages = texts
    backend = select_backend("xla", precision=name)
    result = search(queries, [passages[:333], passages[333:]], K, backend)
    assert_same_bits(result, expected)
    assert len(queries) * K <= result.scored_pairs < sum(result.rounds) * 6 * K
    assert ("candidates in" in result.backend) == (name != "float32")


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_control_without_rounding_losses_results_are_wrong(
    name: str, texts: tuple[np.ndarray, np.ndarray], expected: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With errors of zero, the bound is too low, and a query counts as proven too early."""
    queries, passages = texts
    monkeypatch.setattr("jaxret.search.vectors.exact.MARGIN", 0)
    backend = select_backend("xla", precision=name)
    eager = replace(backend, precision=replace(PRECISIONS[name], extra_candidates=0.0))  # type: ignore[type-var]
    assert_same_bits(search(queries, [passages], K, eager), expected)

    def lossless(vectors: np.ndarray, of: precision.Precision) -> precision.Compressed:
        compressed = compress(vectors, of)
        return compressed._replace(error=np.zeros_like(compressed.error))

    monkeypatch.setattr(accelerators, "compress", lossless)
    assert (search(queries, [passages], K, eager).rows != expected.rows).any()


def test_several_vectors_a_passage(texts: tuple[np.ndarray, np.ndarray]) -> None:
    queries, passages = texts
    several = passages.reshape(500, 3, 16)
    one = search(queries, [several], 7, select_backend("faiss-cpu"))
    assert_same_bits(search(queries, [several], 7, select_backend("xla", precision="int8")), one)


@pytest.mark.parametrize("scores", [2**28, 1])
@pytest.mark.parametrize("name", PRECISIONS)
def test_eight_devices_give_the_result_of_one(
    name: str,
    scores: int,
    texts: tuple[np.ndarray, np.ndarray],
    expected: SearchResult,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cells are computed at the same time, or one after another if they have many scores."""
    queries, passages = texts
    first = jax.local_devices()[:1]
    monkeypatch.setattr(accelerators.jax, "local_devices", lambda: first)
    monkeypatch.setattr(cpu, "MOST_SCORES", scores)
    backend = select_backend("xla", precision=name)
    assert isinstance(backend, Xla)
    assert backend.mesh.size == 1
    assert_same_bits(search(queries, [passages], K, backend), expected)
    several = passages.reshape(500, 3, 16)
    one = search(queries, [several], 7, select_backend("faiss-cpu"))
    assert_same_bits(search(queries, [several], 7, backend), one)


def test_one_device_gives_the_result_of_the_program_for_several(texts: tuple[np.ndarray, np.ndarray]) -> None:
    """`cpu.search_cells` equals `accelerators.search_cells` for the same vectors: scores, places and bounds."""
    queries, passages = texts
    layout = plan_cells(len(passages), (1, 16), FLOAT32, 1, "cpu")
    mesh = Mesh(np.array(jax.local_devices()[:1]), (accelerators.ROW_AXIS,), axis_types=(AxisType.Auto,))
    step = layout.chunk(16) * layout.cells
    held = put_on_devices((passages[start : start + step] for start in range(0, 1500, step)), layout, FLOAT32, mesh)
    assert isinstance(held, DeviceVectors)
    query_vectors = compress(queries, FLOAT32)
    result = cpu.search_cells_on_cpu(query_vectors, held.vectors, held.rows, layout.size, K)
    for ours, theirs in zip(result, search_cells(query_vectors, held.vectors, held.rows, layout, K, mesh), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_self_check_passes(name: str) -> None:
    self_check(select_backend("xla", precision=name))


def test_the_self_check_detects_a_wrong_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def products(queries: Compressed, vectors: Compressed, exists: jax.Array) -> jax.Array:
        return jnp.where(exists, (queries.numbers @ vectors.numbers.T).astype(jnp.float32), -jnp.inf)

    monkeypatch.setattr("jaxret.search.backends.top_k.upper_bounds", products)
    jax.clear_caches()
    with pytest.raises(RuntimeError, match=r"candidates .*bfloat16 .*bfloat16"):
        self_check(select_backend("xla", precision="bfloat16"))
    jax.clear_caches()


def test_rows_are_placed_by_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 rows of two vectors in 16 cells, in chunks of two places."""
    rows = np.arange(200, dtype=np.float32).reshape(100, 2, 1) * np.ones(4, np.float32)
    layout = CellLayout(cells=16, size=8, width=2)
    monkeypatch.setattr(accelerators, "CHUNK_BYTES", 2 * 16 * 2 * 4 * 4)
    step = layout.chunk(4) * layout.cells
    assert step == 32
    held = put_on_devices(
        (rows[start : start + step] for start in range(0, 100, step)), layout, PRECISIONS["float32"], local_mesh()
    )
    numbers = np.asarray(held.vectors.numbers).reshape(16, 8, 2, 4)
    candidate_rows = np.stack([numbers[row % 16, row // 16] for row in range(100)])
    np.testing.assert_array_equal(candidate_rows, rows)
    assert held.rows == 100
    assert {len(part.data) for part in held.vectors.numbers.addressable_shards} == {2}


def test_cells_are_bounded_and_nearly_full() -> None:
    for rows in (1, 9, 255, 257, 10_000, 123_456):
        for width in (1, 3):
            layout = plan_cells(rows, (width, 16), FLOAT32, 8, "cpu")
            assert layout.cells % 8 == 0
            assert layout.size * width <= 32 + 2 * width
            assert rows <= layout.cells * layout.size
            assert layout.size % layout.chunk(16) == 0


def test_the_share_of_a_device_suffices_for_any_placement() -> None:
    layout = plan_cells(3000, (1, 16), FLOAT32, 8, "cpu")
    assert share(3000, layout.cells, layout.size) == layout.size
    for k in (1, 40, 1000):
        assert share(k, layout.cells, layout.size) * layout.cells >= k
    random = np.random.default_rng(0)
    worst = max(np.bincount(random.permutation(3000)[:40] % layout.cells).max() for _ in range(200))
    assert worst <= share(40, layout.cells, layout.size) < 40


@pytest.mark.parametrize(("n", "count"), [(300, 3), (301, 7), (40, 40), (64, 20)])
def test_the_best_of_a_row_by_groups_are_those_of_a_sort(n: int, count: int) -> None:
    scores = np.random.default_rng(n).integers(0, 50, (5, n)).astype(np.float32)
    top, places, bound = (np.asarray(x) for x in best(jnp.asarray(scores), count))
    np.testing.assert_array_equal(top, -np.sort(-scores, axis=1)[:, :count])
    np.testing.assert_array_equal(np.take_along_axis(scores, places, axis=1), top)
    assert all(len(set(row)) == count for row in places.tolist())
    np.testing.assert_array_equal(bound, top[:, -1] if count < n else np.full(5, -np.inf))


def test_no_row_is_sorted_completely(texts: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA on a CPU has a TopK, and uses it for `top_k` unless it sees that only a part of the result is used."""
    queries, passages = texts
    monkeypatch.setattr(accelerators, "CELL", 1500)
    held = select_backend("xla").load(np.concatenate([passages] * 24))
    assert isinstance(held, DeviceVectors)
    lowered = search_cells.lower(compress(queries, held.precision), held.vectors, held.rows, held.layout, K, held.mesh)
    program = str(lowered.compile().as_text())
    assert program.count('custom_call_target="TopK"') == 4, "one each for groups, the best groups, cells and devices"
    assert " sort(" not in program


def test_large_corpora_are_streamed_with_equal_results(texts: tuple[np.ndarray, np.ndarray]) -> None:
    _, passages = texts
    backend = select_backend("xla")
    assert isinstance(backend, Xla)
    corpus = BlockCorpus([passages[:400], passages[400:]])
    blocks = list(streaming.stream_blocks(corpus, backend))
    assert [len(block.rows) for block in blocks] == [375, 375, 375, 375]
    assert np.concatenate([block.rows for block in blocks]).tolist() == list(range(1500))
    assert len({block.top.layout for block in blocks}) == 1, "all blocks have one program"  # type: ignore[attr-defined]
    passages = passages.copy()
    passages[1234, 0, 3] = np.nan
    with pytest.raises(ValueError, match=r"passage row 1234 has a NaN"):
        list(streaming.stream_blocks(BlockCorpus([passages]), backend))


def test_vectors_that_fit_stay_on_the_devices(
    texts: tuple[np.ndarray, np.ndarray], expected: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices have their own memory, with room for 1,700 rows in int8 and for fewer in float32."""
    queries, passages = texts
    backend = select_backend("xla", precision="int8")
    monkeypatch.setattr(Xla, "free", 1700 * (16 + 12))  # room for the rows and up to a sixteenth of padding
    stored = Named([passages[:400], passages[400:]])
    assert streaming.fits_devices(stored, backend)
    assert not streaming.fits_devices(stored, select_backend("xla"))
    assert not streaming.fits_devices(stored, select_backend("faiss-cpu"))
    kept = InMemoryCorpus(stored, None)
    for _ in range(2):
        assert_same_bits(search(queries, kept, K, backend), expected)
    assert kept.blocks
    (block,) = kept.blocks
    assert block.top.vectors.numbers.dtype == jnp.int8  # type: ignore[attr-defined]


def test_vectors_that_do_not_fit_are_not_kept_on_devices(
    texts: tuple[np.ndarray, np.ndarray], expected: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corpus is in memory, and the devices have room for 700 of its rows, or for 1,700."""
    queries, passages = texts
    backend, each = select_backend("xla"), streaming.row_bytes((1, 16), precision.FLOAT32)
    stored = Named([passages])
    for room, parts in ((700, 0), (1700, 1)):
        kept = InMemoryCorpus(stored, passages)
        monkeypatch.setattr(Xla, "free", room * each)
        assert streaming.exceeds_devices(kept, backend) == (parts == 0)
        assert_same_bits(search(queries, kept, K, backend), expected)
        # Vectors on the device are not loaded again, although there would be no room for them.
        monkeypatch.setattr(Xla, "free", 700 * each)
        blocks = list(kept.blocks or ())
        assert_same_bits(search(queries, kept, K, backend), expected)
        assert len(blocks) == parts
        assert all(new is old for new, old in zip(kept.blocks or (), blocks, strict=True))


def test_the_next_block_is_prepared_ahead_and_errors_are_raised() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(4):
            made.append(number)
            yield number
        raise ValueError("the fifth")

    stream = prefetch(items())
    assert next(stream) == 0
    with pytest.raises(ValueError, match="the fifth"):
        list(stream)
    assert made == [0, 1, 2, 3]


def test_faiss_searches_only_in_float32() -> None:
    with pytest.raises(ValueError, match=r"'faiss-cpu' .*float32, .*int8; .*precision"):
        select_backend("faiss-cpu", precision="int8")
    assert select_backend("auto", multi_vector=True, precision="int8").name == "xla"
    chosen = select_backend("auto", precision="bfloat16")
    assert chosen.name == "xla"
    assert "not faiss-cpu: it computes in float32, not in bfloat16" in chosen.description


def test_devices_without_enough_memory_are_an_error() -> None:
    each = streaming.row_bytes((1, 16), precision.FLOAT32)
    few = 100 * each * streaming.BLOCKS_AT_ONCE
    assert streaming.rows_at_once(10_000, (1, 16), precision.FLOAT32, few) <= 100
    with pytest.raises(ValueError, match=r"64 .*vectors .*backend=faiss-cpu"):
        streaming.rows_at_once(10_000, (1, 16), precision.FLOAT32, 64)
