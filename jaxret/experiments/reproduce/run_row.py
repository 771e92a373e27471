"""Run a row of a paper's table, and print the paper's numbers next to the measured ones."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from jaxret.data.dataset_check import CUT_LENGTHS, print_data_check
from jaxret.data.formats import Corpus, DataSource
from jaxret.evaluation.evaluation_report import read_evaluation
from jaxret.evaluation.metrics import Evaluation
from jaxret.evaluation.text_table import aligned_table
from jaxret.experiments.beir_job import BeirJob
from jaxret.experiments.reproduce.commands import Reproduction, case_commands, missing_files, run_folder
from jaxret.experiments.reproduce.papers import Case, PaperRow, resolve_row
from jaxret.experiments.searches.evaluation_queries import EvaluationSource
from jaxret.experiments.vector_diversity import JudgedSource, diversity_path, read_diversity
from jaxret.mining.mining_job import MiningJob, parents_path, require_same_sources
from jaxret.mining.mining_settings import MiningSettings
from jaxret.mining.training_queries import open_training_queries
from jaxret.runs.workdir import Workdir
from jaxret.search.search_options import SearchOptions
from jaxret.storage.atomic import read_json


@dataclass(frozen=True)
class Measured:
    """A measure of a case: the measured value, its standard error and the paper's number."""

    case: Case  # the row and the data set
    measure: str  # name of the measure
    value: float | int  # measured value from 0 to 1, or a count; the mean if there are several seeds
    error: float  # standard error of the value over seeds, or over queries if there is one run
    paper: float | int | None  # the paper's number; None if it prints none

    @property
    def difference(self) -> float | None:
        """(value - paper) / error; None without the paper's number or the error."""
        if self.paper is None or not self.error:
            return None
        return (self.value - self.paper) / self.error


def run_row(row: PaperRow, reproduction: Reproduction, only: str = "") -> list[Measured]:
    """Run the commands of a row, and return the measured values. Finished steps are not repeated.

    Args:
        reproduction: folders of data and runs, and keys that differ from the paper's.
        only: name of the only data set to run on; "" for all data sets of the row.

    Raises:
        ValueError: the row cannot be run.
        FileNotFoundError: data files are missing; the error says where each comes from.
        RuntimeError: a command failed.
    """
    if not row.runnable:
        raise ValueError(f"{row.id} cannot be run: {row.reason or 'it has no config'}")
    cases = [case for case in row.cases() if only in ("", case.target.name)]
    if not cases:
        names = ", ".join(case.target.name for case in row.cases())
        raise ValueError(f"{row.id} has no numbers on {only!r}; it has {names}")
    missing_lines = [line for case in cases for line in missing_files(case, reproduction)]
    if missing_lines:
        raise FileNotFoundError("these files are missing:\n" + "\n".join(dict.fromkeys(missing_lines)))
    if row.verb == "count":
        return [measurement for case in cases for measurement in _count_records(case, reproduction)]
    reproduction.workdir.mkdir(parents=True, exist_ok=True)  # commands write --out only into a folder that exists
    for case in cases:
        for seed in case_seeds(case):
            for command in case_commands(case, reproduction, seed):
                print(f"== jaxret {' '.join(command)}", flush=True)
                if _is_kept(case, command):
                    continue
                status = subprocess.run([sys.executable, "-m", "jaxret", *command], check=False).returncode
                if status:
                    raise RuntimeError(f"jaxret {command[0]} ended with status {status}; the same command continues")
    return [measurement for case in cases for measurement in measure_case(case, reproduction)]


def _count_records(case: Case, reproduction: Reproduction) -> Iterator[Measured]:
    """Run `jaxret data check` on the files whose records a row counts, and yield the counts."""
    counts: dict[str, dict[str, float | int]] = {}
    for command in case_commands(case, reproduction):
        print(f"== jaxret {' '.join(command)}", flush=True)
        path = Path(command[2])
        on_error = _read_flags(command).get("on_error", "error")
        counts[path.name] = print_data_check(DataSource.open(path), None, CUT_LENGTHS, on_error).counts
    for measure, paper in zip(case.measures, case.numbers, strict=True):
        name, _, file = measure.rpartition(" of ")
        yield Measured(case, measure, counts[file][name], 0.0, paper)


def _is_kept(case: Case, command: Sequence[str]) -> bool:
    """Return whether a command has written its file already, and print the reason: negatives were mined from the same
    files, or chunks are newer than their source. Raises ContractError for negatives from other files."""
    flags, reason = _read_flags(command), ""
    if command[0] == "mine" and (out := Path(flags["out"])).exists() and parents_path(out).exists():
        settings = MiningSettings(**dict[str, Any](case.source.mining))
        data = open_training_queries(flags["data"], "train", not settings.positives_from_retrieval)
        corpus = Corpus.open(flags["corpus"])
        require_same_sources(MiningJob(data, (flags["pool"],), flags["out"], corpus=corpus, settings=settings))
        reason = f"{out} is kept: it was mined from these files, with these settings"
    elif command[:2] == ["data", "chunk"]:
        source, out = Path(command[2]), Path(command[3])
        if out.exists() and out.stat().st_mtime > source.stat().st_mtime:
            reason = f"{out} is kept: it is newer than {source}"
    if reason:
        print(reason, flush=True)
    return bool(reason)


