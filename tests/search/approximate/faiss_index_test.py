"""Approximate indexes: candidates have the scores of exact search, recall equals that of a brute force, and vectors
that an index was not built from are refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.experiments.build_index import index_corpus
from jaxret.experiments.verify import verify_folder
from jaxret.index.encoded_corpus import EncodedCorpus, open_encoded
from jaxret.index.parts_list import CorpusPart, part_name, write_parts
from jaxret.index.shards import ShardError, ShardWriter
from jaxret.runs.workdir import Workdir
from jaxret.search.approximate.faiss_build import measure_recall, take_rows
from jaxret.search.approximate.faiss_factory import effort_of, make_index, parse_parameters
from jaxret.search.approximate.faiss_index import FaissIndex, MappedCorpus, open_faiss_index
from jaxret.search.approximate.recall import RecallQueries
from jaxret.search.backends.select import select_backend
from jaxret.search.proof import SearchResult, recall_at
from jaxret.search.search_options import IndexOptions
from jaxret.search.vectors.exact import search
from jaxret.storage.atomic import read_json
from jaxret.types import Ragged

ROWS, D = 900, 16
GONE = (3, 250)  # deleted rows


def vectors(width: int) -> np.ndarray:
    """Clustered vectors [ROWS,V,D] with different norms, some of them twice."""
    random = np.random.default_rng(5)
    centres = random.standard_normal((30, D))
    numbers = centres[random.integers(30, size=(ROWS, width))] + 0.3 * random.standard_normal((ROWS, width, D))
    numbers[ROWS - 50 :] = numbers[:50]
    numbers[74] *= 2  # the longest vectors
    return numbers.astype(np.float32)


def written(folder: Path, passages: Any, deleted: tuple[int, ...] = GONE) -> Path:
    """Write two parts with shards of 200 rows, and delete some rows."""
    parts, first = [], 0
    for number, size in enumerate((700, ROWS - 700)):
        sha256 = f"{number}" * 64
        name = part_name(number, sha256) if number else ""
        fingerprint = {"corpus": {"sha256": sha256, "passages": size}, "contract": {}, "checkpoint": {"step": 1}}
        writer = ShardWriter(folder / name, size, 200, fingerprint)
        for shard in writer.pending():
            rows = np.arange(first + shard.start, first + shard.stop)
            part = passages.take(rows) if isinstance(passages, Ragged) else passages[rows]
            writer.write(shard, part, [f"d{row}" for row in rows])
        writer.finish()
        parts.append(
            CorpusPart(name, sha256, size).with_deleted(row - first for row in deleted if first <= row < first + size)
        )
        first += size
    write_parts(folder, parts)
    return folder


@pytest.fixture(params=[3, 1], ids=["three vectors", "one vector"])
def encoded_corpus(request: pytest.FixtureRequest, tmp_path: Path) -> EncodedCorpus:
    return open_encoded(written(tmp_path / "run" / "embeddings" / "c", vectors(request.param)))


def built(encoded_corpus: EncodedCorpus, factory: str, sample: int = 60, **options: Any) -> Path:
    workdir = Workdir(encoded_corpus.folder.parent.parent)
    return index_corpus(workdir, IndexOptions(factory, sample=sample, **options))


def by_hand(encoded_corpus: EncodedCorpus, queries: np.ndarray) -> np.ndarray:
    """The scores of all rows that are not deleted, float64 [Q,N]."""
    rows = take_rows(encoded_corpus, np.arange(encoded_corpus.total_rows)).astype(np.float64)
    result: np.ndarray = np.einsum("qd,nvd->qnv", queries.astype(np.float64), rows).max(axis=2)
    return result


@pytest.mark.table
@pytest.mark.parametrize("factory", ["IVF8,PQ8x4", "HNSW8", "SQ8", "OPQ4_16,IVF8,Flat", "IVF8,SQ4"])
def test_candidates_are_scored_and_ordered_as_exact_search_does(factory: str, encoded_corpus: EncodedCorpus) -> None:
    folder = built(encoded_corpus, factory)
    index = open_faiss_index(encoded_corpus, folder.name)
    queries = np.random.default_rng(1).standard_normal((9, D)).astype(np.float32)
    exact = search(queries, encoded_corpus, encoded_corpus.total_rows, select_backend("faiss-cpu"))
    for k in (1, 10, 300):
        result = index.search(queries, MappedCorpus(encoded_corpus), k)
        for query in range(len(queries)):
            scores = dict(zip(exact.rows[query].tolist(), exact.scores[query].tolist(), strict=True))
            rows = result.rows[query].tolist()
            assert len(set(rows)) == k
            assert [scores[row] for row in rows] == result.scores[query].tolist()
            assert rows == sorted(rows, key=lambda row: (-scores[row], row))
    assert encoded_corpus.ids([0, 3]) == ["d0", "d4"], "control: rows do not count deleted passages"
    norms = np.linalg.norm(take_rows(encoded_corpus, np.arange(encoded_corpus.total_rows)), axis=-1)
    assert norms.max() <= read_json(folder / "manifest.json")["largest_norm"] < 1.001 * norms.max()
    assert norms.max() > 1.01 * norms[-100:].max(), "control: the longest vector is not in the last block"


@pytest.mark.table
def test_all_vectors_as_candidates_give_the_exact_result(encoded_corpus: EncodedCorpus) -> None:
    built(encoded_corpus, "IVF8,PQ4x4")
    queries = np.random.default_rng(1).standard_normal((9, D)).astype(np.float32)
    exact = search(queries, encoded_corpus, 20, select_backend("faiss-cpu"))

    def searched(parameters: str) -> SearchResult:
        return open_faiss_index(encoded_corpus, "IVF8,PQ4x4", parameters).search(
            queries, MappedCorpus(encoded_corpus), 20
        )

    result = searched(f"nprobe=8,k_factor_rf={encoded_corpus.total_rows}")
    assert (result.rows == exact.rows).all()
    assert (result.scores == exact.scores).all()
    few = searched("nprobe=1,k_factor_rf=1")
    assert (few.rows != exact.rows).any(), "control: with few candidates, results differ"
    assert few.rows.shape == exact.rows.shape, "but the result has as many passages"


@pytest.mark.table
def test_recall_equals_a_brute_force(encoded_corpus: EncodedCorpus) -> None:
    """The manifest has it. The oracle uses float64 and leaves out the passage that is the question."""
    parameters = ("nprobe=1,k_factor_rf=3", "nprobe=2,k_factor_rf=3", "nprobe=8,k_factor_rf=3")
    folder = built(encoded_corpus, "IVF8,PQ2x4", parameters=parameters)
    manifest = read_json(folder / "manifest.json")
    assert tuple(row["parameters"] for row in manifest["recall"]["measured"]) == parameters
    assert manifest["recall"]["questions"]["count"] == 60
    queries = np.random.default_rng(2).standard_normal((40, D)).astype(np.float32)
    recall = measure_recall(encoded_corpus, folder, RecallQueries(queries, "drawn"), parameters[::2])
    scores = by_hand(encoded_corpus, queries).astype(np.float32)
    for row in recall["measured"]:
        index = open_faiss_index(encoded_corpus, folder.name, row["parameters"])
        for k in (1, 10, 100):
            rows = index.search(queries, MappedCorpus(encoded_corpus), k).rows
            kth = np.sort(scores, axis=1)[:, -k]
            hits = np.mean([scores[q, rows[q]] >= kth[q] - 1e-6 for q in range(len(queries))])
            assert row["recall"][str(k)] == pytest.approx(hits, abs=1e-4)
    assert recall["measured"][0]["recall"]["10"] < recall["measured"][1]["recall"]["10"], (
        "control: the first parameters find fewer passages"
    )
    assert index.recall(30) == recall["measured"][1]["recall"]
    entry = {"factory": "IVF8,PQ2x4", "parameters": parameters[2], "candidates": 93}
    assert index.to_json(31) == {**entry, "recall": index.recall(31)}
    assert open_faiss_index(encoded_corpus, folder.name, "nprobe=3").recall(30) is None


@pytest.mark.table
def test_parameters_belong_to_one_call(encoded_corpus: EncodedCorpus) -> None:
    """Threads search one FAISS index with different parameters and k, and each gets its own results."""
    queries = np.random.default_rng(1).standard_normal((200, D)).astype(np.float32)
    for factory, name in (("IVF8,PQ4x4", "nprobe"), ("PCA8,IVF8,Flat", "nprobe"), ("HNSW4", "efSearch")):
        folder, mapped = built(encoded_corpus, factory), MappedCorpus(encoded_corpus)
        shared = open_faiss_index(encoded_corpus, folder.name)
        searches = [(f"{name}={value},k_factor_rf=1", k) for value in (1, 2, 8) for k in (1, 30)]

        def rows(search: tuple[str, int], index: FaissIndex, mapped: MappedCorpus = mapped) -> np.ndarray:
            return replace(index, parameters=search[0]).search(queries, mapped, search[1]).rows

        alone = [rows(search, open_faiss_index(encoded_corpus, folder.name)) for search in searches]
        with ThreadPoolExecutor(6) as threads:
            together = list(threads.map(lambda search: rows(search, shared), 5 * searches))  # noqa: B023
        assert all((a == b).all() for a, b in zip(5 * alone, together, strict=True))
        assert any((alone[0] != alone[4]).flat), "control: parameters matter"


@pytest.mark.table
def test_unknown_parameters_of_an_index(encoded_corpus: EncodedCorpus) -> None:
    folder = built(encoded_corpus, "IVF8,Flat")
    index = open_faiss_index(encoded_corpus, folder.name).index
    assert parse_parameters(index, "nprobe=4,max_codes=9,k_factor_rf=1.5") == {
        "nprobe": 4,
        "max_codes": 9,
        "k_factor_rf": 1.5,
    }
    for text, message in {
        "efSearch=9": "has no parameter 'efSearch'; it has nprobe, max_codes, k_factor_rf",
        "nprobe": "'nprobe' must be nprobe=NUMBER",
        "nprobe=0": "'nprobe=0' must be nprobe=NUMBER",
        "nprobe=1.5": "'nprobe=1.5' must be",
        "nprobe=12345678901234567890123": "'nprobe=12345678901234567890123' must be",
        "nprobe=4;max_codes=3": "'nprobe=4;max_codes=3' must be",
    }.items():
        with pytest.raises(ValueError, match=f"^index_parameters={text}: .*{message}"):
            open_faiss_index(encoded_corpus, folder.name, text)
    with pytest.raises(ValueError, match=r"^parameters=efSearch=9: this index has no parameter"):
        built(encoded_corpus, "IVF8,Flat", parameters=("efSearch=9",))


def test_recall_at() -> None:
    best = np.array([[5.0, 4, 4, 3], [9, 8, 7, 6]], np.float32)
    assert recall_at(best, best, 4) == 1
    assert recall_at(np.array([[5.0, 4, 3, 3], [9, 7, 6, 5]], np.float32), best, 2) == 0.75
    assert recall_at(np.array([[4.0, 4, 3, 3], [8, 7, 6, 5]], np.float32), best, 1) == 0


def test_an_index_of_other_vectors_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passages, folder = vectors(1), tmp_path / "run" / "embeddings" / "c"
    encoded_corpus = open_encoded(written(folder, passages))
    place = built(encoded_corpus, "SQ8", name="mine")
    open_faiss_index(encoded_corpus, "mine")
    assert [one.problem for one in verify_folder(folder) if "corpus.json" not in one.problem and one.problem] == []
    before = place.joinpath("index.faiss").stat().st_mtime_ns
    assert built(encoded_corpus, "SQ8", name="mine", sample=50) == place
    assert place.joinpath("index.faiss").stat().st_mtime_ns == before, (
        "recall is measured again, but the index is not built again"
    )
    assert "was built already" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"is an index SQ8; .* name for"):
        built(encoded_corpus, "SQ4", name="mine")
    written(folder, passages, (*GONE, 9))
    changed = open_encoded(folder)
    with pytest.raises(ValueError, match=r"vectors \(898 passages\).* 897: .*=SQ8 --name"):
        open_faiss_index(changed, "mine")
    outdated = [one for one in verify_folder(folder) if "built from other vectors" in one.warning]
    assert [one.problem for one in outdated] == [""]
    built(changed, "SQ8", name="mine")
    assert open_faiss_index(changed, "mine").index.ntotal == 897
    with pytest.raises(FileNotFoundError, match=r"index 'SQ4'; .*mine"):
        open_faiss_index(changed, "SQ4")
    with pytest.raises(ValueError, match=r"name .*index"):
        open_faiss_index(changed, "../mine")
    with pytest.raises(ValueError, match=r"index_parameters=nprobe=4: .*parameter 'nprobe'; .*k_"):
        open_faiss_index(changed, "mine", "nprobe=4")


def test_flipped_bytes_and_killed_builds_are_detected(tmp_path: Path) -> None:
    encoded_corpus = open_encoded(written(tmp_path / "run" / "embeddings" / "c", vectors(1)))
    place = built(encoded_corpus, "IVF8,Flat")
    path = place / "index.faiss"
    good = path.read_bytes()
    path.write_bytes(good[:-20] + bytes([good[-20] ^ 1]) + good[-19:])
    with pytest.raises(ShardError, match=r"index.faiss: damaged .*; build it again"):
        open_faiss_index(encoded_corpus, place.name)
    for folder in (encoded_corpus.folder, place):
        assert any("index.faiss: damaged" in one.problem for one in verify_folder(folder))
    path.unlink()
    with pytest.raises(ShardError, match="does not exist"):
        open_faiss_index(encoded_corpus, place.name)
    (place / "manifest.json").unlink()
    # Half a file, as a job leaves it that was killed before it wrote the manifest.
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(FileNotFoundError, match="has no index"):
        open_faiss_index(encoded_corpus, place.name)
    built(encoded_corpus, "IVF8,Flat")
    index = open_faiss_index(encoded_corpus, place.name)
    assert index.index.ntotal == encoded_corpus.total_rows
    assert not [one.problem for one in verify_folder(place) if one.problem]
    with pytest.raises(ValueError, match="query 1 has a NaN"):
        index.search(np.array([[1.0] * D, [np.nan] * D], np.float32), MappedCorpus(encoded_corpus), 1)


def test_the_same_seed_trains_the_same(tmp_path: Path) -> None:
    encoded_corpus = open_encoded(written(tmp_path / "run" / "embeddings" / "c", vectors(1)))
    bytes_of = [
        (
            built(encoded_corpus, "IVF8,PQ4x4", name=f"i{seed}{n}", seed=seed, train_vectors=300) / "index.faiss"
        ).read_bytes()
        for seed, n in ((0, 0), (0, 1), (1, 0))
    ]
    assert bytes_of[0] == bytes_of[1] != bytes_of[2]


def test_late_interaction_has_no_index(tmp_path: Path) -> None:
    flat = np.random.default_rng(0).standard_normal((2 * ROWS, D)).astype(np.float32)
    encoded_corpus = open_encoded(written(tmp_path / "run" / "embeddings" / "c", Ragged(flat, np.arange(ROWS + 1) * 2)))
    with pytest.raises(ValueError, match=r"different .*vectors"):
        built(encoded_corpus, "SQ8")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("foo", r"products .*16 .*\(could .*foo\)"),
        ("IVF4,PQ7", r"should .*multiple .*subquantizers"),
        ("HNSW8_PQ4", "FAISS has no IndexHNSWPQ for inner products"),
        ("NSG16", "an IndexNSGFlat is not supported"),
        ("IVF4,SQ8,RFlat", "an IndexRefineFlat is not supported"),
        ("IVF0,Flat", "IVF0 must be from IVF1 to IVF16777216"),
        ("IVF99999999999999,Flat", "must be from IVF1"),
        ("IVF64M,Flat", "IVF64M must be from"),
        ("HNSW100000", "must be from HNSW1 to HNSW512"),
        ("", "cannot build"),
    ],
)
def test_an_unsupported_factory_string(factory: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make_index(factory, D)
    assert "\n" not in str(error.value)


def test_too_few_vectors_to_train_on(tmp_path: Path) -> None:
    encoded_corpus = open_encoded(written(tmp_path / "run" / "embeddings" / "c", vectors(1)))
    with pytest.raises(ValueError, match=r"898 .*\(.*number .*clusters \(1024\)"):
        built(encoded_corpus, "IVF1024,Flat")
    with pytest.raises(ValueError, match=r"on 100 vectors \(.*clusters \(256\).*: raise train_vectors"):
        built(encoded_corpus, "IVF8,PQ4", train_vectors=100)
    assert not (encoded_corpus.folder / "indexes" / "IVF1024,Flat").exists(), "no folder is left"
    single = written(tmp_path / "one" / "embeddings" / "c", vectors(1), tuple(range(1, ROWS)))
    with pytest.raises(ValueError, match=r"c .*1 .*passages"):
        built(open_encoded(single), "SQ8")


def test_default_parameters_by_kind_of_index() -> None:
    assert effort_of(make_index("PCA8,IVF4,Flat", D)) == ("nprobe", 4)
    assert effort_of(make_index("HNSW8", D)) == ("efSearch", 1)
    assert effort_of(make_index("SQ8", D)) == ("", 0)
