"""Run the points of a grid, each as a recipe in a separate folder, and compare them.

WORKDIR/sweep.json        settings that all points share; a sweep with other settings is refused
        POINT/            the recipe of a point (recipes/run_recipe.py), or POINT/seed-N/ if there are seeds
        results.md        the table
        results.json      the scores of all runs, and the tests
        results.svg .png  the picture
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxret.configs import change_config, load_config
from jaxret.evaluation.comparison import Score
from jaxret.evaluation.text_table import aligned_table
from jaxret.experiments.compare_runs import read_result
from jaxret.experiments.pictures.canvas import NO_MATPLOTLIB, drawing_is_installed, save_picture
from jaxret.experiments.pictures.sweep_picture import sweep_picture
from jaxret.experiments.recipes.check_recipe import EvaluationSetup, check_recipe, complete_evaluation
from jaxret.experiments.recipes.run_recipe import run_stages
from jaxret.experiments.recipes.stages import Stage, read_stages
from jaxret.experiments.sweeps.grid import SweepSetup, point_changes, require_distinct_points
from jaxret.experiments.sweeps.sweep_results import SweepResults, compare_points, write_sweep
from jaxret.experiments.vector_diversity import (
    DIVERSITY_MEASURES,
    JudgedSource,
    diversity_path,
    has_several_vectors,
    is_diversity_of,
    read_diversity,
    read_judged_texts,
    report_diversity,
)
from jaxret.models.encoders.pretrained import resolve_encoder
from jaxret.models.retriever_model import encoder_config, make_retriever_model
from jaxret.parallel.events import emit
from jaxret.runs.identity import without_seeds
from jaxret.runs.mismatch import flatten, require_equal
from jaxret.runs.run import config_json, find_best_checkpoint, open_run
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json
from jaxret.storage.folder_kinds import SWEEP, require_folder_kind
from jaxret.storage.leases import Leases
from jaxret.storage.lockfile import LockedError

STAGE = "run"  # name of the only stage of a config without stages


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: a point and a seed."""

    label: str  # name of the point
    point: Mapping[str, Any]  # swept key -> value
    seed: int | None  # value of all seeds; None for the seeds of the config
    folder: Path  # folder of the run's recipe
    stages: tuple[Stage, ...]  # the stages of the recipe; the last one that searches is measured
    # path of the report of diversity; None if diversity is not measured, or a passage has one vector
    report: Path | None = None

    @property
    def name(self) -> str:
        return self.label if self.seed is None else f"{self.label} seed={self.seed}"

    @property
    def stage(self) -> Stage:
        """The stage that is measured."""
        return [stage for stage in self.stages if not stage.is_reranker][-1]

    @property
    def stage_folder(self) -> Workdir:
        """The folder of the stage that is measured."""
        return Workdir(self.folder / self.stage.name)


def sweep_runs(setup: SweepSetup, workdir: str | Path) -> list[SweepRun]:
    """Return the runs of a sweep in the order of the points, and of the seeds for each point. Raises ValueError for
    points that are the same system, and for a point whose config cannot be read."""
    folder, runs, configs = Workdir(workdir).path, [], {}
    for point in setup.grid.points():
        label = setup.grid.label(point)
        for seed in setup.grid.seeds or (None,):
            stages = _point_stages(setup, label, point_changes(point, seed))
            path = folder / setup.grid.folder(point) if point else folder / "config"
            runs.append(SweepRun(label, point, seed, path if seed is None else path / f"seed-{seed}", stages))
        configs[label] = [flatten(config_json(stage.config)) for stage in runs[-1].stages]
    require_distinct_points(setup.grid, configs)
    if setup.baseline and setup.baseline not in configs:
        raise ValueError(f"--baseline={setup.baseline} is not a point; points are {', '.join(map(repr, configs))}")
    return runs


