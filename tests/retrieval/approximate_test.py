"""Approximate indexes: candidates are scored as exact search scores them, recall is what a brute force says, what an
index was not built of is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.retrieval.approximate import Chosen, Mapped, open_index, read_index_manifest
from jaxret.retrieval.approximate_build import Questions, measure, take_rows
from jaxret.retrieval.backends import select_backend
from jaxret.retrieval.encoded import EncodedCorpus, open_encoded
from jaxret.retrieval.factory import bytes_per_vector, effort_of, make_index, sample_sizes
from jaxret.retrieval.parts import Part, part_name, write_parts
from jaxret.retrieval.proof import recall_at
from jaxret.retrieval.search import search
from jaxret.retrieval.shards import ShardError, ShardWriter
from jaxret.runs.workdir import Workdir
from jaxret.storage import read_json
from jaxret.tools.index import index_corpus
from jaxret.tools.verify import verify
from jaxret.types import Ragged

ROWS, D = 900, 16
GONE = (3, 250)  # rows that are deleted


def vectors(width: int) -> np.ndarray:
    """[ROWS,V,D], clustered, of different norms, some of them twice."""
    random = np.random.default_rng(5)
    centers = random.standard_normal((30, D))
    found = centers[random.integers(30, size=(ROWS, width))] + 0.3 * random.standard_normal((ROWS, width, D))
    found[ROWS - 50 :] = found[:50]
    return found.astype(np.float32)


def written(folder: Path, documents: Any, deleted: tuple[int, ...] = GONE) -> Path:
    """Two parts of shards of 200 rows, some of them deleted."""
    parts, first = [], 0
    for number, size in enumerate((700, ROWS - 700)):
        sha256 = f"{number}" * 64
        name = part_name(number, sha256) if number else ""
        made_from = {"corpus": {"sha256": sha256, "passages": size}, "contract": {}, "checkpoint": {"step": 1}}
        writer = ShardWriter(folder / name, size, 200, made_from)
        for shard in writer.pending():
            rows = np.arange(first + shard.start, first + shard.stop)
            part = documents.take(rows) if isinstance(documents, Ragged) else documents[rows]
            writer.write(shard, part, [f"d{row}" for row in rows])
        writer.finish()
        parts.append(Part(name, sha256, size).without(row - first for row in deleted if first <= row < first + size))
        first += size
    write_parts(folder, parts)
    return folder


@pytest.fixture(params=[1, 3], ids=["one vector", "three vectors"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> EncodedCorpus:
    return open_encoded(written(tmp_path / "run" / "embeddings" / "c", vectors(request.param)))


def built(corpus: EncodedCorpus, factory: str, **settings: Any) -> Path:
    workdir = Workdir(corpus.folder.parent.parent)
    return index_corpus(workdir, factory, progress=False, **({"sample": 60} | settings))


def by_hand(corpus: EncodedCorpus, queries: np.ndarray) -> np.ndarray:
    """Scores of all rows that are there, float64 [Q,N]."""
    there = take_rows(corpus, np.arange(corpus.total_rows)).astype(np.float64)
    found: np.ndarray = np.einsum("qd,nvd->qnv", queries.astype(np.float64), there).max(axis=2)
    return found


@pytest.mark.parametrize("factory", ["IVF8,PQ8x4", "HNSW8", "SQ8", "OPQ4_16,IVF8,Flat", "IVF8,SQ4"])
def test_candidates_are_scored_and_ordered_as_exact_search_does(factory: str, corpus: EncodedCorpus) -> None:
    folder = built(corpus, factory)
    index = open_index(corpus, Chosen(folder.name))
    queries = np.random.default_rng(1).standard_normal((9, D)).astype(np.float32)
    exact = search(queries, corpus, corpus.total_rows, select_backend("faiss-cpu"))
    for k in (1, 10, 300):
        found = index.search(queries, Mapped(corpus), k)
        for query in range(len(queries)):
            scores = dict(zip(exact.rows[query].tolist(), exact.scores[query].tolist(), strict=True))
            rows = found.rows[query].tolist()
            assert len(set(rows)) == k
            assert [scores[row] for row in rows] == found.scores[query].tolist()
            assert rows == sorted(rows, key=lambda row: (-scores[row], row))
    assert corpus.ids([0, 3]) == ["d0", "d4"], "control: rows are those that are there"


def test_with_everything_as_a_candidate_it_is_exact_search(corpus: EncodedCorpus) -> None:
    built(corpus, "IVF8,PQ4x4")
    queries = np.random.default_rng(1).standard_normal((9, D)).astype(np.float32)
    exact = search(queries, corpus, 20, select_backend("faiss-cpu"))
    many = 3 * corpus.total_rows
    found = open_index(corpus, Chosen("IVF8,PQ4x4", candidates=many, nprobe=8)).search(queries, Mapped(corpus), 20)
    assert (found.rows == exact.rows).all()
    assert (found.scores == exact.scores).all()
    few = open_index(corpus, Chosen("IVF8,PQ4x4", candidates=1, nprobe=1)).search(queries, Mapped(corpus), 20)
    assert (few.rows != exact.rows).any(), "control: with few it is not"
    assert few.rows.shape == exact.rows.shape, "and has as many passages all the same"


def test_recall_is_that_of_a_brute_force(corpus: EncodedCorpus) -> None:
    """In the manifest; the oracle counts in float64 and leaves each passage itself out."""
    folder = built(corpus, "IVF8,PQ2x4", candidates=30, nprobe=[1, 2, 8])
    manifest = read_json(folder / "manifest.json")
    assert [row["effort"] for row in manifest["recall"]["measured"]] == [1, 2, 8]
    assert manifest["recall"]["questions"]["count"] == 60
    queries = np.random.default_rng(2).standard_normal((40, D)).astype(np.float32)
    told = measure(corpus, folder, read_index_manifest(folder), Questions(queries, "drawn"), [1, 8], 30, False)
    scores = by_hand(corpus, queries).astype(np.float32)
    for row in told["measured"]:
        index = open_index(corpus, Chosen(folder.name, 30, row["effort"]))
        for k in (1, 10, 100):
            found = index.search(queries, Mapped(corpus), k).rows
            kth = np.sort(scores, axis=1)[:, -k]
            hits = np.mean([scores[q, found[q]] >= kth[q] - 1e-6 for q in range(len(queries))])
            assert row["recall"][str(k)] == pytest.approx(hits, abs=1e-4)
    assert told["measured"][0]["recall"]["10"] < told["measured"][1]["recall"]["10"], "control"
    assert index.recall(30) == told["measured"][1]["recall"]
    assert index.described(31) == {"factory": "IVF8,PQ2x4", "nprobe": 8, "candidates": 31, "recall": None}
    assert open_index(corpus, Chosen(folder.name, 31)).recall(30) is None


def test_recall_at() -> None:
    best = np.array([[5.0, 4, 4, 3], [9, 8, 7, 6]], np.float32)
    assert recall_at(best, best, 4) == 1
    assert recall_at(np.array([[5.0, 4, 3, 3], [9, 7, 6, 5]], np.float32), best, 2) == 0.75
    assert recall_at(np.array([[4.0, 4, 3, 3], [8, 7, 6, 5]], np.float32), best, 1) == 0


def test_an_index_of_other_vectors_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents, folder = vectors(1), tmp_path / "run" / "embeddings" / "c"
    corpus = open_encoded(written(folder, documents))
    place = built(corpus, "SQ8", name="mine")
    open_index(corpus, Chosen("mine"))
    assert [one.problem for one in verify(folder) if "corpus.json" not in one.problem and one.problem] == []
    before = place.joinpath("index.faiss").stat().st_mtime_ns
    assert built(corpus, "SQ8", name="mine", candidates=50) == place
    assert place.joinpath("index.faiss").stat().st_mtime_ns == before, "measured again, not built again"
    assert "was built already" in capsys.readouterr().out
    with pytest.raises(ValueError, match="is an index SQ8; choose another --name"):
        built(corpus, "SQ4", name="mine")
    written(folder, documents, (*GONE, 9))
    changed = open_encoded(folder)
    with pytest.raises(
        ValueError, match=r"of other vectors \(898 passages\) than the corpus has now \(897; .*=SQ8 --name"
    ):
        open_index(changed, Chosen("mine"))
    assert any("index of other vectors" in one.problem for one in verify(folder))
    built(changed, "SQ8", name="mine")
    assert open_index(changed, Chosen("mine")).index.ntotal == 897
    with pytest.raises(FileNotFoundError, match="has no index 'SQ4'; it has mine"):
        open_index(changed, Chosen("SQ4"))
    with pytest.raises(ValueError, match="the name of an index is"):
        open_index(changed, Chosen("../mine"))
    with pytest.raises(ValueError, match=r"--nprobe=4: the index SQ8 has no nprobe; it looks at all vectors"):
        open_index(changed, Chosen("mine", nprobe=4))


def test_a_flipped_byte_and_a_kill_are_noticed(tmp_path: Path) -> None:
    corpus = open_encoded(written(tmp_path / "run" / "embeddings" / "c", vectors(1)))
    place = built(corpus, "IVF8,Flat")
    path = place / "index.faiss"
    good = path.read_bytes()
    path.write_bytes(good[:-20] + bytes([good[-20] ^ 1]) + good[-19:])
    with pytest.raises(ShardError, match=r"index.faiss: damaged .*; build it again"):
        open_index(corpus, Chosen(place.name))
    for folder in (corpus.folder, place):
        assert any("index.faiss: damaged" in one.problem for one in verify(folder))
    path.unlink()
    with pytest.raises(ShardError, match="does not exist"):
        open_index(corpus, Chosen(place.name))
    (place / "manifest.json").unlink()
    path.write_bytes(good[: len(good) // 2])  # as if a job was killed before its manifest was there
    with pytest.raises(FileNotFoundError, match="has no index"):
        open_index(corpus, Chosen(place.name))
    built(corpus, "IVF8,Flat")
    index = open_index(corpus, Chosen(place.name))
    assert index.index.ntotal == corpus.total_rows
    assert not [one.problem for one in verify(place) if one.problem]
    with pytest.raises(ValueError, match="query 1 has a NaN"):
        index.search(np.array([[1.0] * D, [np.nan] * D], np.float32), Mapped(corpus), 1)


def test_the_same_seed_trains_the_same(tmp_path: Path) -> None:
    corpus = open_encoded(written(tmp_path / "run" / "embeddings" / "c", vectors(1)))
    bytes_of = [
        (built(corpus, "IVF8,PQ4x4", name=f"i{seed}{n}", seed=seed, train_vectors=300) / "index.faiss").read_bytes()
        for seed, n in ((0, 0), (0, 1), (1, 0))
    ]
    assert bytes_of[0] == bytes_of[1] != bytes_of[2]


def test_lists_of_vectors_have_none(tmp_path: Path) -> None:
    flat = np.random.default_rng(0).standard_normal((2 * ROWS, D)).astype(np.float32)
    corpus = open_encoded(written(tmp_path / "run" / "embeddings" / "c", Ragged(flat, np.arange(ROWS + 1) * 2)))
    with pytest.raises(ValueError, match=r"another number of vectors for each passage .*; search exactly"):
        built(corpus, "SQ8")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("foo", r"makes no index of it for inner products of 16 numbers \(could not parse index string foo\); strings"),
        ("IVF4,PQ7", "should be a multiple of the number of subquantizers"),
        ("HNSW8_PQ4", "FAISS has no IndexHNSWPQ for inner products"),
        ("NSG16", "an IndexNSGFlat is not taken here"),
        ("IVF4,SQ8,RFlat", "an IndexRefineFlat is not taken"),
        ("IVF0,Flat", "IVF0 must be from IVF1 to IVF16777216"),
        ("IVF99999999999999,Flat", "must be from IVF1"),
        ("IVF64M,Flat", "IVF64M must be from"),
        ("HNSW100000", "must be from HNSW1 to HNSW512"),
        ("", "makes no index"),
    ],
)
def test_a_factory_string_that_is_not_taken(factory: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make_index(factory, D)
    assert "\n" not in str(error.value)


def test_too_few_vectors_to_train_on(tmp_path: Path) -> None:
    corpus = open_encoded(written(tmp_path / "run" / "embeddings" / "c", vectors(1)))
    with pytest.raises(
        ValueError, match=r"needs 1,024 vectors to train on at least, and the corpus has 898: take fewer"
    ):
        built(corpus, "IVF1024,Flat")
    with pytest.raises(ValueError, match=r"needs 256 .*, and the sample has 100: raise --train_vectors"):
        built(corpus, "IVF8,PQ4", train_vectors=100)
    assert not (corpus.folder / "indexes" / "IVF1024,Flat").exists(), "nothing is left behind"
    single = written(tmp_path / "one" / "embeddings" / "c", vectors(1), tuple(range(1, ROWS)))
    with pytest.raises(ValueError, match=r"c has 1 of its passages left: an index needs two at least"):
        built(open_encoded(single), "SQ8")
    with pytest.raises(ValueError, match="--nprobe=9: 1 to 8 are right"):
        built(corpus, "IVF8,Flat", nprobe=[9])
    with pytest.raises(ValueError, match="--ef_search: the index IVF8,Flat has none; it has nprobe"):
        built(corpus, "IVF8,Flat", ef_search=[9])


def test_what_an_index_takes_is_known_beforehand() -> None:
    assert sample_sizes(make_index("HNSW32", D)) == (0, 0, 0)
    assert sample_sizes(make_index("IVF2048,PQ4", D)) == (2048, 39 * 2048, 64 * 2048)
    assert sample_sizes(make_index("IVF4,PQ4", D))[0] == 256
    faiss = pytest.importorskip("faiss")
    for factory in ("HNSW32", "IVF4,PQ4x4", "SQ8"):
        index, data = make_index(factory, D), vectors(1)[:, 0]
        index.train(data)
        empty = len(faiss.serialize_index(index))
        index.add(data)
        each = (len(faiss.serialize_index(index)) - empty) / len(data)
        assert bytes_per_vector(index) == pytest.approx(each, rel=0.1)
    assert effort_of(make_index("PCA8,IVF4,Flat", D)) == ("nprobe", 4)
