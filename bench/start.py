"""Measure how long training takes to start, and its memory: python bench/start.py --folder=/tmp/start

Draws a training set (500,000 queries, 8,841,823 passages of 60 tokens on average, 200 hard negatives for each query)
directly into a store, because no text of that size is available; then starts a run with it in a new process, which
trains ten steps, and prints its seconds and its peak of anonymous memory. The encoder is a small random BERT (2 layers,
64 wide) with MiniLM's tokenizer, because the data is measured. --cold first removes the store from the system's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

QUERY_LENGTH, PASSAGE_LENGTH, BLOCK = 32, 128, 1 << 16


def make_config(folder: Path) -> Any:
    """Return the config of the run: ten steps of 32 queries with 8 passages each, in one shape."""
    import jax

    from jaxret.configs.minilm import get_config
    from jaxret.data.formats import write_beir
    from jaxret.data.records import Judgement, Passage, Query
    from jaxret.data.tokens.tokenizer import TOKENIZER_FILES
    from jaxret.models.encoders.architectures.bert import BertConfig
    from jaxret.models.encoders.pretrained import resolve_encoder, save_pretrained
    from jaxret.models.retriever_model import make_retriever_model

    config = get_config("dual_encoder")
    source, encoder = resolve_encoder(config.encoder.checkpoint), folder / "encoder"
    config.encoder.checkpoint, config.encoder.sha256 = str(encoder), ""
    config.tokens.query_length, config.tokens.passage_length = QUERY_LENGTH, PASSAGE_LENGTH
    config.tokens.length_multiple = PASSAGE_LENGTH
    config.data.train, config.data.dev, config.data.store = str(folder / "data"), "", str(folder / "stores")
    config.data.negatives, config.train.batch_size, config.train.chunk_size = 7, 32, 0
    config.train.steps, config.train.log_every, config.train.checkpoint_every = 10, 5, 10
    if not encoder.exists():
        bert = BertConfig(30522, 64, 2, 4, 128, 512)
        save_pretrained(encoder, bert, make_retriever_model(config, bert).init(jax.random.key(0))["encoder"])
        for name in filter(lambda name: (source / name).exists(), TOKENIZER_FILES):
            shutil.copyfile(source / name, encoder / name)
        write_beir(folder / "data", [Passage("0", "drawn")], [Query("0", "drawn")], {"train": [Judgement("0", "0", 1)]})
    return config


def draw(folder: Path, queries: int, passages: int, negatives: int) -> None:
    """Write the store that `folder/data` would have with so much text."""
    import numpy as np

    from jaxret.data.tokens.store import ColumnWriter, StringsBuilder, open_or_make_store, store_root
    from jaxret.data.tokens.tokenized import ExampleSource
    from jaxret.data.tokens.tokenizer import TextTokenizer
    from jaxret.types import Ragged

    config, random = make_config(folder), np.random.default_rng(0)
    tokenizer = TextTokenizer.load(folder / "encoder", QUERY_LENGTH, PASSAGE_LENGTH)

    def texts(count: int, mean: int, limit: int) -> Iterator[Ragged]:
        for start in range(0, count, BLOCK):
            lengths = np.clip(random.normal(mean, mean / 3, min(BLOCK, count - start)), 3, limit).astype(np.int64)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            yield Ragged(random.integers(1000, 30000, offsets[-1], dtype=np.int32), offsets)

    def hard(count: int) -> Iterator[Ragged]:
        for start in range(0, count, BLOCK):
            rows = min(BLOCK, count - start)
            drawn = random.integers(0, passages, rows * negatives, dtype=np.int32)
            yield Ragged(drawn, np.arange(rows + 1) * negatives)

    def make(writer: ColumnWriter) -> dict[str, Any]:
        writer.ragged("queries", texts(queries, 10, QUERY_LENGTH))
        writer.ragged("passages", texts(passages, 60, PASSAGE_LENGTH))
        positives = random.integers(0, passages, queries, dtype=np.int32)
        writer.array("positives", positives)
        writer.array("known_positives", np.arange(queries, dtype=np.int32))
        writer.ragged("known_positive_sets", [Ragged(positives, np.arange(queries + 1))])
        writer.ragged("negatives", hard(queries))
        writer.strings("query_ids", StringsBuilder(map(str, range(queries))).strings())
        return {"digest": f"drawn {queries} {passages} {negatives}", "truncations": [], "report": ""}

    begin = time.perf_counter()
    source = ExampleSource(config.data.train, config.data.train_split, config.data.on_error)
    open_or_make_store(source.origin(tokenizer), store_root(config.data.store), make, print)
    print(f"drawn, written and digested in {time.perf_counter() - begin:.0f} s")


def drop(folder: Path) -> None:
    """Remove the files of the stores from the system's memory."""
    for path in (folder / "stores").rglob("*.npy"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def start(folder: Path, began: float) -> None:
    """Start a run, and print its seconds since `began`, when this process was started, and its memory."""
    peak = {"RssAnon": 0, "VmRSS": 0}

    def watch() -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            for name in peak:
                peak[name] = max(peak[name], int(re.search(rf"{name}:\s*(\d+)", status)[1]))  # type: ignore[index]
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()
    from jaxret.training import loop
    from jaxret.training.tasks import RETRIEVAL, TASKS

    seconds: dict[str, float] = {}
    before: dict[str, int] = {}
    step = loop.Trainer.batch

    def reading(job: Any) -> Any:
        begin = time.time()
        try:
            return RETRIEVAL.read_data(job)
        finally:
            seconds["data"] = time.time() - begin

    def first(self: Any, number: int) -> Any:
        seconds.setdefault("steps", time.time() - began)
        before.update({name: before.get(name, kib) for name, kib in peak.items()})
        return step(self, number)

    TASKS["retrieval"] = replace(RETRIEVAL, read_data=reading)
    loop.Trainer.batch = first  # type: ignore[method-assign, assignment]
    loop.train(make_config(folder), folder / "run")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    print(
        f"data: {seconds['data']:.1f} s of the start; from the process's start to the first batch: "
        f"{seconds['steps']:.1f} s"
    )
    print(
        f"ten steps and a checkpoint later {time.time() - began:.1f} s; the last 5 steps took "
        f"{lines[-1]['seconds_per_step']:.3f} s each, data_wait {lines[-1]['data_wait']:.3f}"
    )
    for what, memory_by_kind in (("up to the first batch", before), ("over all", peak)):
        anonymous, mapped = memory_by_kind["RssAnon"] / 2**20, memory_by_kind["VmRSS"] / 2**20
        print(f"peak memory {what}: {anonymous:.2f} GiB anonymous; with mapped files {mapped:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the store and the run (3.5 GB)")
    parser.add_argument("--queries", type=int, default=500_000)
    parser.add_argument("--passages", type=int, default=8_841_823)
    parser.add_argument("--negatives", type=int, default=200)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.began:
        start(arguments.folder, arguments.began)
        return
    draw(arguments.folder, arguments.queries, arguments.passages, arguments.negatives)
    shutil.rmtree(arguments.folder / "run", ignore_errors=True)
    if arguments.cold:
        drop(arguments.folder)
    subprocess.run([sys.executable, __file__, f"--folder={arguments.folder}", f"--began={time.time()}"], check=True)


if __name__ == "__main__":
    main()
