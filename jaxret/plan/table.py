"""The programs that are watched: what they may need, and the table of docs/scale.md.

A bound is a little above what was measured, so that a change that doubles memory, splits no parameter any more or moves
activations instead of weights fails `tests/plan/table_test.py`. A change that needs less lowers its bounds here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxret.plan.programs import ASKED, Asked

LARGE = 1  # MB of a kind of collective in a step, below which it is not looked at


class Row(NamedTuple):
    """gib: of a device at most. megabytes: kind of collective -> results of a step at most; of other kinds LARGE.
    verb: train, encode or search; options: of the config; lengths: mean tokens of queries and of passages, (): all are
    as long as they may be; asked: of a search; traffic: of main memory, times that of
    the products alone, at most (0: not looked at)."""

    topology: str
    options: dict[str, Any]
    gib: float
    megabytes: dict[str, int | float]
    verb: str = "train"
    lengths: tuple[int | float, ...] = ()
    asked: Asked = ASKED
    traffic: float = 0.0

    @property
    def name(self) -> str:
        """ "train v5e:4x4 dtype=bfloat16"."""
        settings = [f"{key.removesuffix('.name').rpartition('.')[2]}={v}" for key, v in self.options.items()]
        settings += [f"lengths={','.join(f'{mean:g}' for mean in self.lengths)}"] if self.lengths else []
        settings += [f"k={self.asked.k} {self.asked.precision}"] if self.verb == "search" else []
        return " ".join([self.verb, self.topology, *settings])


# The plain dual encoder on BERT-base, untied, AdamW, dropout on: 128 queries of 32 tokens, 256 passages of 256.
COMMON = {"tokens.query_length": 32, "encoder.dtype": "bfloat16"}
ALL = {"encoder.recompute": "none"}
CHEAP = {"encoder.recompute": "cheap"}
SPLIT = {**CHEAP, "mesh.fsdp": 4}
FLASH = {"encoder.attention": "flash"}
CUDNN = {"encoder.attention_dropout": 0.0, "encoder.attention": "cudnn"}
LONG = {"tokens.passage_length": 512}
T5 = {"encoder.checkpoint": "t5-base", "head.token": "mean"}
MS_MARCO = (10, 80)  # tokens of its queries and passages on average
REDUCED: dict[str, int | float] = {"all-reduce": 875}  # float32 gradients, once


def travel(
    gathered: int | float, scattered: int | float, exchanged: int | float, added: int | float
) -> dict[str, int | float]:
    """MB where parameters are split: weights gathered, gradients of layers scattered and of tables exchanged, and added
    up over the other devices."""
    return {"all-gather": gathered, "reduce-scatter": scattered, "all-to-all": exchanged, "all-reduce": added}


# What 8 or 16 devices find for 1,024 queries, their share of k each and some more: scores and rows.
FOUND: dict[str, int | float] = {"all-gather": 17}
# MS MARCO's passages and its dev queries.
MARCO = Asked(passages=8_841_823, queries=6_980, k=1000)
# Packed texts lie in another order: vectors of all 128 queries and 256 passages are gathered, to be put in the batch's.
ORDERED: dict[str, int | float] = {"all-gather": 1.2}
ROWS = (
    Row("v5e:4x4", ALL, 6.6, REDUCED),
    Row("v5e:4x4", {**ALL, **FLASH}, 5.7, REDUCED),
    Row("v5e:4x4", {**ALL, **LONG}, 11.8, REDUCED),
    Row("v5e:4x4", {**ALL, **LONG, **FLASH}, 8.0, REDUCED),
    Row("v5e:4x4", {**ALL, "mesh.reduce_dtype": "bfloat16"}, 6.6, {"all-reduce": 445}),
    Row("v5e:4x4", {**ALL, "mesh.fsdp": 4}, 4.5, travel(440, 172, 192, 222)),
    Row("v5e:4x4", CHEAP, 4.3, REDUCED),
    Row("v5e:4x4", {**CHEAP, **LONG}, 5.5, REDUCED),
    Row("v5e:4x4", {**CHEAP, **LONG, **FLASH}, 5.0, REDUCED),
    Row("v5e:4x4", {**CHEAP, "train.chunk_size": 16}, 4.3, {"all-reduce": 881}),
    Row("v5e:4x4", SPLIT, 1.9, travel(785, 172, 192, 222)),
    Row("v5e:4x4", {**SPLIT, "encoder.tied": True}, 1.8, travel(220, 86, 97, 112)),
    Row("v5e:4x4", {**SPLIT, **T5}, 1.9, travel(740, 172, 199, 223)),
    Row("v5e:4x4", {**SPLIT, "encoder.checkpoint": "answerdotai/ModernBERT-base"}, 2.9, travel(1_050, 223, 312, 302)),
    Row("v5e:2x2", CHEAP, 7.5, REDUCED),
    Row("v5e:4x4", {**CHEAP, "tokens.packing": True}, 4.3, REDUCED | ORDERED, lengths=MS_MARCO),
    Row("v5e:1x1", {**CHEAP, "train.chunk_size": 8}, 4.5, {}),
    Row("h100:1", CHEAP, 22, {}),
    Row("h100:8", {**CHEAP, **LONG, "encoder.attention_dropout": 0.0}, 8.3, REDUCED),
    Row("h100:8", {**CHEAP, **LONG, **CUDNN}, 7.5, REDUCED),
    Row("v5e:4x4", {}, 1.0, {}, "encode"),
    Row("h200:1", {}, 27, {}, "search", asked=MARCO, traffic=2.7),
    Row("h200:1", {}, 14, {}, "search", asked=MARCO._replace(precision="bfloat16"), traffic=1.0),
    Row("h100:8", {}, 1.3, FOUND, "search", asked=MARCO._replace(precision="int8"), traffic=0.8),
    Row("v5e:4x4", {}, 1.8, FOUND, "search", asked=MARCO, traffic=1.1),
    Row("v5e:4x4", {}, 1.0, FOUND, "search", asked=MARCO._replace(precision="bfloat16"), traffic=1.05),
    Row("v5e:4x4", {}, 0.6, FOUND, "search", asked=MARCO._replace(precision="int8"), traffic=1.0),
)


def megabytes(collectives: list[dict[str, Any]]) -> dict[str, float]:
    """Kind of collective -> results of a step on one device."""
    moved: dict[str, float] = {}
    for found in collectives:
        moved[found["kind"]] = moved.get(found["kind"], 0.0) + found["times"] * found["bytes"] / 1e6
    return moved


def problems(row: Row, values: dict[str, Any]) -> list[str]:
    """Which bounds a plan of the row breaks."""
    found = []
    gib = values["memory"]["total"] / 2**30
    if gib > row.gib:
        found.append(f"{gib:.2f} GiB on a device, at most {row.gib} expected")
    for kind, moved in megabytes(values["collectives"]).items():
        most = row.megabytes.get(kind, LARGE)
        if moved > most:
            found.append(f"{moved:,.1f} MB of {kind}, at most {most:,} expected")
    if row.traffic and values["traffic"]["bytes"] is None:
        found.append(f"unknown traffic of main memory, at most {row.traffic} times the products' expected")
    elif row.traffic:
        ratio = values["traffic"]["bytes"] / values["traffic"]["products"]
        if ratio > row.traffic:
            found.append(f"{ratio:.2f} times the products' traffic of main memory, at most {row.traffic} expected")
    return found


def markdown(rows: Iterator[tuple[Row, dict[str, Any]]]) -> Iterator[str]:
    """The lines of the table, as they become known."""
    yield "| program | memory of a device | collectives, results / sent | lower bound |"
    yield "|:--|--:|--:|--:|"
    for row, values in rows:
        need, usable = values["memory"]["total"] / 2**30, values["memory"]["usable"] / 2**30
        fits = "" if values["memory"]["fits"] else ", does not fit"
        moved, sent = values["collective_bytes"] / 1e6, values["sent_bytes"] / 1e6
        bound = values["lower_bound"]["seconds"] * 1e3
        yield f"| {row.name} | {need:.2f} of {usable:.2f} GiB{fits} | {moved:,.0f} / {sent:,.0f} MB | {bound:.1f} ms |"