def list_sweep(setup: SweepSetup, workdir: str | Path) -> str:
    """Return a table of the runs of a sweep: index, point, seed, folder, and state."""
    runs = sweep_runs(setup, workdir)
    name = _shared_evaluation(setup, runs).result_name
    rows = []
    for index, run in enumerate(runs, 1):
        state = "begun" if run.folder.exists() else "-"
        state = "measured" if run.stage_folder.evaluation(name).exists() else state
        rows.append([str(index), run.label, "" if run.seed is None else str(run.seed), str(run.folder), state])
    return aligned_table(["index", "point", "seed", "folder", "state"], rows, left=5)


def run_sweep(setup: SweepSetup, workdir: str | Path, index: int = 0) -> SweepResults | None:
    """Run the unfinished points, and return the comparison of all points; None if only one run was requested.

    Args:
        setup: the settings of the sweep.
        workdir: folder of the sweep; several jobs may run points in it at the same time.
        index: number of the only run to do, from 1; 0 for all runs and their comparison.
    Raises:
        ValueError: settings contradict each other, or differ from the settings in sweep.json; nothing was run.
        LockedError: other jobs hold some of the points; all other points are done.
    """
    require_folder_kind(Workdir(workdir).path, SWEEP)
    runs = sweep_runs(setup, workdir)
    if not 0 <= index <= len(runs):
        raise ValueError(f"--index={index}: the sweep has the runs 1 to {len(runs)} (--list shows them)")
    evaluation = _shared_evaluation(setup, runs)
    part = slice(index - 1, index) if index else slice(None)
    _check_runs(runs[part], evaluation)
    judged = JudgedSource.open(setup.diversity, evaluation.source.queries.split) if setup.diversity else None
    texts = read_judged_texts(judged) if judged else None
    if judged:
        runs = _with_reports(runs, judged, evaluation.name)
    part_runs = runs[part]
    _require_same_sweep(setup, evaluation, Workdir(workdir).path)
    skipped_runs: Sequence[SweepRun] = part_runs
    for _ in range(2):  # a second time, because another job may have finished its point in the meantime
        skipped_runs = [run for run in skipped_runs if not _run_point(run, runs.index(run) + 1, len(runs), evaluation)]
    for run in (run for run in part_runs if run not in skipped_runs):
        if run.report and judged and texts:
            checkpoint = find_best_checkpoint(run.stage_folder, run.stage.config)
            if not is_diversity_of(run.report, checkpoint, texts):
                text = report_diversity(open_run(run.stage_folder), judged, evaluation.name)
                print(f"{run.name}: {text}", flush=True)
    if skipped_runs:
        names = " and ".join(run.name for run in skipped_runs)
        raise LockedError(f"another job runs {names}; start the same command again when it has ended, to compare")
    if index:
        return None
    name = evaluation.result_name
    results = {
        run.label: [read_result(os.fspath(member.stage_folder), name) for member in runs if member.label == run.label]
        for run in runs
    }
    points = {run.label: run.point for run in runs}
    table = compare_points(setup.grid, points, results, setup.baseline, evaluation.measures or ())
    return table.with_scores(_diversity_scores(runs))


def _point_stages(setup: SweepSetup, label: str, changes: Mapping[str, Any]) -> tuple[Stage, ...]:
    """Return the stages of a point with its keys set. Raises ValueError with the point's label for a wrong value."""
    keys = {**setup.overrides, **changes}
    try:
        if setup.stages:
            return tuple(read_stages(setup.config, keys, setup.evaluation.match))
        config = change_config(load_config(setup.config), keys, setup.config)
        if config.task != "retrieval":
            raise ValueError(f"{setup.config} trains no retriever, so there is nothing to search with")
        return (Stage(STAGE, config, explicit_keys=tuple(sorted(keys))),)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from error


def _shared_evaluation(setup: SweepSetup, runs: Sequence[SweepRun]) -> EvaluationSetup:
    """Return the evaluation that all points share. Raises ValueError if its sources would differ between points."""
    configs: dict[str, ConfigDict] = {}  # data.train -> config of the first run that has it
    for run in runs:
        configs.setdefault(run.stages[-1].config.data.train, run.stages[-1].config)
    first, *other_evaluations = (complete_evaluation(setup.evaluation, config) for config in configs.values())
    if any(evaluation != first for evaluation in other_evaluations):
        raise ValueError("data.train is swept: give --corpus, --queries and --qrels, so that points are comparable")
    return first


