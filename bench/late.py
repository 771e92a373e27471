"""Compare late interaction with a plain blocked product with maxima: python bench/late.py --documents=4000

The lists of vectors are random (or, with --embeddings, from an encoded corpus: runs/RUN/embeddings/NAME), and all
systems open them once. Each round runs numpy's product, torch's if it is installed (on GPU 0 if there is one), and then
ours, so that the machine is the same for all. Our exact rankings are compared with numpy's, and differences must be
ties within float32; for candidates, the recall is printed. Prints medians, the least times, and ratios to the faster
peer.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.rounds import Results, add_json_flag, can_import, timed  # noqa: E402

BLOCK = 65_536  # vectors that torch multiplies at a time
TILE = 1_024  # vectors that numpy multiplies at a time: with 1,024 query vectors, 4 MiB of products

Ranking = tuple[np.ndarray, np.ndarray]  # scores and rows [Q,k]
System = Callable[[Any, int], Any]


def best(scores: np.ndarray, k: int) -> Ranking:
    rows = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    rows = np.take_along_axis(rows, np.argsort(-np.take_along_axis(scores, rows, axis=1), axis=1), axis=1)
    return np.take_along_axis(scores, rows, axis=1), rows


def numpy_peer(passages: Any) -> System:
    """Return a search by numpy: a tile of passages x all query vectors, the maxima over each passage, the sums over
    each query."""
    starts = np.searchsorted(passages.offsets, np.arange(0, len(passages.flat) + TILE, TILE))
    bounds = np.unique(np.minimum(starts, len(passages)))

    def run(queries: Any, k: int) -> Ranking:
        scores = np.empty((len(queries), len(passages)), np.float32)
        for start, stop in pairwise(bounds):
            part = passages.part(start, stop)
            maxima = np.maximum.reduceat(queries.flat @ part.flat.T, part.offsets[:-1], axis=1)
            scores[:, start:stop] = np.add.reduceat(maxima, queries.offsets[:-1], axis=0)
        return best(scores, k)

    return run


def torch_peer(passages: Any) -> System:
    """Return a search like `numpy_peer`, with passages in order of their lengths, padded in blocks."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    order = np.argsort(passages.lengths, kind="stable")
    blocks, start = [], 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * passages.lengths[order[stop]] <= BLOCK:
            stop += 1
        vectors, mask = passages.padded(order[start:stop], int(passages.lengths[order[stop - 1]]))
        blocks.append((torch.from_numpy(vectors).to(device), torch.from_numpy(~mask).to(device)))
        start = stop

    def run(queries: Any, k: int) -> Ranking:
        query_vectors = torch.from_numpy(queries.flat).to(device)
        owner = torch.from_numpy(np.repeat(np.arange(len(queries)), queries.lengths)).to(device)
        block_scores = []
        for vectors, absent in blocks:
            products = (query_vectors @ vectors.reshape(-1, vectors.shape[-1]).T).reshape(
                len(query_vectors), *absent.shape
            )
            maxima = products.masked_fill_(absent, -torch.inf).amax(dim=-1)
            sums = torch.zeros((len(queries), maxima.shape[1]), device=device)
            block_scores.append(sums.index_add_(0, owner, maxima))
        scores, positions = torch.cat(block_scores, dim=1).topk(k, dim=1)
        return scores.cpu().numpy(), order[positions.cpu().numpy()]

    return run


def ours(name: str, passages: Any) -> System:
    """Return a search by xla, xla:PRECISION, or candidates (mean:N, muvera:N), with the passages in memory, as in an
    Index."""
    from jaxret.search.approximate.candidates import CandidateGenerator
    from jaxret.search.backends.select import select_backend
    from jaxret.search.search_options import parse_candidates
    from jaxret.search.vectors.exact import search
    from jaxret.search.vectors.in_memory import InMemoryCorpus
    from jaxret.search.vectors.self_check import self_check
    from jaxret.search.vectors.vector_corpus import BlockCorpus

    class Named(BlockCorpus):
        def ids(self, indices: Any) -> list[str]:
            return [str(row) for row in indices]

    kept = InMemoryCorpus(Named([passages]), passages)
    if not name.startswith("xla"):
        proposer = CandidateGenerator.open(kept, parse_candidates(name), select_backend("auto"), many=True)
        return lambda queries, k: proposer(queries, kept, k)
    backend = select_backend("xla", multi_vector=True, precision=name.partition(":")[2] or "float32")
    self_check(backend, multi_vector=True)
    print(f"{name}: {backend.description}", flush=True)
    return lambda queries, k: search(queries, kept, k, backend)


def agree(ranking: Ranking, expected: Ranking, name: str) -> None:
    np.testing.assert_allclose(ranking[0], expected[0], atol=1e-5 * np.abs(expected[0]).max(), err_msg=name)
    if (differ := (ranking[1] != expected[1]).mean()) > 0.01:
        raise AssertionError(f"{differ:.1%} of the ids of {name} differ from numpy's")


