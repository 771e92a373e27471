"""Several systems, each of one run or of several seeds, on the same queries: means, deviations, paired tests against
the first, corrected for their number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxret.evaluation.metrics import MEAN_DECIMALS
from jaxret.evaluation.significance import Comparison, compare, holm, over_runs
from jaxret.evaluation.table import Row, aligned, piped

Values = Mapping[str, Mapping[str, float]]  # measure -> query id -> value, of one run


@dataclass(frozen=True)
class Score:
    """A measure of a system: of each run its mean over queries."""

    system: str
    measure: str
    runs: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.runs))

    @property
    def deviation(self) -> float | None:
        """The standard deviation over runs (n - 1); None of one run."""
        return float(np.std(self.runs, ddof=1)) if len(self.runs) > 1 else None

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" ± {self.deviation:.{MEAN_DECIMALS}f}"
        return f"{self.mean:.{MEAN_DECIMALS}f}{spread}"


@dataclass(frozen=True)
class Test:
    """A system against the first one, on one measure; a query's value is its mean over the system's runs."""

    system: str
    measure: str
    found: Comparison
    p_runs: float | None  # Welch's test between the means of runs
    holm_t: float | None  # None where the t-test is not defined
    holm_permutation: float


@dataclass(frozen=True)
class Comparisons:
    """What `jaxret compare` prints. `tests` have every system but the first, on every measure."""

    systems: tuple[str, ...]
    measures: tuple[str, ...]
    scores: tuple[Score, ...]
    tests: tuple[Test, ...]
    queries: Mapping[str, int]  # that have a value, of each measure
    resamples: int

    def score(self, system: str, measure: str) -> Score:
        return next(one for one in self.scores if (one.system, one.measure) == (system, measure))

    def to_text(self) -> str:
        return self._told(aligned)

    def to_markdown(self) -> str:
        return self._told(piped)

    def to_json(self) -> dict[str, Any]:
        return {
            "baseline": self.systems[0],
            "systems": {
                name: {
                    measure: {"mean": one.mean, "deviation": one.deviation, "runs": list(one.runs)}
                    for measure in self.measures
                    for one in [self.score(name, measure)]
                }
                for name in self.systems
            },
            "tests": [
                {
                    "system": one.system,
                    "measure": one.measure,
                    **asdict(one.found),
                    "ties": one.found.ties,
                    "holm_t": one.holm_t,
                    "holm_permutation": one.holm_permutation,
                    "p_runs": one.p_runs,
                }
                for one in self.tests
            ],
            "queries": dict(self.queries),
            "resamples": self.resamples,
        }

    def _told(self, table: Callable[[Row, Sequence[Row], int], str]) -> str:
        rows = [
            [
                name,
                str(len(self.score(name, self.measures[0]).runs)),
                *(str(self.score(name, m)) for m in self.measures),
            ]
            for name in self.systems
        ]
        parts = [table(["system", "runs", *self.measures], rows, 1), f"Means over {self._told_queries()}."]
        if any(len(one.runs) > 1 for one in self.scores):
            parts.append("±: standard deviation over runs.")
        if not self.tests:
            return "\n\n".join([*parts, "One system: there is nothing to compare it with."])
        header = ["system", "measure", "difference", "95 %", "wins", "ties", "losses"]
        header += ["t-test", "Holm", "randomisation", "Holm", "over runs"]
        parts.append(f"Minus {self.systems[0]}, query by query:")
        parts.append(table(header, [_cells(one) for one in self.tests], 2))
        parts.append(
            f"p-values, two-sided. t-test and randomisation ({self.resamples:,} sign vectors at most) say whether "
            "other queries would agree, for these runs; over runs (Welch's t-test between the means of seeds) whether "
            f"other seeds would. Holm corrects the column on its left for all {len(self.tests)} tests of this table; "
            "over runs is not corrected."
        )
        if any(one.found.p_t is None for one in self.tests):
            parts.append("No t-test where all differences are equal: it divides by their deviation, which is 0.")
        return "\n\n".join(parts)

    def _told_queries(self) -> str:
        """ "300 queries", or of which measures how many."""
        counts = {count: [m for m in self.measures if self.queries[m] == count] for count in self.queries.values()}
        if len(counts) == 1:
            return f"{next(iter(counts)):,} queries"
        return "; ".join(f"{count:,} queries ({', '.join(names)})" for count, names in counts.items())


def _cells(one: Test) -> list[str]:
    found = one.found
    numbers = [f"{found.difference:+.4f}", f"{found.low:+.4f} to {found.high:+.4f}"]
    counts = [str(found.wins), str(found.ties), str(found.losses)]
    tests = (found.p_t, one.holm_t, found.p_permutation, one.holm_permutation, one.p_runs)
    return [one.system, one.measure, *numbers, *counts, *map(told_p, tests)]


def told_p(value: float | None) -> str:
    """A p-value as it is printed; None: there is no such test."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value >= 0.0001 else "<0.0001"


def compare_systems(
    systems: Mapping[str, Sequence[Values]], measures: Sequence[str], seed: int = 0, resamples: int = 100_000
) -> Comparisons:
    """Compares every system with the first. systems: name -> the values of each of its runs. Raises ValueError where
    runs do not have the same queries."""
    names = list(systems)
    for measure in measures:
        require_same_queries(systems, measure)
    scores = [
        Score(name, measure, tuple(float(np.mean(list(run[measure].values()))) for run in systems[name]))
        for name in names
        for measure in measures
    ]
    runs = {(one.system, one.measure): one.runs for one in scores}
    tests = [
        (name, measure, over_queries(systems[names[0]], systems[name], measure, seed, resamples))
        for name in names[1:]
        for measure in measures
    ]
    # A test that is not defined was asked for too: it counts, as one that finds nothing.
    holm_t = holm([1.0 if found.p_t is None else found.p_t for _, _, found in tests])
    holm_permutation = holm([found.p_permutation for _, _, found in tests])
    made = [
        Test(
            name,
            measure,
            found,
            over_runs(runs[names[0], measure], runs[name, measure]),
            None if found.p_t is None else corrected_t,
            corrected_permutation,
        )
        for (name, measure, found), corrected_t, corrected_permutation in zip(
            tests, holm_t, holm_permutation, strict=True
        )
    ]
    queries = {measure: len(systems[names[0]][0][measure]) for measure in measures}
    return Comparisons(tuple(names), tuple(measures), tuple(scores), tuple(made), queries, resamples)


def require_same_queries(systems: Mapping[str, Sequence[Values]], measure: str) -> None:
    """Raises ValueError where runs have values of other queries."""
    every = {f"run {n} of {name}": run[measure] for name, runs in systems.items() for n, run in enumerate(runs, 1)}
    (first, known), *others = every.items()
    for name, values in others:
        if odd := known.keys() ^ values.keys():
            query = min(odd)
            there, lacking = (first, name) if query in known else (name, first)
            raise ValueError(
                f"query {query!r} has a {measure} in {there}, but none in {lacking}; evaluate all on the same queries"
            )


def over_queries(
    baseline: Sequence[Values], system: Sequence[Values], measure: str, seed: int, resamples: int
) -> Comparison:
    """The paired tests of two systems; a query's value is its mean over a system's runs."""
    require_same_queries({"the baseline": baseline, "the system": system}, measure)
    before, after = (_mean_values([run[measure] for run in runs]) for runs in (baseline, system))
    return compare(before, after, seed, resamples)


def _mean_values(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {query: float(np.mean([run[query] for run in runs])) for query in runs[0]}