def _check_runs(runs: Sequence[SweepRun], evaluation: EvaluationSetup) -> None:
    """Check the steps of all runs, and raise the first error with the label of its point. One seed of a point is
    checked, because seeds do not affect the checks."""
    for run in {run.label: run for run in reversed(runs)}.values():
        try:
            check_recipe(run.stages, run.folder, evaluation)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{run.label}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{run.label}: {error}") from error


def _with_reports(runs: Sequence[SweepRun], judged: JudgedSource, name: str) -> list[SweepRun]:
    """Return the runs with the paths of their reports, which have a name or, if it is "", that of the data. Raises
    ValueError if no point has several vectors per passage."""
    runs_with_reports = []
    for run in runs:
        config = run.stage.config
        directory = resolve_encoder(config.encoder.checkpoint, config.encoder.download, weights=False)
        several = has_several_vectors(make_retriever_model(config, encoder_config(config, directory)))
        report = diversity_path(run.stage_folder, judged, name=name) if several else None
        runs_with_reports.append(replace(run, report=report))
    if all(run.report is None for run in runs_with_reports):
        raise ValueError(
            "--diversity: no point has several vectors of a passage, with the same number for every passage"
        )
    return runs_with_reports


def _diversity_scores(runs: Sequence[SweepRun]) -> list[Score]:
    """Return local variation and perplexity of each point for which they are defined."""
    scores = []
    for label in dict.fromkeys(run.label for run in runs):
        reports = [read_diversity(run.report) for run in runs if run.label == label and run.report]
        for measure in DIVERSITY_MEASURES:
            values = [report[measure] for report in reports]
            if numbers := [value for value in values if value is not None]:
                scores.append(Score(label, measure, tuple(numbers)))
    return scores


def _require_same_sweep(setup: SweepSetup, evaluation: EvaluationSetup, folder: Path) -> None:
    """Write the settings that all points share, or require that they equal sweep.json. Swept values and seeds are not
    among them, so that a later command may add more of them."""
    path, keys = folder / "sweep.json", set(setup.grid.keys)
    config = flatten(config_json(change_config(load_config(setup.config), setup.overrides, setup.config)))
    settings = {
        "config": {key: value for key, value in without_seeds(config).items() if key not in keys},
        "grid": sorted(keys),
        "stages": setup.stages,
        "evaluation": evaluation.to_json(),
    }
    with Leases(folder) as leases:  # jobs of one sweep may begin at the same time
        leases.publish_once(path, settings)
    remedy = "Give another --workdir for a sweep with other settings."
    require_equal(read_json(path), settings, str(path), "this sweep", remedy)


def _run_point(run: SweepRun, number: int, count: int, evaluation: EvaluationSetup) -> bool:
    """Run the unfinished steps of a run, and return True; return False if another job holds its folder."""
    name = f"[{number}/{count}] {run.name}"

    def log(line: str) -> None:
        if not line.endswith("already done"):
            print(f"{name} {line}", flush=True)

    try:
        run_stages(run.stages, run.folder, evaluation, log)
    except LockedError as error:
        print(f"{name}: {error}", flush=True)
        return False
    except ArithmeticError as error:
        raise ArithmeticError(f"{run.name}: {error}") from error
    return True


def report_sweep(setup: SweepSetup, workdir: str | Path, index: int = 0) -> None:
    """Run a sweep, print and write its table, and draw its picture if matplotlib is installed.

    `index` is the number of the only run to do, from 1; 0 for all runs. With an index there is no table.
    """
    results = run_sweep(setup, workdir, index)
    if results is None:
        return
    folder = Workdir(workdir).path
    print(f"\n{results.to_text()}\ntable: {write_sweep(results, folder)}")
    emit("sweep", folder=folder, results=results.to_json())
    if not drawing_is_installed():
        print(f"no picture: {NO_MATPLOTLIB}")
        return
    print(f"picture: {save_picture(lambda: sweep_picture(results.to_json()), folder / 'results')}")