def random_lists(count: int, least: int, most: int, dimension: int, random: np.random.Generator) -> Any:
    from jaxret.types import Ragged

    offsets = np.concatenate([[0], np.cumsum(random.integers(least, most + 1, count))])
    flat = random.standard_normal((int(offsets[-1]), dimension), dtype=np.float32)
    return Ragged(flat / np.linalg.norm(flat, axis=1, keepdims=True), offsets)


def stored_lists(folder: str) -> Any:
    from jaxret.index.encoded_corpus import open_encoded
    from jaxret.search.vectors.in_memory import hold_in_memory

    kept: Any = hold_in_memory(open_encoded(folder))
    return next(iter(kept))[1]


def near(passages: Any, count: int, length: int, random: np.random.Generator) -> Any:
    """Draw queries near passages: some vectors of one passage each, slightly moved."""
    from jaxret.types import Ragged

    rows = random.integers(0, len(passages), count)
    vectors = [passages[row][random.integers(0, len(passages[row]), length)] for row in rows]
    flat = np.concatenate(vectors) + 0.05 * random.standard_normal((count * length, passages.flat.shape[1]))
    return Ragged(flat.astype(np.float32), np.arange(count + 1) * length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--embeddings", help="folder of an encoded corpus of lists of vectors, for random ones")
    parser.add_argument("--vectors", type=int, default=100, help="of a passage at most; a third of that at least")
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--queries", default="1,64", help="how many at a time")
    parser.add_argument("--query_vectors", type=int, default=32)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", default="xla,xla:int8,mean:100,muvera:100")
    add_json_flag(parser)
    arguments = parser.parse_args()
    results = Results(arguments.json)

    from jaxret.parallel.memory import keep_freed_memory

    keep_freed_memory()
    random = np.random.default_rng(0)
    if arguments.embeddings:
        passages = stored_lists(arguments.embeddings)
    else:
        vectors = arguments.vectors
        passages = random_lists(arguments.documents, vectors // 3, vectors, arguments.dimension, random)
    peers = {"numpy": numpy_peer(passages)}
    if can_import("torch"):
        peers["torch"] = torch_peer(passages)
    systems = {name: ours(name, passages) for name in arguments.systems.split(",")}
    print(f"{len(passages):,} passages of {passages.lengths.mean():.0f} x {passages.flat.shape[1]}")
    for count in map(int, arguments.queries.split(",")):
        queries = near(passages, count, arguments.query_vectors, random)
        seconds = compare(peers, systems, queries, arguments.k, arguments.rounds, results)
        of_peers = {name: seconds.pop(name) for name in peers}
        shape = f"{len(passages)} lists of {passages.lengths.mean():.0f} x {passages.flat.shape[1]}"
        results.add(f"{count} queries of {arguments.query_vectors}, {shape}, k={arguments.k}", seconds, of_peers)
    results.write()
    print(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of host memory")


def compare(
    peers: dict[str, System], systems: dict[str, System], queries: Any, k: int, rounds: int, results: Results
) -> dict[str, list[float]]:
    """Print the times of all systems, and return the seconds of each round."""
    seconds: dict[str, list[float]] = {name: [] for name in (*peers, *systems)}
    notes: dict[str, str] = {}
    for number in range(rounds + 1):
        expected: Ranking | None = None
        results.calibrate()
        for name, run in (*peers.items(), *systems.items()):
            result, elapsed = timed(partial(run, queries, k))
            ranking = result if name in peers else (result.scores, result.rows)
            expected = expected or ranking
            if name in systems:
                shared = [np.isin(a, b).mean() for a, b in zip(expected[1], ranking[1], strict=True)]
                scored = result.scored_pairs / len(queries)
                notes[name] = f"; recall {np.mean(shared):.3f}, {scored:.0f} scored exactly, rounds {result.rounds}"
            if name in peers or name.startswith("xla"):
                agree(ranking, expected, name)
            if number:  # the first round compiles
                seconds[name].append(elapsed)
    peer = min(peers, key=lambda name: np.median(seconds[name]))
    print(f"{len(queries)} queries of {len(queries.flat)} vectors, k={k}, {rounds} rounds; the faster peer is {peer}")
    for name, values in seconds.items():
        ratios = [f(values) / f(seconds[peer]) for f in (np.median, np.min)]
        print(
            f"  {name:<14} median {np.median(values):.4f} s, least {np.min(values):.4f} s: "
            f"{ratios[0]:.2f} and {ratios[1]:.2f} times the peer{notes.get(name, '')}",
            flush=True,
        )
    return seconds


if __name__ == "__main__":
    main()
