"""Sections on the runs: overview, differences of configs, curves of training, throughput, origin."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from jaxret.experiments.pictures.run_pictures import metric_picture
from jaxret.experiments.report.html import (
    Cell,
    Html,
    NumberCell,
    as_html,
    bullets,
    collapsible,
    data_table,
    join_html,
    missing_note,
    paragraph,
    tag,
    value_cell,
)
from jaxret.experiments.report.report_page import Drawing, gallery
from jaxret.experiments.report.run_files import ReportFiles, RunFiles
from jaxret.runs.identity import VALIDATION, without_seeds

_TITLES = {
    "loss": "Training loss",
    "learning_rate": "Learning rate",
    "tokens_per_second": "Tokens per second",
    "data_wait": "Share of the time that devices wait for data",
    "gradient_norm": "Norm of the gradient",
}


def overview_section(files: ReportFiles) -> Html:
    """Return the number of runs, the best system on each data set, and a table of the runs."""
    facts: list[tuple[str, str, str]] = [("Runs", str(len(files.runs)), ", ".join(run.label for run in files.runs))]
    for set_results in files.sets:
        measure = set_results.measures[0]
        if set_results.comparison:
            scores = [set_results.comparison.score(system, measure) for system in set_results.comparison.systems]
            best = max(scores, key=lambda score: score.mean)
            several = f"the best of {len(scores)}, " if len(scores) > 1 else ""
            queries = set_results.comparison.describe_queries()
            facts.append((f"{set_results.name}: {measure}", str(best), f"{best.system}: {several}{queries}"))
    cards = (tag("div", tag("dt", name), tag("dd", value, tag("small", note))) for name, value, note in facts)
    header = ["run", "family", "encoder", "steps", "best checkpoint on dev", "results", "folder"]
    rows = [_overview_row(run) for run in files.runs]
    return join_html([tag("dl", *cards, class_="facts"), data_table("The runs of this report", header, rows)])


def _overview_row(run: RunFiles) -> list[Cell]:
    config, results = run.config, [", ".join(run.results) or "none", str(run.workdir)]
    if not config:
        is_bm25 = any("bm25" in result.get("provenance", {}).get("config", {}) for result in run.results.values())
        return [run.label, "BM25" if is_bm25 else "", "", NumberCell(None), NumberCell(None), *results]
    steps = max((line["step"] for line in run.metrics if "loss" in line), default=0)
    metric = config.get("validation.metric", "")
    dev = [line[f"validation/{metric}"] for line in run.metrics if f"validation/{metric}" in line]
    best = (min if metric in ("nll", "average_rank") else max)(dev, default=None)
    best_cell = NumberCell(best, f"{metric} {best:.4f}") if best is not None else NumberCell(None)
    family = config["head.name"] if config.get("task") == "retrieval" else config.get("task", "")
    return [run.label, family, config["encoder.checkpoint"], value_cell(steps, ",.0f"), best_cell, *results]


def config_section(files: ReportFiles) -> Html:
    """Return the keys in which the configs differ, the other keys, and what changed on resuming."""
    runs = [run for run in files.runs if run.config]
    if not runs:
        return missing_note("No run has a config: these folders have only results.")
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    values = {key: [_value_text(run.config.get(key)) for run in runs] for key in keys}
    different_keys = [key for key in keys if len(set(values[key])) > 1]
    header = ["key", *(run.label for run in runs)]
    parts: list[str] = []
    if different_keys:
        rows = [[key, *values[key]] for key in different_keys]
        parts.append(data_table(f"{len(different_keys)} keys differ", header, rows))
        result_keys = without_seeds(dict.fromkeys(different_keys))
        if all(key.startswith("seed.") or key not in result_keys for key in different_keys):
            parts.append(paragraph("Of the keys that results depend on, only seeds differ."))
    else:
        parts.append(paragraph("The configs are equal." if len(runs) > 1 else "There is one run, so nothing differs."))
    equal_rows = [[key, values[key][0]] for key in keys if key not in different_keys]
    table = data_table("Keys with one value", ["key", "value"], equal_rows)
    parts.append(collapsible(f"The other {len(equal_rows)} keys", table))
    for run in runs:
        for line in run.history:
            changes = (f"{key}: {_value_text(old)} → {_value_text(new)}" for key, (old, new) in line["changes"].items())
            parts.append(paragraph(f"{run.label} was resumed at step {line['step']:,} with other settings:"))
            parts.append(bullets(list(changes)))
    return join_html(parts)


def _value_text(value: Any) -> str:
    return "–" if value is None else '""' if value == "" else str(value)


def training_section(files: ReportFiles) -> Html:
    """Return curves of loss, learning rate and dev measures, and a table of their first and last values."""
    runs = [run for run in files.runs if run.metrics]
    if not any("loss" in line for run in runs for line in run.metrics):
        return missing_note("No run has logged a training step; a run is trained by", "jaxret train --workdir=RUN")
    dev = sorted({name for run in runs for line in run.metrics for name in line if name.startswith("validation/")})
    dev_names = [f"validation/{metric}" for metric in dict.fromkeys(run.config["validation.metric"] for run in runs)]
    main_names = ["loss", "learning_rate", *(name for name in dev_names if name in dev)]
    extra_names = [name for name in dev if name not in main_names] + ["gradient_norm"]
    parts: list[str] = [curves(files, main_names)]
    if not dev:
        sentence = "There are no dev curves: no run was validated. A dev set is"
        parts.append(missing_note(sentence, "--config.data.dev=DATA"))
    dev_header = [f"dev {name.removeprefix('validation/')}" for name in dev]
    parts.append(data_table("Ends of the curves", ["run", "steps", "first loss", "last loss", *dev_header],
                            [_curve_ends(run, dev) for run in runs]))  # fmt: skip
    if extra_curves := curves(files, extra_names):
        parts.append(collapsible("More curves", extra_curves))
    return join_html(parts)


def _curve_ends(run: RunFiles, dev: list[str]) -> list[Cell]:
    losses = [line for line in run.metrics if "loss" in line]
    last = {name: line[name] for line in run.metrics for name in dev if name in line}
    ends = (losses[0]["loss"], losses[-1]["loss"]) if losses else (None, None)
    steps = value_cell(losses[-1]["step"] if losses else 0, ",.0f")
    return [run.label, steps, *map(value_cell, ends), *(value_cell(last.get(name)) for name in dev)]


def curves(files: ReportFiles, names: list[str]) -> Html:
    """Return a picture of each metric in `names` that at least one run has logged."""
    drawings: list[Drawing] = []
    names_in_logs = {name for run in files.runs for line in run.metrics for name in line}
    for name in names:
        if name in names_in_logs:
            title = _TITLES.get(name, f"Dev {name.removeprefix('validation/')}")
            prefix = f"curve-{'-'.join(name.split('/')).replace('@', '-')}"
            drawings.append((partial(metric_picture, files.workdirs, name), title, prefix))
    return gallery(drawings)


def throughput_section(files: ReportFiles) -> Html:
    """Return the speed of training, its share of waiting for data, and the speed of encoding."""
    parts: list[str] = []
    runs = [run for run in files.runs if any("seconds_per_step" in line for line in run.metrics)]
    if runs:
        parts.append(curves(files, ["tokens_per_second", "data_wait"]))
        header = ["run", "device", "seconds per step", "tokens per second", "padding", "MFU", "data wait"]
        parts.append(data_table("Training: medians over the logged steps", header, [_speed_cells(run) for run in runs]))
        parts.append(
            paragraph(
                "Padding: tokens computed for each real one. Data wait: share of the time that the devices waited "
                "for a batch. MFU: share of the chips' full rate; empty on chips whose rate is not known. The first "
                "line of a log includes compilation."
            )
        )
    else:
        parts.append(missing_note("No training step was timed; a run is trained by", "jaxret train --workdir=RUN"))
    times = [(run.label, corpus, timing) for run in files.runs for corpus, timing in run.encoding_times.items()]
    if times:
        header = ["run", "corpus", "passages", "passages per second", "ms per passage", "device"]
        rows: list[list[Cell]] = [
            [label, corpus, value_cell(timing["passages"], ",.0f"), value_cell(timing["passages_per_second"], ",.1f"),
             value_cell(timing["ms_per_passage"], ",.3f"), f"{timing['devices']} × {timing['device']}"]
            for label, corpus, timing in times
        ]  # fmt: skip
        parts.append(data_table("Encoding of corpora", header, rows))
    else:
        parts.append(missing_note("No corpus was encoded; this is", "jaxret encode --workdir=RUN --corpus=CORPUS"))
    return join_html(parts)


def _speed_cells(run: RunFiles) -> list[Cell]:
    def median(name: str) -> float | None:
        values = [line[name] for line in run.metrics if name in line]
        return statistics.median(values) if values else None

    devices = run.environment.get("devices", [])
    device = f"{len(devices)} × {devices[0].partition(':')[2]}" if devices else ""
    forms = {"seconds_per_step": ".3f", "tokens_per_second": ",.0f", "padding": ".2f", "mfu": ".1%", "data_wait": ".2%"}
    return [run.label, device, *(value_cell(median(name), form) for name, form in forms.items())]


def origin_section(files: ReportFiles) -> Html:
    """Return where the runs come from: versions, devices, commands, and digests of data and checkpoints."""
    header = ["run", "jaxret", "Python", "JAX", "devices", "platform"]
    rows = [_version_cells(run) for run in files.runs if run.environment]
    parts = [data_table("Where the runs were trained", header, rows) if rows else missing_note("No run has env.json.")]
    if digests := list(_digest_rows(files)):
        header = ["run", "of", "digest (SHA-256)", "size"]
        parts.append(collapsible("Digests of data, checkpoints and corpora", data_table("Digests", header, digests)))
    commands = [(run.label, " ".join(map(str, run.environment.get("command", [])))) for run in files.runs]
    lines = [Html(f"{as_html(label)}: {tag('code', command)}") for label, command in commands if command]
    return join_html([*parts, collapsible("Commands", bullets(lines))]) if lines else join_html(parts)


def _version_cells(run: RunFiles) -> list[Cell]:
    environment, devices = run.environment, run.environment.get("devices", [])
    names = f"{len(devices)} × {devices[0]}" if devices else ""
    jaxret, python, platform = (environment.get(key, "") for key in ("jaxret", "python", "platform"))
    return [run.label, jaxret, python, environment.get("packages", {}).get("jax", ""), names, platform]


def _digest_rows(files: ReportFiles) -> Iterator[list[Cell]]:
    for run in files.runs:
        for name, entry in run.data.items():
            if isinstance(entry, dict) and "sha256" in entry:
                yield [run.label, f"{name} data", entry["sha256"], f"{entry.get('examples', 0):,} examples"]
        for name, digest in run.data.get(VALIDATION, {}).items():
            yield [run.label, f"validation {name}", digest, ""]
        for name, result in run.results.items():
            provenance = result.get("provenance", {})
            if "checkpoint" in provenance:
                step = provenance["checkpoint"].get("step")
                yield [run.label, f"checkpoint of {name}", str(provenance["checkpoint"].get("digest")), f"step {step}"]
            for part, digest in provenance.get("dataset", {}).get("sha256", {}).items():
                yield [run.label, f"{part} of {name}", digest, ""]
            if "corpus" in provenance:
                size = f"{provenance['corpus'].get('passages', 0):,} passages"
                yield [run.label, f"corpus of {name}", str(provenance["corpus"].get("sha256")), size]
