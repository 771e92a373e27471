"""Search on a GPU, with its kernel interpreted by Pallas: the maxima of groups, and the same proven results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxret.search.backends import accelerators, gpu_kernel
from jaxret.search.backends.accelerators import DeviceVectors, plan_cells
from jaxret.search.backends.precision import FLOAT32, PRECISIONS, Compressed, compress, find_precision
from jaxret.search.backends.select import select_backend
from jaxret.search.backends.top_k import upper_bounds
from jaxret.search.vectors.exact import search
from jaxret.search.vectors.self_check import self_check

LOW = [name for name in PRECISIONS if name != "float32"]
CELLS, SIZE, D, K = 2, 64, 32, 10


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """Set tiles of 32 places and 16 numbers and cells of 64 rows, and let a CPU take the kernel as a GPU does."""
    can_take = gpu_kernel.can_take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_kernel, "TILE_POSITIONS", 32)
        patch.setattr(gpu_kernel, "TILE_DIMENSIONS", 16)
        patch.setattr(gpu_kernel, "TILE_QUERIES", 16)
        patch.setattr(accelerators, "MAXIMA_CELL", SIZE)
        patch.setattr(gpu_kernel, "can_take", lambda platform, *rest: can_take("cuda", *rest))
        yield


def drawn(name: str) -> tuple[Compressed, Compressed, jax.Array]:
    """32 queries, two cells of vectors in a precision, and the mask of one cell's rows."""
    random, precision = np.random.default_rng(0), find_precision(name)
    queries = compress(random.standard_normal((32, D), dtype=np.float32), precision)
    flat = compress(random.standard_normal((CELLS * SIZE, D), dtype=np.float32), precision)
    vectors = jax.tree.map(lambda x: jnp.asarray(x.reshape(CELLS, SIZE, *x.shape[1:])), flat)
    return jax.tree.map(jnp.asarray, queries), vectors, jnp.arange(SIZE) < 50


