"""Tables of comparisons of systems on one or several data sets: text, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxret.evaluation.comparison import Score, SystemComparison, format_p_value
from jaxret.evaluation.metrics import MEAN_DECIMALS
from jaxret.evaluation.significance import LEVEL
from jaxret.evaluation.text_table import Row

MEAN = "mean"  # the column of the mean over data sets
Sets = Mapping[str, SystemComparison]  # data set -> comparison, all of the same systems and measures
_COLUMNS = (
    *("data", "system", "measure", "queries", "runs", "mean", "deviation"),
    *("difference", "low", "high", "wins", "ties", "losses", "p_t"),
    *("holm_t", "p_permutation", "holm_permutation", "p_runs"),
)
_TEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"
}  # fmt: skip


def sets_table(sets: Sets, table: Callable[[Row, Sequence[Row], int], str]) -> str:
    """Return a table of systems and data sets for each measure, with the mean over sets, and a table of all tests.

    `table` is a function that renders header, rows, and the number of columns that are aligned left.
    """
    first = next(iter(sets.values()))
    parts = []
    for measure in first.measures:
        rows = [[system, *(str(score) for _, score in _scores(sets, system, measure))] for system in first.systems]
        parts.append(table([measure, *sets, MEAN], rows, 1))
    counts = ", ".join(f"{name}: {comparison.describe_queries()}" for name, comparison in sets.items())
    parts.append(f"{MEAN}: over {len(sets)} data sets, each with the same weight ({counts}).")
    if any(len(score.runs) > 1 for score in first.scores):
        parts.append("±: standard deviation over runs.")
    tests = [(name, test) for name, comparison in sets.items() for test in comparison.tests]
    if tests:
        header = ["data", "system", "measure", "difference", "95 %", "t-test", "Holm", "randomization", "Holm"]
        parts.append(f"Minus {first.systems[0]}, query by query:")
        rows = [
            [name, test.system, test.measure, *test.comparison.cells, *map(format_p_value, test.p_values[:4])]
            for name, test in tests
        ]
        parts.append(table(header, rows, 3))
        test_count = sum(not test.comparison.equal for _, test in tests)
        parts.append(f"p-values are two-sided; Holm corrects the column on its left for all {test_count} tests.")
    return "\n\n".join(parts)


def _scores(sets: Sets, system: str, measure: str) -> Iterator[tuple[str, Score]]:
    """Yield the score on each set, then the mean over sets, whose deviation is that of the runs' means."""
    scores = [comparison.score(system, measure) for comparison in sets.values()]
    yield from zip(sets, scores)
    yield MEAN, mean_score(scores)


def mean_score(scores: Sequence[Score]) -> Score:
    """Return the mean of a system's scores on several sets, for each of its runs."""
    means = np.mean([score.runs for score in scores], axis=0)
    return Score(scores[0].system, scores[0].measure, tuple(map(float, means)))


def csv_table(sets: Sets) -> str:
    """Return CSV with a line for each data set, system and measure, unrounded. Undefined values are empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for name, comparison in sets.items():
        tests = {(test.system, test.measure): test for test in comparison.tests}
        for score in comparison.scores:
            row: dict[str, Any] = {"data": name, "system": score.system, "measure": score.measure}
            row |= {"queries": comparison.queries[score.measure], "runs": len(score.runs)}
            row |= {"mean": score.mean, "deviation": score.deviation}
            if test := tests.get((score.system, score.measure)):
                row |= {key: getattr(test.comparison, key) for key in _COLUMNS[7:14]}
                row |= {"holm_t": test.holm_t, "holm_permutation": test.holm_permutation, "p_runs": test.p_runs}
                row["p_permutation"] = None if test.comparison.equal else test.comparison.p_permutation
            writer.writerow(row)
    return file.getvalue().rstrip("\n")


def latex_table(sets: Sets) -> str:
    """Return LaTeX (booktabs): of one data set a table of systems and measures; of several a table for each measure,
    of systems and data sets with their mean. The best of a column is bold."""
    comparisons = list(sets.values())
    first, several = comparisons[0], len(sets) > 1
    test_count = sum(not test.comparison.equal for comparison in comparisons for test in comparison.tests)
    mark = f"% bold: the best. dagger: not {first.systems[0]}'s, p < {LEVEL} (randomization, Holm, {test_count} tests)"
    if not several:
        (name,) = sets
        columns = {measure: [first.score(system, measure) for system in first.systems] for measure in first.measures}
        daggers = {(test.measure, test.system) for test in first.tests if test.significant}
        return "\n".join([f"% {name}", mark, _tabular(first.systems, columns, daggers)])
    parts = [mark]
    for measure in first.measures:
        by_system = [dict(_scores(sets, system, measure)) for system in first.systems]
        columns = {name: [scores[name] for scores in by_system] for name in (*sets, MEAN)}
        daggers = {
            (name, test.system)
            for name, comparison in sets.items()
            for test in comparison.tests
            if test.measure == measure and test.significant
        }
        parts += [f"% {measure}", _tabular(first.systems, columns, daggers)]
    return "\n".join(parts)


def _tabular(systems: Sequence[str], columns: Mapping[str, Sequence[Score]], daggers: set[tuple[str, str]]) -> str:
    rows = [[_tex(system)] for system in systems]
    for name, scores in columns.items():
        best = max(round(score.mean, MEAN_DECIMALS) for score in scores)
        for row, system, score in zip(rows, systems, scores, strict=True):
            mean = f"{score.mean:.{MEAN_DECIMALS}f}"
            cell = rf"\textbf{{{mean}}}" if round(score.mean, MEAN_DECIMALS) == best else mean
            cell += r"$^\dagger$" if (name, system) in daggers else ""
            cell += "" if score.deviation is None else rf" $\pm$ {score.deviation:.{MEAN_DECIMALS}f}"
            row.append(cell)
    lines = [rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule"]
    lines += [" & ".join(["system", *map(_tex, columns)]) + r" \\", r"\midrule"]
    lines += [" & ".join(row) + r" \\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text)
