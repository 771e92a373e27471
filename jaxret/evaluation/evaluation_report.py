"""Render evaluations as a table (plain text or Markdown); read and write evaluation files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jaxret.evaluation.metrics import MEAN_DECIMALS, Evaluation
from jaxret.evaluation.text_table import aligned_table, markdown_table
from jaxret.parallel.events import emit
from jaxret.storage.atomic import read_json, write_json

Systems = Mapping[str, Evaluation]  # name -> evaluation, in the order of the rows


def evaluation_text(systems: Systems) -> str:
    """Return a plain-text table with a row for each system; "*" marks the best value of a column."""
    header, rows = _cells(systems, ("", "*"))
    rows = [[name, *(cell if cell.endswith("*") else f"{cell} " for cell in cells)] for name, *cells in rows]
    header = [header[0], *(f"{cell} " for cell in header[1:])]  # the space takes the place of a star
    return f"{aligned_table(header, rows)}\n\n{footer(systems)}"


def evaluation_markdown(systems: Systems) -> str:
    """Return a Markdown table with a row for each system; the best value of a column is bold."""
    header, rows = _cells(systems, ("**", "**"))
    return f"{markdown_table(header, rows)}\n\n{footer(systems)}"


def footer(systems: Systems) -> str:
    """Return the number of queries with results: one line for all systems if the numbers are equal, else one for each.

    If some queries have no answers, a further line has the number of queries with answers.
    """
    counts = dict.fromkeys(
        e.answer_counts for e in systems.values() if e.answer_counts and len(set(e.answer_counts)) > 1
    )
    partly = "".join(f"\nAccuracy@k: of the {count} of {total} queries that have answers." for count, total in counts)
    coverage = {
        name: f"{e.queries_found} of {e.queries_expected} expected"
        + ("; the missing ones count as zero" if e.queries_found < e.queries_expected else "")
        for name, e in systems.items()
    }
    if len(set(coverage.values())) == 1:
        return f"Queries found: {next(iter(coverage.values()))}.{partly}"
    return "\n".join(f"Queries found, {name}: {count}." for name, count in coverage.items()) + partly


def _cells(systems: Systems, mark: tuple[str, str]) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows); `mark` goes before and after the best value of a column.

    Values that print alike are equally good. A table of one system has no best.
    """
    measures = list(next(iter(systems.values())).mean)
    text = {
        name: [f"{evaluation.mean[measure]:.{MEAN_DECIMALS}f}" for measure in measures]
        for name, evaluation in systems.items()
    }
    best = [max(column, key=float) for column in zip(*text.values())] if len(systems) > 1 else [""] * len(measures)
    rows = [
        [name, *(f"{mark[0]}{cell}{mark[1]}" if cell == top else cell for cell, top in zip(cells, best))]
        for name, cells in text.items()
    ]
    return ["system", *measures], rows


def write_evaluation(
    path: str | os.PathLike[str],
    evaluation: Evaluation,
    provenance: Mapping[str, Any],
    answers: Evaluation | None = None,
    cost: Mapping[str, Any] | None = None,
) -> None:
    """Write an evaluation as JSON, atomically, with its values for every query and its provenance.

    Args:
        path: the file to write; an existing file is replaced.
        evaluation: the measures of a run.
        provenance: JSON value: versions, seeds, fingerprints of config and data.
        answers: accuracy of the same run by answer strings.
        cost: JSON value: bytes per passage and time per query.
    """
    optional_parts: dict[str, Any] = {"answers": answers.to_json()} if answers else {}
    optional_parts |= {"cost": dict(cost)} if cost else {}
    write_json(path, evaluation.to_json() | optional_parts | {"provenance": dict(provenance)})


def emit_evaluation(
    run: str | os.PathLike[str],
    results: str | os.PathLike[str],
    evaluation: Evaluation | None,
    answers: Evaluation | None = None,
    cost: Mapping[str, Any] | None = None,
) -> None:
    """Emit the event of an evaluation.

    Args:
        run: the file with the rankings.
        results: the file of `write_evaluation`.
        evaluation: the measures in this file; None if there is no evaluation, and no file.
        answers: accuracy by answer strings (see `write_evaluation`).
        cost: bytes per passage and time per query (see `write_evaluation`).
    """
    emit(
        "evaluation",
        run=run,
        results=results if evaluation else None,
        queries=evaluation.queries_expected if evaluation else None,
        measures={name: value for part in (evaluation, answers) if part for name, value in _round_means(part).items()},
        cost=cost or {},
    )


def emit_table(systems: Systems, path: str | os.PathLike[str] | None = None) -> None:
    """Emit the event of a table of systems. path: the file that it was written to, if any."""
    emit("table", systems={name: _round_means(evaluation) for name, evaluation in systems.items()}, path=path)


def _round_means(evaluation: Evaluation) -> dict[str, float]:
    """Return the means as files have them."""
    return {measure: round(value, MEAN_DECIMALS) for measure, value in evaluation.mean.items()}


def read_evaluation(path: str | os.PathLike[str]) -> Evaluation:
    """Return the evaluation in a file of `write_evaluation`; accuracies follow the measures by judgements.

    Raises ValueError for a file without an evaluation.
    """
    report = read_json(path)
    try:
        answers = report.get("answers", {"mean": {}, "per_query": {}})
        of_answers = answers if "answers" in report else report  # alone in the file without judgements
        all_queries = of_answers.get("queries_asked")
        return Evaluation(
            mean=report["mean"] | answers["mean"],
            per_query=report["per_query"] | answers["per_query"],
            queries_expected=report["queries_expected"],
            queries_found=report["queries_found"],
            answer_counts=(of_answers["queries_expected"], all_queries) if all_queries else None,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an evaluation that jaxret wrote: {error!r} is missing") from error
