"""Compare the points of a sweep: scores over seeds, and tests against one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxret.evaluation.comparison import Score, SystemComparison, compare_systems, format_p_value, score_systems
from jaxret.evaluation.text_table import Row, aligned_table, markdown_table
from jaxret.experiments.compare_runs import (
    RunResult,
    common_measures,
    comparison_notes,
    require_comparable,
    require_distinct_runs,
)
from jaxret.experiments.config_values import format_value, short_names
from jaxret.experiments.sweeps.grid import Grid
from jaxret.storage.atomic import atomic_write, write_json


@dataclass(frozen=True)
class SweepResults:
    """The scores of a sweep's points, and the tests of the first measure against the baseline."""

    keys: tuple[str, ...]  # swept keys in order
    points: Mapping[str, Mapping[str, Any]]  # label -> swept key -> value, in the order of the grid
    scores: tuple[Score, ...]  # a score for each point and measure
    comparison: SystemComparison  # comparison by the first measure; its first system is the baseline
    notes: tuple[str, ...]  # sentences on differences between runs

    @property
    def measures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(score.measure for score in self.scores))

    @property
    def baseline(self) -> str:
        return self.comparison.systems[0]

    def with_scores(self, scores: Sequence[Score]) -> SweepResults:
        """Return the results with the scores of further measures, which some points may lack."""
        return replace(self, scores=(*self.scores, *scores))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value that `sweep_picture` reads."""
        return {
            "keys": list(self.keys),
            "points": [
                {
                    "label": label,
                    "values": dict(point),
                    "scores": {score.measure: list(score.runs) for score in self.scores if score.system == label},
                }
                for label, point in self.points.items()
            ],
            "measures": list(self.measures),
            "comparison": self.comparison.to_json(),
            "notes": list(self.notes),
        }

    def to_text(self, table: Callable[[Row, Sequence[Row], int], str] = aligned_table) -> str:
        names, main = short_names(self.keys), self.measures[0]
        header = [*(names[key] for key in self.keys), "runs", *self.measures]
        header += [f"{main} minus baseline", "95 %", "Holm", "over runs"]
        rows = [self._point_cells(label) for label in self.points]
        parts = [table(header, rows, len(self.keys)), f"Baseline: {self.baseline}."]
        if any(len(score.runs) > 1 for score in self.scores):
            parts[-1] += " ±: standard deviation over runs."
        parts.append(
            f"Means over {self.comparison.queries[main]:,} queries. Holm: p-value of the randomization test over "
            f"queries, corrected for all points; over runs: Welch's t-test between the means of runs, not corrected."
        )
        return "\n\n".join([*parts, *self.notes])

    def _point_cells(self, label: str) -> list[str]:
        values = [format_value(self.points[label][key]) for key in self.keys]
        scores = {score.measure: score for score in self.scores if score.system == label}
        cells = [*values, str(len(scores[self.measures[0]].runs)), *(str(scores.get(m, "-")) for m in self.measures)]
        for test in self.comparison.tests:
            if test.system == label:
                return [*cells, *test.comparison.cells, *map(format_p_value, test.p_values[3:])]
        return [*cells, "baseline", "", "", ""]


def compare_points(
    grid: Grid,
    points: Mapping[str, Mapping[str, Any]],
    results: Mapping[str, Sequence[RunResult]],
    baseline: str = "",
    measures: Sequence[str] = (),
) -> SweepResults:
    """Compare the points of a sweep.

    Args:
        grid: the swept keys.
        points: label -> swept key -> value.
        results: label -> the results of its runs.
        baseline: label of the point that the others are tested against; "" for the first.
        measures: names of measures, of which the first is tested; () for all that every result has.
    Raises:
        ContractError: the results are on different data.
        ValueError: a run is given twice for a point, or a measure is missing.
    """
    all_results = [result for members in results.values() for result in members]
    require_comparable(all_results)
    for members in results.values():
        require_distinct_runs(members, named=True)
    names = common_measures(all_results, measures)
    first = baseline or next(iter(results))
    values = {label: [result.values for result in results[label]] for label in (first, *results)}
    comparison = compare_systems(values, names[:1])
    scores = score_systems({label: values[label] for label in results}, names)
    notes = comparison_notes({label: list(members) for label, members in results.items()})
    return SweepResults(grid.keys, points, tuple(scores), comparison, tuple(notes))


def write_sweep(results: SweepResults, folder: Path) -> Path:
    """Write results.md and results.json into the folder of a sweep, and return the path of the table."""
    write_json(folder / "results.json", results.to_json())
    with atomic_write(folder / "results.md") as file:
        file.write(results.to_text(markdown_table) + "\n")
    return folder / "results.md"
