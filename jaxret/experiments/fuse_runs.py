"""Fuse the runs of several systems into one, and evaluate it (`jaxret fuse`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxret.data.errors import Location, Policy
from jaxret.data.formats import read_judgements, read_run, write_run
from jaxret.data.formats.readers import run_files
from jaxret.data.records import Rankings
from jaxret.evaluation.evaluation_report import evaluation_text, write_evaluation
from jaxret.evaluation.fusion import METHODS, fuse, tune_weights
from jaxret.evaluation.metrics import Evaluation, evaluate, parse_measure
from jaxret.experiments.evaluation_queries import dataset_name, read_evaluation_queries
from jaxret.experiments.rerank_run import evaluation_path
from jaxret.storage.atomic import require_other_file, require_writable, sha256_file


@dataclass(frozen=True)
class FuseJob:
    """Runs to fuse, and how to evaluate the result.

    Attributes:
        runs: files of runs of the same queries.
        out: file to write, a TREC run.
        method: "rrf", "min_max" or "z_score".
        weights: of the runs; () for 1 each.
        k: passages of a query that are written.
        queries, qrels: folders or files to evaluate with; "" for no evaluation.
        split: split to read, where a source is a folder.
        measures: names such as "nDCG@10".
        tune_runs: runs of other queries, in the same order, on which the weights are tuned.
        tune_qrels: judgements of these queries.
        tune_split: split of these judgements, where they are a folder.
    """

    runs: Sequence[str]
    out: str
    method: str = "rrf"
    weights: Sequence[float] = ()
    k: int = 1000
    queries: str = ""
    qrels: str = ""
    split: str = "test"
    measures: Sequence[str] = ("nDCG@10", "RR@10", "R@100")
    tune_runs: Sequence[str] = ()
    tune_qrels: str = ""
    tune_split: str = "dev"


def fuse_runs(job: FuseJob) -> Evaluation | None:
    """Write the fused run; with judgements, print and return its evaluation beside those of its parts.

    Raises:
        ValueError: fewer than two runs, weights or runs for tuning that do not fit, or an output that is an input.
        DataError: a bad record.
    """
    _check(job)
    runs = [_read_rankings(run) for run in job.runs]
    _report_missing(job.runs, runs)
    weights, tuned = _weights(job)
    fused = fuse(runs, job.method, weights, job.k)
    write_run(job.out, fused, tag=f"jaxret-fuse-{job.method}")
    print(f"run: {job.out} ({len(fused):,} queries, {job.method}, weights {', '.join(f'{w:g}' for w in weights)})")
    if not job.qrels:
        return None
    return _evaluate(job, runs, fused, {"weights": list(weights), **tuned})


def _read_rankings(path: str) -> Rankings:
    """Read a run. Raises DataError if it has no rankings."""
    if rankings := read_run(path):
        return rankings
    raise Location(run_files(path)[0]).error("empty run", "it has no rankings", "give a run with rankings")


def _report_missing(names: Sequence[str], runs: Sequence[Rankings]) -> None:
    """Print how many queries each run lacks that another run has."""
    queries = set().union(*runs)
    for name, run in zip(names, runs, strict=True):
        if missing := len(queries - run.keys()):
            print(f"{name} has no ranking for {missing:,} of {len(queries):,} queries")


def _check(job: FuseJob) -> None:
    if len(job.runs) < 2:
        raise ValueError(f"{len(job.runs)} run is given; fusion takes two or more")
    if job.method not in METHODS:
        raise ValueError(f"--method={job.method} must be one of {', '.join(METHODS)}")
    if job.weights and len(job.weights) != len(job.runs):
        raise ValueError(f"--weights has {len(job.weights)} numbers for {len(job.runs)} runs; give one for each")
    if job.tune_runs and job.weights:
        raise ValueError("give either --weights or --tune, which finds them")
    if job.tune_runs and (len(job.tune_runs) != len(job.runs) or not job.tune_qrels):
        raise ValueError("--tune needs a run for each run that is fused, in the same order, and --tune_qrels")
    if job.qrels and not job.queries:
        raise ValueError("--qrels needs --queries")
    for measure in job.measures:
        parse_measure(measure)
    require_writable(Path(job.out).absolute().parent)
    for run in (*job.runs, *job.tune_runs):
        require_other_file(job.out, run_files(run), "a run that is fused")


def _weights(job: FuseJob) -> tuple[tuple[float, ...], dict[str, Any]]:
    """The weights of the runs, and where they come from."""
    if not job.tune_runs:
        return tuple(job.weights) or (1.0,) * len(job.runs), {}
    judgements = list(read_judgements(job.tune_qrels, job.tune_split))
    measure = parse_measure(job.measures[0]).name
    weights, value = tune_weights([_read_rankings(run) for run in job.tune_runs], judgements, measure, job.method)
    print(f"weights {', '.join(f'{weight:g}' for weight in weights)}: {measure} {value:.4f} on {job.tune_qrels}")
    digests = [sha256_file(path) for run in job.tune_runs for path in run_files(run)]
    return weights, {"tuned_on": {"runs": digests, "measure": measure, "value": round(value, 4)}}


def _evaluate(job: FuseJob, runs: Sequence[Rankings], fused: Rankings, how: dict[str, Any]) -> Evaluation:
    evaluated = read_evaluation_queries(job.queries, job.qrels, job.split, Policy())
    measures = [parse_measure(measure).name for measure in job.measures]
    systems = {Path(name).stem: evaluate(run, evaluated.judgements, measures) for name, run in zip(job.runs, runs)}
    if len(systems) < len(runs):  # files of one name in several folders
        systems = {name: evaluate(run, evaluated.judgements, measures) for name, run in zip(job.runs, runs)}
    result = evaluate(fused, evaluated.judgements, measures)
    print(evaluation_text({**systems, "fused": result}))
    path = evaluation_path(job.out)
    files = {str(run): sha256_file(file) for run in job.runs for file in run_files(run)}
    dataset = {"name": dataset_name(job.queries), "split": job.split, **evaluated.digests()}
    provenance = {"fused": {"runs": files, "method": job.method, "k": job.k, **how}, "dataset": dataset}
    write_evaluation(path, result, provenance)
    print(f"evaluation: {path}")
    return result
