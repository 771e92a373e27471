"""What `jaxret compare` does: results of runs -> systems, each of one run or several seeds, on the same data."""

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

from jaxret.contract import flatten, require_equal
from jaxret.evaluation.comparison import Comparisons, compare_systems
from jaxret.evaluation.metrics import KINDS, parse_measure
from jaxret.runs.system import trained_on, without_seeds
from jaxret.runs.upgrade import upgrade
from jaxret.runs.workdir import Workdir
from jaxret.storage import read_json, sha256_json


@dataclass(frozen=True)
class Result:
    """An evaluation that `jaxret search` or `jaxret rerank` wrote."""

    path: Path
    name: str  # of the run
    values: dict[str, dict[str, float]]  # measure -> query id -> value, those by answer strings too
    data: dict[str, Any]  # digests of queries, judgements and corpus, and what was left out
    k: int
    system: str  # digest of the config without its seeds, and of what it was trained on
    start: Any  # digests of the weights that it began with; None: not known, or part of `system`
    seed: Any
    checkpoint: str  # digest
    trained: Any  # digests of what it was trained on
    found: tuple[int, int]  # of so many queries that are expected, so many have a passage in the run

    @property
    def group(self) -> str:
        """The same of all runs that are seeds of one system."""
        return sha256_json([self.system, self.start])


def compare_runs(
    given: Sequence[str], data: str = "", measures: Sequence[str] = (), seed: int = 0, resamples: int = 100_000
) -> tuple[Comparisons, dict[str, list[Result]]]:
    """Compares runs. given: folders of runs, or result files; those whose configs differ in their seeds alone, and that
    began with the same weights, are one system. NAME=RUN,RUN: one system, whatever their configs. data: which result of
    the folders, where they have several. measures: by default all that every result has.

    Returns the comparison, and the results of each system. Raises FileNotFoundError and ValueError for what cannot be
    found or compared, ContractError for results on different data.
    """
    names = [path for one in given for path in _split(one)[1]]
    chosen = data or common_data([name for name in names if Path(name).is_dir()])
    results = {name: read_result(name, chosen) for name in names}
    first, *others = results.values()
    for other in others:
        remedy = "Search all runs with the same queries, judgements and corpus."
        require_equal(first.data, other.data, str(first.path), str(other.path), remedy)
    systems = grouped(given, results)
    wanted = list(dict.fromkeys(measures)) or [m for m in first.values if all(m in other.values for other in others)]
    for measure in wanted:
        require_measure(measure, list(results.values()))
    if not wanted:
        raise ValueError(f"{first.path} and the others have no measure in common; search with the same --measures")
    values = {name: [result.values for result in found] for name, found in systems.items()}
    return compare_systems(values, wanted, seed, resamples), systems


def _split(given: str) -> tuple[str, list[str]]:
    """ "NAME=RUN,RUN" -> (NAME, runs); "RUN" -> ("", [RUN])."""
    if "=" not in given or os.path.exists(given):
        return "", [given]
    name, _, runs = given.partition("=")
    found = [run for run in runs.split(",") if run]
    if not name or not found:
        raise ValueError(f"{given!r} names no runs; write NAME=RUN or NAME=RUN,RUN")
    return name, found


def common_data(folders: Sequence[str]) -> str:
    """The name of the one result that all folders have; "" without folders."""
    if not folders:
        return ""
    stems = [{path.stem for path in Workdir(folder).evaluations} for folder in folders]
    for folder, there in zip(folders, stems):
        if not there:
            remedy = f"jaxret search --workdir={folder} --queries=... --qrels=... writes one"
            raise FileNotFoundError(f"{folder} has no result in eval/; {remedy}")
    common = sorted(set.intersection(*stems))
    if len(common) == 1:
        return common[0]
    if common:
        raise ValueError(f"the runs have several results, {', '.join(common)}: choose one with --data=NAME")
    each = "; ".join(f"{folder} has {', '.join(sorted(there))}" for folder, there in zip(folders, stems))
    raise ValueError(f"the runs have no result of the same name: {each}. Give the files of eval/ themselves")


