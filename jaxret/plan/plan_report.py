"""Formats a plan as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from jaxret.models.encoders.fused import describe_attention
from jaxret.parallel.chips import GIB, GPU_FRACTION, Topology
from jaxret.parallel.flops import PHASES, PROGRAM_PARTS
from jaxret.plan.estimates import PlanValues


def number(value: int | float) -> str:
    """Format a number with three digits and a unit: 1234567 -> "1.23 M"."""
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * unit:  # 999,500 has three digits as 1 M, not as 1000 k
            return f"{value / unit:.3g} {name}"
    return f"{value:.3g}"


def duration(seconds: int | float) -> str:
    """Return a time in words: "350 ms", "90 s", "12.5 min" or "3.0 h"."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def gib(value: int | float) -> str:
    """Return a number of bytes in GiB, with two decimals."""
    return f"{value / GIB:,.2f} GiB"


def plan_report(values: PlanValues, topology: Topology | None) -> str:
    """Format all values of a plan as paragraphs."""
    lines = [headline(values, topology), f"encoder: {values['encoder']}", f"batch: {batch(values)}"]
    lines += [describe_attention(values["attention"])] if values["verb"] != "search" else []
    for write in (_parameters, _flops, _memory, _collectives, _time, _training, _cost, _storage):
        paragraph = list(write(values, topology))
        if paragraph:
            lines += ["", *paragraph]
    notes = [*values.get("warnings", []), *values.get("notes", [])]
    if notes:
        lines += ["", *(f"note: {note}" for note in notes)]
    return "\n".join(lines)


def headline(values: PlanValues, topology: Topology | None) -> str:
    """Return a line that says whether the work fits the chips."""
    activity = {"train": "training", "encode": "encoding", "search": "search"}[values["verb"]]
    if topology is None:
        return f"{activity} with {values['config']}, for no chips in particular (--topology=v5e:4x4 names some)"
    memory = values["memory"]
    subject = f"{activity} with {values['config']} on {topology}"
    need, usable = memory["total"], memory["usable"]
    if memory["fits"] is None:
        return f"{subject}: at least {gib(need)} of {gib(usable)}; whether it fits was not computed"
    if memory["fits"]:
        return f"{subject}: fits, {gib(need)} of {gib(usable)}, {gib(usable - need)} to spare"
    least = "at least " if memory["at_least"] else ""
    return f"{subject}: does not fit, {least}{gib(need)} of {gib(usable)}, {gib(need - usable)} too much"


def batch(values: PlanValues) -> str:
    """Return the size of a step of training, encoding or search in words."""
    sizes = values["batch"]
    if values["verb"] == "train":
        text = f"{sizes['queries']} queries of {sizes['query_length']} tokens"
        text += f", {sizes['documents']} passages of {sizes['passage_length']}"
        if sizes.get("packed_queries"):
            rows = ("{} x {}".format(*sizes[f"packed_{side}"]) for side in ("queries", "passages"))
            text += f", packed by each device and chunk into rows: {' and '.join(rows)} tokens"
        return text
    if values["verb"] == "encode":
        return f"{sizes['passages']} passages of {sizes['passage_length']} tokens"
    best = f"the best {sizes['k']}, candidates in {sizes['precision']}"
    return f"{sizes['queries']} queries on {sizes['passages']:,} passages at a time, {best}"


def _parameters(values: PlanValues, _: Topology | None) -> Iterator[str]:
    if "parameters" in values:
        parts = [f"{name} {number(count)}" for name, count in values["parameters"].items() if name != "total"]
        yield f"parameters: {number(values['parameters']['total'])} ({', '.join(parts)})"


def _flops(values: PlanValues, _: Topology | None) -> Iterator[str]:
    table: dict[tuple[str, str], int] = defaultdict(int)
    for kind in values["flops"]:
        table[kind["part"], kind["phase"]] += kind["flops"]
    per = {"train": "a step", "encode": "a batch", "search": "in all"}[values["verb"]]
    yield f"FLOPs {per}, all chips together: {number(values['flops_total'])} (products, counted from their shapes)"
    if values["verb"] != "search":
        for part in PROGRAM_PARTS:
            cells = [f"{phase} {number(table[part, phase])}" for phase in PHASES if table[part, phase]]
            if part == "optimizer" and cells:
                cells = [f"{number(table[part, 'forward'])} operations on single numbers"]
            if cells:
                yield f"  {part:<12}{', '.join(cells)}"