@pytest.mark.table
@pytest.mark.parametrize("name", LOW)
def test_maxima_are_those_of_the_scores_of_a_group(name: str) -> None:
    queries, vectors, exists = drawn(name)
    mask, cell = jnp.where(exists, 0.0, -jnp.inf), jnp.int32(1)
    scores = np.asarray(upper_bounds(queries, jax.tree.map(lambda x: x[1], vectors), exists))
    result = np.asarray(gpu_kernel.group_maxima(queries, vectors, cell, mask, interpret=True))
    strided = scores.reshape(32, SIZE // 32, gpu_kernel.GROUP_POSITIONS, 32 // gpu_kernel.GROUP_POSITIONS)
    np.testing.assert_allclose(result, strided.max(axis=2).reshape(32, -1), rtol=1e-6, atol=1e-5)
    again, places = gpu_kernel.best_of_groups(queries, vectors, cell, mask, jnp.argsort(-result, axis=1)[:, :3])
    np.testing.assert_allclose(again, np.take_along_axis(scores, np.asarray(places), axis=1), rtol=1e-6, atol=1e-5)
    highest = np.sort(scores, axis=1)[:, :-4:-1]
    np.testing.assert_allclose(np.sort(again, axis=1)[:, :-4:-1], highest, rtol=1e-6, atol=1e-5)


def test_a_cell_is_copied_where_offsets_would_turn_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made only for int8 cells of 2 to 4 GiB."""

    def largest(dtype: str, cells: int) -> int:
        numbers = jax.ShapeDtypeStruct((cells, 2**20, 768), dtype)
        each = jax.ShapeDtypeStruct((cells, 2**20), np.float32)
        query_vectors = Compressed(
            jax.ShapeDtypeStruct((16, 768), dtype), *[jax.ShapeDtypeStruct((16,), np.float32)] * 3
        )
        cell, mask = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((2**20,), np.float32)
        arguments = query_vectors, Compressed(numbers, each, each, each), cell, mask
        traced = jax.make_jaxpr(partial(gpu_kernel.group_maxima, interpret=True))(*arguments)
        (call,) = [one for one in traced.eqns if one.primitive.name == "pallas_call"]
        return max(variable.aval.shape[0] for variable in call.invars if variable.aval.ndim == 3)

    assert [largest("int8", cells) for cells in (2, 3, 5, 6)] == [2, 1, 1, 6]
    assert [largest("bfloat16", cells) for cells in (2, 3, 6)] == [2, 3, 6]
    queries, vectors, exists = drawn("int8")
    present = jnp.where(exists, 0.0, -jnp.inf)
    whole = gpu_kernel.group_maxima(queries, vectors, jnp.int32(1), present, interpret=True)
    monkeypatch.setattr(gpu_kernel, "IN_32_BITS", vectors.numbers.size)
    copied = gpu_kernel.group_maxima(queries, vectors, jnp.int32(1), present, interpret=True)
    np.testing.assert_array_equal(whole, copied)


def test_the_rest_of_a_chosen_group_is_below_the_bound() -> None:
    """The five best are in one group, whose places are four apart. The fourth and fifth are left out, although they are
    far above all other groups."""
    vectors = np.zeros((1, SIZE, D), np.float32)
    vectors[0, :, 0] = 1
    vectors[0, 1:20:4, 0] = [50, 49, 48, 47, 46]
    held = jax.tree.map(lambda x: jnp.asarray(x)[None], compress(vectors[0], find_precision("bfloat16")))
    queries = np.zeros((16, D), np.float32)
    queries[:, 0] = 1
    query_vectors = jax.tree.map(jnp.asarray, compress(queries, find_precision("bfloat16")))
    every = jnp.ones(SIZE, bool)
    top, places, bound = accelerators.best_by_maxima(query_vectors, held, jnp.int32(0), every, 3, "cpu")
    np.testing.assert_allclose(top[0], [50, 49, 48], rtol=0.02)
    assert places[0].tolist() == [1, 5, 9]
    assert (bound >= 47).all()


@pytest.mark.parametrize("name", LOW)
def test_results_equal_faiss(name: str) -> None:
    """Many consecutive rows are near one query, and some rows are repeated."""
    random = np.random.default_rng(1)
    queries = random.standard_normal((9, D), dtype=np.float32)
    passages = random.standard_normal((900, 1, D), dtype=np.float32)
    passages[300:500, 0] = queries[2] + 0.3 * passages[300:500, 0]
    passages[700:760] = passages[300]
    backend = select_backend("xla", precision=name)
    held = backend.load(passages)
    assert isinstance(held, DeviceVectors)
    assert accelerators._by_maxima(held.vectors, held.layout, held.mesh)
    assert held.layout == (16, SIZE, 1)  # eight devices with two cells each, none of them full
    for k in (K, 300):
        result, expected = search(queries, [passages], k, backend), search(queries, [passages], k, FAISS)
        np.testing.assert_array_equal(result.rows, expected.rows)
        np.testing.assert_array_equal(result.scores.view(np.int32), expected.scores.view(np.int32))


@pytest.mark.table
@pytest.mark.parametrize("name", LOW)
def test_the_self_check_runs_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    group_maxima = gpu_kernel.group_maxima

    def counting(queries: Compressed, *rest: object, **keys: object) -> jax.Array:
        seen.append(len(queries.numbers))
        return group_maxima(queries, *rest, **keys)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_kernel, "group_maxima", counting)
    self_check(select_backend("xla", precision=name))
    assert {16, 128} <= set(seen)


def test_the_self_check_covers_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernel, "TILE_QUERIES", 128)
    assert [gpu_kernel.pad_to_tiles(count) for count in (1, 16, 17, 33, 65, 129)] == [16, 16, 128, 128, 128, 256]


def test_precisions_without_a_kernel_use_the_common_product() -> None:
    assert gpu_kernel.can_take("cuda", 1, D, np.dtype(np.int8))
    assert not gpu_kernel.can_take("cuda", 1, D, FLOAT32.dtype)
    assert not gpu_kernel.can_take("cuda", 2, D, np.dtype(np.int8))
    assert not gpu_kernel.can_take("cuda", 1, D + 8, np.dtype(np.int8))
    large = plan_cells(10_000_000, (1, D), find_precision("int8"), 8, "cuda")
    assert large.size <= SIZE
    assert plan_cells(10_000_000, (1, D), FLOAT32, 8, "cuda").size > SIZE


FAISS = select_backend("faiss-cpu")
