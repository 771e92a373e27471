"""JSON lines on standard output, all other text on standard error."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxret.cli.app import requests_events
from tests.pipeline import (
    REPOSITORY,
    command,
    environment,
    free_address,
    run_script,
    together,
    train_arguments,
    write_data,
    write_encoder,
)


def events(text: str) -> list[dict[str, Any]]:
    """Return the events on a standard output, in which every line must be an event; NaN is not JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def emitted_in_code() -> dict[str, set[str]]:
    """Return event -> fields, from every call of `emit` in the package."""
    fields: dict[str, set[str]] = {}
    for path in (REPOSITORY / "jaxret").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "emit":
                (event,) = node.args
                assert isinstance(event, ast.Constant), f"{path}:{node.lineno}: the event's name is not in the code"
                assert isinstance(event.value, str)
                names = {keyword.arg or "**" for keyword in node.keywords}
                assert "**" not in names, f"{path}:{node.lineno}: the fields' names are not in the code"
                assert fields.setdefault(event.value, names) == names, f"{path}:{node.lineno}: {event.value}"
    return fields


@pytest.mark.slow
def test_the_page_lists_every_event_with_its_fields() -> None:
    page = (REPOSITORY / "docs" / "events.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \| ", page, re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", fields)) for name, fields in rows} == emitted_in_code()
    assert [name for name, _ in rows] == list(dict.fromkeys(name for name, _ in rows))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "--json"], True),
        (["train", "-json"], True),
        (["train", "--json=true", "x"], True),
        (["train", "--json", "--nojson"], False),
        (["train", "--nojson", "--json=1"], True),
        (["train", "--json=false"], False),
        (["train", "--jsonl"], False),
        (["train"], False),
    ],
)
def test_json_flag_is_read_before_other_flags(arguments: list[str], expected: bool) -> None:
    assert requests_events(arguments) == expected


VALUES = """
import ctypes, os, subprocess, sys
from pathlib import Path
import numpy as np
from jaxret.parallel.events import emit, start_events
emit("before", value=1)
start_events()
print("printed")
sys.stderr.write("error text\\n")
os.write(1, b"written\\n")
subprocess.run(["echo", "of a child"])
ctypes.CDLL(None).puts(b"of C")
ctypes.CDLL(None).fflush(None)
emit("values", floats=[1.5, float("nan"), -float("inf"), np.float32("nan"), np.float16(0.5)], number=np.int64(7),
     flag=np.bool_(True), array=np.array([[1.0, np.inf]]), path=Path("a") / "b", text="caf\\u00e9\\n\\u2028",
     mapping={1: (Path("c"), None)}, long="x" * 1_000_000)
"""


def test_values_are_json_and_everything_else_is_on_standard_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", VALUES], cwd=REPOSITORY, env=environment(), capture_output=True, text=True
    )
    (event,) = events(done.stdout)
    assert len(event.pop("long")) == 1_000_000
    assert event == {
        "event": "values",
        "floats": [1.5, None, None, None, 0.5],
        "number": 7,
        "flag": True,
        "array": [[1.0, None]],
        "path": "a/b",
        "text": "café\n\u2028",
        "mapping": {"1": ["c", None]},
    }
    assert done.stderr.splitlines() == ["printed", "error text", "written", "of a child", "of C"]


@pytest.mark.slow
def test_errors_are_events() -> None:
    for arguments, message in (
        (("demmo", "--json"), "'demmo' is not a verb; did you mean demo?"),
        (("verify", "nowhere", "--json", "--wrong=1"), "--wrong is not a flag (--help lists them)"),
        (("verify", "nowhere", "--json"), "nowhere is not a folder; give the folder of a run"),
    ):
        done = run_script("-m", "jaxret", *arguments)
        (event,) = events(done.stdout)
        assert (event["event"], event["status"]) == ("error", done.returncode) == ("error", 1)
        assert event["message"].startswith(message)
        assert done.stderr == f"error: {event['message']}\n"
    plain = run_script("-m", "jaxret", *arguments[:-1])
    assert (plain.stderr, plain.returncode, plain.stdout) == (done.stderr, 1, ""), (
        "control: without the flag there is no event"
    )


def test_help_is_no_event() -> None:
    done = run_script("-m", "jaxret", "verify", "--json", "--help")
    assert (done.stdout, done.returncode) == ("", 0)
    assert "--json=" in done.stderr


