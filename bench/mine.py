"""Measure the peak memory of mining for several numbers of queries: python bench/mine.py --queries=2000,20000,500000

For each size, writes passages, queries and a file of rankings, mines from it in a new process, and prints the output of
the command, its time and its peak memory. The texts are random words. 500,000 queries take a file of 3 GB and twenty
minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.as_it_comes import run

WORDS, PASSAGE, QUERY = 2000, 60, 8  # the number of different words; words per text


def write(folder: Path, passages: int, queries: int, depth: int) -> None:
    """Write a BEIR folder in which each query has one positive, and rankings.trec."""
    random = np.random.default_rng(0)

    def text(words: int) -> str:
        return " ".join(f"w{number}" for number in random.integers(0, WORDS, words))

    (folder / "qrels").mkdir()
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for number in range(passages):
            file.write(json.dumps({"_id": f"p{number}", "title": "", "text": text(PASSAGE)}) + "\n")
    order = random.permutation(passages)
    ranks = [f"{rank + 1} {depth - rank} made" for rank in range(depth)]
    with (
        open(folder / "queries.jsonl", "w", encoding="utf-8") as query_file,
        open(folder / "qrels" / "train.tsv", "w", encoding="utf-8") as judgement_file,
        open(folder / "rankings.trec", "w", encoding="utf-8") as ranking_file,
    ):
        judgement_file.write("query-id\tcorpus-id\tscore\n")
        for number in range(queries):
            query_file.write(json.dumps({"_id": f"q{number}", "text": text(QUERY)}) + "\n")
            judgement_file.write(f"q{number}\tp{number % passages}\t1\n")
            row_numbers = order[(random.integers(passages) + np.arange(depth)) % passages].tolist()
            ranking_file.writelines(f"q{number} Q0 p{p} {rank}\n" for p, rank in zip(row_numbers, ranks, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", default="2000,20000", help="how many, a size after the other")
    parser.add_argument("--passages", type=int, default=20_000)
    parser.add_argument("--depth", type=int, default=200, help="passages that a ranking has")
    parser.add_argument("--keep", type=int, default=8, help="negatives of a query")
    parser.add_argument("--folder", help="where there is room; default: that of temporary files")
    arguments = parser.parse_args()
    for size in map(int, arguments.queries.split(",")):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
            folder = Path(temporary)
            write(folder, arguments.passages, size, arguments.depth)
            data = [f"--data={folder}", f"--corpus={folder}", f"--pool={folder / 'rankings.trec'}"]
            run(["mine", *data, f"--out={folder / 'mined.jsonl.zst'}", f"--keep={arguments.keep}"])


if __name__ == "__main__":
    main()
