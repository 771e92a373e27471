"""Send the metrics of a run to experiment trackers (trackio, wandb, mlflow), each line once.

`trackers.json` in the run's folder has the run's id in each project of a tracker, and the last step that was sent, so
that no step is sent twice when a run is resumed or sent again. A tracker that was missing or failed first gets the
earlier lines of metrics.jsonl. A tracker also gets the config of the run, its environment (env.json, with the state of
git at the start of training), and the means of its evaluations.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jaxret.parallel.progress import hide_prints
from jaxret.runs.mismatch import flatten
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json, sha256_bytes, sha256_file, write_json

StepValues = Mapping[str, float]
_TRAINING, _VALIDATION = "training", "validation/"
LINE_KINDS = {_TRAINING, _VALIDATION}  # kinds of lines; a step has at most one line of each kind


class Tracker(NamedTuple):
    """A run that is open at a tracker."""

    id: str  # id of the run at the tracker
    log: Callable[[int, StepValues], object]  # sends values of a step
    finish: Callable[[], object]  # ends the run there
    newest: int | None = None  # last step that the tracker has; None: unknown
    # returns the values of a step that the tracker does not have; None: the tracker cannot tell
    missing: Callable[[int, StepValues], StepValues] | None = None


@dataclass(frozen=True)
class TrackedRun:
    """A run to open at a tracker."""

    project: str  # project at the tracker
    name: str  # name of the run
    id: str  # id of the run at the tracker; "" for a new run
    config: dict[str, Any]  # config, environment and git state of the run, with dotted keys


def open_trackio(run: TrackedRun) -> Tracker:
    """Open a run at trackio, a new one or the one with the id of `run`. The result knows the last step that trackio
    has."""
    import trackio

    key = run.id or f"{run.name}-{secrets.token_hex(4)}"  # trackio identifies runs by their names
    settings: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    handle = trackio.init(run.project, name=key, config=run.config, resume="allow", **settings)
    # Lines in the queue of a killed process are lost, so the last step that trackio has is read.
    next_step = getattr(handle, "_next_step", None)
    newest = next_step - 1 if run.id and next_step is not None else None
    # handle.finish is not used, because trackio calls it again at the end of the process.
    return Tracker(key, lambda step, values: handle.log(dict(values), step=step), trackio.finish, newest)


def open_wandb(run: TrackedRun) -> Tracker:
    """Open a run at Weights & Biases, a new one or the one with the id of `run`."""
    import wandb

    key = run.id or secrets.token_hex(4)
    handle = wandb.init(project=run.project, name=run.name, id=key, config=run.config, resume="allow")
    return Tracker(key, lambda step, values: handle.log(dict(values), step=step), handle.finish)


def open_mlflow(run: TrackedRun) -> Tracker:
    """Open a run at MLflow, a new one or the one with the id of `run`. A new run gets the config as parameters, and its
    project becomes an experiment. The result can ask MLflow which values of a step it has."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient()
    key = run.id
    if not key:
        experiment = client.get_experiment_by_name(run.project)
        place = experiment.experiment_id if experiment else client.create_experiment(run.project)
        key = client.create_run(place, run_name=run.name).info.run_id
        params = [Param(name, str(value)[:500]) for name, value in run.config.items()]
        for start in range(0, len(params), 100):  # a request may have at most 100
            client.log_batch(key, params=params[start : start + 100])

    def named(name: str) -> str:
        return name.replace("@", "_at_")  # mlflow allows no @

    def log(step: int, values: StepValues) -> None:
        milliseconds = int(time.time() * 1000)
        client.log_batch(
            key, metrics=[Metric(named(name), value, milliseconds, step) for name, value in values.items()]
        )

    def missing_values(step: int, values: StepValues) -> StepValues:
        def has(name: str) -> bool:
            return any(metric.step == step for metric in client.get_metric_history(key, named(name)))

        return {name: value for name, value in values.items() if not has(name)}

    return Tracker(key, log, partial(client.set_terminated, key), missing=missing_values)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "trackio": open_trackio,
    "wandb": open_wandb,
    "mlflow": open_mlflow,
}
PACKAGE_NAMES = {"mlflow": "mlflow-skinny"}  # tracker -> package to install, if the names differ


def tracker_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names in train.trackers, which the command line gives as one text "a,b"."""
    return tuple(name for text in names for name in text.split(",") if name)


def check_trackers(names: Sequence[str], setting: str = "train.trackers") -> None:
    """Raise ValueError for an unknown tracker, and for a tracker that is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"{setting} has {name!r}; trackers are {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"{setting} has {name!r}, which is not installed: pip install {PACKAGE_NAMES.get(name, name)}"
            )


