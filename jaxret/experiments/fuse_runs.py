"""Fuse the runs of several systems into one, and evaluate it (`jaxret fuse`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxret.configs.options import given_fields
from jaxret.data.errors import Location, Policy
from jaxret.data.formats import JudgementSource, write_run
from jaxret.data.formats.data_source import DataSource
from jaxret.data.formats.outputs import require_other_output
from jaxret.data.formats.rankings import RankingSource
from jaxret.data.records import Judgement, Query, Rankings
from jaxret.evaluation.evaluation_report import emit_table, evaluation_text
from jaxret.evaluation.fusion import FUSION_METHODS, best_weights, fuse, tune_weights, weights_to_try
from jaxret.evaluation.metrics import Evaluation, evaluate, parse_measure
from jaxret.evaluation.self_matches import without_self_matches
from jaxret.experiments.fuse_job import FuseJob
from jaxret.experiments.open_systems import is_system_folder, open_systems
from jaxret.experiments.searches.evaluate_search import evaluation_path, write_measures
from jaxret.experiments.searches.evaluation_queries import EvaluationQueries, EvaluationSource, read_evaluation_queries
from jaxret.index.source import encoded_sources
from jaxret.search.exact_fusion import SCALES, CachedSystem, ExactFusion, ScoringSystem, SystemWithoutSelfMatches
from jaxret.storage.atomic import sha256_file, sha256_json
from jaxret.storage.buckets.working_copy import require_writable, shown_message, shown_path

TUNED_DEPTH = 1000  # passages per query in tuning if the measure has no cut-off


def fuse_runs(job: FuseJob) -> Evaluation | None:
    """Write the fused run. With judgements, print its evaluation next to the evaluations of the runs, and return it.

    Run files are fused by their rankings, folders of systems by the scores of all systems (`ExactFusion`).

    Raises:
        ValueError: fewer than two runs, weights or runs for tuning that do not fit, or an output that is a file of a
            source.
        DataError: a bad record.
    """
    if any(map(is_system_folder, job.runs)):
        return _fuse_systems(job)
    job = replace(job, method=job.method or next(iter(FUSION_METHODS)))
    _check_files(job)
    # Read before the work, so that a mistyped path is an error at once.
    judged = JudgementSource.open(job.tune_qrels, job.tune_split) if job.tune_runs else None
    sources = [("a run that is fused", source.data) for source in job.rankings]
    sources += [("what the weights are tuned on", source.data) for source in job.tune_rankings]
    _check_output(job, [*sources, *([("the judgements", judged.data)] if judged else [])])
    evaluation_queries = read_evaluation_queries(job.source, Policy()) if job.source else None
    runs = [_read_rankings(source, job.removes_self_matches) for source in job.rankings]
    queries = set().union(*runs)
    for name, run in zip(job.runs, runs, strict=True):
        if count := len(queries - run.keys()):
            print(f"{name} has no ranking for {count:,} of {len(queries):,} queries")
    weights, tuning_record = _tuned_on_runs(job, judged) if judged else (_given_weights(job), dict[str, Any]())
    rankings = fuse(runs, job.method, weights, job.k)
    names = [Path(run).stem for run in job.runs]
    if len(set(names)) < len(names):  # files of one name in several folders
        names = list(job.runs)
    files = {shown_message(str(source)): sha256_file(file) for source in job.rankings for file in source.files}
    provenance = {"runs": files, "weights": list(weights), **tuning_record}
    return _write_fusion(job, dict(zip(names, runs, strict=True)), rankings, provenance, evaluation_queries)


def _fuse_systems(job: FuseJob) -> Evaluation | None:
    """Fuse systems by the scores of all of them, and print and return the evaluation."""
    if files := [run for run in job.runs if not is_system_folder(run)]:
        raise ValueError(f"{files[0]} is not a folder of a run; give folders of systems or files of rankings, not both")
    if job.tune_runs and (len(job.tune_runs) != 1 or not job.tune_qrels):
        raise ValueError("--tune of folders of systems takes the queries, one folder or file, and --tune_qrels")
    job = replace(job, method=job.method or next(iter(SCALES)))
    _check_job(job)
    if not job.source:
        raise ValueError("folders of systems are searched: give --queries")
    tuning = EvaluationSource.open(job.tune_runs[0], job.tune_qrels, job.tune_split) if job.tune_runs else None
    sources = [("a run that is fused", DataSource.open(run)) for run in job.runs]
    _check_output(job, [*sources, *(_data_of(tuning) if tuning else [])])
    weights, tuning_record = _given_weights(job), dict[str, Any]()
    fusion = ExactFusion(job.method, weights)
    evaluation_queries = read_evaluation_queries(job.source, Policy())
    # A mistake in these queries is reported before the systems are opened, which takes longer.
    tune_queries = read_evaluation_queries(tuning, Policy()) if tuning else None
    parts = open_systems(job.runs, job.encoded_name)
    systems: list[ScoringSystem] = [part.system for part in parts]
    if job.removes_self_matches:
        systems = [SystemWithoutSelfMatches(system) for system in systems]
    if tune_queries:
        weights, tuning_record = _tuned_on_queries(job, systems, tune_queries)
        fusion = ExactFusion(job.method, weights)
    rankings = fusion(systems, evaluation_queries.queries, job.k)
    provenance: dict[str, Any] = {"systems": {shown_message(str(part.folder)): part.digest for part in parts}}
    provenance |= {"corpus": parts[0].corpus_identity, "exact": True, "depth": fusion.depth}
    provenance |= {"weights": list(weights), **tuning_record}
    return _write_fusion(job, {}, rankings, provenance, evaluation_queries)


def _tuned_on_queries(
    job: FuseJob, systems: Sequence[ScoringSystem], data: EvaluationQueries
) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Return the weights of systems, and a record of the queries on which they were tuned."""
    measure = parse_measure(job.measures[0]).name
    weights, value = tune_systems(systems, data.queries, data.judgements, measure, job.method)
    record = {"sha256": data.digests(), "measure": measure, "value": round(value, 4)}
    return weights, _tuning_record(weights, data.source.judgements, len(data.queries), record)


