"""Compare results of runs on the same data. Runs that differ only in their seeds are one system."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxret.evaluation.comparison import SystemComparison, compare_systems, correct_together
from jaxret.evaluation.comparison_table import csv_table, latex_table, sets_table
from jaxret.evaluation.metrics import MEASURE_KINDS, parse_measure
from jaxret.evaluation.significance import RESAMPLES
from jaxret.evaluation.text_table import aligned_table, markdown_table
from jaxret.experiments.searches.evaluation_measures import is_accuracy
from jaxret.parallel.events import emit
from jaxret.runs.added_keys import complete_config
from jaxret.runs.identity import RUN_KEYS, trained_on, without_seeds
from jaxret.runs.mismatch import flatten, require_equal
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json, sha256_json


@dataclass(frozen=True)
class RunResult:
    """An evaluation that `jaxret search` or `jaxret rerank` wrote."""

    path: Path  # the result file
    name: str  # name of the run
    values: dict[str, dict[str, float]]  # measure -> query id -> value, with accuracies by answer strings
    data: dict[str, Any]  # digests of queries, judgements and corpus, and the settings that choose passages
    k: int  # passages per query
    system: str  # digest of the config without its seeds, and of its training data
    initial_weights: Any  # digests of the weights that training started from; None if unknown or part of `system`
    seed: Any  # the seeds of the config, by key
    checkpoint: str  # digest of the checkpoint
    training_data: Any  # digests of the training data
    coverage: tuple[int, int]  # (queries with a passage in the run, queries expected)

    @property
    def group(self) -> str:
        """A digest that all seeds of one system share."""
        return sha256_json([self.system, self.initial_weights])


def compare_runs(
    arguments: Sequence[str], data: str = "", measures: Sequence[str] = (), seed: int = 0, resamples: int = RESAMPLES
) -> tuple[SystemComparison, dict[str, list[RunResult]]]:
    """Compare runs, and return (comparison, system -> its results).

    Args:
        arguments: folders of runs, or result files. Runs that started from the same weights and whose configs differ
            only in their seeds are one system. "NAME=RUN,RUN" makes one system of runs with any configs.
        data: name of the result to read in the folders; "" for the only one that all have.
        measures: names of the measures to compare; () for all that every result has.
        seed: seed of the randomization test (`paired_comparison`).
        resamples: number of its permutations.
    Raises:
        FileNotFoundError, ValueError: a result is missing, or cannot be compared.
        ContractError: the results are on different data.
    """
    names = [path for argument in arguments for path in split_argument(argument)[1]]
    result_name = data or common_result_name([name for name in names if Path(name).is_dir()])
    results = {name: read_result(name, result_name) for name in names}
    require_comparable(list(results.values()))
    systems = group_by_system(arguments, results)
    chosen_measures = common_measures(list(results.values()), measures)
    values = {name: [result.values for result in results_of] for name, results_of in systems.items()}
    return compare_systems(values, chosen_measures, seed, resamples), systems


Comparison = tuple[SystemComparison, dict[str, list[RunResult]]]


def compare_on_sets(
    arguments: Sequence[str],
    data: Sequence[str],
    measures: Sequence[str] = (),
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> dict[str, Comparison]:
    """Compare runs on one or several data sets, and return data set -> result of `compare_runs`. The p-values are
    corrected for the tests of all sets.

    Args:
        arguments: arguments of `compare_runs`; with several sets they must be folders of runs.
        data: names of results; ("all",) for all that every folder has; () for the only one.
        measures: names of the measures to compare; () for all that every result of every set has.
        seed: seed of the randomization test (`paired_comparison`).
        resamples: number of its permutations.

    Raises:
        FileNotFoundError: a result is missing.
        ValueError: results cannot be compared, or the sets do not have the same systems.
        ContractError: the results of a set are on different data.
    """
    locations = [path for argument in arguments for path in split_argument(argument)[1]]
    names = _all_results(locations) if list(data) == ["all"] else list(data)
    if len(names) > 1 and (files := [location for location in locations if not Path(location).is_dir()]):
        raise ValueError(f"--data={','.join(data)} needs folders of runs, but {files[0]} is not one")
    if len(names) > 1 and not measures:
        results = [read_result(location, name) for name in names for location in locations]
        measures = common_measures(results)
    sets: dict[str, Comparison] = {}
    for name in names or [""]:
        comparison, systems = compare_runs(arguments, name, measures, seed, resamples)
        sets[name or next(iter(systems.values()))[0].path.stem] = comparison, systems
    first, *further_sets = sets
    for further in further_sets:
        if sets[further][0].systems != sets[first][0].systems:
            listing = " and ".join(f"{', '.join(sets[name][0].systems)} on {name}" for name in (first, further))
            raise ValueError(f"the systems differ between data sets: {listing}; name each system with NAME=RUN,RUN")
    comparisons = correct_together({name: comparison for name, (comparison, _) in sets.items()})
    return {name: (comparisons[name], systems) for name, (_, systems) in sets.items()}


def _all_results(locations: Sequence[str]) -> list[str]:
    """Return the names of the results that all folders have. Raises ValueError if they have none in common."""
    stems = [{path.stem for path in Workdir(folder).evaluations} for folder in locations if Path(folder).is_dir()]
    if not (common := sorted(set.intersection(*stems)) if stems else []):
        raise ValueError("--data=all: the runs have no result of the same name; give the files of eval/ themselves")
    return common


def render_sets(sets: Mapping[str, Comparison], form: str = "text") -> str:
    """Return comparisons as "text", "markdown", "csv" or "latex". The first two have the notes, too."""
    comparisons = {name: comparison for name, (comparison, _) in sets.items()}
    if form in ("csv", "latex"):
        return csv_table(comparisons) if form == "csv" else latex_table(comparisons)
    table = markdown_table if form == "markdown" else aligned_table
    first, *further_sets = comparisons.values()
    notes = dict.fromkeys(note for _, systems in sets.values() for note in comparison_notes(systems))
    return "\n\n".join([sets_table(comparisons, table) if further_sets else first.to_text(table), *notes])


def emit_comparisons(sets: Mapping[str, Comparison]) -> None:
    """Emit an event for the comparison on each data set."""
    for name, (comparison, systems) in sets.items():
        emit(
            "comparison",
            data=name,
            comparison=comparison.to_json(),
            results={system: [result.path for result in results] for system, results in systems.items()},
            digests=next(iter(systems.values()))[0].data,
            notes=comparison_notes(systems),
        )


def require_comparable(results: Sequence[RunResult]) -> None:
    """Raise ContractError unless all results are on the same queries, judgements and passages."""
    first = results[0]
    for result in results[1:]:
        remedy = "Search all runs with the same queries, judgements and corpus."
        require_equal(first.data, result.data, str(first.path), str(result.path), remedy)


def common_measures(results: Sequence[RunResult], measures: Sequence[str] = ()) -> list[str]:
    """Return the measures to compare: `measures`, or all that every result has. Raises ValueError for a measure that a
    result does not have, and if the results have none in common."""
    names = list(dict.fromkeys(measures))
    names = names or [name for name in results[0].values if all(name in result.values for result in results)]
    if not names:
        raise ValueError(
            f"{results[0].path} and the other results have no measure in common; search with the same --measures"
        )
    for measure in names:
        require_measure(measure, results)
    return names


def split_argument(argument: str) -> tuple[str, list[str]]:
    """Split "NAME=RUN,RUN" into (NAME, runs); "RUN" gives ("", [RUN]). A path that exists is one run, also with "=" and
    commas. Raises ValueError without a name or runs."""
    if "=" not in argument or os.path.exists(argument):
        return "", [argument]
    name, _, runs = argument.partition("=")
    run_names = [runs] if os.path.exists(runs) else [run for run in runs.split(",") if run]
    if not name or not run_names:
        raise ValueError(f"{argument!r} names no runs; write NAME=RUN or NAME=RUN,RUN")
    return name, run_names


def common_result_name(folders: Sequence[str]) -> str:
    """Return the name of the only result that all folders have; "" without folders. Raises FileNotFoundError for a
    folder without results, ValueError if the folders have no result in common, or several."""
    if not folders:
        return ""
    stems = [{path.stem for path in Workdir(folder).evaluations} for folder in folders]
    for folder, names in zip(folders, stems):
        if not names:
            remedy = f"jaxret search --workdir={folder} --queries=... --qrels=... writes one"
            raise FileNotFoundError(f"{folder} has no result in eval/; {remedy}")
    common = sorted(set.intersection(*stems))
    if len(common) == 1:
        return common[0]
    if common:
        raise ValueError(
            f"the runs have several results, {', '.join(common)}: choose some with --data=NAME,NAME, or --data=all"
        )
    listing = "; ".join(f"{folder} has {', '.join(sorted(names))}" for folder, names in zip(folders, stems))
    raise ValueError(f"the runs have no result of the same name: {listing}. Give the files of eval/ themselves")


def read_result(location: str, data: str) -> RunResult:
    """Read a result file, or the result `data` of a run's folder. Raises FileNotFoundError if it is missing, and
    ValueError for a file that is not a result or has no digests of its data."""
    is_folder = Path(location).is_dir()
    path = Workdir(location).evaluation(data) if is_folder else Path(location)
    if not path.exists():
        available = ", ".join(path.stem for path in Workdir(location).evaluations) if is_folder else ""
        raise FileNotFoundError(f"{path} does not exist{f'; the run has {available}' if available else ''}")
    report = read_json(path)
    provenance = report.get("provenance") if isinstance(report, dict) else None
    if isinstance(provenance, dict) and "fused" in provenance and "search" not in provenance:
        raise ValueError(
            f"{path} names no corpus, because run files were fused: fuse folders of systems to compare them"
        )
    if not isinstance(provenance, dict) or "per_query" not in report or "search" not in provenance:
        raise ValueError(f"{path} is not a result of jaxret search (it has no values per query with provenance)")
    dataset = provenance.get("dataset", {})
    if "sha256" not in dataset:
        raise ValueError(f"{path} has no digests of its queries and judgements: run jaxret search again")
    config, search = flatten(complete_config(provenance["config"])), provenance["search"]
    lineage, record = provenance.get("lineage"), provenance.get("training_data")
    run = path.resolve().parent.parent if path.resolve().parent.name == "eval" else path.with_suffix("")
    return RunResult(
        path=path,
        name=run.name.removesuffix(".eval"),
        values=_read_values(path, report),
        data={
            **dataset["sha256"],
            "corpus": provenance["corpus"]["sha256"],
            "filter": sorted(search.get("filter", [])),  # the order of filters has no meaning
            "approximate": _approximation(search),
            "self_matches": dataset["self_matches"],
            "match": dataset.get("match", "string"),
        },
        k=search["k"],
        system=_system_digest(config, lineage, record, search),
        # The lineage of a recipe's stage has the digests of the encoder's files.
        initial_weights=None if lineage else (record or {}).get("start"),
        seed={key: value for key, value in config.items() if key.startswith("seed.")},
        checkpoint=sha256_json([provenance["checkpoint"]["digest"], search.get("reranked")]),
        training_data=trained_on(record, whole_sets=False).get("train"),
        coverage=(report.get("queries_found", 0), report.get("queries_expected", 0)),
    )


def _system_digest(config: Mapping[str, Any], lineage: Any, record: Any, search: Mapping[str, Any]) -> str:
    """Return a digest of all values that a run's results depend on, except seeds.

    Args:
        config: the flat config of the run.
        lineage: lineage of a recipe's stage, which identifies its data and its initial weights (each seed mines its own
            data and starts from its own run); None for other runs.
        record: the training data of the run; None without a record.
        search: the search settings of the result.
    """
    # The corpus may have been encoded with other values than the config's.
    names_in_search = {"encode.dtype": "dtype", "encode.words": "words"}
    keys = without_seeds(config) | {key: search.get(name, config.get(key)) for key, name in names_in_search.items()}
    if lineage:
        system = [lineage["sha256"], {key: value for key, value in keys.items() if key not in RUN_KEYS}]
    else:
        system = [keys, trained_on(record, whole_sets=bool(config.get("data.subset")))]
    names = ("reranked", "query_length", "passage_length", "dimension", "max_passage")
    return sha256_json([system, *(search.get(name) for name in names)])


def _read_values(path: Path, report: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return measure -> query id -> value. Measures have the order of tables, with accuracies by answer strings last.
    Raises ValueError for a value that is not a finite number."""
    answers = report.get("answers", {})
    parts = [report["per_query"], answers.get("per_query", {}) if isinstance(answers, dict) else answers]
    values_by_measure: dict[str, dict[str, float]] = {}
    for part in parts:
        if not isinstance(part, dict) or not all(isinstance(values, dict) for values in part.values()):
            raise ValueError(f"{path}: per_query must map measures to values by query; search again")
        values_by_measure |= part
    for measure, values in values_by_measure.items():
        for query, value in values.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(
                    f"{path}: {measure} of query {query!r} is {value!r}, not a finite number; search again"
                )
    return dict(sorted(values_by_measure.items(), key=lambda item: _measure_order(item[0])))


