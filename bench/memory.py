"""Measure the peak memory of jaxret's commands by the size of the corpus: python bench/memory.py --sizes=100000,1000000

Draws passages of 5 to 60 words, and encodes them with a small random BERT (2 layers, 64 wide) with MiniLM's tokenizer,
because memory could grow with the data, not with the model. Then it searches for 1,000 queries, mines negatives of
1,000 training queries, reranks 20 passages of 50 queries with a cross-encoder, and serves. Each command is a new
process. Prints its peak memory, its peak without mapped files, which the system can free, and its seconds. --corpus
uses the first passages of a corpus instead of drawn ones. Only on Linux.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.serve import free_port, wait_for  # noqa: E402
from jaxret.data.records import Judgement, Passage, Query  # noqa: E402

VERBS = ("encode", "search", "mine", "rerank", "serve")
SHARD_ROWS, QUERIES, K, RERANKED = 2500, 1000, 100, 50
WORDS = np.array([f"word{i}" for i in range(5000)])


@dataclass(frozen=True)
class Peak:
    """The peak memory of a process in MiB, with mapped files and without; and its seconds."""

    whole: int
    own: int
    seconds: float


def drawn(size: int) -> Iterator[Passage]:
    """Yield passages of 5 to 60 words, which are the same in every call."""
    for start in range(0, size, 1000):
        random = np.random.default_rng(start)
        for number in range(start, min(start + 1000, size)):
            yield Passage(f"p{number}", " ".join(random.choice(WORDS, int(random.integers(5, 61)))))


def write_data(folder: Path, passages: Iterable[Passage]) -> list[str]:
    """Write a BEIR folder in which each query is the first words of a passage; return the queries' texts."""
    from jaxret.data.formats import write_beir

    first = list(islice(passages := iter(passages), QUERIES))
    queries = [Query(f"q{number}", " ".join(passage.text.split()[:8])) for number, passage in enumerate(first)]
    judgements = [Judgement(query.id, passage.id, 1) for query, passage in zip(queries, first, strict=True)]
    write_beir(folder, [], queries, {"train": judgements, "test": judgements})
    with gzip.open(folder / "corpus.jsonl.gz", "wt", compresslevel=1) as file:
        for group in (first, passages):
            for passage in group:
                file.write(json.dumps({"_id": passage.id, "title": passage.title, "text": passage.text}) + "\n")
    (folder / "corpus.jsonl").unlink()
    return [query.text for query in queries]


