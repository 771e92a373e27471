"""Compare encoding from text to verified shards with the model alone:

python bench/encode_pipeline.py --workdir=RUN --corpus=FOLDER_OR_FILE --passages=4096

The model alone gets the same batches of tokens from memory, and vectors are copied to the host. From text, the corpus
is read, checked, tokenized, encoded and written into a new folder, whose digests are all compared again. Both have
compiled programs, and rounds are interleaved. A ratio compares two times of a round, or, on a busy machine, the least
times. A quarter of the corpus is also encoded, because time should grow linearly. On a CPU, the type is exact float32;
elsewhere, the run's settings apply.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))


def seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def from_text(run: Any, corpus: Path, folder: Path, shard_rows: int) -> None:
    """Do everything that `jaxret encode` does, and then open the shards as a search does."""
    from jaxret.data.formats import Corpus
    from jaxret.index.encoding.encode import encode_source
    from jaxret.index.encoding.encode_options import EncodeOptions
    from jaxret.index.shard_set import open_shards
    from jaxret.index.source import inspect_corpus

    source = inspect_corpus(run, Corpus.open(corpus), "error", str(folder / "tokens"), lambda _: None)
    encode_source(run, folder / "shards", source, EncodeOptions(shard_rows=shard_rows), progress=False)
    open_shards(folder / "shards")
    shutil.rmtree(folder)


def alone(run: Any, corpus: Path, shard_rows: int) -> Callable[[], None]:
    """Return a call of the model on tokens in memory, with the same shards."""
    import numpy as np

    from jaxret.data.formats import Corpus

    tokens = run.tokenizer.passages(Corpus.open(corpus).read())
    parts = [
        tokens.take(np.arange(start, min(start + shard_rows, len(tokens))))
        for start in range(0, len(tokens), shard_rows)
    ]
    embedder = run.embedder()

    def encode() -> None:
        for _ in embedder.stream(iter(parts), "passage"):
            pass

    return encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", required=True, help="a run, as `jaxret open` makes one")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--passages", type=int, default=4096)
    parser.add_argument("--shard_rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    import numpy as np

    from jaxret.data.formats import Corpus, write_beir
    from jaxret.parallel.memory import keep_freed_memory
    from jaxret.runs.run import open_run

    keep_freed_memory()
    run, rows = open_run(arguments.workdir), arguments.shard_rows
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        whole, quarter = folder / "whole", folder / "quarter"
        for path, step in ((whole, 1), (quarter, 4)):  # every fourth passage, so that tokens are a quarter, too
            write_beir(path, islice(Corpus.open(arguments.corpus).read(), 0, arguments.passages, step), [], {})
        acts = {
            "the model alone": alone(run, whole, rows),
            "from text to verified shards": lambda: from_text(run, whole, folder / "out", rows),
            "a quarter of it": lambda: from_text(run, quarter, folder / "out", rows),
        }
        for act in acts.values():  # the first call compiles
            act()
        took: dict[str, list[float]] = {name: [] for name in acts}
        for _ in range(arguments.rounds):
            for name, act in acts.items():
                took[name].append(seconds(act))
    print(
        f"{arguments.passages:,} passages of {arguments.corpus}, {rows} a shard, medians of {arguments.rounds} rounds"
    )
    for name, each in took.items():
        print(f"{name}: {np.median(each):.2f} s, from {min(each):.2f} to {max(each):.2f}")
    model, text, part = (np.array(each) for each in took.values())
    for what, ratio, least, limit in (
        ("the model alone / from text", model / text, model.min() / text.min(), "at least 0.9"),
        ("all of it / a quarter", text / part, text.min() / part.min(), "at most 4.1"),
    ):
        print(f"{what}: median {np.median(ratio):.3f}, of the least times {least:.3f} ({limit})")


if __name__ == "__main__":
    main()
