"""Compare systems, each with one run or with runs of several seeds, on the same queries: means, deviations over seeds,
and paired tests against the first system, corrected for their number."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from jaxret.evaluation.metrics import MEAN_DECIMALS
from jaxret.evaluation.significance import LEVEL, RESAMPLES, PairedComparison, holm, paired_comparison, welch_p_value
from jaxret.evaluation.text_table import Row, aligned_table, html_paragraphs, html_table

MeasureValues = Mapping[str, Mapping[str, float]]  # values of one run: measure -> query id -> value


@dataclass(frozen=True)
class Score:
    """A measure of a system."""

    system: str
    measure: str
    runs: tuple[float, ...]  # mean over queries for each run

    @property
    def mean(self) -> float:
        return float(np.mean(self.runs))

    @property
    def deviation(self) -> float | None:
        """Return the standard deviation over runs (n - 1); None for a single run."""
        return float(np.std(self.runs, ddof=1)) if len(self.runs) > 1 else None

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" ± {self.deviation:.{MEAN_DECIMALS}f}"
        return f"{self.mean:.{MEAN_DECIMALS}f}{spread}"


@dataclass(frozen=True)
class SystemTest:
    """The test of a system against the first one on one measure; the value of a query is its mean over runs."""

    system: str
    measure: str
    comparison: PairedComparison
    p_runs: float | None  # p-value of Welch's test between the means of runs
    holm_t: float | None = None  # corrected p-value; None if the t-test is not defined
    holm_permutation: float | None = None  # corrected p-value; None if all values are equal

    @property
    def p_values(self) -> tuple[float | None, ...]:
        """The p-values in the order of tables: t-test, corrected, randomization, corrected, over runs."""
        permutation = None if self.comparison.equal else self.comparison.p_permutation
        return self.comparison.p_t, self.holm_t, permutation, self.holm_permutation, self.p_runs

    @property
    def significant(self) -> bool:
        return self.holm_permutation is not None and self.holm_permutation < LEVEL


@dataclass(frozen=True)
class SystemComparison:
    """Scores and paired tests of several systems, which `jaxret compare` prints."""

    systems: tuple[str, ...]  # names; the first system is the baseline
    measures: tuple[str, ...]  # names, such as "nDCG@10"
    scores: tuple[Score, ...]  # a score for each system and measure
    tests: tuple[SystemTest, ...]  # a test for each system but the baseline, and each measure with two queries or more
    queries: Mapping[str, int]  # measure -> number of queries that have a value
    resamples: int  # largest number of sign vectors in the randomization test

    def score(self, system: str, measure: str) -> Score:
        """Return the score of a system on a measure. Both must be names of this comparison."""
        return next(score for score in self.scores if (score.system, score.measure) == (system, measure))

    def to_text(self, table: Callable[[Row, Sequence[Row], int], str] = aligned_table) -> str:
        return "\n\n".join(self._parts(table))

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return html_paragraphs(self._parts(html_table))

    def to_json(self) -> dict[str, Any]:
        """Return the baseline, the means and deviations of all systems, the tests and their settings as a JSON
        value."""
        return {
            "baseline": self.systems[0],
            "systems": {
                name: {
                    measure: {"mean": score.mean, "deviation": score.deviation, "runs": list(score.runs)}
                    for measure in self.measures
                    for score in [self.score(name, measure)]
                }
                for name in self.systems
            },
            "tests": [
                {
                    "system": test.system,
                    "measure": test.measure,
                    **asdict(test.comparison),
                    "ties": test.comparison.ties,
                    "holm_t": test.holm_t,
                    "holm_permutation": test.holm_permutation,
                    "p_runs": test.p_runs,
                }
                for test in self.tests
            ],
            "queries": dict(self.queries),
            "resamples": self.resamples,
        }

    def _parts(self, table: Callable[[Row, Sequence[Row], int], str]) -> list[str]:
        rows = [
            [
                name,
                str(len(self.score(name, self.measures[0]).runs)),
                *(str(self.score(name, measure)) for measure in self.measures),
            ]
            for name in self.systems
        ]
        parts = [table(["system", "runs", *self.measures], rows, 1), f"Means over {self.describe_queries()}."]
        if any(len(score.runs) > 1 for score in self.scores):
            parts.append("±: standard deviation over runs.")
        if len(self.systems) == 1:
            return [*parts, "One system: there is nothing to compare it with."]
        if not self.tests:
            return [*parts, "One query: there is nothing to test."]
        header = ["system", "measure", "difference", "95 %", "wins", "ties", "losses"]
        header += ["t-test", "Holm", "randomization", "Holm", "over runs"]
        parts.append(f"Minus {self.systems[0]}, query by query:")
        parts.append(table(header, [_cells(test) for test in self.tests], 2))
        parts.append(
            f"p-values are two-sided. t-test and randomization ({self.resamples:,} sign vectors at most) test whether "
            "the difference holds on other queries, for these runs; over runs (Welch's t-test between the means of "
            "seeds) tests whether it holds for other seeds. Holm corrects the column on its left for all "
            f"{sum(not test.comparison.equal for test in self.tests)} tests of this table; over runs is not corrected."
        )
        if any(test.comparison.p_t is None for test in self.tests):
            parts.append("There is no t-test if all differences are equal, and no test if they are zero.")
        return parts

    def describe_queries(self) -> str:
        """Return "300 queries", or the counts with their measures if they differ."""
        counts = {count: [m for m in self.measures if self.queries[m] == count] for count in self.queries.values()}
        if len(counts) == 1:
            return _count_queries(next(iter(counts)))
        return "; ".join(f"{_count_queries(count)} ({', '.join(names)})" for count, names in counts.items())


def _count_queries(count: int) -> str:
    return f"{count:,} {'query' if count == 1 else 'queries'}"


def _cells(test: SystemTest) -> list[str]:
    counts = map(str, (test.comparison.wins, test.comparison.ties, test.comparison.losses))
    return [test.system, test.measure, *test.comparison.cells, *counts, *map(format_p_value, test.p_values)]


def format_p_value(value: float | None) -> str:
    """Return a p-value as text for a table; "-" if the test is not defined."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value >= 0.0001 else "<0.0001"


