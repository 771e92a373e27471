"""Section on single queries: the queries that a system wins and loses, with the passages of both systems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxret.data.records import Passage
from jaxret.experiments.compare_runs import RunResult
from jaxret.experiments.report.html import (
    Cell,
    Html,
    collapsible,
    data_table,
    join_html,
    missing_note,
    paragraph,
    tag,
    value_cell,
)
from jaxret.experiments.report.run_files import ComparedSet, ReportFiles, RunFiles
from jaxret.experiments.report.set_texts import SetTexts, Winners, read_rankings, winning_vectors

HITS = 5  # passages that are shown for a query and a system
TABLE_QUERIES = 200  # largest number of queries in the table
_TEXT_LENGTH, _QUERY_LENGTH = 260, 90  # characters that are shown of a passage, and of a query in the table

SystemValues = dict[str, dict[str, float]]  # system -> query id -> value, the mean over its runs


@dataclass(frozen=True)
class SystemColumn:
    """One column of a query: the values, rankings and winning vectors of a system."""

    system: str  # name of the system
    values: dict[str, float]  # query id -> value
    rankings: dict[str, list[tuple[str, float]]]  # query id -> passages with scores
    winners: Winners  # names of the vectors that won; {} if a passage has one vector
    note: str = ""  # sentence about missing winners; "" if none is missing


def query_section(files: ReportFiles, count: int) -> Html:
    """Return at most `count` wins and `count` losses of each system against the first one."""
    parts: list[str] = []
    for set_results in files.sets:
        parts.append(tag("h3", set_results.name))
        if set_results.comparison is None:
            parts.append(missing_note("The runs cannot be compared on this data set, so no query is won or lost."))
            continue
        values = _query_values(set_results)
        try:
            texts = SetTexts(set_results)
            parts += [_value_table(set_results, values, texts), *_system_pairs(set_results, values, texts, count)]
        except (OSError, ValueError) as error:
            parts.append(paragraph(f"Texts are missing: {error}", "warning"))
    if parts:
        return join_html(parts)
    command = "jaxret search --workdir=RUN --queries=DATA --qrels=DATA"
    return missing_note("No run was evaluated, so no query is won or lost. An encoded corpus is searched by", command)


def _query_values(set_results: ComparedSet) -> SystemValues:
    measure = set_results.measures[0]

    def mean(results: Sequence[RunResult]) -> dict[str, float]:
        queries = results[0].values[measure]
        return {query: float(np.mean([result.values[measure][query] for result in results])) for query in queries}

    return {system: mean(results) for system, results in set_results.systems.items()}


def _value_table(set_results: ComparedSet, values: SystemValues, texts: SetTexts) -> Html:
    """Return a table of the queries on which systems differ most, with the values of all systems."""
    systems = list(values)
    queries = list(values[systems[0]])
    spread = {query: max(row) - min(row) for query in queries for row in [[values[name][query] for name in systems]]}
    selection = sorted(queries, key=lambda query: (-spread[query], query))[:TABLE_QUERIES]
    rows: list[list[Cell]] = []
    for query in selection:
        cells = (value_cell(value) for value in (*(values[name][query] for name in systems), spread[query]))
        rows.append([_shorten(_query_text(texts, query), _QUERY_LENGTH), *cells])
    several = f"the {len(selection):,} of {len(queries):,} on which systems differ most" if len(systems) > 1 else "all"
    caption = f"{set_results.measures[0]} of queries: {several if len(selection) < len(queries) else 'all'}"
    table = data_table(caption, ["query", *systems, "spread"], rows)
    return collapsible(f"Values of {len(selection):,} queries", table)


def _system_pairs(set_results: ComparedSet, values: SystemValues, texts: SetTexts, count: int) -> Iterator[Html]:
    """Yield the wins and losses of each system against the first. If there is one system, yield its worst queries."""
    baseline, *other_systems = values
    if not other_systems:
        worst = sorted(values[baseline], key=lambda query: (values[baseline][query], query))[:count]
        column = _system_column(set_results, baseline, values, texts, worst)
        title = f"The {len(worst)} queries with the lowest {set_results.measures[0]}"
        yield collapsible(title, *(_query_part(set_results, query, [column], texts) for query in worst))
        return
    wins, losses = {}, {}
    for system in other_systems:
        difference = {query: values[system][query] - values[baseline][query] for query in values[baseline]}
        wins[system] = sorted((q for q in difference if difference[q] > 0), key=lambda q: (-difference[q], q))
        losses[system] = sorted((q for q in difference if difference[q] < 0), key=lambda q: (difference[q], q))
    selection = {system: [*wins[system][:count], *losses[system][:count]] for system in other_systems}
    selection[baseline] = list(dict.fromkeys(query for queries in selection.values() for query in queries))
    columns = {name: _system_column(set_results, name, values, texts, queries) for name, queries in selection.items()}
    for place, system in enumerate(other_systems):
        pair = [columns[baseline], columns[system]]
        notes = [paragraph(column.note, "warning") for column in pair if column.note]
        title = f"{system} against {baseline}: {len(wins[system]):,} wins, {len(losses[system]):,} losses"
        part = collapsible(
            title, *notes, *(_query_part(set_results, query, pair, texts) for query in selection[system])
        )
        yield Html(part.replace("<details>", "<details open>", 1)) if place == 0 else part


def _system_column(
    set_results: ComparedSet, system: str, values: SystemValues, texts: SetTexts, queries: Sequence[str]
) -> SystemColumn:
    """Return the column of a system for some queries, from its first run."""
    run = set_results.run_of(set_results.systems[system][0])
    run_rankings = read_rankings(run, set_results.name)
    rankings = {query: list(run_rankings.get(query, ())[:HITS]) for query in queries}
    if not queries or not run.vector_names:
        return SystemColumn(system, values[system], rankings, {})
    return SystemColumn(system, values[system], rankings, *_find_winners(run, set_results.name, rankings, texts))


def _find_winners(
    run: RunFiles, result: str, rankings: dict[str, list[tuple[str, float]]], texts: SetTexts
) -> tuple[Winners, str]:
    """Return (names of the vectors that won, ""), or ({}, sentence that says why they are unknown)."""
    passages = texts.passages({key for ranking in rankings.values() for key, _ in ranking})
    hits = {query: [passages[key] for key, _ in ranking] for query, ranking in rankings.items()}
    try:
        return winning_vectors(run, result, [texts.queries[query] for query in rankings], hits), ""
    except (OSError, ValueError, RuntimeError) as error:
        return {}, f"{run.label}: the vectors that won are unknown, because the model cannot be opened: {error}"


def _query_part(set_results: ComparedSet, query: str, columns: Sequence[SystemColumn], texts: SetTexts) -> Html:
    values = [column.values[query] for column in columns]
    line = "; ".join(f"{column.system} {value:.4f}" for column, value in zip(columns, values, strict=True))
    verdict: list[str] = []
    if len(values) == 2:
        won = values[1] > values[0]
        word = f"{'win' if won else 'loss'} {values[1] - values[0]:+.4f}"
        verdict = [tag("span", word, class_="up" if won else "down"), Html(" · ")]
    score = tag("p", *verdict, f"{set_results.measures[0]}: {line} · query {query}", class_="score")
    passages = texts.passages({key for column in columns for key, _ in column.rankings[query]})
    lists = (_hit_list(column, query, passages, texts) for column in columns)
    return tag("div", tag("h4", _query_text(texts, query)), score, tag("div", *lists, class_="sides"), class_="query")


def _hit_list(column: SystemColumn, query: str, passages: dict[str, Passage], texts: SetTexts) -> Html:
    items = []
    for rank, (key, score) in enumerate(column.rankings[query], 1):
        passage, relevant = passages[key], (query, key) in texts.relevant
        winner = column.winners.get((query, key))
        meta = f"{score:.4f}" + (f" · {winner} won" if winner else "")
        line = [
            tag("span", f"{rank}.", class_="meta"),
            tag("span", passage.title or key, class_="title"),
            tag("span", meta, class_="meta"),
            *([tag("span", "relevant", class_="mark")] if relevant else []),
        ]
        body = [tag("p", _shorten(passage.text, _TEXT_LENGTH))]
        if len(passage.text) > _TEXT_LENGTH:
            body = [tag("details", tag("summary", "whole text"), tag("p", passage.text)), *body][::-1]
        items.append(tag("li", tag("div", *line, class_="line"), *body, **({"class_": "relevant"} if relevant else {})))
    hits = tag("ol", *items, class_="hits") if items else paragraph("No passage was retrieved.")
    return tag("div", tag("h5", column.system), hits)


def _query_text(texts: SetTexts, query: str) -> str:
    return texts.queries[query].text if query in texts.queries else query


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length].rstrip()} …"
