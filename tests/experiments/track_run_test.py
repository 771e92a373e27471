"""`jaxret track` with the real trackers, offline, in the environment of requirements-clients.txt."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline import REPOSITORY, run_script, train_arguments, write_data, write_encoder

SCRIPT = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
history = {name: [[value.step, value.value] for value in values] for name, values in histories.items()}
print(json.dumps({"params": run.data.params, "metrics": history, "name": run.info.run_name}))
"""

TEXT: dict[str, Any] = {"capture_output": True, "text": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("track")
    write_encoder(root / "encoder")
    write_data(root / "data")
    keys = {"train__steps": 3, "train__log_every": 1, "train__checkpoint_every": 2}
    done = run_script("train.py", *train_arguments(root / "encoder", root / "data", root / "run", **keys))
    assert done.returncode == 0, done.stderr
    return root / "run"


def tracked(name: str, run: Path, home: Path) -> str:
    """Run `jaxret track` twice for a real tracker; return what the second call, with --quiet, printed."""
    python = os.environ.get("JAXRET_CLIENTS_PYTHON", sys.executable)
    variables = {
        **os.environ,
        "HOME": str(home),
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{sysconfig.get_paths()['purelib']}",
        "TRACKIO_DIR": str(home / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(home),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"file://{home}/mlflow",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    seen = subprocess.run([python, "-c", f"import {name}, sys; print(sys.version_info[:2])"], env=variables, **TEXT)
    if seen.returncode or seen.stdout.strip() != str(sys.version_info[:2]):
        pytest.skip(f"{name} is missing for this Python: requirements-clients.txt says how to install it")
    command = [python, "-m", "jaxret", "track", str(run), f"--to={name}", "--project=project"]
    for flags in ([], ["--quiet"]):
        done = subprocess.run([*command, *flags], env=variables, cwd=home, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    if name == "mlflow":
        read = subprocess.run([python, "-c", SCRIPT], env=variables, capture_output=True, text=True)
        assert read.returncode == 0, read.stderr
        (home / "mlflow.json").write_text(read.stdout)
    return done.stdout


def losses(run: Path) -> list[list[float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[line["step"], line["loss"]] for line in lines if "loss" in line]


@pytest.mark.slow
def test_trackio(run: Path, tmp_path: Path) -> None:
    lines = tracked("trackio", run, tmp_path).splitlines()
    assert [line.partition(" of metrics")[0] for line in lines] == ["trackio: sent 0 lines"]
    (database,) = [path for path in (tmp_path / "trackio").rglob("*.db") if "project" in path.name]
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
    stored = [[step, json.loads(metrics)["loss"]] for step, metrics in rows if "loss" in json.loads(metrics)]
    assert stored == losses(run)


@pytest.mark.exhaustive
def test_wandb(run: Path, tmp_path: Path) -> None:
    assert "wandb: sent 0 lines of metrics" in tracked("wandb", run, tmp_path)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.exhaustive
def test_mlflow(run: Path, tmp_path: Path) -> None:
    assert "mlflow: sent 0 lines of metrics" in tracked("mlflow", run, tmp_path)
    stored = json.loads((tmp_path / "mlflow.json").read_text())
    assert stored["metrics"]["loss"] == losses(run)
    assert any(name.startswith("validation/RR_at_10") for name in stored["metrics"])
    assert (stored["name"], stored["params"]["train.steps"]) == ("run", "3")