def compare_systems(
    systems: Mapping[str, Sequence[MeasureValues]], measures: Sequence[str], seed: int = 0, resamples: int = RESAMPLES
) -> SystemComparison:
    """Compare every system with the first one. A measure with the values of only one query has means, but no test.

    Args:
        systems: name -> the values of each of its runs.
        measures: names of the measures to compare.
        seed: seed of the randomization test and of the bootstrap intervals.
        resamples: largest number of sign vectors in the randomization test.

    Raises:
        ValueError: the runs have different queries.
    """
    first, *names = systems
    for measure in measures:
        require_same_queries(systems, measure)
    queries = {measure: len(systems[first][0][measure]) for measure in measures}
    scores = score_systems(systems, measures)
    runs = {(score.system, score.measure): score.runs for score in scores}
    system_tests = []
    for name, measure in itertools.product(names, measures):
        if queries[measure] > 1:
            baseline, system = (_query_means(systems[key], measure) for key in (first, name))
            p_runs = welch_p_value(runs[first, measure], runs[name, measure])
            comparison = paired_comparison(baseline, system, seed, resamples)
            system_tests.append(SystemTest(name, measure, comparison, p_runs))
    tests = tuple(with_holm(system_tests))
    return SystemComparison(tuple(systems), tuple(measures), tuple(scores), tests, queries, resamples)


def with_holm(tests: Sequence[SystemTest]) -> list[SystemTest]:
    """Return the tests with p-values that are corrected for their number. A pair whose values are all equal is not
    tested and not counted."""
    unequal_tests = [test for test in tests if not test.comparison.equal]
    # An undefined t-test counts as a test with p = 1, so that the correction is the same for both columns.
    holm_t = holm([1.0 if test.comparison.p_t is None else test.comparison.p_t for test in unequal_tests])
    holm_permutation = holm([test.comparison.p_permutation for test in unequal_tests])
    replacements = {
        id(test): replace(test, holm_t=None if test.comparison.p_t is None else p_t, holm_permutation=permutation)
        for test, p_t, permutation in zip(unequal_tests, holm_t, holm_permutation, strict=True)
    }
    return [replacements.get(id(test), test) for test in tests]


def correct_together(sets: Mapping[str, SystemComparison]) -> dict[str, SystemComparison]:
    """Return comparisons on several data sets with p-values that are corrected for the tests of all sets."""
    all_tests = iter(with_holm([test for comparison in sets.values() for test in comparison.tests]))
    return {
        name: replace(comparison, tests=tuple(itertools.islice(all_tests, len(comparison.tests))))
        for name, comparison in sets.items()
    }


def score_systems(systems: Mapping[str, Sequence[MeasureValues]], measures: Sequence[str]) -> list[Score]:
    """Return the score of each system (name -> the values of each of its runs) by each measure."""
    return [
        Score(name, measure, tuple(float(np.mean(list(run[measure].values()))) for run in runs))
        for name, runs in systems.items()
        for measure in measures
    ]


def require_same_queries(systems: Mapping[str, Sequence[MeasureValues]], measure: str) -> None:
    """Raise ValueError unless all runs have values for the same queries."""
    values_by_run = {
        f"run {n} of {name}": run[measure] for name, runs in systems.items() for n, run in enumerate(runs, 1)
    }
    (first, baseline_values), *run_values = values_by_run.items()
    for name, values in run_values:
        if other_queries := baseline_values.keys() ^ values.keys():
            query = min(other_queries)
            present_in, missing_in = (first, name) if query in baseline_values else (name, first)
            raise ValueError(
                f"query {query!r} has a {measure} in {present_in}, but none in {missing_in}; "
                "evaluate all on the same queries"
            )


def _query_means(runs: Sequence[MeasureValues], measure: str) -> dict[str, float]:
    return {query: float(np.mean([run[measure][query] for run in runs])) for query in runs[0][measure]}