def read_result(given: str, data: str) -> Result:
    """A result file, or that of `data` in a run's folder. Raises FileNotFoundError, and ValueError for a file that is
    no result, or one of an older jaxret, which says nothing of its data."""
    path = Workdir(given).evaluation(data) if Path(given).is_dir() else Path(given)
    if not path.exists():
        there = ", ".join(one.stem for one in Workdir(given).evaluations) if Path(given).is_dir() else ""
        raise FileNotFoundError(f"{path} does not exist{f'; there are {there}' if there else ''}")
    stored = read_json(path)
    made = stored.get("provenance") if isinstance(stored, dict) else None
    if not isinstance(made, dict) or "per_query" not in stored or "search" not in made:
        raise ValueError(f"{path} is no result of jaxret search (it has no values per query with their provenance)")
    dataset = made.get("dataset", {})
    if "sha256" not in dataset:
        raise ValueError(
            f"{path} has no digests of its queries and judgements, as older results: run jaxret search again"
        )
    values = _values(path, stored)
    config = flatten(upgrade(made["config"]))
    lineage, record = made.get("lineage"), made.get("training_data")
    keys = without_seeds(config)
    if lineage:  # a recipe's stage: its training data and what it starts from are its seeds' own
        system = [lineage["sha256"], {key: value for key, value in keys.items() if key != "train.start_from"}]
    else:
        system = [keys, trained_on(record, whole=bool(config["data.subset"]))]
    start = None if lineage else (record or {}).get("start")  # a lineage has the digests of the encoder's files
    reranked = made["search"].get("reranked")
    run = path.resolve().parent.parent if path.resolve().parent.name == "eval" else path.with_suffix("")
    return Result(
        path=path,
        name=run.name.removesuffix(".eval"),
        values=dict(sorted(values.items(), key=lambda item: _order(item[0]))),
        data={
            **dataset["sha256"],
            "corpus": made["corpus"]["sha256"],
            "filter": sorted(made["search"].get("filter", [])),  # in any order they say the same
            "approximate": _approximate(made["search"]),
            "self_matches": dataset["self_matches"],
            "match": dataset.get("match", "string"),
        },
        k=made["search"]["k"],
        system=sha256_json(
            [system, reranked, *(made["search"].get(f"{side}_length") for side in ("query", "passage"))]
        ),
        start=start,
        seed={key: value for key, value in config.items() if key.startswith("seed.")},
        checkpoint=sha256_json([made["checkpoint"]["digest"], reranked]),
        trained=trained_on(record, whole=False).get("train"),
        found=(stored.get("queries_found", 0), stored.get("queries_expected", 0)),
    )