def _approximation(search: Mapping[str, Any]) -> str:
    """Return the description of an approximate search: factory and effort of an index, or proxies and number of
    candidates; "" for an exact search."""
    index = search.get("index", {})
    effort = [f"{key} {index[key]}" for key in sorted(index) if key not in ("factory", "recall")]
    return str(search.get("candidates") or ", ".join([index.get("factory", ""), *effort]))


def _measure_order(measure: str) -> tuple[int, int]:
    """Return the sort key of a measure in tables. In files, measures are in alphabetical order."""
    if is_accuracy(measure):
        return len(MEASURE_KINDS), int(measure.partition("@")[2])
    parsed_measure = parse_measure(measure)
    return MEASURE_KINDS.index(parsed_measure.kind), parsed_measure.cutoff or 0


def group_by_system(arguments: Sequence[str], results: dict[str, RunResult]) -> dict[str, list[RunResult]]:
    """Return system -> its results, in the order of the arguments. Raises ValueError if a run would count twice."""
    groups: dict[tuple[str, str], list[RunResult]] = {}  # (name or "", group of unnamed runs) -> results
    for argument in arguments:
        name, runs = split_argument(argument)
        for run in runs:
            groups.setdefault((name, "" if name else results[run].group), []).append(results[run])
    systems: dict[str, list[RunResult]] = {}
    for (name, _), members in groups.items():
        require_distinct_runs(members, bool(name))
        system = name or _shared_name(members)
        systems[f"{system} ({members[0].path})" if system in systems else system] = members
    paths = Counter(result.path.resolve() for members in systems.values() for result in members)
    if duplicates := [path for path, count in paths.items() if count > 1]:
        raise ValueError(f"{duplicates[0]} is in two systems, but a run counts only once; remove it from one")
    return systems


