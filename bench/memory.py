"""Peak memory of encoding against the size of the corpus: python bench/memory.py --corpus=FOLDER --sizes=5000,50000

Encodes the first passages of a corpus in a process of its own for each size and prints its peak resident memory, and
that without mapped files. The encoder is a small random BERT (2 layers, 64 wide) with MiniLM's tokenizer, because what
could grow is the data, not the model; --weights=minilm takes the real one. Without --corpus passages are drawn, as many
as asked for: a .jsonl.gz that is read as a stream (--sizes=50000,5000000 takes half an hour or more on two cores).
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from jaxret.data.records import Passage  # noqa: E402

SHARD_ROWS = 2500


def drawn(size: int) -> Iterator[Passage]:
    """Passages of 5 to 60 words, the same ones every time."""
    words = np.array([f"word{i}" for i in range(5000)])
    for start in range(0, size, 1000):
        random = np.random.default_rng(start)
        for number in range(start, min(start + 1000, size)):
            yield Passage(f"p{number}", " ".join(random.choice(words, int(random.integers(5, 61)))))


def write_stream(path: Path, passages: Iterable[Passage]) -> Path:
    with gzip.open(path, "wt", compresslevel=1) as file:
        for passage in passages:
            file.write(json.dumps({"_id": passage.id, "title": passage.title, "text": passage.text}) + "\n")
    return path


def watch(own: list[int]) -> None:
    """Notes the most MiB that are the process's own: without the pages of mapped files, which the system takes back."""
    while True:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        own[0] = max(own[0], int(status["RssAnon"].split()[0]) // 1024)
        time.sleep(0.05)


def encode(corpus: str, workdir: Path, size: int, weights: str) -> None:
    """Encodes the first `size` passages and prints the peak memory of this process."""
    import shutil

    import jax

    from jaxret.configs.minilm import get_config
    from jaxret.data.formats import read_corpus
    from jaxret.data.tokens.tokenizer import TOKENIZER_FILES
    from jaxret.index.encode import encode_corpus
    from jaxret.index.encode_options import EncodeOptions
    from jaxret.models.encoders.bert import BertConfig
    from jaxret.models.encoders.pretrained import resolve_encoder, save_pretrained
    from jaxret.models.retriever import build_retriever_model
    from jaxret.runs.run import open_run
    from jaxret.training.loop import train

    config = get_config("as_it_comes")
    config.tokens.passage_length = 64
    config.encode.shard_rows = SHARD_ROWS
    if weights == "random":
        source = resolve_encoder(config.encoder.checkpoint)
        bert = BertConfig(30522, 64, 2, 4, 128, 512)
        config.encoder.checkpoint, config.encoder.sha256 = str(workdir / "small"), ""
        save_pretrained(workdir / "small", bert, build_retriever_model(config, bert).init(jax.random.key(0))["encoder"])
        for name in filter(lambda name: (source / name).exists(), TOKENIZER_FILES):
            shutil.copyfile(source / name, workdir / "small" / name)
    passages = islice(read_corpus(corpus), size) if corpus else drawn(size)
    texts = write_stream(workdir / "corpus.jsonl.gz", passages)
    passage = next(read_corpus(texts))
    from jaxret.data.formats import write_dpr_examples
    from jaxret.data.records import Example, Query

    write_dpr_examples(workdir / "one.json", [Example(Query("0", "a question"), (passage,))])
    config.data.train = str(workdir / "one.json")
    train(config, workdir / "run", progress=False)
    run = open_run(workdir / "run")
    begin = time.perf_counter()
    own = [0]
    threading.Thread(target=watch, args=(own,), daemon=True).start()
    result = encode_corpus(run, texts, options=EncodeOptions(store=str(workdir / "tokens")), progress=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{result.passages:,} passages in {result.shards} shards: peak {peak:.0f} MiB", end="")
    print(f", {own[0]:.0f} of its own, {time.perf_counter() - begin:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="", help="BEIR folder, corpus.jsonl or psgs.tsv; default: drawn")
    parser.add_argument("--sizes", default="5000,50000")
    parser.add_argument("--weights", default="random", choices=["random", "minilm"])
    parser.add_argument("--one", type=int, default=0, help=argparse.SUPPRESS)  # the inner process
    arguments = parser.parse_args()
    if arguments.one:
        with tempfile.TemporaryDirectory() as folder:
            encode(arguments.corpus, Path(folder), arguments.one, arguments.weights)
        return
    for size in arguments.sizes.split(","):
        command = [sys.executable, __file__, f"--corpus={arguments.corpus}", f"--weights={arguments.weights}"]
        subprocess.run([*command, f"--one={size}"], check=True, cwd=REPOSITORY)


if __name__ == "__main__":
    main()