def _read_flags(command: Sequence[str]) -> dict[str, str]:
    """Return name -> value of a command's flags; the value is "" for a flag without one."""
    flags = (argument.removeprefix("--").partition("=") for argument in command if argument.startswith("--"))
    return {name: value for name, _, value in flags}


def case_seeds(case: Case) -> list[int | None]:
    """Return the numbers of a case's runs; [None] for a single run with the seeds of the config."""
    return list(range(1, case.row.seeds + 1)) if case.row.seeds > 1 else [None]


def measure_case(case: Case, reproduction: Reproduction) -> Iterator[Measured]:
    """Yield the measured values of a case, from the evaluations that its searches wrote. Raises ValueError for an
    evaluation without the measure of the row."""
    row = resolve_row(case.row)
    if row.verb == "diversity":
        yield from _measure_diversity(case, reproduction)
    if not case.row.numbers:
        return
    runs, subsets = [], len(case.row.subsets)
    for seed in case_seeds(case):
        run = run_folder(case, reproduction, seed)
        folder = run / row.stage if row.verb == "recipe" else run
        parts = _evaluation_parts(case, reproduction, folder)
        evaluations = [(part, read_evaluation(path)) for path, part in parts.items()]
        runs.append(evaluations[: len(evaluations) - subsets])
        for number, (_, evaluation) in enumerate(evaluations[len(evaluations) - subsets :]):
            (measure,) = case.measures
            name, error = f"{measure} of set {number}", _standard_error([(1.0, evaluation)], measure)
            yield Measured(case, name, evaluation.mean[measure], error, case.row.subsets[number])
    for measure, paper in zip(case.measures, case.numbers, strict=True):
        if paper is None:
            continue
        if lacking := [e for evaluations in runs for _, e in evaluations if measure not in e.mean]:
            raise ValueError(
                f"{case.row.id}: the run's evaluation has no {measure}; it has {', '.join(lacking[0].mean)}"
            )
        means = [math.fsum(part * evaluation.mean[measure] for part, evaluation in evaluations) for evaluations in runs]
        one_run = len(means) == 1
        error = _standard_error(runs[0], measure) if one_run else stdev(means) / math.sqrt(len(means))
        yield Measured(case, measure, fmean(means), error, paper)


def _measure_diversity(case: Case, reproduction: Reproduction) -> Iterator[Measured]:
    """Yield perplexity and local variation of a run's vectors, or the fraction of queries for which the vector of the
    last layer wins. They have no standard error."""
    run, (_, command) = run_folder(case, reproduction, case_seeds(case)[0]), case_commands(case, reproduction)
    data = command[-1].removeprefix("--data=")
    path = diversity_path(Workdir(run), JudgedSource.open(data, ""))
    values = read_diversity(path)
    if "last_layer_wins" in case.measures:  # the last layer is the first vector of MLR
        wins = list(read_json(path)["wins"].values())
        values["last_layer_wins"] = wins[0] / sum(wins)
    for measure, paper in zip(case.measures, case.numbers, strict=True):
        if (value := values[measure]) is not None:
            yield Measured(case, measure, value, 0.0, paper)


def _standard_error(evaluations: Sequence[tuple[float, Evaluation]], measure: str) -> float:
    """Return the standard error over queries of a mean of evaluations, which are given as (weight, evaluation)."""
    set_values = [(part, list(evaluation.per_query[measure].values())) for part, evaluation in evaluations]
    return math.sqrt(sum(part**2 * stdev(values) ** 2 / len(values) for part, values in set_values if len(values) > 1))


def comparison_table(measurements: Sequence[Measured]) -> str:
    """Return a table of the paper's and the measured values as aligned text."""
    rows = []
    for entry in measurements:
        difference = "" if entry.difference is None else f"{entry.difference:+.1f}"
        row = [entry.case.row.id, entry.case.target.name, entry.measure]
        if entry.case.row.counts:
            rows.append([*row, f"{entry.paper:,}", f"{round(entry.value, 2):,}", "", ""])
            continue
        paper = "" if entry.paper is None else f"{entry.paper:.4f}"
        rows.append([*row, paper, f"{entry.value:.4f}", f"{entry.error:.4f}", difference])
    header = ["row", "data", "measure", "paper", "run", "standard error", "difference in errors"]
    return aligned_table(header, rows, left=3)


def _evaluation_parts(case: Case, reproduction: Reproduction, run: Path) -> dict[Path, float]:
    """Return path of an evaluation -> its weight in the case's mean, for the evaluations that its searches wrote below
    `run`."""
    paths: dict[Path, float] = {}
    parts = iter(case.target.folders(case.sets).values())
    for command in case_commands(case, reproduction):
        flags = _read_flags(command)
        if command[0] == "beir":
            query, passage = (int(flags.get(name, 0)) or None for name in ("query_length", "passage_length"))
            job = BeirJob(command[1], str(run), query_length=query, passage_length=passage)
            for set_result in (read_json(job.result)["sets"][name] for name in case.sets):
                members = set_result.get("members", {"": set_result}).values()
                paths |= {Path(member["evaluation"]): 1 / len(case.sets) / len(members) for member in members}
        elif command[0] in ("search", "bm25"):
            name = EvaluationSource.open(flags["queries"], flags.get("qrels", "")).name
            label = SearchOptions(max_passage="max_passage" in flags).label
            path = Workdir(run).evaluation(".".join(filter(None, (name, label))))
            paths[path] = next(parts, 1.0)
    return paths
