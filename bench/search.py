"""Compare exact search with a bare FAISS flat index, on the same vectors: python bench/search.py --rows=200000,400000

The vectors are random, and both sides open them once; each round runs the peer and then every backend of ours, so that
the machine is the same for all. Ids are compared, and differences must be ties within float32. Prints medians and
ratios to the peer, and those of the least times, which a busy machine changes least. With GPUs, the peer is a flat
index on GPU 0, and XLA's precisions are also of interest: --backends=xla,xla:bfloat16,xla:int8.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.rounds import Results, add_json_flag, timed  # noqa: E402


def peer(passages: Any) -> Any:
    """Return FAISS's flat index with default settings, except the number of queries from which it uses BLAS: this value
    is its fastest."""
    import faiss

    faiss.cvar.distance_compute_blas_threshold = 20
    index: Any = faiss.IndexFlatIP(passages.shape[1])
    if getattr(faiss, "get_num_gpus", int)():
        index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index)
    index.add(passages)
    return index


def ours(name: str, passages: Any) -> Callable[[Any, int], Any]:
    """Return a search by a backend, or backend:precision, with the passages in memory, as in an Index."""
    from jaxret.search.backends.select import select_backend, with_many_searches
    from jaxret.search.vectors.exact import search
    from jaxret.search.vectors.in_memory import InMemoryCorpus
    from jaxret.search.vectors.self_check import self_check
    from jaxret.search.vectors.vector_corpus import BlockCorpus

    class Named(BlockCorpus):
        def ids(self, indices: Any) -> list[str]:
            return [str(row) for row in indices]

    where, _, precision = name.partition(":")
    backend = with_many_searches(select_backend(where, precision=precision or "float32"))
    self_check(backend)
    vectors = passages[:, None]
    kept = InMemoryCorpus(Named([vectors]), vectors)
    print(f"{name}: {backend.description}", flush=True)
    return lambda queries, k: search(queries, kept, k, backend)


def agree(result: Any, scores: Any, rows: Any) -> None:
    """Require that the peer's ranking is ours, except for ties within float32."""
    import numpy as np

    np.testing.assert_allclose(result.scores, scores, atol=1e-5 * np.abs(scores).max())
    differ = result.rows != rows
    if differ.mean() > 0.01:
        raise AssertionError(f"{differ.mean():.1%} of the ids differ from the peer's")


Seconds = dict[tuple[str, int], list[float]]  # the time of every round, by system and rows


def report(k: int, rows: int, first: int, seconds: Seconds, notes: dict[tuple[str, int], str]) -> None:
    """Print every system's time for a corpus, with ratios to the peer and to its time for the first corpus."""
    from statistics import median

    of_peer = seconds["peer", rows]
    print(f"k={k}, {rows:,} rows: FAISS flat {median(of_peer):.4f} s, at least {min(of_peer):.4f} s")
    for (name, size), times in seconds.items():
        if size != rows or (name == "peer" and rows == first):
            continue
        line = f"  {name:<14} {median(times):.4f} s"
        if name != "peer":
            ratio, of_least = median(times) / median(of_peer), min(times) / min(of_peer)
            line += f", {ratio:.2f} times the peer (the least of each: {of_least:.2f}; {notes[name, rows]})"
        if rows != first:
            line += f", {median(times) / median(seconds[name, first]):.2f} times its time for {first:,} rows"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="200000", help="of the corpus, or of several")
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--queries", type=int, default=512)
    parser.add_argument("--k", default="10,100,1000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backends", default="faiss-cpu,xla")
    add_json_flag(parser)
    arguments = parser.parse_args()
    results = Results(arguments.json)
    import numpy as np

    from jaxret.parallel.memory import keep_freed_memory

    keep_freed_memory()
    sizes = [int(rows) for rows in arguments.rows.split(",")]
    random = np.random.default_rng(0)
    passages = random.standard_normal((max(sizes), arguments.dimension), dtype=np.float32)
    passages /= np.linalg.norm(passages, axis=1, keepdims=True)
    queries = random.standard_normal((arguments.queries, arguments.dimension), dtype=np.float32)
    names = arguments.backends.split(",")
    corpora = {rows: (peer(passages[:rows]), {name: ours(name, passages[:rows]) for name in names}) for rows in sizes}
    print(f"{arguments.queries} queries on {arguments.rows} x {arguments.dimension}, {arguments.rounds} rounds")
    for k in map(int, arguments.k.split(",")):
        seconds: Seconds = {}
        notes = {}
        for number in range(arguments.rounds + 1):
            results.calibrate()
            for rows, (index, systems) in corpora.items():
                (scores, rows_of_peer), elapsed = timed(partial(index.search, queries, k))
                round_times = {"peer": elapsed}
                for name, run in systems.items():
                    result, round_times[name] = timed(partial(run, queries, k))
                    agree(result, scores, rows_of_peer)
                    each = result.scored_pairs / len(queries)
                    notes[name, rows] = f"{each:.0f} scored exactly, rounds {result.rounds}"
                for name, value in round_times.items() if number else ():  # the first round compiles
                    seconds.setdefault((name, rows), []).append(value)
        for rows in sizes:
            report(k, rows, sizes[0], seconds, notes)
            case = f"{len(queries)} queries, {rows} x {arguments.dimension}, k={k}"
            ours_seconds = {name: seconds[name, rows] for name in names}
            results.add(case, ours_seconds, {"FAISS flat": seconds["peer", rows]})
    results.write()
    print(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of host memory")


if __name__ == "__main__":
    main()