def _memory(values: PlanValues, topology: Topology | None) -> Iterator[str]:
    if topology is None:
        return
    memory = values["memory"]
    source = "without temporaries of a step" if memory["at_least"] else "as the compiler assigns it"
    yield f"memory of a device, {source}: {gib(memory['total'])} of {gib(memory['usable'])}"
    for kind, size in memory["by_kind"].items():
        if size >= 2**20:
            note = ""
            if kind == "temporaries" and values["verb"] == "train":
                note = f" (activations, and gradients: {gib(memory['by_kind'].get('parameters', 0))} if all at once)"
            yield f"  {kind:<18}{gib(size)}{note}"
    if host := values.get("host"):
        part = f"{host['passages']:,} passages, {gib(host['vector_bytes'])} of vectors on disk"
        yield f"each of {host['hosts']} hosts: {part}"
        yield f"  memory of a host, without the vectors: {gib(host['memory'])} at least"
    if topology.chip.is_gpu:
        yield f"  JAX takes {GPU_FRACTION:.0%} of a GPU's memory; XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 gives it more"
    for trial in values.get("advice", []):
        keys = " ".join(f"--config.{key}={value}" for key, value in trial["change"].items())
        yield f"  {'fits with' if trial['fits'] else 'too much with'} {keys}: {gib(trial['total'])}"


def _collectives(values: PlanValues, _: Topology | None) -> Iterator[str]:
    if "collectives" not in values:
        return
    result_mb, sent_mb = values["collective_bytes"] / 1e6, values["sent_bytes"] / 1e6
    yield f"collectives, of each device: {result_mb:,.1f} MB of results, of which it sends {sent_mb:,.1f} MB at least"
    if sent_mb:
        yield f"  {values['overlapped']:.0%} of what it sends moves during matrix products, as XLA schedules them"
    table: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for collective in values["collectives"]:
        row = table[collective["kind"], "+".join(collective["dtypes"])]
        row[0] += collective["times"]
        row[1] += collective["times"] * collective["bytes"]
    for (kind, dtypes), (times, size) in sorted(table.items(), key=lambda item: -item[1][1]):
        yield f"  {kind:<19}{dtypes:<10}x {times:<6,} {size / 1e6:,.2f} MB"


def _time(values: PlanValues, topology: Topology | None) -> Iterator[str]:
    if topology is None:
        return
    bound = values["lower_bound"]
    works = {"train": "a step", "encode": "a batch", "search": "a thousand queries on the passages of a block"}
    parts = ", ".join(f"{name} {duration(bound[name])}" for name in bound if name != "seconds")
    if traffic := values.get("traffic"):
        traffic_text = "unknown, because the compiled program does not say how often a loop runs"
        if traffic["bytes"] is not None:
            ratio = traffic["bytes"] / traffic["products"]
            traffic_text = f"{number(traffic['bytes'])}B read and written, {ratio:.2f} times the products' own"
        yield f"main memory of each device: {traffic_text}"
    work = works[values["verb"]]
    yield f"lower bound of the time of {work}: {duration(bound['seconds'])} ({parts}); it will be longer"
    if values["verb"] == "encode":
        yield f"lower bound for {values['passages']:,} passages: {duration(values['corpus_seconds'])}"
    if values["verb"] == "search":
        load = f"{values['queries']:,} queries on {values['passages']:,} passages"
        load += f" in {values['pieces']} pieces" if values["pieces"] > 1 else ""
        yield f"lower bound for {load}: {duration(values['search_seconds'])}, reading the corpus from disk not counted"
    if host := values.get("host"):
        traffic_text = f"{number(host['received_bytes'])}B of queries and results come to each host"
        yield f"of that the merge of {host['hosts']} hosts: {duration(host['merge_seconds'])} ({traffic_text})"


def _training(values: PlanValues, topology: Topology | None) -> Iterator[str]:
    data = values.get("data")
    if data is None:
        return
    if data["examples"] is not None:
        yield f"data: {data['examples']:,} examples"
    if data["real"] is not None:
        real, padded_tokens, packed_tokens = (data[name] for name in ("real", "padded", "packed"))
        ratio = padded_tokens / real
        yield f"tokens per step: {number(real)} real, {number(padded_tokens)} padded: {ratio:.2f} computed for each"
        ratio, saving = packed_tokens / real, 1 - packed_tokens / padded_tokens
        packing = f"{number(packed_tokens)}, {ratio:.2f} computed for each: {saving:.0%} less to encode"
        yield f"with tokens.packing: {packing}"
    if data["steps"] is not None:
        yield f"steps: {data['steps']:,}"
        if topology is not None:
            time, part = duration(values["hours"] * 3600), values["utilization"]
            yield f"training: {time} if arithmetic runs at {part:.0%} of its full rate (--utilization)"


def _cost(values: PlanValues, topology: Topology | None) -> Iterator[str]:
    if "cost" not in values:
        return
    price = values["cost"]["price"]
    work = "training" if values["verb"] == "train" else f"encoding {values['passages']:,} passages"
    shares = ", ".join(f"{row['dollars']:,.2f} at {row['utilization']:.0%}" for row in values["cost"]["dollars"])
    yield f"{work} costs, in dollars at {price:g} for a chip's hour: {shares} of the full rate"


def _storage(values: PlanValues, _: Topology | None) -> Iterator[str]:
    if "checkpoint_bytes" in values:
        yield f"a checkpoint: {gib(values['checkpoint_bytes'])}; best, last and the one being written are kept"
    if "corpus_bytes" in values:
        yield f"vectors of {values['passages']:,} passages on disk: {gib(values['corpus_bytes'])}, and their ids"
