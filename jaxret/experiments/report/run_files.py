"""The files in folders of runs from which a report is made. No model is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxret.evaluation.comparison import SystemComparison
from jaxret.evaluation.evaluation_report import read_evaluation
from jaxret.evaluation.metrics import Evaluation
from jaxret.experiments.compare_runs import RunResult, compare_runs, split_argument
from jaxret.experiments.pictures.run_pictures import Runs, read_metrics
from jaxret.models.heads import make_head
from jaxret.models.retriever_model import encoder_config
from jaxret.runs.mismatch import flatten
from jaxret.runs.run import config_json, stored_config
from jaxret.runs.run_warnings import RunWarning, read_warnings
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json


@dataclass(frozen=True)
class RunFiles:
    """A run of a report."""

    label: str  # its unique name in the report
    workdir: Workdir  # its folder; a folder of `jaxret bm25` has only results

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config with dotted keys; {} for BM25. Raises ContractError if a file of the run was edited."""
        return flatten(config_json(stored_config(self.workdir))) if self.workdir.config.exists() else {}

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl; [] if the file is missing."""
        return read_metrics(self.workdir) if self.workdir.metrics.exists() else []

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The changes of the config on resuming."""
        if not self.workdir.history.exists():
            return []
        return [json.loads(line) for line in self.workdir.history.read_text(encoding="utf-8").splitlines()]

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The content of env.json; {} if the file is missing."""
        return read_json(self.workdir.environment) if self.workdir.environment.exists() else {}

    @cached_property
    def data(self) -> dict[str, Any]:
        """Sizes and digests of the training data."""
        return read_json(self.workdir.data) if self.workdir.data.exists() else {}

    @cached_property
    def encoding_times(self) -> dict[str, Any]:
        """The time of the last encoding of each corpus, by its name."""
        return {path.name.removesuffix(".json"): read_json(path) for path in self.workdir.encoding_times}

    @cached_property
    def warnings(self) -> dict[str, list[RunWarning]]:
        """The warnings of each job, by the name of the job. Raises ValueError for a file without warnings of a job."""
        return read_warnings(self.workdir)

    @cached_property
    def results(self) -> dict[str, dict[str, Any]]:
        """The JSON values of the evaluations by result name, provenance included."""
        return {path.stem: read_json(path) for path in self.workdir.evaluations}

    @cached_property
    def evaluations(self) -> dict[str, Evaluation]:
        """The evaluations by the names of the results."""
        return {path.stem: read_evaluation(path) for path in self.workdir.evaluations}

    def reports(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the reports of `jaxret diversity` or `jaxret probe` by the names of the data."""
        suffix = f".{kind}"
        paths = sorted(self.workdir.path.glob(f"eval/*{suffix}.json"))
        return {path.stem.removesuffix(suffix): read_json(path) for path in paths}

    @cached_property
    def vector_names(self) -> tuple[str, ...]:
        """The names of a passage's vectors before pooling; () if passages have one vector or different numbers."""
        if self.config.get("task") != "retrieval":
            return ()
        config = stored_config(self.workdir)
        head = make_head(config, encoder_config(config, self.workdir.encoder))
        return head.vector_names() if (head.vectors_per_passage() or 1) > 1 else ()


@dataclass(frozen=True)
class ComparedSet:
    """The results of one data set."""

    name: str  # name of the result
    runs: tuple[RunFiles, ...]  # the runs that have the result
    comparison: SystemComparison | None = None  # comparison of the systems; None if they cannot be compared
    # name of a system -> its results, as `compare_runs` returns them
    systems: Mapping[str, Sequence[RunResult]] = field(default_factory=dict)
    problem: str = ""  # why they cannot be compared

    @property
    def measures(self) -> tuple[str, ...]:
        """The measures that all runs have; the measures of the first run if the runs cannot be compared."""
        return self.comparison.measures if self.comparison else tuple(self.runs[0].evaluations[self.name].mean)

    def run_of(self, result: RunResult) -> RunFiles:
        """Return the run that a result was read from."""
        return next(run for run in self.runs if run.workdir.evaluation(self.name) == result.path)


@dataclass(frozen=True)
class ReportFiles:
    """The runs of a report, in the order of its arguments."""

    arguments: tuple[str, ...]  # folders, or NAME=RUN,RUN
    data: tuple[str, ...] = ()  # names of the results to show; () for all
    measures: tuple[str, ...] = ()  # measures to compare; () for all

    @cached_property
    def runs(self) -> tuple[RunFiles, ...]:
        """The runs. Raises FileNotFoundError for a folder without a run or a result, ValueError for a folder that is
        given twice."""
        workdirs = [Workdir(path) for argument in self.arguments for path in split_argument(argument)[1]]
        names = [workdir.name for workdir in workdirs]
        for place, workdir in enumerate(workdirs):
            if not workdir.config.exists() and not workdir.evaluations:
                raise FileNotFoundError(f"{workdir} is not a run: it has neither config.json nor a result in eval/")
            if workdir.path.resolve() in [earlier.path.resolve() for earlier in workdirs[:place]]:
                raise ValueError(f"{workdir} is given twice; a report shows a run once")
        return tuple(
            RunFiles(name if names.count(name) == 1 else str(workdir), workdir)
            for name, workdir in zip(names, workdirs, strict=True)
        )

    @property
    def workdirs(self) -> Runs:
        """Label -> the run, for pictures. It has all runs, so that a run has the same colour in every picture."""
        return {run.label: [run.workdir] for run in self.runs}

    @cached_property
    def sets(self) -> tuple[ComparedSet, ...]:
        """The data sets that at least one run was evaluated on. Raises FileNotFoundError if `data` names a result that
        no run has."""
        names = dict.fromkeys(name for run in self.runs for name in run.results)
        for name in self.data:
            if name not in names:
                raise FileNotFoundError(f"no run has the result {name!r}; they have {', '.join(names) or 'none'}")
        return tuple(self._compare(name) for name in names if name in self.data or not self.data)

    def _compare(self, name: str) -> ComparedSet:
        runs = tuple(run for run in self.runs if name in run.results)
        try:
            comparison, systems = compare_runs(list(self._arguments(name)), name, self.measures)
        except ValueError as error:
            return ComparedSet(name, runs, problem=str(error))
        return ComparedSet(name, runs, comparison, systems)

    def _arguments(self, result: str) -> Iterator[str]:
        """Yield the arguments without the runs that do not have the result."""
        for argument in self.arguments:
            name, paths = split_argument(argument)
            members = [path for path in paths if Workdir(path).evaluation(result).exists()]
            if members:
                yield f"{name}={','.join(members)}" if name else members[0]