def comparison_notes(systems: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """Return sentences about differences between the runs that the numbers do not show."""
    notes = [training_data_note(systems), *initial_weight_notes(systems)]
    for result in itertools.chain.from_iterable(systems.values()):
        count, expected = result.coverage
        if count < expected:
            notes.append(
                f"{result.path} has rankings of {count:,} of {expected:,} queries: the missing ones count as zero."
            )
    return [note for note in notes if note]


def initial_weight_notes(systems: Mapping[str, Sequence[RunResult]]) -> Iterator[str]:
    """Yield a sentence for runs with the same config and data that started from different weights."""
    by_system: dict[str, dict[str, RunResult]] = {}  # system -> digest of weights -> first result with both
    for result in itertools.chain.from_iterable(systems.values()):
        by_system.setdefault(result.system, {}).setdefault(sha256_json(result.initial_weights), result)
    for by_weights in by_system.values():
        if len(by_weights) > 1:
            parts = (f"{result.path} {_describe_weights(result.initial_weights)}" for result in by_weights.values())
            listing = "; ".join(parts)
            yield (
                "These runs have the same config but started from different weights, so they are not seeds of one "
                f"system: {listing}."
            )


def _describe_weights(start: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} {str(value)[:12]}" for key, value in start.items()) if start else "(weights not recorded)"


def training_data_note(systems: Mapping[str, Sequence[RunResult]]) -> str:
    """Return a sentence about systems whose runs were trained on different data; "" if no system has such runs."""
    parts = []
    for name, results in systems.items():
        if (count := len({sha256_json(result.training_data) for result in results})) > 1:
            parts.append(f"of {name} ({count} sets for {len(results)} runs)")
    sentence = f"Training data differ between the runs {', '.join(parts)}: deviations include this difference."
    return sentence if parts else ""


def require_distinct_runs(results: Sequence[RunResult], named: bool) -> None:
    """Raise ValueError if two results belong to the same run. Runs of a `named` system may have the same seeds."""
    for first, second in itertools.combinations(results, 2):
        is_same_checkpoint = first.checkpoint == second.checkpoint
        if is_same_checkpoint or (first.seed == second.seed and not named):
            reason = "are of one checkpoint" if is_same_checkpoint else "have the same config, seeds included"
            remedy = "remove one" if named else "make each a system of its own with NAME=RUN"
            raise ValueError(f"{first.path} and {second.path} {reason}, and a run counts once; {remedy}")


def _shared_name(results: Sequence[RunResult]) -> str:
    """Return the common prefix of the names of a system's runs ("mlr" for "mlr-1" and "mlr-2")."""
    columns = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*(result.name for result in results)))
    prefix = "".join(letters[0] for letters in columns)
    return (re.sub(r"[-_. ]*(seed)?[-_. ]*$", "", prefix) if len(results) > 1 else prefix) or results[0].name


def require_measure(name: str, results: Sequence[RunResult]) -> None:
    """Raise ValueError unless all results have the measure and, if it has no cut-off, the same depth."""
    for result in results:
        if name not in result.values:
            raise ValueError(f"{result.path} has no {name!r}; it has {', '.join(result.values)}")
    depths = {result.k: result.path for result in results}
    if len(depths) > 1 and not is_accuracy(name) and parse_measure(name).cutoff is None:
        (k, path), (second_k, second_path) = list(depths.items())[:2]
        raise ValueError(
            f"{name} reads whole rankings, which have {k} passages in {path} and {second_k} in {second_path}: search "
            "both with the same --k"
        )
