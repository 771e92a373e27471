"""`python -m jaxret plan` as a user runs it, without compilers for other chips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxret.plan.plan_report import duration, number, plan_report
from jaxret.plan.programs import ENCODERS
from tests.pipeline import run_script

BASE = ("plan", "--config=configs/base.py")
# The largest BERT that a config.json may request here: its parameters alone need more memory than a v5e has.
LARGE = {"hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 16384}


def write_large(folder: Path) -> str:
    shapes = json.loads((ENCODERS / "bert-base-uncased" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shapes | LARGE))
    return f"--config.encoder.checkpoint={folder}"


@pytest.mark.exhaustive
def test_values_without_a_compiler() -> None:
    steps = "--config.train.steps=1000"
    done = run_script("-m", "jaxret", *BASE, "--json", "--topology=v5e:4x4", steps, "--price=1.5", "--utilization=0.25")
    values = json.loads(done.stdout)["plan"]
    assert done.returncode == 0, done.stderr
    assert values["parameters"]["total"] == 2 * 108_891_648
    counters = values["memory"]["by_kind"]["moments"] - 2 * values["memory"]["by_kind"]["parameters"]
    assert counters == (2 * 512 if "collectives" in values else 8), "a TPU stores a number in 512 bytes"
    # Two counters, the step, and whether the state is healthy.
    assert values["checkpoint_bytes"] == 3 * 4 * 2 * 108_891_648 + 13
    assert values["data"]["steps"] == 1000
    seconds = values["lower_bound"]["arithmetic"]
    products = sum(kind["flops"] for kind in values["flops"] if kind["part"] != "optimizer")
    assert seconds == pytest.approx(products / 16 / (197e12 / 6))
    assert values["hours"] == pytest.approx(1000 * seconds / 0.25 / 3600)
    costs = {row["utilization"]: row["dollars"] for row in values["cost"]["dollars"]}
    assert costs.keys() == {0.2, 0.25, 0.4, 0.6}
    assert costs[0.25] == pytest.approx(16 * 1.5 * values["hours"])
    assert costs[0.4] == pytest.approx(costs[0.2] / 2)
    if "collectives" not in values:
        assert any("requirements-plan.txt" in note for note in values["notes"])


@pytest.mark.exhaustive
def test_the_cost_of_encoding() -> None:
    arguments = ("--topology=l4:1", "--config.tokens.passage_length=128", "--passages=1000000", "--price=0.7")
    done = run_script("-m", "jaxret", "plan", "encode", BASE[1], "--json", *arguments)
    values = json.loads(done.stdout)["plan"]
    seconds = 1_000_000 * values["lower_bound"]["arithmetic"] / values["batch"]["passages"]
    costs = {row["utilization"]: row["dollars"] for row in values["cost"]["dollars"]}
    assert costs[0.4] == pytest.approx(0.7 * seconds / 0.4 / 3600, rel=1e-3)
    dollars = f"{costs[0.2]:,.2f} at 20%, {costs[0.4]:,.2f} at 40%, {costs[0.6]:,.2f} at 60% of the full rate"
    text = run_script("-m", "jaxret", "plan", "encode", BASE[1], *arguments).stdout
    assert f"encoding 1,000,000 passages costs, in dollars at 0.7 for a chip's hour: {dollars}\n" in text


@pytest.mark.exhaustive
def test_a_program_that_cannot_fit_ends_with_status_1(tmp_path: Path) -> None:
    done = run_script("-m", "jaxret", *BASE, "--topology=h100:1", "--advice=false", write_large(tmp_path))
    assert done.returncode == 1
    assert "h100:1: does not fit, " in done.stdout
    assert f"encoder: {tmp_path / 'config.json'}" in done.stdout


@pytest.mark.table
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan",), "--config must be given"),
        (("plan", "encod", *BASE[1:]), "is one of train, encode, search; did you mean encode?"),
        ((*BASE, "--topology=v9:1"), "'v9' is not a known chip"),
        ((*BASE, "--topolgy=v5e:1x1"), "--topolgy is not a flag; did you mean --topology?"),
        ((*BASE, "--config.encoder.checkpoint=nobody/knows"), "A plan needs no weights"),
        (
            (*BASE, "--topology=v5e:2x2", "--config.mesh.fsdp=3"),
            "mesh.fsdp is 3; it must divide the number of devices, 4",
        ),
        (("plan", "encode", "--config=configs/base.py", "--passages=0"), "--passages"),
        ((*BASE, "--price=2"), "--price is for training and encoding on chips: name them with --topology"),
        (("plan", "search", *BASE[1:], "--topology=v5e:1x1", "--price=2"), "--price is for training and encoding"),
        (
            (*BASE, "--topology=v5e:1x1", "--price=0"),
            "--price=0: it must be the price of a chip in dollars per hour, above 0",
        ),
        (
            (*BASE, "--lengths=10,80", "--config.data.train=x"),
            "--lengths draws texts in place of data.train",
        ),
        (("plan", "encode", *BASE[1:], "--lengths=10,80"), "--lengths draws texts to train on, and plan encode has"),
        ((*BASE, "--utilization=nan"), "--utilization is nan; it must be a number from 0.01 to 1"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    done = run_script("-m", "jaxret", *arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_help_has_the_flags() -> None:
    done = run_script("-m", "jaxret", "plan", "--help")
    assert done.returncode == 0
    assert "--topology=" in done.stdout
    assert "--config.KEY=" in done.stdout


def values(fits: bool | None) -> dict[str, Any]:
    return {
        "verb": "train",
        "config": "c.py",
        "encoder": "e",
        "attention": "plain",
        "batch": {"queries": 1, "query_length": 2, "documents": 3, "passage_length": 4},
        "flops": [{"part": "queries", "phase": "forward", "precision": "bfloat16", "flops": 1234567}],
        "flops_total": 1234567,
        "memory": {"by_kind": {"temporaries": 2**30}, "total": 2**30, "usable": 2**31, "fits": fits, "at_least": False},
        "lower_bound": {"arithmetic": 0.5, "memory": 0.25, "seconds": 0.5},
        "advice": [{"change": {"train.chunk_size": 8}, "total": 2**29, "fits": True}],
    }


def test_the_text_has_the_values() -> None:
    from jaxret.parallel.chips import parse_topology

    chips = parse_topology("v5e:1x1")
    assert "c.py on v5e:1x1: fits, 1.00 GiB of 2.00 GiB, 1.00 GiB to spare" in plan_report(values(True), chips)
    assert "whether it fits was not computed" in plan_report(values(None), chips)
    rows = {"packed_queries": (2, 32), "packed_passages": (3, 256)}
    packed = values(True)
    packed["batch"] |= rows
    assert "into rows: 2 x 32 and 3 x 256 tokens" in plan_report(packed, chips)
    text = plan_report(values(False), chips)
    assert "does not fit" in text
    assert "1 queries of 2 tokens, 3 passages of 4" in text
    assert "queries     forward 1.23 M" in text
    assert "lower bound of the time of a step: 500 ms (arithmetic 500 ms, memory 250 ms)" in text
    assert "fits with --config.train.chunk_size=8: 0.50 GiB" in text
    moved = values(True) | {"traffic": {"bytes": 3e6, "products": 2e6}}
    assert "main memory of each device: 3 MB read and written, 1.50 times the products' own" in plan_report(
        moved, chips
    )
    moved["traffic"]["bytes"] = None
    assert "main memory of each device: unknown, because the compiled program does not say how" in plan_report(
        moved, chips
    )


def test_numbers_and_times_are_short() -> None:
    assert [number(n) for n in (7, 1234, 999_999, 2.5e12)] == ["7", "1.23 k", "1 M", "2.5 T"]
    assert [duration(s) for s in (0.0123, 5, 300, 7300)] == ["12.3 ms", "5 s", "5 min", "2.0 h"]
