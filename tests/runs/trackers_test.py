"""Experiment trackers: every line is sent once after any interruption, and no tracker ends a training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxret.evaluation.evaluation_report import write_evaluation
from jaxret.evaluation.metrics import Evaluation
from jaxret.experiments.track_run import SentCounts, track_run
from jaxret.runs import trackers
from jaxret.runs.trackers import TrackedRun, Tracker, check_trackers, tracker_names
from jaxret.storage.atomic import read_json
from jaxret.training.loop import train
from tests.pipeline import tiny_config, write_data, write_encoder

pytestmark = pytest.mark.slow

Line = tuple[int, dict[str, float]]


class Service:
    """A tracker's server: its runs, and whether it answers."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Line]] = {}
        self.opened: list[TrackedRun] = []
        self.fails = lambda step: False
        self.finished = 0
        self.newest: int | None = None
        self.tells = False  # whether it reports the values that it has

    def open(self, run: TrackedRun) -> Tracker:
        key = run.id or f"{run.name}-{len(self.runs)}"
        self.opened.append(run)

        def log(step: int, values: Any) -> None:
            if self.fails(step):
                raise ConnectionError("no answer\nand more")
            self.runs.setdefault(key, []).append((step, dict(values)))

        def finish() -> None:
            self.finished += 1

        def absent(step: int, values: Any) -> dict[str, float]:
            stored = {name for at, sent in self.runs.get(key, []) if at == step for name in sent}
            return {name: value for name, value in values.items() if name not in stored}

        return Tracker(key, log, finish, self.newest, absent if self.tells else None)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    """The service under the name "json", because that is the name of a module."""
    made = Service()
    monkeypatch.setitem(trackers.TRACKERS, "json", made.open)
    return made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trackers")
    write_encoder(root / "encoder")
    write_data(root / "data")
    return root


@pytest.fixture
def trained(root: Path, tmp_path: Path) -> Callable[..., Path]:
    def run(steps: int, *names: str) -> Path:
        keys = {"train__steps": steps, "train__log_every": 1, "train__checkpoint_every": 2}
        config = tiny_config(root / "encoder", root / "data", **keys, train__trackers=names)
        train(config, tmp_path / "run", progress=False)
        return tmp_path / "run"

    return run


def logged(run: Path) -> list[Line]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line.pop("step"), line) for line in lines]


def test_a_resumed_run_is_one_tracked_run_with_each_line_once(trained: Any, service: Service) -> None:
    run = trained(2, "json")
    assert list(service.runs.values()) == [logged(run)]
    trained(4, "json")
    assert list(service.runs.values()) == [logged(run)]
    assert [step for step, values in logged(run) if "loss" in values] == [1, 2, 3, 4]
    first, second = service.opened
    assert (first.project, first.name, first.id, second.id) == ("jaxret", "run", "", "run-0")
    assert first.config["train.batch_size"] == read_json(run / "config.json")["train"]["batch_size"]
    assert first.config["environment.packages.jax"]
    assert len(first.config["environment.git.commit"]) == 40


def test_lines_after_the_checkpoint_of_a_killed_run_are_not_sent_twice(trained: Any, service: Service) -> None:
    """The run was killed after step 3: it has lines of step 3, and a checkpoint of step 2."""
    run = trained(2, "json")
    lines = (run / "metrics.jsonl").read_text()
    state = read_json(run / "trackers.json")
    state["json: jaxret"]["sent"]["training"] = 3
    (run / "trackers.json").write_text(json.dumps(state))
    (run / "metrics.jsonl").write_text(lines + json.dumps({"step": 3, "loss": 1.0}) + "\n")
    trained(4, "json")
    (sent,) = service.runs.values()
    assert [step for step, values in sent if "loss" in values] == [1, 2, 4]
    assert len(logged(run)) == len(sent) + 1


def test_lines_that_a_killed_process_had_queued_are_sent_again(trained: Any, service: Service) -> None:
    run = trained(4, "json")
    (sent,) = service.runs.values()
    lost = [line for line in sent if line[0] > 2]
    del sent[-len(lost) :]
    service.newest = 2
    assert track_run(run, ["json"]) == {"json": SentCounts(len(lost), 0)}
    assert list(service.runs.values()) == [logged(run)]


def test_a_line_that_a_killed_process_had_sent_is_not_sent_again(trained: Any, service: Service) -> None:
    """The process was killed before it recorded step 3."""
    service.tells = True
    run = trained(4, "json")
    (sent,) = service.runs.values()
    del sent[next(place for place, (step, values) in enumerate(sent) if step > 3) :]
    state = read_json(run / "trackers.json")
    state["json: jaxret"]["sent"]["training"] = 2
    (run / "trackers.json").write_text(json.dumps(state))
    track_run(run, ["json"])
    assert [step for step, values in sent if "loss" in values] == [1, 2, 3, 4]


