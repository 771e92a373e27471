"""Programs with bounds of their needs, and their table in docs/scale.md: python -m tests.plan.watched_programs

A bound is a little above the measured value, so that `watched_programs_test.py` fails if a change doubles memory, no
longer splits parameters, or moves activations instead of weights. Lower a bound with the change that
makes it possible.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jaxret.configs import load_config
from jaxret.parallel.chips import parse_topology
from jaxret.plan.advice import with_changes
from jaxret.plan.compilation import require_compiler
from jaxret.plan.planner import Planner
from jaxret.plan.programs import DEFAULT_SEARCH, SearchLoad

LARGE = 1  # MB; smaller sums of a kind of collective in a step are ignored


class WatchedProgram(NamedTuple):
    """A program, with upper bounds for its needs."""

    topology: str
    options: dict[str, Any]  # keys of the config
    gib: float  # memory of a device
    megabytes: dict[str, int | float]  # kind of collective -> results of a step; LARGE for other kinds
    verb: str = "train"  # train, encode or search
    lengths: tuple[int | float, ...] = ()  # mean tokens of queries and of passages; (): all have the largest length
    search: SearchLoad = DEFAULT_SEARCH
    traffic: float = 0.0  # traffic of main memory, divided by that of products alone; 0: not bounded
    gathers: tuple[int, int | float] = (0, 0)  # all-gathers of a step, and MB of the largest; 0: not bounded
    overlapped: float = 0.0  # lower bound of the share of sent bytes that moves during products

    @property
    def name(self) -> str:
        """A name such as "train v5e:4x4 dtype=bfloat16"."""
        settings = [f"{key.removesuffix('.name').rpartition('.')[2]}={v}" for key, v in self.options.items()]
        settings += [f"lengths={','.join(f'{mean:g}' for mean in self.lengths)}"] if self.lengths else []
        if self.verb == "search":
            settings += [f"passages={self.search.passages}"] if self.search.passages != MARCO.passages else []
            settings += [f"k={self.search.k} {self.search.precision}"]
        return " ".join([self.verb, self.topology, *settings])


# The plain dual encoder on BERT-base, untied, with AdamW and dropout: 128 queries of 32 tokens, 256 passages of 256.
COMMON = {"tokens.query_length": 32, "encoder.dtype": "bfloat16"}
ALL = {"encoder.recompute": "none"}
CHEAP = {"encoder.recompute": "cheap"}
SPLIT = {**CHEAP, "mesh.fsdp": 4}
FLASH = {"encoder.attention": "flash"}
CUDNN = {"encoder.attention_dropout": 0.0, "encoder.attention": "cudnn"}
LONG = {"tokens.passage_length": 512}
T5 = {"encoder.checkpoint": "t5-base", "head.token": "mean"}
LORA = {
    "encoder.checkpoint": "Qwen/Qwen3-Embedding-8B",
    "encoder.tied": True,
    "encoder.recompute": "layer",
    "head.token": "last",
    "tokens.query_length": 64,
    "tokens.passage_length": 512,
    "lora.rank": 16,
}
# For each side, seven kernels of 36 layers, once forward and once backward; and the word table, which is the largest.
BY_LAYER = (2 * 2 * 36 * 7 + 2, 1_243)
MS_MARCO = (10, 80)  # tokens of its queries and passages on average
REDUCED: dict[str, int | float] = {"all-reduce": 875}  # the gradients in float32 are sent once


def split_collectives(
    gathered: int | float, scattered: int | float, exchanged: int | float, added: int | float
) -> dict[str, int | float]:
    """Return MB by kind if parameters are split: gathered weights, scattered gradients of layers, exchanged gradients
    of tables, and sums over the other devices."""
    return {"all-gather": gathered, "reduce-scatter": scattered, "all-to-all": exchanged, "all-reduce": added}


# Scores and rows that the 4 or 8 devices of a host gather for 1,024 queries: slightly more than their shares of k.
CANDIDATES: dict[str, int | float] = {"all-gather": 17}
# MS MARCO's passages and dev queries.
MARCO = SearchLoad(passages=8_841_823, queries=6_980, k=1000)
# A search by four hosts of eight chips. Each host holds a quarter of the passages.
MANY = SearchLoad(passages=100_000_000, queries=6_980, k=1000)
# Packed texts have another order: vectors of all 128 queries and 256 passages are gathered to restore that of the
# batch.
ORDERED: dict[str, int | float] = {"all-gather": 1.2}
WATCHED_PROGRAMS = (
    WatchedProgram("v5e:4x4", ALL, 6.6, REDUCED),
    WatchedProgram("v5e:4x4", {**ALL, **FLASH}, 5.7, REDUCED),
    WatchedProgram("v5e:4x4", {**ALL, **LONG}, 11.8, REDUCED),
    WatchedProgram("v5e:4x4", {**ALL, **LONG, **FLASH}, 8.0, REDUCED),
    WatchedProgram("v5e:4x4", {**ALL, "mesh.reduce_dtype": "bfloat16"}, 6.6, {"all-reduce": 445}),
    WatchedProgram("v5e:4x4", {**ALL, "mesh.fsdp": 4}, 4.5, split_collectives(440, 172, 192, 222)),
    WatchedProgram("v5e:4x4", CHEAP, 4.3, REDUCED),
    WatchedProgram("v5e:4x4", {**CHEAP, **LONG}, 5.5, REDUCED),
    WatchedProgram("v5e:4x4", {**CHEAP, **LONG, **FLASH}, 5.0, REDUCED),
    WatchedProgram("v5e:4x4", {**CHEAP, "train.chunk_size": 16}, 4.3, {"all-reduce": 881}),
    WatchedProgram("v5e:4x4", SPLIT, 1.9, split_collectives(785, 172, 192, 222), overlapped=0.3),
    WatchedProgram("v5e:4x4", {**SPLIT, "encoder.tied": True}, 1.8, split_collectives(220, 86, 97, 112)),
    WatchedProgram("v5e:4x4", {**SPLIT, **T5}, 1.9, split_collectives(740, 172, 199, 223)),
    WatchedProgram(
        "v5e:4x4",
        {**SPLIT, "encoder.checkpoint": "answerdotai/ModernBERT-base"},
        2.9,
        split_collectives(1_050, 223, 312, 302),
    ),
    WatchedProgram("v5e:2x2", CHEAP, 7.5, REDUCED),
    WatchedProgram("v5e:4x4", {**CHEAP, "tokens.packing": True}, 4.3, REDUCED | ORDERED, lengths=MS_MARCO),
    WatchedProgram("v5e:1x1", {**CHEAP, "train.chunk_size": 8}, 4.5, {}),
    WatchedProgram("h100:1", CHEAP, 22, {}),
    WatchedProgram("h100:8", {**CHEAP, **LONG, "encoder.attention_dropout": 0.0}, 8.3, REDUCED),
    WatchedProgram("h100:8", {**CHEAP, **LONG, **CUDNN}, 7.5, REDUCED),
    WatchedProgram(
        "v5e:4x4", {**LORA, "mesh.fsdp": 16}, 10.0, {"all-gather": 57_000, "all-reduce": 180}, gathers=BY_LAYER
    ),
    WatchedProgram(
        "v5e:4x4",
        {**LORA, **FLASH, "mesh.fsdp": 16},
        8.7,
        {"all-gather": 57_000, "all-reduce": 180},
        gathers=BY_LAYER,
    ),
    WatchedProgram(
        "v5e:4x4",
        {**LORA, "mesh.fsdp": 4, "mesh.tensor": 4, "train.chunk_size": 32},
        8.9,
        {"all-gather": 84_700, "all-reduce": 93_200},
    ),
    WatchedProgram("h100:1", {**LORA, "train.chunk_size": 8}, 23.5, {}),
    WatchedProgram("h100:1", {**LORA, "encoder.attention": "cudnn", "train.chunk_size": 8}, 22.6, {}),
    WatchedProgram("v5e:4x4", {}, 1.0, {}, "encode"),
    WatchedProgram("h200:1", {}, 27, {}, "search", search=MARCO, traffic=2.7),
    WatchedProgram("h200:1", {}, 14, {}, "search", search=MARCO._replace(precision="bfloat16"), traffic=1.0),
    WatchedProgram("h100:8", {}, 1.3, CANDIDATES, "search", search=MARCO._replace(precision="int8"), traffic=0.8),
    WatchedProgram("v5e:4x4", {}, 1.85, CANDIDATES, "search", search=MARCO, traffic=1.95),
    WatchedProgram(
        "v5e:4x4", {}, 1.05, CANDIDATES, "search", search=MARCO._replace(precision="bfloat16"), traffic=2.15
    ),
    WatchedProgram("v5e:4x4", {}, 0.65, CANDIDATES, "search", search=MARCO._replace(precision="int8"), traffic=2.3),
    WatchedProgram("h100:32", {}, 9.6, CANDIDATES, "search", search=MANY, traffic=2.7),
    WatchedProgram("h100:32", {}, 5.3, CANDIDATES, "search", search=MANY._replace(precision="bfloat16"), traffic=0.75),
    WatchedProgram("h100:32", {}, 3.7, CANDIDATES, "search", search=MANY._replace(precision="int8"), traffic=0.9),
)


def collective_megabytes(collectives: list[dict[str, Any]]) -> dict[str, float]:
    """Return kind of collective -> MB of results per step on one device."""
    moved: dict[str, float] = {}
    for each in collectives:
        moved[each["kind"]] = moved.get(each["kind"], 0.0) + each["times"] * each["bytes"] / 1e6
    return moved


def broken_bounds(row: WatchedProgram, values: dict[str, Any]) -> list[str]:
    """Return a description of every bound that a plan of the row breaks."""
    broken = []
    gib = values["memory"]["total"] / 2**30
    if gib > row.gib:
        broken.append(f"{gib:.2f} GiB on a device, at most {row.gib} expected")
    for kind, moved in collective_megabytes(values["collectives"]).items():
        most = row.megabytes.get(kind, LARGE)
        if moved > most:
            broken.append(f"{moved:,.1f} MB of {kind}, at most {most:,} expected")
    gathers = [each for each in values["collectives"] if each["kind"] == "all-gather"]
    count, largest = sum(each["times"] for each in gathers), max((each["bytes"] / 1e6 for each in gathers), default=0.0)
    if any(row.gathers) and (count > row.gathers[0] or largest > row.gathers[1]):
        expected = f"at most {row.gathers[0]:,} of {row.gathers[1]:,} MB expected"
        broken.append(f"{count:,} all-gathers of up to {largest:,.1f} MB, {expected}")
    if row.overlapped and values["overlapped"] < row.overlapped:
        broken.append(
            f"{values['overlapped']:.0%} of sent bytes during products, at least {row.overlapped:.0%} expected"
        )
    if row.traffic and values["traffic"]["bytes"] is None:
        broken.append(f"unknown traffic of main memory, at most {row.traffic} times the products' expected")
    elif row.traffic:
        ratio = values["traffic"]["bytes"] / values["traffic"]["products"]
        if ratio > row.traffic:
            broken.append(f"{ratio:.2f} times the products' traffic of main memory, at most {row.traffic} expected")
    return broken


def watched_table(rows: Iterable[tuple[WatchedProgram, dict[str, Any]]]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| program | memory of a device | collectives, results / sent | lower bound |"
    yield "|:--|--:|--:|--:|"
    for row, values in rows:
        need, usable = values["memory"]["total"] / 2**30, values["memory"]["usable"] / 2**30
        fits = "" if values["memory"]["fits"] else ", does not fit"
        moved, sent = values["collective_bytes"] / 1e6, values["sent_bytes"] / 1e6
        bound = values["lower_bound"]["seconds"] * 1e3
        yield f"| {row.name} | {need:.2f} of {usable:.2f} GiB{fits} | {moved:,.0f} / {sent:,.0f} MB | {bound:.1f} ms |"


def main() -> None:
    """Compile every program with configs/base.py and print the table."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("XLA_FLAGS", None)
    topologies = [parse_topology(row.topology) for row in WATCHED_PROGRAMS]
    jax.config.update("jax_num_cpu_devices", max(topology.devices for topology in topologies))
    for line in watched_table(plans()):
        print(line, flush=True)


def plans() -> Iterator[tuple[WatchedProgram, dict[str, Any]]]:
    """Yield each program with its plan. Raises ValueError if a compiler is missing."""
    for row in WATCHED_PROGRAMS:
        topology = parse_topology(row.topology)
        require_compiler(topology)
        config = with_changes(load_config("base"), COMMON | row.options)
        plan = Planner(row.verb, config, "base", log, advice=False, search=row.search, lengths=row.lengths)
        yield row, plan.on(topology)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