def write_models(folder: Path, shard_rows: int) -> None:
    """Write an untrained run of a retriever, and a cross-encoder, both from a small random BERT."""
    import jax
    from safetensors.numpy import load_file, save_file

    from jaxret.configs.minilm import get_config
    from jaxret.data.tokens.tokenizer import TOKENIZER_FILES
    from jaxret.models.encoders.architectures.bert import BertConfig
    from jaxret.models.encoders.pretrained import resolve_encoder, save_pretrained
    from jaxret.models.retriever_model import make_retriever_model
    from jaxret.training.loop import train

    config, bert, encoder = get_config("as_it_comes"), BertConfig(30522, 64, 2, 4, 128, 512), folder / "encoder"
    config.tokens.passage_length, config.encode.shard_rows = 64, shard_rows
    source = resolve_encoder(config.encoder.checkpoint)
    config.encoder.checkpoint, config.encoder.sha256 = str(encoder), ""
    save_pretrained(encoder, bert, make_retriever_model(config, bert).init(jax.random.key(0))["encoder"])
    for name in filter(lambda name: (source / name).exists(), TOKENIZER_FILES):
        shutil.copyfile(source / name, encoder / name)
    config.data.train, config.train.steps = str(folder / "data"), 0
    config.data.store = str(folder / "tokens")
    train(config, folder / "run", progress=False)

    cross, random = folder / "cross", np.random.default_rng(0)
    shutil.copytree(encoder, cross)
    stated = json.loads((cross / "config.json").read_text()) | {"num_labels": 1}
    (cross / "config.json").write_text(json.dumps(stated))
    sizes = {"pooler.dense.weight": (64, 64), "pooler.dense.bias": (64,)}
    sizes |= {"classifier.weight": (1, 64), "classifier.bias": (1,)}
    tensors = load_file(cross / "model.safetensors")
    tensors |= {name: random.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    save_file(tensors, cross / "model.safetensors", {"format": "pt"})


def measure(arguments: list[str], use: Callable[[subprocess.Popen[bytes]], Any] | None = None) -> Peak:
    """Run a jaxret command and return its peak memory. `use` is called with a server, which is then ended."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-m", "jaxret", *arguments], env=environment, stdout=subprocess.DEVNULL)
    begin, whole, own = time.perf_counter(), 0, 0
    if use:
        use(process)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        numbers = dict(re.findall(r"^(VmHWM|RssAnon):\s+(\d+) kB", status, re.MULTILINE))
        whole = max(whole, int(numbers.get("VmHWM", 0)) // 1024)
        own = max(own, int(numbers.get("RssAnon", 0)) // 1024)
        if use and own:
            process.terminate()
            process.wait()
        time.sleep(0.02)
    if process.returncode and not use:
        raise SystemExit(f"jaxret {arguments[0]} ended with status {process.returncode}")
    return Peak(whole, own, time.perf_counter() - begin)


def keep_queries(run: Path, some: Path) -> None:
    """Write the rankings of the first RERANKED queries of a TREC run."""
    ids = {f"q{number}" for number in range(RERANKED)}
    with open(run) as every, open(some, "w") as kept:
        kept.writelines(line for line in every if line.split()[0] in ids)


def ask(port: int, queries: list[str]) -> Callable[[subprocess.Popen[bytes]], None]:
    """Return a function that waits for a server and searches for some queries, one at a time."""

    def use(process: subprocess.Popen[bytes]) -> None:
        wait_for(port, process)
        for query in queries:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            body = json.dumps({"queries": [query], "k": K})
            connection.request("POST", "/search", body, {"content-type": "application/json"})
            if (status := connection.getresponse().status) != 200:
                raise SystemExit(f"the server answered with status {status}")

    return use


def peaks(folder: Path, passages: Iterable[Passage], shard_rows: int = SHARD_ROWS) -> Iterator[tuple[str, Peak]]:
    """Yield the peak of each command of VERBS.

    Args:
        folder: a new folder.
        passages: passages of the corpus.
        shard_rows: passages per shard.
    """
    folder.mkdir(exist_ok=True)
    data, run = folder / "data", f"--workdir={folder / 'run'}"
    queries = write_data(data, passages)
    write_models(folder, shard_rows)
    port = free_port()
    store, corpus = f"--store={folder / 'tokens'}", f"--corpus={data}"
    searched, some = folder / "run" / "runs" / "data.trec", folder / "some.trec"
    commands: dict[str, list[str]] = {
        "encode": ["encode", run, corpus, store],
        "search": ["search", run, f"--queries={data}", f"--k={K}"],
        "mine": ["mine", f"--data={data}", corpus, f"--pool={folder / 'run'}", f"--out={folder / 'mined.jsonl'}"],
        "rerank": [
            "rerank", f"--model={folder / 'cross'}", f"--run={some}", f"--queries={data}", corpus, "--k=20",
            f"--out={folder / 'reranked.trec'}",
        ],
        "serve": ["serve", str(folder / "run"), f"--port={port}"],
    }  # fmt: skip
    for verb, command in commands.items():
        if verb == "rerank":
            keep_queries(searched, some)
        yield verb, measure(command, ask(port, queries[:20]) if verb == "serve" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="", help="BEIR folder, corpus.jsonl or psgs.tsv; default: drawn")
    parser.add_argument("--sizes", default="5000,50000")
    parser.add_argument("--folder", help="where there is room; default: that of temporary files")
    arguments = parser.parse_args()
    from jaxret.data.formats import Corpus

    print("| command | passages | peak, MiB | without mapped files, MiB | seconds |\n|:--|--:|--:|--:|--:|", flush=True)
    for size in map(int, arguments.sizes.split(",")):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            passages = islice(Corpus.open(arguments.corpus).read(), size) if arguments.corpus else drawn(size)
            for verb, peak in peaks(Path(folder), passages):
                print(f"| {verb} | {size:,} | {peak.whole:,} | {peak.own:,} | {peak.seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
