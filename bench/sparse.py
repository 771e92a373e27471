"""Compare exact search of sparse vectors with a plain product of scipy, and with Seismic and its recall:

python bench/sparse.py --rows=20000,100000

Words of passages and queries are drawn by Zipf's law, with weights and numbers of words like those of SPLADE on MS
MARCO (119 per passage, 43 per query). All systems use the same vectors and are opened once; each round runs the peer,
then our backends, then Seismic. Only scores are compared with the peer's, because it returns any of several rows with
equal scores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.rounds import Results, add_json_flag, can_import, timed  # noqa: E402
from jaxret.search.approximate.seismic_build import quiet_output  # noqa: E402
from jaxret.search.approximate.seismic_index import SeismicIndex, seismic_library  # noqa: E402
from jaxret.search.backends.sparse_scipy import as_csr  # noqa: E402
from jaxret.search.proof import recall_at  # noqa: E402
from jaxret.search.vectors.inverted_lists import InvertedLists, sparse_backend, sparse_norms  # noqa: E402
from jaxret.types import SparseRows  # noqa: E402
from tests.tiny import SparseBlocks  # noqa: E402

VOCABULARY = 30_522
PASSAGE_WORDS, QUERY_WORDS = 119, 43
PARAMETERS = ("query_cut=10,heap_factor=0.7", "query_cut=10,heap_factor=0.9", "query_cut=30,heap_factor=1.0")


class Passages(SparseBlocks):
    """A corpus in memory, without files that could change."""

    ragged = False

    def require_unwritten(self, rows: np.ndarray) -> None:
        pass


def random_rows(count: int, words: int, random: np.random.Generator) -> SparseRows:
    """Return rows of about `words` different words each, drawn by Zipf's law, with weights from 0 to 3."""
    chances = 1 / np.arange(20, VOCABULARY + 20)
    drawn = random.choice(VOCABULARY, (count, words), p=chances / chances.sum())
    rows = [np.unique(row) for row in drawn]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    weights = np.log1p(random.gamma(1.0, 2.0, offsets[-1])).astype(np.float32)
    return SparseRows(np.concatenate(rows).astype(np.uint16), weights, offsets.astype(np.int64), VOCABULARY)


def peer(passages: SparseRows) -> Callable[[SparseRows, int], np.ndarray]:
    """Return a search by one product of scipy in float32 and a partial sort; its result is not proven."""
    lists = as_csr(passages).astype(np.float32).T.tocsr()

    def search(queries: SparseRows, k: int) -> np.ndarray:
        scores = (as_csr(queries).astype(np.float32) @ lists).toarray()
        rows = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        return -np.sort(-np.take_along_axis(scores, rows, axis=1), axis=1)

    return search


def seismic(passages: SparseRows) -> SeismicIndex:
    """Return an index of Seismic with its own settings."""
    library = seismic_library()
    data = library.SeismicDataset(dim=VOCABULARY)
    ids = [str(row) for row in range(len(passages))]
    data.add_documents_by_id(ids, passages.words.astype(np.int64), passages.weights, passages.offsets)
    with quiet_output():
        index = library.SeismicIndex.build_from_dataset(data)
    return SeismicIndex(index, "seismic", float(sparse_norms(passages).max()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="20000", help="of the corpus, or of several")
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backends", default="scipy,xla")
    add_json_flag(parser)
    arguments = parser.parse_args()
    results = Results(arguments.json)
    random, k = np.random.default_rng(0), arguments.k
    queries = random_rows(arguments.queries, QUERY_WORDS, random)
    for count in map(int, arguments.rows.split(",")):
        passages = random_rows(count, PASSAGE_WORDS, random)
        corpus: Any = Passages([passages])
        bare = peer(passages)
        systems: dict[str, Callable[[], Any]] = {"scipy's product": partial(bare, queries, k)}
        for name in arguments.backends.split(","):
            lists = InvertedLists(corpus, True, sparse_backend(name))
            systems[f"exact, {name}"] = partial(lists.search, queries, k)
        if can_import("seismic"):
            index = seismic(passages)
            for text in PARAMETERS:
                one = SeismicIndex(index.index, index.factory, index.largest_norm, text)
                systems[f"seismic, {text}"] = partial(one.search, queries, corpus, k)
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        recalls: dict[str, float] = {}
        for number in range(arguments.rounds + 1):
            results.calibrate()
            for name, run in systems.items():
                result, elapsed = timed(run)
                if number:  # the first round compiles
                    seconds[name].append(elapsed)
                scores = result if isinstance(result, np.ndarray) else result.scores
                if name.startswith("scipy"):
                    best = scores
                elif name.startswith("exact"):
                    np.testing.assert_allclose(scores, best, rtol=1e-5)
                recalls[name] = recall_at(scores * (1 + 1e-6), best, k)
        print(
            f"{count:,} passages of {passages.word_counts.mean():.0f} words, {len(queries)} queries, k={k}", flush=True
        )
        of_peer = seconds["scipy's product"]
        for name, times in seconds.items():
            ratios = f"{median(times) / median(of_peer):.2f} times, the least of each {min(times) / min(of_peer):.2f}"
            print(
                f"  {name:<40} {1000 * median(times) / len(queries):8.3f} ms per query, {ratios}; "
                f"recall {recalls[name]:.3f}"
            )
        ours = {name: times for name, times in seconds.items() if name.startswith("exact")}
        peers = {name: times for name, times in seconds.items() if name not in ours}
        results.add(f"{len(queries)} queries, {count} passages, k={k}", ours, peers)
    results.write()


if __name__ == "__main__":
    main()