class RunTracker:
    """A run at one tracker. Lines that were sent before are not sent again. Raises any error of the tracker."""

    def __init__(self, name: str, workdir: Workdir, project: str) -> None:
        self.name, self._workdir, self._key = name, workdir, f"{name}: {_place(name)}{project}"
        state = _state(workdir).get(self._key, {})
        self._newest: dict[str, Any] = dict(state.get("sent", {}))
        config = {**read_json(workdir.config), "environment": read_json(workdir.environment)}
        with hide_prints():
            self._tracker = TRACKERS[name](TrackedRun(project, workdir.name, state.get("id", ""), flatten(config)))
        if (newest := self._tracker.newest) is not None:
            for kind in LINE_KINDS & self._newest.keys():
                self._newest[kind] = min(self._newest[kind], newest)
        # A killed process may have sent a line that it did not record, so the tracker is asked about the first line of
        # each kind.
        self._unsure = set(LINE_KINDS) if state and self._tracker.missing else set[str]()
        self._store()

    def catch_up(self) -> int:
        """Send the lines of metrics.jsonl that were not sent, and return their number."""
        return sum(self.send(step, values) for step, values in _lines(self._workdir))

    def send(self, step: int, values: StepValues) -> bool:
        """Send a line of metrics.jsonl unless it was sent before. Return whether it was sent now."""
        kind = _VALIDATION if any(name.startswith(_VALIDATION) for name in values) else _TRAINING
        if not values or step <= self._newest.get(kind, -1):
            return False
        if kind in self._unsure and self._tracker.missing:
            self._unsure.remove(kind)
            values = self._tracker.missing(step, values)
        if values:
            self._tracker.log(step, values)
        self._newest[kind] = step
        self._store()
        return True

    def send_evaluations(self) -> int:
        """Send the means of evaluations that are new or have changed, and return their number."""
        step, count = max((step for step, _ in _lines(self._workdir)), default=0), 0
        for path in self._workdir.evaluations:
            kind, digest = f"eval/{path.stem}", sha256_file(path)
            if self._newest.get(kind) != digest:
                result = read_json(path)
                means = result.get("mean", {}) | result.get("answers", {}).get("mean", {})
                self._tracker.log(step, {f"{kind}/{name}": value for name, value in means.items()})
                self._newest[kind] = digest
                self._store()
                count += 1
        return count

    def finish(self) -> None:
        """End the run at the tracker."""
        with hide_prints():
            self._tracker.finish()

    def _store(self) -> None:
        state = {**_state(self._workdir), self._key: {"id": self._tracker.id, "sent": self._newest}}
        write_json(self._workdir.trackers, state)


class LiveTrackers:
    """The trackers of a training. A tracker that fails is left out, with a warning, and training continues.

    Args:
        names: names of the trackers.
        workdir: folder of the run; it has config.json and env.json.
        project: project of the run at the trackers.
    """

    def __init__(self, names: Sequence[str], workdir: Workdir, project: str) -> None:
        self._workdir, self._open = workdir, dict[str, RunTracker]()
        for name in names:
            self._try(name, partial(self._begin, name, project))

    def send(self, step: int, values: StepValues) -> None:
        """Send the values of a step to every tracker that has not failed."""
        for name, tracker in list(self._open.items()):
            self._try(name, partial(tracker.send, step, values))

    def finish(self) -> None:
        """End the run at every tracker that has not failed."""
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.finish)

    def _begin(self, name: str, project: str) -> None:
        self._open[name] = RunTracker(name, self._workdir, project)
        self._open[name].catch_up()

    def _try(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # a tracker may raise anything
            self._open.pop(name, None)
            sentence = str(error).strip().splitlines() or [""]
            print(
                f"warning: {name} failed ({type(error).__name__}: {sentence[0]:.300}) and gets no more lines of "
                f"this training; jaxret track {self._workdir} --to={name} sends the rest later",
                file=sys.stderr,
            )


def _state(workdir: Workdir) -> dict[str, Any]:
    return read_json(workdir.trackers) if workdir.trackers.exists() else {}


def _place(name: str) -> str:
    """Return a digest of the place where a tracker keeps its projects, if a run's id is valid only there. It is not the
    address, because that may hold a password."""
    if name != "mlflow":
        return ""
    from mlflow import get_tracking_uri

    return f"{sha256_bytes(get_tracking_uri().encode())[:8]}, "


def _lines(workdir: Workdir) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, values) of the complete lines of metrics.jsonl."""
    if not workdir.metrics.exists():
        return
    for line in workdir.metrics.read_bytes().splitlines():
        try:
            values = json.loads(line)
            step = values.pop("step")
        except (ValueError, KeyError, AttributeError):
            continue  # the line was being written when the machine failed
        yield step, values
