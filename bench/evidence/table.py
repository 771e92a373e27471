"""From values of questions to rows of the table of `bench/evidence/run.py`: differences, tests, verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.evidence.claims import Claim
from jaxret.evaluation.comparison import format_p_value
from jaxret.evaluation.significance import PairedComparison, holm, paired_comparison, paired_t
from jaxret.evaluation.text_table import markdown_table

LEVEL = 0.05
RESAMPLES = 20_000  # sign vectors: the smallest p is 5e-5
HOLDS, NOT_SEEN, OPPOSITE, NOT_RUN = "holds", "not seen", "opposite", "not run yet"
ENOUGH, SO_FAR = 3, " so far"  # the number of seeds, and the suffix of verdicts with fewer


def row_of(
    claim: Claim, values: Mapping[int, Sequence[np.ndarray]], groups: Sequence[str], runs: Sequence[str]
) -> dict[str, Any]:
    """Return a claim's row, from the (baseline, treated) values of each seed [N], and the passage of each value;
    without corrected p-values and without a verdict."""
    row: dict[str, Any] = {
        "baseline": claim.baseline,
        "treated": claim.treated,
        "measure": claim.measure,
        "margin": claim.margin,
        "runs": list(runs),
        "seeds": list(values),
    }
    if not values:
        return row
    before, after = (np.mean([np.asarray(pair[side], float) for pair in values.values()], axis=0) for side in (0, 1))
    # A claim of "no worse by more than `margin`" is a claim of "better" for values that are higher by the margin.
    comparison = over_groups(before, after + claim.margin, groups)
    by_seed = [float(np.mean(np.asarray(pair[1], float) - pair[0])) for pair in values.values()]
    p_seeds = paired_t(np.array(by_seed) + claim.margin)[1] if len(values) > 1 else None
    numbers = {
        "before": float(np.mean(before)),
        "after": float(np.mean(after)),
        "difference": comparison.difference - claim.margin,
        "low": comparison.low - claim.margin,
        "high": comparison.high - claim.margin,
        "p": comparison.p_permutation,
    }
    return {
        **row,
        "ids": len(before),
        "passages": comparison.queries,
        **{key: round(value, 6) for key, value in numbers.items()},
        "by_seed": [round(difference, 6) for difference in by_seed],
        "p_seeds": None if p_seeds is None else round(p_seeds, 6),
    }


def over_groups(before: np.ndarray, after: np.ndarray, groups: Sequence[str]) -> PairedComparison:
    """Compare in paired tests that flip and draw whole groups, because questions about one passage share its vector. A
    group has the sum of its values, scaled so that the mean over groups is the mean over all values."""
    names, places = np.unique(np.asarray(groups), return_inverse=True)
    scale = len(names) / len(places)
    sums = [np.bincount(places, values) * scale for values in (before, after)]
    baseline, treated = (dict(zip(names.tolist(), one.tolist(), strict=True)) for one in sums)
    return paired_comparison(baseline, treated, 0, RESAMPLES)


def judged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with verdicts, and with Holm's p-values over all rows with runs."""
    corrected = iter(holm([row["p"] for row in rows if row["seeds"]]))
    return [
        {**row, "holm": round(p, 6), "verdict": verdict(row, p)}
        if row["seeds"] and (p := next(corrected)) is not None
        else {**row, "verdict": NOT_RUN}
        for row in rows
    ]


def verdict(row: Mapping[str, Any], p: float) -> str:
    """Return HOLDS or OPPOSITE if p is below LEVEL, and if the difference (plus the margin) has that sign in every
    seed; with SO_FAR, if there are fewer than ENOUGH seeds."""
    effects = [difference + row["margin"] for difference in row["by_seed"]]
    so_far = "" if len(effects) >= ENOUGH else SO_FAR
    if p < LEVEL and min(effects) > 0:
        return HOLDS + so_far
    return OPPOSITE + so_far if p < LEVEL and max(effects) < 0 else NOT_SEEN


def to_markdown(results: Mapping[str, Any], claims: Sequence[Claim]) -> str:
    """Return the table, an explanation of its words, and the failures."""
    rows = {(row["baseline"], row["treated"], row["measure"]): row for row in results["rows"]}
    header = ["paper", "claim", "setting, minus", "measure", "before", "after", "difference [95 %]", "p", "Holm"]
    header += ["seeds (with the sign)", "p over seeds", "verdict"]
    cells = [_cells(claim, rows.get((claim.baseline, claim.treated, claim.measure), {"seeds": []})) for claim in claims]
    run = [row for row in results["rows"] if row["seeds"]]
    parts = [markdown_table(header, cells, left=4), legend(len(run), len(claims))]
    parts += [f"Failed: {name}: {reason}" for name, reason in results["failed"].items()]
    return "\n\n".join(parts)


def _cells(claim: Claim, row: Mapping[str, Any]) -> list[str]:
    margin = f" (by more than {claim.margin:g})" if claim.margin else ""
    begin = [claim.paper, claim.says + margin, f"`{claim.treated}` - `{claim.baseline}`", claim.measure]
    if not row["seeds"]:
        return [*begin, *[""] * 7, NOT_RUN]
    sign = 1 if row["difference"] + row["margin"] > 0 else -1
    same = sum(sign * (difference + row["margin"]) > 0 for difference in row["by_seed"])
    return [
        *begin,
        f"{row['before']:.4f}",
        f"{row['after']:.4f}",
        f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]",
        format_p_value(row["p"]),
        format_p_value(row["holm"]),
        f"{len(row['seeds'])} ({same})",
        "" if row["p_seeds"] is None else format_p_value(row["p_seeds"]),
        row["verdict"],
    ]


def legend(run: int, claims: int) -> str:
    return (
        f"{run} of {claims} claims were run. The difference is the mean over questions (perplexity: passages) of a "
        "value that is itself a mean over seeds. Questions about one passage share its vector, so passages are drawn "
        "instead of questions: the interval is a percentile bootstrap over passages, and p is a two-sided "
        "randomization test over passages, which Holm corrects for all rows that were run. "
        f"**{HOLDS}**: Holm's p is below {LEVEL} and every seed has the claimed sign. With fewer than {ENOUGH} seeds "
        f"it is **{HOLDS}{SO_FAR}**, because a few trained models are not yet two methods. **{OPPOSITE}**: the same "
        f'with the other sign. **{NOT_SEEN}**: neither. "No worse" is tested as "worse by less than the margin", also '
        "in the signs of the seeds and in p over seeds. p over seeds is a paired t-test of the seeds' "
        "differences (both runs of a seed have the same questions, in the same order). It says whether other "
        "seeds would agree; with two or three seeds it decides little."
    )