def _values(path: Path, stored: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The values per query, those by answer strings too. Raises ValueError for what is no finite number."""
    answers = stored.get("answers", {})
    parts = [stored["per_query"], answers.get("per_query", {}) if isinstance(answers, dict) else answers]
    found: dict[str, dict[str, float]] = {}
    for part in parts:
        if not isinstance(part, dict) or not all(isinstance(values, dict) for values in part.values()):
            raise ValueError(f"{path}: its values per query are no values of queries by measure; search again")
        found |= part
    for measure, values in found.items():
        for query, value in values.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{path}: {measure} of query {query!r} is {value!r}, no finite number; search again")
    return found


def _approximate(search: Mapping[str, Any]) -> str:
    """What found the candidates that were scored: an index's factory and how hard it looked, or a front and how many;
    "" if it is exact."""
    index = search.get("index", {})
    effort = [f"{key} {index[key]}" for key in sorted(index) if key not in ("factory", "recall")]
    return str(search.get("candidates") or ", ".join([index.get("factory", ""), *effort]))


def _order(measure: str) -> tuple[int, int]:
    """Where a measure stands in tables: a file has them by alphabet."""
    if _is_accuracy(measure):
        return len(KINDS), int(measure.partition("@")[2])
    parsed = parse_measure(measure)
    return KINDS.index(parsed.kind), parsed.cutoff or 0


def _is_accuracy(measure: str) -> bool:
    """Whether it is one by answer strings, which `parse_measure` does not know."""
    return measure.startswith("Accuracy@")


def grouped(given: Sequence[str], results: dict[str, Result]) -> dict[str, list[Result]]:
    """System -> its results, in the order given. Raises ValueError where a run would count twice."""
    groups: dict[tuple[str, str], list[Result]] = {}  # (name given, or ""; what its runs have in common) -> its runs
    for one in given:
        name, runs = _split(one)
        for run in runs:
            groups.setdefault((name, "" if name else results[run].group), []).append(results[run])
    systems: dict[str, list[Result]] = {}
    for (name, _), found in groups.items():
        refuse_twice(found, bool(name))
        shared = name or _shared_name(found)
        systems[f"{shared} ({found[0].path})" if shared in systems else shared] = found
    paths = Counter(result.path.resolve() for found in systems.values() for result in found)
    if twice := [path for path, count in paths.items() if count > 1]:
        raise ValueError(f"{twice[0]} is in two systems, and a run counts once; leave it out of one")
    return systems


def notes(systems: Mapping[str, Sequence[Result]]) -> list[str]:
    """What is to be known of what was compared, beside the numbers."""
    return [told for told in (told_of_data(systems), *told_of_weights(systems), *told_of_queries(systems)) if told]


def told_of_queries(systems: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """Of runs that found nothing for some queries: how many."""
    for one in itertools.chain.from_iterable(systems.values()):
        found, expected = one.found
        if found < expected:
            yield f"{one.path} has rankings of {found:,} of {expected:,} queries: the missing ones count as zero."


def told_of_weights(systems: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """Of runs with the same config and data that began with other weights: which, and with which."""
    alike: dict[str, dict[str, Result]] = {}  # system -> weights -> the first run
    for one in itertools.chain.from_iterable(systems.values()):
        alike.setdefault(one.system, {}).setdefault(sha256_json(one.start), one)
    for found in alike.values():
        if len(found) > 1:
            each = "; ".join(f"{one.path} {_told_start(one.start)}" for one in found.values())
            yield f"These have one config but began with other weights, so they are not seeds of one system: {each}."


def _told_start(start: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} {str(value)[:12]}" for key, value in start.items()) if start else "does not say which"


def told_of_data(systems: Mapping[str, Sequence[Result]]) -> str:
    """Which systems have runs that were trained on different data, in a sentence; "" if none."""
    several = {name: len({sha256_json(one.trained) for one in found}) for name, found in systems.items()}
    found = [f"of {name} ({count} sets for {len(systems[name])} runs)" for name, count in several.items() if count > 1]
    return f"Training data differ between the runs {', '.join(found)}: deviations are over these, too." if found else ""


def refuse_twice(found: Sequence[Result], named: bool) -> None:
    """Raises ValueError where two results are of one run; the same seed may come twice in a system that was named."""
    for place, result in enumerate(found):
        for other in found[:place]:
            if other.checkpoint == result.checkpoint or (other.seed == result.seed and not named):
                same = other.checkpoint == result.checkpoint
                what = "are of one checkpoint" if same else "have the same config, seeds included"
                remedy = "leave one out" if named else "NAME=RUN makes each a system of its own"
                raise ValueError(f"{other.path} and {result.path} {what}, and a run counts once; {remedy}")


def _shared_name(found: Sequence[Result]) -> str:
    """What the names of a system's runs begin with ("mlr-1", "mlr-2": "mlr")."""
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*(result.name for result in found)))
    shared = "".join(letters[0] for letters in same)
    return (re.sub(r"[-_. ]*(seed)?[-_. ]*$", "", shared) if len(found) > 1 else shared) or found[0].name


def require_measure(name: str, results: Sequence[Result]) -> None:
    """Raises ValueError unless all results have the measure and, where it looks at whole rankings, of one depth."""
    for result in results:
        if name not in result.values:
            raise ValueError(f"{result.path} has no {name!r}; it has {', '.join(result.values)}")
    whole = not _is_accuracy(name) and parse_measure(name).cutoff is None
    depths = {result.k: result.path for result in results}
    if whole and len(depths) > 1:
        (k, path), (other, second) = list(depths.items())[:2]
        raise ValueError(f"{name} looks at whole rankings, of {k} passages in {path} and of {other} in {second}")
