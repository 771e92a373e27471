"""Evaluations as a table (plain text or Markdown) and as a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jaxret.evaluation.metrics import MEAN_DECIMALS, Evaluation
from jaxret.evaluation.table import aligned, piped
from jaxret.storage import read_json, write_json

Systems = Mapping[str, Evaluation]  # name -> evaluation, in the order of the rows


def to_text(systems: Systems) -> str:
    """The table as aligned plain text, one system a row; "*" marks the best of a column. Ends without a newline."""
    header, rows = _cells(systems, ("", "*"))
    rows = [[name, *(cell if cell.endswith("*") else f"{cell} " for cell in cells)] for name, *cells in rows]
    header = [header[0], *(f"{cell} " for cell in header[1:])]  # keeps the digits aligned where a star follows
    return f"{aligned(header, rows)}\n\n{footer(systems)}"


def to_markdown(systems: Systems) -> str:
    """The table as Markdown; the best of a column is bold. Ends without a newline."""
    header, rows = _cells(systems, ("**", "**"))
    return f"{piped(header, rows)}\n\n{footer(systems)}"


def footer(systems: Systems) -> str:
    """How many queries were found and expected: one line if all systems agree, otherwise a line each; and of how many
    accuracy by answers is, if not of all."""
    answered = dict.fromkeys(one.answered for one in systems.values() if one.answered and len(set(one.answered)) > 1)
    partly = "".join(f"\nAccuracy@k: of the {some} of {all} queries that have answers." for some, all in answered)
    return _found(systems) + partly


def _found(systems: Systems) -> str:
    counts = {name: _count(one) for name, one in systems.items()}
    if len(set(counts.values())) == 1:
        return f"Queries found: {next(iter(counts.values()))}."
    return "\n".join(f"Queries found, {name}: {count}." for name, count in counts.items())


def _count(one: Evaluation) -> str:
    note = "; the missing ones count as zero" if one.queries_found < one.queries_expected else ""
    return f"{one.queries_found} of {one.queries_expected} expected{note}"


def _cells(systems: Systems, mark: tuple[str, str]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows; `mark` goes before and after the best value of a column.

    Values that print the same are equally good. A table of one system has no best.
    """
    _check(systems)
    measures = list(next(iter(systems.values())).mean)
    text = {name: [f"{one.mean[measure]:.{MEAN_DECIMALS}f}" for measure in measures] for name, one in systems.items()}
    best = [max(column, key=float) for column in zip(*text.values())] if len(systems) > 1 else [""] * len(measures)
    rows = [
        [name, *(f"{mark[0]}{cell}{mark[1]}" if cell == top else cell for cell, top in zip(cells, best))]
        for name, cells in text.items()
    ]
    return ["system", *measures], rows


def _check(systems: Systems) -> None:
    if not systems:
        raise ValueError("there is no system to report; give at least one evaluation")
    first_name, first = next(iter(systems.items()))
    for name, one in systems.items():
        if one.mean.keys() != first.mean.keys():
            raise ValueError(
                f"{first_name!r} has the measures {list(first.mean)} and {name!r} has {list(one.mean)}; "
                "evaluate both with the same measures"
            )
        if one.queries_expected != first.queries_expected:
            raise ValueError(
                f"{first_name!r} was evaluated on {first.queries_expected} queries and {name!r} on "
                f"{one.queries_expected}; evaluate both with the same judgements"
            )


def write_evaluation(
    path: str | os.PathLike[str],
    evaluation: Evaluation,
    provenance: Mapping[str, Any],
    answers: Evaluation | None = None,
    cost: Mapping[str, Any] | None = None,
) -> None:
    """Writes an evaluation as JSON, atomically, with its values for every query and with where it comes from.

    Args:
        path: the file to write; a file already there is replaced.
        provenance: JSON-like; versions, seeds, fingerprints of config and data.
        answers: another evaluation of the same run, by answer strings.
        cost: JSON-like; what a passage and a question cost.
    """
    more: dict[str, Any] = {"answers": answers.to_json()} if answers else {}
    more |= {"cost": dict(cost)} if cost else {}
    write_json(path, evaluation.to_json() | more | {"provenance": dict(provenance)})


def read_evaluation(path: str | os.PathLike[str]) -> Evaluation:
    """What `write_evaluation` was given; where it has both, the measures and then the accuracy by answer strings."""
    found = read_json(path)
    try:
        more = found.get("answers", {"mean": {}, "per_query": {}})
        of_answers = more if "answers" in found else found  # alone in the file without judgements
        asked = of_answers.get("queries_asked")
        return Evaluation(
            mean=found["mean"] | more["mean"],
            per_query=found["per_query"] | more["per_query"],
            queries_expected=found["queries_expected"],
            queries_found=found["queries_found"],
            answered=(of_answers["queries_expected"], asked) if asked else None,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no evaluation that jaxret wrote: {error!r} is missing") from error