def test_projects_are_sent_to_apart(trained: Any, service: Service) -> None:
    run = trained(2, "json")
    assert track_run(run, ["json"], "other") == {"json": SentCounts(len(logged(run)), 0)}
    assert track_run(run, ["json"], "other") == {"json": SentCounts(0, 0)}
    assert [sent for sent in service.runs.values()] == [logged(run), logged(run)]
    assert [opened.project for opened in service.opened] == ["jaxret", "other", "other"]


def test_a_failed_tracker_does_not_end_training_and_is_updated_later(
    trained: Any, service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.fails = lambda step: step >= 2
    run = trained(4, "json")
    warnings = [line for line in capsys.readouterr().err.splitlines() if "json failed" in line]
    assert len(warnings) == 1
    assert "json failed (ConnectionError: no answer)" in warnings[0]
    assert f"jaxret track {run} --to=json" in warnings[0]
    (sent,) = service.runs.values()
    assert [step for step, _ in sent] == [1]
    service.fails = lambda step: False
    assert track_run(run, ["json"], "jaxret") == {"json": SentCounts(len(logged(run)) - 1, 0)}
    assert list(service.runs.values()) == [logged(run)]


@pytest.mark.parametrize("moment", ["init", "log", "finish"])
@pytest.mark.parametrize("names", [("json", "csv"), ("csv", "json")])
def test_a_failed_tracker_does_not_affect_others(
    trained: Any,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    moment: str,
    names: tuple[str, str],
) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError(f"no {moment}")

    def open_failing(run: TrackedRun) -> Tracker:
        if moment == "init":
            fail()
        return Tracker("key", fail if moment == "log" else print, fail if moment == "finish" else print)

    monkeypatch.setitem(trackers.TRACKERS, "csv", open_failing)  # "csv" is a module, too
    run = trained(2, *names)
    assert [step for step, values in logged(run) if "loss" in values] == [1, 2]
    assert list(service.runs.values()) == [logged(run)]
    assert service.finished == 1
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "warning: " in line and " failed " in line]
    assert warning.startswith(f"warning: csv failed (ConnectionError: no {moment}) and gets no more")


def test_a_run_is_sent_afterwards_with_its_evaluations(trained: Any, service: Service) -> None:
    run = trained(2)
    assert not service.runs
    answers = Evaluation({"Accuracy@5": 0.25}, {"Accuracy@5": {"q": 0.25}}, 1, 1)
    measured = Evaluation({"nDCG@10": 0.5}, {"nDCG@10": {"q": 0.5}}, 1, 1)
    write_evaluation(run / "eval" / "data.test.json", measured, {}, answers)
    assert track_run(run, ["json"], "other") == {"json": SentCounts(len(logged(run)), 1)}
    evaluation = (2, {"eval/data.test/nDCG@10": 0.5, "eval/data.test/Accuracy@5": 0.25})
    assert list(service.runs.values()) == [[*logged(run), evaluation]]
    assert service.opened[0].project == "other"
    assert track_run(run, ["json"], "other") == {"json": SentCounts(0, 0)}, "nothing is sent twice"
    write_evaluation(run / "eval" / "data.test.json", Evaluation({"nDCG@10": 0.6}, {"nDCG@10": {"q": 0.6}}, 1, 1), {})
    assert track_run(run, ["json"], "other") == {"json": SentCounts(0, 1)}


def test_errors_are_one_sentence(trained: Any, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"train.trackers .*'nothing'; trackers"):
        trained(2, "nothing")
    monkeypatch.setitem(trackers.TRACKERS, "no_such_module", service.open)
    with pytest.raises(ValueError, match=r"train.trackers .*'no_such_module', .*installed"):
        trained(2, "no_such_module")
    check_trackers(["json"])
    assert tracker_names(["json,csv", "wandb"]) == ("json", "csv", "wandb")
    run = trained(2)
    with pytest.raises(ValueError, match=r"--to is empty"):
        track_run(run, [], "jaxret")
    service.fails = lambda step: True
    with pytest.raises(ValueError, match="json failed: ConnectionError: no answer"):
        track_run(run, ["json"], "jaxret")
    with pytest.raises(FileNotFoundError, match="is not a run"):
        track_run(run / "nowhere", ["json"], "jaxret")
