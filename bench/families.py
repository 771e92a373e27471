"""Every family fine-tuned from MiniLM on a BEIR data set: quality, size on disk and time, as a Markdown table.

python bench/families.py --data=FOLDER --workdir=runs/families --set=train.steps=40

T5 has random weights here (4 layers, 256 wide, MiniLM's tokenizer): MiniLM is no T5. Run again, it continues; times are
those of the run that encoded. Times are seconds of this machine, one after the other, not a comparison with anybody.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.minilm import get_config
from jaxret.models.architectures import make_encoder
from jaxret.models.pretrained import resolve, save_pretrained
from jaxret.models.run import open_run
from jaxret.models.t5 import T5Config
from jaxret.retrieval.encode import encode_corpus
from jaxret.storage import read_json, write_json
from jaxret.tools.search import search_files
from jaxret.training.loop import train
from jaxret.types import Tokens

SYSTEMS = ("dual_encoder", "mlr", "me_bert", "colbert", "late_interaction", "mvr", "aggretriever", "i3", "t5")
MEASURES = ("nDCG@10", "R@100", "Success@20")


def random_t5(folder: Path) -> str:
    """A T5 encoder with random weights and MiniLM's tokenizer."""
    source = resolve(get_config().encoder.checkpoint)
    vocabulary = read_json(source / "config.json")["vocab_size"]
    config = T5Config(vocabulary, 256, 4, 4, 64, 1024)
    tokens = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
    params = make_encoder(config).init(jax.random.key(0), tokens)["params"]
    save_pretrained(folder, config, params)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    return str(folder)


def measure(system: str, workdir: Path, data: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Trains, encodes and searches; returns what the table needs, and keeps it in workdir/measured.json."""
    path = workdir / "measured.json"
    if path.exists():
        return read_json(path)
    config = get_config("dual_encoder" if system == "t5" else system).lock()
    config.update_from_flattened_dict({"data.train": data, **changes})
    if system == "t5":
        t5 = {"encoder.checkpoint": random_t5(workdir.parent / "random-t5"), "encoder.sha256": ""}
        config.update_from_flattened_dict(t5 | {"optimizer.learning_rate": 1e-3})
    train(config, workdir)
    losses = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    run = open_run(workdir)
    started = time.perf_counter()
    encoded = encode_corpus(run, data)
    encode_seconds = time.perf_counter() - started
    manifest = read_json(encoded.folder / "manifest.json")
    names = [name for name in ("vectors", "offsets") if name in manifest["shards"][0]]
    size = sum(shard[name]["bytes"] for shard in manifest["shards"] for name in names)
    vectors = sum(shard["shape"][0] * (manifest["vectors_per_row"] or 1) for shard in manifest["shards"])
    started = time.perf_counter()
    evaluation = search_files(run, data, data, "test", 100, MEASURES)
    search_seconds = time.perf_counter() - started
    assert evaluation is not None
    found = {
        "mean": {measure: evaluation.mean[measure] for measure in MEASURES},
        "first_loss": next((row["loss"] for row in losses if "loss" in row), None),
        "last_loss": next((row["loss"] for row in reversed(losses) if "loss" in row), None),
        "vectors": vectors / encoded.passages,
        "bytes": size / encoded.passages,
        "encode_seconds": encode_seconds,
        "search_seconds": search_seconds,
    }
    write_json(path, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="BEIR folder")
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="config key to change")
    arguments = parser.parse_args()
    changes = {key: ast.literal_eval(value) for key, _, value in (s.partition("=") for s in arguments.set)}
    changes["train.log_every"] = 1
    rows = []
    for system in arguments.systems:
        workdir = Path(arguments.workdir)
        before = measure(system, workdir / f"{system}-untrained", arguments.data, changes | {"train.steps": 0})
        after = measure(system, workdir / system, arguments.data, changes)
        rows.append((system, before, after))
    print(
        "\n| family | nDCG@10 untrained | trained | R@100 | Success@20 | loss, first to last | vectors / passage |",
        end="",
    )
    print(" bytes / passage | encode, s | search, s |\n|:--|" + "--:|" * 9)
    for system, before, after in rows:
        mean = after["mean"]
        print(
            f"| {system} | {before['mean']['nDCG@10']:.4f} | {mean['nDCG@10']:.4f} | {mean['R@100']:.4f} "
            f"| {mean['Success@20']:.4f} | {after['first_loss']:.2f} to {after['last_loss']:.2f} "
            f"| {after['vectors']:.1f} | {after['bytes']:,.0f} | {after['encode_seconds']:.0f} "
            f"| {after['search_seconds']:.1f} |"
        )


if __name__ == "__main__":
    main()
