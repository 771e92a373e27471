"""Fine-tune every family from MiniLM on a BEIR data set, and print quality, size on disk and time as a Markdown table.

python bench/families.py --data=FOLDER --workdir=runs/families --set=train.steps=24 --set=tokens.passage_length=64

With one seed. Some parameters are not pre-trained: I3's reconstructor and interactor, Aggretriever's MLM head, term
weights and [CLS] projection, and late interaction's projection start from random numbers; T5 is completely random (4
layers, 256 wide, MiniLM's tokenizer), so it trains for 150 steps at 3e-4. A second call continues. Times are those of
this machine, after a warm-up, without reading, tokenizing and writing; they are not comparable with other systems.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxret.configs.minilm import get_config
from jaxret.data.formats import Corpus, QuerySource
from jaxret.data.tokens.tokenizer import TOKENIZER_FILES
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.searches.run_system import run_system
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.models.encoders.architectures import make_encoder
from jaxret.models.encoders.architectures.t5 import T5Config
from jaxret.models.encoders.pretrained import resolve_encoder, save_pretrained
from jaxret.runs.run import Run, open_run
from jaxret.search.backends.select import select_backend
from jaxret.search.vectors.exact import search
from jaxret.storage.atomic import read_json
from jaxret.types import Tokens

SYSTEMS = ("dual_encoder", "mlr", "me_bert", "colbert", "late_interaction", "mvr", "aggretriever", "i3", "t5")
MEASURES = ("nDCG@10", "R@100", "Success@20")
RANDOM_T5 = {"encoder.sha256": "", "optimizer.learning_rate": 3e-4, "train.steps": 150}
TIMED_PASSAGES, TIMED_QUERIES, K = 1000, 500, 100


def random_t5(folder: Path) -> str:
    """Write a T5 encoder with random weights and MiniLM's tokenizer; return its folder."""
    source = resolve_encoder(get_config().encoder.checkpoint)
    vocabulary = read_json(source / "config.json")["vocab_size"]
    config = T5Config(vocabulary, 256, 4, 4, 64, 1024)
    tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
    params = make_encoder(config).init(jax.random.key(0), tokens)["params"]
    save_pretrained(folder, config, params)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    return str(folder)


def evaluate(system: str, workdir: Path, data: str, changes: dict[str, Any], untrained: bool) -> dict[str, float]:
    """Train, encode and search; return the means of MEASURES."""
    config = get_config("dual_encoder" if system == "t5" else system).lock()
    config.update_from_flattened_dict({"data.train": data, "train.log_every": 1, **changes})
    if system == "t5":
        checkpoint = {"encoder.checkpoint": random_t5(workdir.parent / "random-t5")}
        config.update_from_flattened_dict(RANDOM_T5 | checkpoint)
    if untrained:
        config.train.steps = 0
    return run_system(config, workdir, Corpus.open(data), EvaluationSource.open(data, data), MEASURES).mean


def contrastive_loss(workdir: Path) -> tuple[float, float]:
    """Return the means over the first and the last five steps."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["contrastive_loss"] for line in lines if "contrastive_loss" in line]
    return float(np.mean(losses[:5])), float(np.mean(losses[-5:]))


def size(run: Run) -> tuple[float, float]:
    """Return vectors and bytes on disk per passage."""
    manifest = read_json(corpus_folder(run.workdir) / "manifest.json")
    names = [name for name in ("vectors", "offsets") if name in manifest["shards"][0]]
    stored = sum(shard[name]["bytes"] for shard in manifest["shards"] for name in names)
    vectors = sum(shard["shape"][0] * (manifest["vectors_per_row"] or 1) for shard in manifest["shards"])
    return vectors / manifest["total_rows"], stored / manifest["total_rows"]


def times(run: Run, data: str) -> tuple[float, float]:
    """Return the milliseconds to encode a passage, and to search the whole corpus for a query: medians of three."""

    def median_ms(call: Callable[[], Any], number: int) -> float:
        call()  # the first call compiles
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return 1000 * float(np.median(seconds)) / number

    passages = [passage for passage, _ in zip(Corpus.open(data).read(), range(TIMED_PASSAGES), strict=False)]
    texts = run.tokenizer.passages(passages)
    embedder = run.embedder()
    encode = median_ms(lambda: embedder(texts, "passage"), len(passages))
    queries = [query for query, _ in zip(QuerySource.open(data).read(), range(TIMED_QUERIES), strict=False)]
    vectors = embedder(run.tokenizer.queries(query.text for query in queries), "query")
    shards = open_encoded(corpus_folder(run.workdir))
    backend = select_backend(multi_vector=shards.ragged)
    return encode, median_ms(lambda: search(vectors, shards, K, backend), len(queries))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="BEIR folder")
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="config key to change")
    arguments = parser.parse_args()
    changes = {key: ast.literal_eval(value) for key, _, value in (s.partition("=") for s in arguments.set)}
    workdir, rows = Path(arguments.workdir), []
    for system in arguments.systems:
        before = evaluate(system, workdir / f"{system}-untrained", arguments.data, changes, untrained=True)
        after = evaluate(system, workdir / system, arguments.data, changes, untrained=False)
        rows.append((system, before, after))
    print("\n| family | contrastive loss | nDCG@10 untrained | nDCG@10 | R@100 | Success@20 ", end="")
    print("| vectors / passage | bytes / passage | encode, ms / passage | search, ms / query |\n|:--|" + "--:|" * 9)
    for system, before, after in rows:
        run = open_run(workdir / system)
        first, last = contrastive_loss(run.workdir.path)
        vectors, stored = size(run)
        encode, searched = times(run, arguments.data)
        print(
            f"| {system} | {first:.2f} to {last:.2f} | {before['nDCG@10']:.4f} | {after['nDCG@10']:.4f} "
            f"| {after['R@100']:.4f} | {after['Success@20']:.4f} | {vectors:.1f} | {stored:,.0f} | {encode:.1f} "
            f"| {searched:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
