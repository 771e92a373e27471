"""Sections on results: measures and tests, quality over layers, winning vectors, storage and latency."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxret.evaluation.comparison import Score, SystemTest, format_p_value
from jaxret.evaluation.metrics import MEAN_DECIMALS
from jaxret.evaluation.significance import LEVEL
from jaxret.experiments.compare_runs import comparison_notes
from jaxret.experiments.pictures.run_pictures import vector_bars
from jaxret.experiments.probe.probe_report import PROBE_MEASURE
from jaxret.experiments.report.html import (
    Cell,
    Html,
    NumberCell,
    data_table,
    join_html,
    missing_note,
    paragraph,
    tag,
    value_cell,
)
from jaxret.experiments.report.report_page import Drawing, gallery
from jaxret.experiments.report.report_pictures import cost_picture, interval_picture, layer_picture
from jaxret.experiments.report.run_files import ComparedSet, ReportFiles, RunFiles

_SEARCH_COMMAND = "jaxret search --workdir=RUN --queries=DATA --qrels=DATA"


def quality_section(files: ReportFiles) -> Html:
    """Return the measures of each data set, and the paired tests against the first system."""
    if not files.sets:
        return missing_note("No run was evaluated. An encoded corpus is searched and evaluated by", _SEARCH_COMMAND)
    parts: list[str] = []
    for number_of_set, set_results in enumerate(files.sets):
        parts.append(tag("h3", set_results.name))
        labels = [run.label for run in files.runs if run not in set_results.runs]
        if labels:
            parts.append(missing_note(f"Without a result on this data set: {', '.join(labels)}.", _SEARCH_COMMAND))
        if set_results.comparison is None:
            parts += [_mean_table(set_results), paragraph(f"Not compared: {set_results.problem}", "warning")]
        else:
            parts += _comparison_parts(set_results, f"difference-{number_of_set}")
    return join_html(parts)


def _mean_table(set_results: ComparedSet) -> Html:
    """Return the measures of runs that cannot be compared with each other."""
    measures = list(dict.fromkeys(name for run in set_results.runs for name in run.evaluations[set_results.name].mean))
    means = {run.label: run.evaluations[set_results.name].mean for run in set_results.runs}
    rows: list[list[Cell]] = [
        [label, *(value_cell(mean.get(name)) for name in measures)] for label, mean in means.items()
    ]
    return data_table(f"Measures on {set_results.name}", ["run", *measures], rows)


def _comparison_parts(set_results: ComparedSet, name: str) -> list[str]:
    comparison = set_results.comparison
    assert comparison is not None
    columns = [[comparison.score(system, measure) for system in comparison.systems] for measure in comparison.measures]
    cells = [_score_cells(column) for column in columns]
    counts = [value_cell(len(score.runs), ",.0f") for score in columns[0]]
    rows = [[system, *row] for system, *row in zip(comparison.systems, counts, *cells, strict=True)]
    caption = f"{set_results.name}: means over {comparison.describe_queries()}"
    parts: list[str] = [data_table(caption, ["system", "runs", *comparison.measures], rows)]
    if any(len(score.runs) > 1 for column in columns for score in column):
        parts.append(paragraph("±: standard deviation over runs."))
    if comparison.tests:
        tests = [test for test in comparison.tests if test.measure == comparison.measures[0]]
        title = f"{comparison.measures[0]} minus that of {comparison.systems[0]}, with intervals of 95\u00a0%"
        parts.append(gallery([(partial(interval_picture, tests), title, name)]))
        header = ["system", "measure", "difference", "95 %", "significant", "wins", "ties", "losses", "t-test", "Holm"]
        header += ["randomization", "Holm", "over runs"]
        count = sum(not test.comparison.equal for test in comparison.tests)
        caption = f"{set_results.name}: minus {comparison.systems[0]}, query by query: paired tests"
        parts.append(data_table(caption, header, [_test_cells(test) for test in comparison.tests]))
        parts.append(
            paragraph(
                f"p-values are two-sided. Holm corrects the column on its left for all {count} tests of this table. "
                f"Significant: the randomization test's p after Holm is below {LEVEL}. Over runs: Welch's t-test "
                "between the means of seeds, which is not corrected."
            )
        )
    else:
        sentence = "There is one system, so there is nothing to test. Another one is added by"
        parts.append(missing_note(sentence, "jaxret report RUN RUN"))
    return parts + [paragraph(note, "warning") for note in comparison_notes(set_results.systems)]


def _score_cells(scores: list[Score]) -> list[NumberCell]:
    """Return the cells of a column. The best mean is bold if there are several systems."""
    best = max(round(score.mean, MEAN_DECIMALS) for score in scores)
    is_best = [len(scores) > 1 and round(score.mean, MEAN_DECIMALS) == best for score in scores]
    return [NumberCell(score.mean, tag("b", str(score)) if top else str(score)) for score, top in zip(scores, is_best)]


def _test_cells(test: SystemTest) -> list[Cell]:
    comparison, verdict = test.comparison, "no"
    if test.significant:
        word, kind = ("better", "up") if comparison.difference > 0 else ("worse", "down")
        verdict = tag("span", word, class_=kind)
    return [
        test.system,
        test.measure,
        value_cell(comparison.difference, "+.4f"),
        NumberCell(comparison.low, comparison.cells[1]),
        verdict,
        *(value_cell(count, ",.0f") for count in (comparison.wins, comparison.ties, comparison.losses)),
        *(NumberCell(p, format_p_value(p)) if p is not None else NumberCell(None, "–") for p in test.p_values),
    ]


def layer_section(files: ReportFiles) -> Html:
    """Return pictures and tables of the quality of each layer of encoders, as measured by `jaxret probe`."""
    parts: list[str] = []
    for run in files.runs:
        for name, results in run.reports("probe").items():
            parts.append(tag("h3", f"{run.label}, {name}"))
            prefix, title = f"layers-{files.runs.index(run)}-{name}", "of one layer on both sides"
            cosines = partial(layer_picture, results, True), f"Cosines {title}", f"{prefix}-Cosines"
            products = partial(layer_picture, results, False), f"Dot products {title}", f"{prefix}-Dot"
            parts += [gallery([cosines, products]), _finding_table(results)]
    if parts:
        return join_html(parts)
    return missing_note("No run was probed layer by layer; this is", "jaxret probe DATA --workdir=RUN --split=dev")


def _finding_table(results: dict[str, Any]) -> Html:
    header = ["chosen", "layers", "token", "scores", f"{PROBE_MEASURE}, held out", "difference", "p (Holm)", "vectors"]
    header += ["bytes"]
    rows = [
        [
            finding["name"],
            ", ".join(map(str, finding["layers"])),
            finding["token"].replace("_", " "),
            "cosines" if finding["normalize"] else "dot products",
            value_cell(finding["held_out"]),
            value_cell(finding.get("difference"), "+.4f"),
            NumberCell(finding.get("p_holm"), format_p_value(finding.get("p_holm")) if "p_holm" in finding else ""),
            value_cell(finding["vectors"], ",.0f"),
            value_cell(finding.get("bytes_per_passage"), ",.0f"),
        ]
        for finding in results["findings"]
    ]
    caption = f"Chosen on some queries, measured on the other {results['held_out']:,} of {results['queries']:,}"
    caption += "; bytes of a passage's vectors in float32"
    return data_table(caption, header, rows)


def winner_section(files: ReportFiles) -> Html:
    """Return pictures and a table of how often each vector of a passage has the best score (`jaxret diversity`)."""
    drawings: list[Drawing] = []
    sentences: list[str] = []
    rows: list[list[Cell]] = []
    for place, run in enumerate(files.runs):
        reports = run.reports("diversity")
        if run.vector_names and not reports:
            command = f"jaxret diversity --workdir={run.workdir} --data=DATA"
            sentences.append(missing_note(f"{run.label}: nobody has counted yet which vectors win; this is", command))
        for name, report in reports.items():
            forms = {"pairs": ",.0f", "distance": ".2g", "perplexity": ",.4f"}
            rows.append([run.label, name, *(value_cell(report[key], form) for key, form in forms.items())])
            if report["equal"]:
                text = "the vectors of a passage are equal except for rounding, so none of them wins."
                sentences.append(paragraph(f"{run.label}, {name}: {text}", "warning"))
            else:
                shares = {vector: wins / report["pairs"] for vector, wins in report["wins"].items()}
                draw = partial(vector_bars, {run.label: [shares]}, "share of pairs won")
                title = f"{run.label}, {name}: which vector of the relevant passage wins"
                drawings.append((draw, title, f"winners-{place}-{name}"))
    if one_vector_labels := [run.label for run in files.runs if run.config and not run.vector_names]:
        text = "a passage has one vector, which wins always, or one for each of its tokens or words."
        sentences.append(missing_note(f"{', '.join(one_vector_labels)}: {text}"))
    header = ["run", "data", "pairs", "1 − cos of two vectors", "perplexity of the winner"]
    table = [data_table("Diversity of the vectors of a passage", header, rows)] if rows else []
    return join_html([gallery(drawings), *table, *sentences])


def cost_section(files: ReportFiles) -> Html:
    """Return the quality of each run against the bytes of a passage and the time of a query."""
    parts: list[str] = []
    for number_of_set, set_results in enumerate(files.sets):
        measure = set_results.measures[0]
        costs = {run: run.results[set_results.name].get("cost", {}) for run in set_results.runs}
        parts.append(tag("h3", set_results.name))
        parts.append(_cost_pictures(set_results, costs, f"cost-{number_of_set}"))
        times = ("encoding p50, ms", "p99", "search p50, ms", "p99")
        header = ["run", measure, "bytes per passage", *times, "k", "backend"]
        rows = [_cost_cells(run, set_results.name, measure, cost) for run, cost in costs.items()]
        parts.append(data_table("One query at a time", header, rows))
        if any("latency" not in cost for cost in costs.values()):
            sentence = "Times are missing where a search did not measure them; this is"
            parts.append(missing_note(sentence, f"{_SEARCH_COMMAND} --latency=100"))
    if parts:
        return join_html(parts)
    sentence = "No run was evaluated, so costs cannot be compared with quality. A search measures both:"
    return missing_note(sentence, _SEARCH_COMMAND)


def _cost_cells(run: RunFiles, name: str, measure: str, cost: dict[str, Any]) -> list[Cell]:
    latency = cost.get("latency", {})
    times = [latency.get(f"{phase}_ms", {}).get(p) for phase in ("encode", "search") for p in ("p50", "p99")]
    quality, size = run.evaluations[name].mean.get(measure), value_cell(cost.get("bytes_per_passage"), ",.0f")
    cells: list[Cell] = [run.label, value_cell(quality), size, *(value_cell(time, ",.2f") for time in times)]
    return [*cells, value_cell(latency.get("k"), ",.0f"), str(latency.get("backend", "")).partition(" (")[0]]


def _cost_pictures(set_results: ComparedSet, costs: dict[RunFiles, dict[str, Any]], name: str) -> Html:
    measure, sizes, times = set_results.measures[0], {}, {}
    for run, cost in costs.items():
        quality = run.evaluations[set_results.name].mean.get(measure)
        if quality is None:
            continue
        if "bytes_per_passage" in cost:
            sizes[run.label] = cost["bytes_per_passage"], quality
        if "latency" in cost:
            times[run.label] = sum(cost["latency"][f"{phase}_ms"]["p50"] for phase in ("encode", "search")), quality
    axes = {"storage": (sizes, "bytes per passage"), "latency": (times, "ms per query, encoding and search, median")}
    return gallery(
        [
            (partial(cost_picture, points, (axis, measure)), f"Quality against {kind}", f"{name}-{kind}")
            for kind, (points, axis) in axes.items()
            if points
        ]
    )
