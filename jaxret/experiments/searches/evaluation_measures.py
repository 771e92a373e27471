"""The measures of an evaluation: measures by judgements, and accuracies by answers at several cut-offs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxret.evaluation.metrics import parse_measure

MEASURES = ("nDCG@10", "RR@10", "R@100", "Success@5", "Success@20")
ANSWER_CUTOFFS = (1, 5, 20, 100)
_ACCURACY = "Accuracy@"


@dataclass(frozen=True)
class MeasureNames:
    """Names of measures that fit a depth of rankings; made by `choose_measures`."""

    names: tuple[str, ...]  # measures by judgements
    cutoffs: tuple[int, ...]  # k of each Accuracy@k by answers, in the order of the names
    answers_needed: bool  # whether an accuracy is requested; queries without answers are then an error


def is_accuracy(measure: str) -> bool:
    """Return whether a measure counts answer strings; `parse_measure` does not parse such a measure."""
    return measure.startswith(_ACCURACY)


def measures_for(k: int) -> tuple[str, ...]:
    """Return MEASURES with cut-offs of at most k."""
    parsed_measures = [parse_measure(name) for name in MEASURES]
    return tuple(dict.fromkeys(f"{measure.kind}@{min(measure.cutoff or k, k)}" for measure in parsed_measures))


def choose_measures(measures: Sequence[str] | None, k: int, file_name: str = "") -> MeasureNames:
    """Return the measures of an evaluation of rankings with k passages.

    Names of measures by judgements replace MEASURES, and names Accuracy@k replace ANSWER_CUTOFFS: each kind has its own
    default.

    Args:
        measures: names of ir-measures, and Accuracy@k; None for the default.
        k: number of passages per query.
        file_name: the file that has k passages per query; "" if k is the value of --k.

    Raises:
        ValueError: a measure is unknown, or deeper than k.
    """
    names = list(measures or ())
    cutoffs = {name: _accuracy_cutoff(name) for name in names if is_accuracy(name)}
    parsed_measures = [parse_measure(name) for name in names if not is_accuracy(name)]
    depths = {**cutoffs, **{measure.name: measure.cutoff or 0 for measure in parsed_measures}}
    deepest = max(depths, key=lambda name: depths[name], default="")
    if deepest and depths[deepest] > k:
        if file_name:
            raise ValueError(f"{deepest} needs {depths[deepest]} passages per query; {file_name} has {k} at most")
        raise ValueError(f"{deepest} needs --k={depths[deepest]} or more; only {k} passages per query are requested")
    return MeasureNames(
        names=tuple(measure.name for measure in parsed_measures) or measures_for(k),
        cutoffs=tuple(dict.fromkeys(cutoffs.values())) or tuple(cutoff for cutoff in ANSWER_CUTOFFS if cutoff <= k),
        answers_needed=bool(cutoffs),
    )


def _accuracy_cutoff(name: str) -> int:
    match = re.fullmatch(_ACCURACY + "([1-9][0-9]{0,8})", name)
    if match is None:
        raise ValueError(f"unknown measure {name!r:.60}; k of Accuracy@k is a whole number above 0, as in Accuracy@20")
    return int(match[1])