def tune_systems(
    systems: Sequence[ScoringSystem],
    queries: Sequence[Query],
    judgements: Sequence[Judgement],
    measure: str,
    method: str,
) -> tuple[tuple[float, ...], float]:
    """Return the weights of exact fusion with the best value of a measure, and this value, like `tune_weights`.

    Args:
        systems: systems that score the same corpus.
        queries: queries that are not in the evaluation.
        judgements: judgements of these queries.
        measure: a name such as "nDCG@10".
        method: a name of SCALES.
    """
    rankings: dict[tuple[float, ...], Rankings] = {weights: {} for weights in weights_to_try(len(systems))}
    depth = parse_measure(measure).cutoff or TUNED_DEPTH
    for query in queries:
        cached_systems = [CachedSystem(system) for system in systems]  # a cache holds the scores of one query
        for weights, run in rankings.items():
            run.update(ExactFusion(method, weights)(cached_systems, [query], depth))
    values = {weights: evaluate(run, judgements, [measure]).mean[measure] for weights, run in rankings.items()}
    return best_weights(values)


def _read_rankings(source: RankingSource, remove: bool) -> Rankings:
    """Read a run, without self-matches if `remove` is set. Raises DataError if it has no rankings."""
    if rankings := source.read():
        return without_self_matches(rankings, max(map(len, rankings.values()))) if remove else rankings
    raise Location(source.files[0]).error("empty run", "it has no rankings", "give a run with rankings")


def _check_files(job: FuseJob) -> None:
    _check_job(job)
    if job.encoded_name:
        raise ValueError(f"--corpus={job.encoded_name} is for folders of systems; remove it with files of rankings")
    if job.method not in FUSION_METHODS:
        raise ValueError(f"--method={job.method} needs folders of systems; for files it is {', '.join(FUSION_METHODS)}")
    if job.tune_runs and (len(job.tune_runs) != len(job.runs) or not job.tune_qrels):
        raise ValueError("--tune needs a run for each run that is fused, in the same order, and --tune_qrels")


def _check_job(job: FuseJob) -> None:
    if len(job.runs) < 2:
        raise ValueError(f"{len(job.runs)} run is given; fusion takes two or more")
    if job.weights and len(job.weights) != len(job.runs):
        raise ValueError(f"--weights has {len(job.weights)} number(s) for {len(job.runs)} runs; give one for each")
    if invalid := [weight for weight in job.weights if not (math.isfinite(weight) and weight >= 0)]:
        raise ValueError(f"--weights has {invalid[0]:g}; a weight is a finite number of at least 0")
    if job.tune_runs and job.weights:
        raise ValueError("give either --weights or --tune, which finds them")
    if job.qrels and not job.queries:
        raise ValueError("--qrels needs --queries")
    names = given_fields(job, ("tune_qrels", "tune_split", "split", "measures"), job.explicit_fields)
    if not job.tune_runs and (tuning_names := [name for name in names if name.startswith("tune_")]):
        raise ValueError(f"--{tuning_names[0]} needs --tune: without it no weights are tuned")
    if "split" in names and not job.queries:
        raise ValueError("--split needs --queries")
    if "measures" in names and not (job.qrels or job.tune_runs):
        raise ValueError("--measures needs --qrels, or --tune: without judgements nothing is measured")
    for measure in job.measures:
        parse_measure(measure)


