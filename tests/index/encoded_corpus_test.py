"""Parts, deleted rows and filters: a search equals that of a corpus with only the remaining passages."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.parts_list import CorpusPart, part_name, read_parts, write_parts
from jaxret.index.shards import ShardError, ShardWriter
from jaxret.search.backends.select import select_backend
from jaxret.search.backends.top_k import rounded_size
from jaxret.search.vectors.exact import search
from jaxret.storage.atomic import read_json, write_json
from jaxret.types import Ragged

SIZES = (75, 40, 33)  # rows of the parts
SHARDS = (20, 40, 7)  # rows of their shards
TOTAL = sum(SIZES)
CASES = [
    ("fixed", 1, "faiss-cpu"),
    ("fixed", 1, "xla"),
    ("fixed", 3, "faiss-cpu"),
    ("fixed", 3, "xla"),
    ("ragged", 0, "xla"),
]
DELETED = {"none": [], "some": [0, 5, 19, 76, 80, 114, 147], "a shard and a part": [*range(20, 40), *range(75, 115)]}


def vectors(layout: str, width: int) -> tuple[Any, Any]:
    """(queries, passages) of small integers, so that there are many ties."""
    random = np.random.default_rng(1)
    if layout == "fixed":
        return tuple(random.integers(-2, 3, shape).astype(np.float32) for shape in ((4, 8), (TOTAL, width, 8)))  # type: ignore[return-value]
    counts = random.integers(1, 6, TOTAL)
    flat = random.integers(-2, 3, (int(counts.sum()), 8)).astype(np.float32)
    queries = Ragged(random.integers(-2, 3, (9, 8)).astype(np.float32), np.array([0, 2, 5, 9]))
    return queries, Ragged(flat, np.concatenate([[0], np.cumsum(counts)]))


def rows_of(passages: Any, rows: np.ndarray) -> Any:
    return passages.take(rows) if isinstance(passages, Ragged) else passages[rows]


def written(folder: Path, passages: Any, deleted: list[int]) -> Path:
    """Write the passages as three parts with shards."""
    parts, first = [], 0
    for number, (size, rows) in enumerate(zip(SIZES, SHARDS, strict=True)):
        sha256 = f"{number}" * 64
        name = part_name(number, sha256) if number else ""
        writer = ShardWriter(folder / name, size, rows, {"corpus": {"sha256": sha256, "passages": size}})
        for shard in writer.pending():
            candidate_rows = np.arange(first + shard.start, first + shard.stop)
            writer.write(shard, rows_of(passages, candidate_rows), [f"d{row}" for row in candidate_rows])
        writer.finish()
        own = [row - first for row in deleted if first <= row < first + size]
        parts.append(CorpusPart(name, sha256, size).with_deleted(own))
        first += size
    write_parts(folder, parts)
    return folder


@pytest.mark.table
@pytest.mark.parametrize("deleted", DELETED.values(), ids=DELETED)
@pytest.mark.parametrize(("layout", "width", "backend"), CASES)
def test_a_search_covers_only_remaining_passages(
    layout: str, width: int, backend: str, deleted: list[int], tmp_path: Path
) -> None:
    queries, passages = vectors(layout, width)
    chosen = select_backend(backend)
    best = search(queries, [passages], 3, chosen).rows
    deleted = sorted({*deleted, *(best.ravel().tolist() if deleted else [])})  # also delete the best results
    encoded_corpus = open_encoded(written(tmp_path, passages, deleted))
    left = np.setdiff1d(np.arange(TOTAL), deleted)
    for kept, actual in ((left, encoded_corpus), (left[3::2], encoded_corpus.select(np.arange(TOTAL)[left[3::2]]))):
        for k in (1, 10, len(kept), TOTAL + 5):
            expected = search(queries, [rows_of(passages, kept)], k, chosen)
            result = search(queries, actual, k, chosen)
            np.testing.assert_array_equal(result.rows, expected.rows)
            np.testing.assert_array_equal(result.scores.view(np.int32), expected.scores.view(np.int32))
        assert actual.total_rows == len(kept)
        assert actual.ids(np.arange(len(kept))) == [f"d{row}" for row in kept]
        assert actual.missing_ids({"d0", "d147", "x"}) == {"d0", "d147", "x"} - {f"d{row}" for row in kept}
    assert encoded_corpus.corpus_identity["passages"] == len(left)


def test_control_deleted_passages_would_be_retrieved(tmp_path: Path) -> None:
    queries, passages = vectors("fixed", 1)
    best = search(queries, [passages], 3, select_backend("xla")).rows.ravel().tolist()
    folder = written(tmp_path, passages, best)
    result = search(queries, open_encoded(folder), 3, select_backend("xla"))
    whole = search(queries, open_encoded(written(tmp_path / "whole", passages, [])), 3, select_backend("xla"))
    assert (result.scores < whole.scores).any()


@pytest.mark.parametrize("row", [-1, TOTAL])
def test_a_row_outside_is_an_error(row: int, tmp_path: Path) -> None:
    corpus = open_encoded(written(tmp_path, vectors("fixed", 1)[1], []))
    with pytest.raises(IndexError, match=f"row {row} is outside 0 to {TOTAL - 1}"):
        corpus.ids([0, row])


def test_the_limit_of_open_files_is_raised_or_named(tmp_path: Path) -> None:
    """Each shard needs a file descriptor; MS MARCO has more shards than many systems allow files."""
    writer = ShardWriter(tmp_path, 100, 1, {"corpus": {"sha256": "0" * 64, "passages": 100}})
    for shard in writer.pending():
        writer.write(shard, np.ones((1, 1, 4), np.float32), [f"d{shard.start}"])
    writer.finish()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/dev/fd")))
    free = [number for number in range(4000) if number not in taken]
    low = (free[60], before[1])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, low)
        encoded_corpus = open_encoded(tmp_path)
        assert len(list(encoded_corpus)) == 100
        resource.setrlimit(resource.RLIMIT_NOFILE, low)
        with pytest.raises(OSError, match=r"vectors-000.*limit of open files"):
            list(encoded_corpus)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_digests_depend_on_parts_and_deletions(tmp_path: Path) -> None:
    _, passages = vectors("fixed", 1)
    result = [
        open_encoded(written(tmp_path / str(n), passages, gone)).corpus_identity
        for n, gone in enumerate(([], [1], [2]))
    ]
    assert len({one["sha256"] for one in result}) == 3
    assert [one["passages"] for one in result] == [TOTAL, TOTAL - 1, TOTAL - 1]
    (tmp_path / "0" / "parts.json").unlink()
    assert open_encoded(tmp_path / "0").corpus_identity == {"sha256": "0" * 64, "passages": SIZES[0]}


def test_rows_are_deleted_once_and_kept_as_ranges() -> None:
    part = CorpusPart("", "a" * 64, 10).with_deleted([3, 4, 5, 9]).with_deleted([5, 6, 0])
    assert part.deletions.tolist() == [[0, 1], [3, 7], [9, 10]]
    assert np.flatnonzero(part.present).tolist() == [1, 2, 7, 8]
    assert part.with_deleted([]).deletions.tolist() == part.deletions.tolist()


@pytest.mark.parametrize(
    "parts",
    [
        [],
        None,
        [{}],
        [{"name": "part-00001-0123456789ab", "sha256": "0", "rows": 75, "deleted": []}],
        [{"name": "", "sha256": "0", "rows": 75, "deleted": [[3, 3]]}],
        [{"name": "", "sha256": "0", "rows": 75, "deleted": [[5, 7], [6, 8]]}],
        [{"name": "", "sha256": "0", "rows": 75, "deleted": [[70, 76]]}],
        [{"name": "", "sha256": "0", "rows": 75, "deleted": [[-1, 3]]}],
        [{"name": "", "sha256": "0", "rows": True, "deleted": []}],
        [{"name": "", "sha256": "0", "rows": 75, "deleted": []}] * 2,
        [
            {"name": "", "sha256": "0", "rows": 75, "deleted": []},
            {"name": "../x", "sha256": "0", "rows": 1, "deleted": []},
        ],
    ],
)
def test_invalid_lists_of_parts_are_refused(parts: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "parts.json", {"parts": parts})
    with pytest.raises(ShardError, match=r"parts\.json: .* restore it"):
        read_parts(tmp_path)


def test_damage_is_named(tmp_path: Path) -> None:
    _, passages = vectors("fixed", 1)
    folder = written(tmp_path, passages, [1])
    path = folder / "parts.json"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"1,", b"2,", 1))
    with pytest.raises(ShardError, match=r"parts\.json: damaged"):
        open_encoded(folder)
    stored = read_json(path)
    path.write_bytes(good)
    open_encoded(folder)
    parts = [CorpusPart(part["name"], part["sha256"], part["rows"]) for part in stored["parts"]]
    write_parts(folder, [parts[0], CorpusPart(parts[1].name, "f" * 64, SIZES[1])])
    with pytest.raises(ShardError, match=r"vectors .*texts .*parts\.json"):
        open_encoded(folder)
    write_parts(folder, parts)
    next((folder / parts[2].name).glob("ids-00001*")).unlink()
    with pytest.raises(ShardError, match=r"part-00002-2{12}/ids-00001-of-00005\.txt .* does not exist"):
        open_encoded(folder)


def test_blocks_of_many_sizes_compile_few_programs() -> None:
    assert [rounded_size(n) for n in (1, 2, 15, 16, 17, 37, 8100, 8192, 8193, 21845)] == [
        1, 2, 15, 16, 18, 40, 8192, 8192, 9216, 22528,
    ]  # fmt: skip
    assert len({rounded_size(n) for n in range(8193, 16385)}) <= 16