def test_a_closed_pipe_ends_the_command() -> None:
    body = "import sys; from jaxret.parallel.events import emit, start_events; from jaxret.cli.app import report_errors"
    program = (
        f"{body}\nwith report_errors():\n    start_events(); sys.stdin.readline(); emit('x'); print('not reached')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate("go\n", timeout=30)
    assert (process.returncode, errors) == (141, "")


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    encoder, data, run = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data"), tmp_path / "run"
    done = run_script("train.py", *train_arguments(encoder, data, run), "--json")
    assert done.returncode == 0, done.stderr
    trained = events(done.stdout)
    assert "the training step was compiled to 1 program(s)" in done.stderr
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "loss" in line]
    assert len(steps) == 6
    for event, line in zip([one for one in trained if one["event"] == "metrics"], steps, strict=True):
        assert {"step": event["step"], **event["metrics"]} == line
    validations = [one for one in trained if one["event"] == "validation"]
    assert [one["step"] for one in validations] == [3, 6]
    checkpoints = [one for one in trained if one["event"] == "checkpoint"]
    assert [(one["step"], one["path"]) for one in checkpoints] == [(s, f"{run}/checkpoints/{s}") for s in (3, 6)]
    last = {"event": "training", "workdir": str(run), "step": 6, "total": 6, "resumed_from": None}
    assert trained[-1] == {**last, "metrics": validations[-1]["metrics"]}


@pytest.mark.exhaustive
def test_encoding_searching_and_comparing(tmp_path: Path) -> None:
    run, data = tmp_path / "run", write_data(tmp_path / "data")
    encoder = write_encoder(tmp_path / "encoder")
    done = run_script("-m", "jaxret", "open", str(encoder), f"--workdir={run}", "--json")
    (opened,) = events(done.stdout)
    assert (opened["event"], opened["workdir"], opened["model"]) == ("run", str(run), str(encoder))
    assert "\n".join(opened["notes"]) in done.stderr
    done = run_script("encode.py", f"--workdir={run}", f"--corpus={data}", "--json", "--quiet")
    (encoded,) = events(done.stdout)
    assert (encoded["event"], encoded["passages"], encoded["shards"]) == ("encoding", 115, 1)
    shards = list(Path(encoded["folder"]).glob("vectors-*"))
    assert sum(np.load(path).size for path in shards) * 4 == encoded["bytes"] - 128 * len(shards)
    assert encoded["vectors"] == sum(np.prod(np.load(path).shape[:2]) for path in shards)
    assert "115 passages are in" in done.stderr

    search = ("search.py", f"--workdir={run}", "--json")
    done = run_script(*search, f"--queries={data}", f"--qrels={data}", "--split=dev", "--k=10", "--latency=0")
    (evaluated,) = events(done.stdout)
    result = json.loads(Path(evaluated["results"]).read_text())
    assert evaluated["measures"] == result["mean"] | result["answers"]["mean"]
    assert (evaluated["queries"], Path(evaluated["run"]).exists()) == (12, True)
    assert "nDCG@10" in done.stderr
    done = run_script(*search, "--interactive", "--k=2", input="silver river\ncaf\udce9\nstone\n")
    first, error, second = events(done.stdout)
    questions = (first["question"], error["event"], error["status"], second["question"])
    assert questions == ("silver river", "error", 0, "stone")
    assert [hit["rank"] for hit in first["hits"]] == [1, 2]
    assert first["hits"][0]["score"] >= first["hits"][1]["score"]
    assert first["hits"][0]["text"]

    other = tmp_path / "other"
    shutil.copytree(run, other)
    file = other / "eval" / "data.dev.json"
    result["provenance"]["checkpoint"]["digest"] = "other"
    file.write_text(json.dumps(result))
    done = run_script("-m", "jaxret", "compare", f"a={run}", f"b={other}", "--resamples=1000", "--json")
    (compared,) = events(done.stdout)
    assert compared["comparison"]["baseline"] == "a"
    assert compared["results"] == {"a": [f"{run}/eval/data.dev.json"], "b": [str(file)]}
    assert "nDCG@10" in done.stderr

    damaged = next(Path(encoded["folder"]).glob("vectors-*"))
    damaged.write_bytes(damaged.read_bytes()[:-4])
    done = run_script("-m", "jaxret", "verify", str(run), "--json")
    verified, error = events(done.stdout)
    assert [str(damaged) in problem for problem in verified["problems"]] == [True]
    assert (error["event"], error["status"], done.returncode) == ("error", 1, 1)
    assert "bad: " in done.stderr


@pytest.mark.exhaustive
def test_only_the_first_process_writes_events(tmp_path: Path) -> None:
    encoder, data, run = write_encoder(tmp_path / "encoder"), write_data(tmp_path / "data"), tmp_path / "run"
    job = {"mesh__coordinator": free_address(), "mesh__num_processes": 2}
    arguments = (train_arguments(encoder, data, run, **job, mesh__process_id=number) for number in range(2))
    first, second = together(*(command("train.py", *each, "--json") for each in arguments))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert events(first[1])[-1]["event"] == "training"
    assert second[1] == ""
    assert "Gloo" not in first[2] + second[2]
