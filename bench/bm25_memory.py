"""Measure the memory and time of building a BM25 index of growing corpora: python bench/bm25_memory.py --corpus=FOLDER

Each corpus repeats the passages of --corpus with other ids, and is indexed in a new process. Private memory excludes
the pages of mapped files, which the system takes back when it needs them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from jaxret.data.formats import Corpus
from jaxret.data.records import Passage
from jaxret.search.bm25_index import write_bm25_index
from jaxret.search.bm25_settings import BM25Settings


def private_bytes() -> int:
    """Return the private memory of this process now (Linux)."""
    kilobytes = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert kilobytes is not None
    return 1024 * int(kilobytes[1])


def repeated(corpus: str, times: int) -> Iterator[Passage]:
    """Yield the passages of a corpus several times, with new ids."""
    for number in range(times):
        for passage in Corpus.open(corpus).read():
            yield replace(passage, id=f"{passage.id}-{number}")


def measure(corpus: str, times: int) -> None:
    """Build an index, and print a row of a table."""
    peak, done = [private_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak[0] = max(peak[0], private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_bm25_index(Path(folder), repeated(corpus, times), BM25Settings())
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
        passages = (Path(folder) / "ids.txt").read_bytes().count(b"\n")
        size = sum((Path(folder) / f"{name}.csc.index.npy").stat().st_size for name in ("data", "indices"))
    print(f"| {passages:,} | {size / 2**20:,.0f} MiB | {peak[0] / 2**20:,.0f} MiB | {seconds:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--times", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--one", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.corpus, arguments.one)
        return
    for times in arguments.times:
        command = [sys.executable, __file__, f"--corpus={arguments.corpus}", f"--one={times}"]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
