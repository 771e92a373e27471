"""The programs that are watched: what they may need, and the table of docs/scale.md.

A bound is a little above what was measured, so that a change that doubles memory, splits no parameter any more or moves
activations instead of weights fails `tests/plan/table_test.py`. A change that needs less lowers its bounds here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

LARGE = 1e6  # bytes: kinds of collectives that move less in a step are not looked at


class Row(NamedTuple):
    """gib, megabytes: of a device at most; the latter are results of all collectives of a step. kinds: of collectives
    that may move more than LARGE. verb: train, encode or search; options: of the config; lengths: tokens of queries and
    of passages on average, (): all are as long as they may be."""

    topology: str
    options: dict[str, Any]
    gib: float
    megabytes: int | float
    kinds: tuple[str, ...] = ("all-reduce",)
    verb: str = "train"
    lengths: tuple[int | float, ...] = ()

    @property
    def name(self) -> str:
        """ "train v5e:4x4 dtype=bfloat16"."""
        settings = [f"{key.rpartition('.')[2]}={value}" for key, value in self.options.items()]
        settings += [f"lengths={','.join(f'{mean:g}' for mean in self.lengths)}"] if self.lengths else []
        return " ".join([self.verb, self.topology, *settings])


# The plain dual encoder on BERT-base, untied, AdamW, dropout on: 128 queries of 32 tokens, 256 passages of 256.
COMMON = {"tokens.query_length": 32, "encoder.dtype": "bfloat16"}
ALL = {"encoder.recompute": "none"}
CHEAP = {"encoder.recompute": "cheap"}
SPLIT = {**CHEAP, "mesh.fsdp": 4}
FLASH = {"encoder.attention": "flash"}
CUDNN = {"encoder.attention_dropout": 0.0, "encoder.attention": "cudnn"}
LONG = {"tokens.passage_length": 512}
MS_MARCO = (10, 80)  # tokens of its queries and passages on average
TRAVEL = ("all-gather", "all-reduce", "reduce-scatter")  # weights are gathered, gradients added up and scattered
ROWS = (
    Row("v5e:4x4", ALL, 6.6, 875),
    Row("v5e:4x4", {**ALL, **FLASH}, 5.7, 875),
    Row("v5e:4x4", {**ALL, **LONG}, 11.8, 875),
    Row("v5e:4x4", {**ALL, **LONG, **FLASH}, 8.0, 875),
    Row("v5e:4x4", {**ALL, "mesh.reduce_dtype": "bfloat16"}, 6.6, 445),
    Row("v5e:4x4", {**ALL, "mesh.fsdp": 4}, 4.6, 1_050, TRAVEL),
    Row("v5e:4x4", CHEAP, 4.3, 875),
    Row("v5e:4x4", {**CHEAP, **LONG}, 5.5, 875),
    Row("v5e:4x4", {**CHEAP, **LONG, **FLASH}, 5.0, 875),
    Row("v5e:4x4", {**CHEAP, "train.chunk_size": 16}, 4.3, 881),
    Row("v5e:4x4", SPLIT, 2.0, 1_360, TRAVEL),
    Row("v5e:2x2", CHEAP, 7.5, 875),
    Row("v5e:4x4", {**CHEAP, "tokens.packing": True}, 4.3, 875, ("all-reduce", "all-gather"), lengths=MS_MARCO),
    Row("v5e:1x1", {**CHEAP, "train.chunk_size": 8}, 4.5, 0, ()),
    Row("h100:1", CHEAP, 22, 0, ()),
    Row("h100:8", {**CHEAP, **LONG, "encoder.attention_dropout": 0.0}, 8.3, 875),
    Row("h100:8", {**CHEAP, **LONG, **CUDNN}, 7.5, 875),
    Row("v5e:4x4", {}, 1.0, 1, (), "encode"),
    Row("v5e:1x1", {}, 1.0, 0, (), "search"),
)


def large_kinds(collectives: list[dict[str, Any]]) -> set[str]:
    """The kinds of collectives that move more than LARGE bytes in a step."""
    moved: dict[str, float] = {}
    for found in collectives:
        moved[found["kind"]] = moved.get(found["kind"], 0.0) + found["times"] * found["bytes"]
    return {kind for kind, size in moved.items() if size > LARGE}


def problems(row: Row, values: dict[str, Any]) -> list[str]:
    """Which bounds a plan of the row breaks."""
    found = []
    gib, megabytes = values["memory"]["total"] / 2**30, values["collective_bytes"] / 1e6
    if gib > row.gib:
        found.append(f"{gib:.2f} GiB on a device, at most {row.gib} expected")
    if megabytes > row.megabytes:
        found.append(f"{megabytes:,.1f} MB of collectives, at most {row.megabytes:,} expected")
    if unknown := large_kinds(values["collectives"]) - set(row.kinds):
        found.append(f"{', '.join(sorted(unknown))} of more than {LARGE / 1e6:g} MB, which nobody expected")
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