def _check_output(job: FuseJob, sources: Sequence[tuple[str, DataSource]]) -> None:
    """Raise ValueError if an output is a file of a source. `sources` are those of runs and of tuning."""
    corpora = {corpus: f"the corpus of {run}" for run in job.runs for corpus in encoded_sources(Path(run))}
    sources = [*sources, *((name, DataSource.open(corpus)) for corpus, name in corpora.items())]
    sources += _data_of(job.source) if job.source else []
    for path in (job.out, evaluation_path(job.out)):
        require_other_output(path, sources, (job.split, job.tune_split))
    require_writable(Path(job.out).absolute().parent)


def _data_of(source: EvaluationSource) -> list[tuple[str, DataSource]]:
    """Return the sources of queries and judgements, each with a description."""
    judgements = [("the judgements", source.judgements.data)] if source.judgements else []
    return [("the queries", source.queries.data), *judgements]


def _given_weights(job: FuseJob) -> tuple[float, ...]:
    return tuple(job.weights) or (1.0,) * len(job.runs)


def _tuned_on_runs(job: FuseJob, judged: JudgementSource) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Return the weights of run files, and a record of the queries on which they were tuned."""
    measure, judgements = parse_measure(job.measures[0]).name, judged.read()
    runs = [_read_rankings(source, job.removes_self_matches) for source in job.tune_rankings]
    weights, value = tune_weights(runs, judgements, measure, job.method)
    digests = [sha256_file(path) for source in job.tune_rankings for path in source.files]
    record = {"runs": digests, "measure": measure, "value": round(value, 4)}
    return weights, _tuning_record(weights, judged, len({judgement.query_id for judgement in judgements}), record)


def _tuning_record(
    weights: Sequence[float], judged: JudgementSource | None, count: int, record: Mapping[str, Any]
) -> dict[str, Any]:
    """Print the tuned weights, and return the record of their tuning with the file of its judgements.

    Args:
        weights: the chosen weights.
        judged: the judgements of the queries of tuning.
        count: number of these queries.
        record: measure, its value, and digests.
    """
    assert judged is not None
    file = shown_path(judged.file.path)
    texts = ", ".join(f"{weight:g}" for weight in weights)
    print(f"weights {texts}: {record['measure']} {record['value']:.4f} on the {count:,} queries of {file}")
    return {"tuned_on": {"qrels": file, **record}}


def _write_fusion(
    job: FuseJob,
    parts: Mapping[str, Rankings],
    rankings: Rankings,
    provenance: Mapping[str, Any],
    queries: EvaluationQueries | None,
) -> Evaluation | None:
    """Write fused rankings and, with judgements, their evaluation, which is printed and returned.

    Args:
        job: measures and output.
        parts: name -> rankings that were fused; their evaluations are printed, too.
        rankings: the fused rankings.
        provenance: provenance of the fused rankings.
        queries: queries and judgements; None for no evaluation.
    """
    write_run(job.out, rankings, tag=f"jaxret-fuse-{job.method}")
    kind = f"exact fusion of {len(job.runs)} systems, {job.method}" if "exact" in provenance else job.method
    weights = ", ".join(f"{weight:g}" for weight in provenance["weights"])
    print(f"run: {job.out} ({len(rankings):,} queries, {kind}, weights {weights})")
    files = job.out, evaluation_path(job.out)
    if not job.qrels or not queries:
        write_measures(files, None, None, {}, {})
        return None
    measures = [parse_measure(measure).name for measure in job.measures]
    result = evaluate(rankings, queries.judgements, measures)
    systems = {name: evaluate(run, queries.judgements, measures) for name, run in parts.items()}
    assert queries.source.judgements is not None
    print(f"measured on the {len(queries.queries):,} queries of {shown_path(queries.source.judgements.file.path)}")
    print(evaluation_text({**systems, "fused": result}))
    emit_table({**systems, "fused": result})
    record = {"method": job.method, "k": job.k, **provenance}
    origin = {"fused": record, "dataset": queries.provenance(Policy(), job.removes_self_matches, "string")}
    if "corpus" in record:  # a fusion of systems, which have one corpus; those of run files are unknown
        names = {"method": job.method, "weights": record["weights"], "systems": list(record["systems"].values())}
        origin |= {
            "checkpoint": {"step": 0, "digest": sha256_json(names)},
            "config": {"fused": names},
            "training_data": {},
            "corpus": record["corpus"],
            "search": {"k": job.k, "exact": record["exact"]},
        }
    write_measures(files, result, None, origin, {})
    return result
