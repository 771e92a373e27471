"""Section with all warnings: warnings that jobs stored in the folders of runs, warnings that follow from results, and
two checks of the data: queries of an evaluation in the training data, and equal passages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxret.data.errors import Policy
from jaxret.data.formats import TrainingSource, source_path
from jaxret.data.formats.format import content_id
from jaxret.data.record_checks import question_key
from jaxret.data.records import Query
from jaxret.experiments.report.html import Html, bullets, collapsible, join_html, paragraph, tag
from jaxret.experiments.report.run_files import ReportFiles, RunFiles
from jaxret.experiments.report.set_texts import SetTexts
from jaxret.index.source import encoded_source, open_source
from jaxret.runs.run_warnings import RunWarning

READ_BYTES = 2**28  # larger data are not read by a report, but by `jaxret data check`
_KIND_TITLES = {
    "truncation": "Cut texts",
    "collapse": "Collapsed vectors",
    "leak": "Leaks",
    "duplicates": "Equal passages",
    "results": "Results",
    "data": "Data",
    "settings": "Settings",
    "devices": "Devices",
}


def warning_section(files: ReportFiles) -> Html:
    """Return all warnings, grouped by kind."""
    warnings: dict[str, list[str]] = {}
    remarks: list[str] = []
    labels: dict[RunWarning, list[str]] = {}  # warning -> the runs that have it, so that it is shown once
    for run in files.runs:
        for warning in _run_warnings(run):
            labels.setdefault(warning, []).append(run.label)
        if run.config and "train" not in run.warnings:
            reason = "an earlier version trained it, or it was imported"
            remarks.append(f"{run.label} has no stored warnings of training: {reason}.")
    for warning, names in labels.items():
        warnings.setdefault(warning.kind, []).append(f"{warning.text} ({', '.join(names)})")
    for warning in [*_leak_warnings(files), *_equal_passage_warnings(files)]:
        if warning.kind == "unread":
            remarks.append(warning.text)
        else:
            warnings.setdefault(warning.kind, []).append(warning.text)
    parts: list[str] = []
    for kind in sorted(warnings, key=[*_KIND_TITLES, *warnings].index):
        lines = list(dict.fromkeys(warnings[kind]))
        parts.append(tag("h3", f"{_KIND_TITLES.get(kind, kind)} ({len(lines):,})"))
        parts += [paragraph(line, "warning") for line in lines]
    if not warnings:
        parts.append(paragraph("There is no warning."))
    sentence = "Looked for: cut texts, collapsed vectors, queries that are trained on, equal passages, missing results."
    parts.append(paragraph(sentence, "lead"))
    if remarks:
        parts.append(collapsible("What could not be looked at", bullets(list(dict.fromkeys(remarks)))))
    return join_html(parts)


def _run_warnings(run: RunFiles) -> Iterator[RunWarning]:
    """Yield the warnings that the jobs of a run stored, and the warnings that follow from its results."""
    for job, warnings in run.warnings.items():
        for warning in warnings:
            yield RunWarning(warning.kind, warning.text if job == "train" else f"{job}: {warning.text}")
    skips = max((line.get("skipped_steps", 0) for line in run.metrics), default=0)
    if skips:
        yield RunWarning("results", f"train: {skips:,.0f} steps were skipped, because the loss was not finite")
    for name, result in run.results.items():
        yield from _result_warnings(name, result)


def _result_warnings(name: str, result: dict[str, Any]) -> Iterator[RunWarning]:
    dataset = result.get("provenance", {}).get("dataset", {})
    if missing_count := dataset.get("relevant_passages_not_in_corpus", 0):
        text = f"{missing_count:,} relevant passages are not in the corpus: they count as not found"
        yield RunWarning("results", f"{name}: {text}")
    if result["queries_found"] < result["queries_expected"]:
        text = f"{result['queries_expected'] - result['queries_found']:,} queries have no passage: they count as zero"
        yield RunWarning("results", f"{name}: {text}")
    if result.get("provenance", {}).get("search", {}).get("exact") is False:
        yield RunWarning("results", f"{name}: the search was approximate")
    for reason, count in dataset.get("skipped", {}).items():
        yield RunWarning("data", f"{name}: {count:,} records were skipped ({reason})")


def _leak_warnings(files: ReportFiles) -> Iterator[RunWarning]:
    """Yield a warning for each training set that has queries of an evaluation. A warning of kind "unread" says which
    data could not be compared."""
    sources: dict[tuple[str, str], list[str]] = {}
    for run in files.runs:
        if run.config.get("data.train") and run.config.get("task") != "pretraining":
            key = str(run.config["data.train"]), str(run.config["data.train_split"])
            sources.setdefault(key, []).append(run.label)
    queries_by_set: dict[str, list[Query]] = {}
    for set_results in files.sets if sources else ():
        try:
            queries_by_set[set_results.name] = SetTexts(set_results).evaluation_queries.queries
        except (OSError, ValueError) as error:
            text = f"Queries of {set_results.name} could not be compared with training data: {error}"
            yield RunWarning("unread", text)
    for (source, split), labels in sources.items():
        if problem := _unread_reason(source):
            yield RunWarning("unread", problem)
            continue
        try:
            examples = TrainingSource.open(source, split).read(Policy("skip"), targets=False)
            training_questions = {question_key(example.query.text) for example in examples}
        except (OSError, ValueError) as error:
            yield RunWarning("unread", f"Queries of {source} could not be compared with those of results: {error}")
            continue
        for name, queries in queries_by_set.items():
            leaks = [query for query in queries if question_key(query.text) in training_questions]
            if leaks:
                yield RunWarning(
                    "leak",
                    f"{len(leaks):,} of {len(queries):,} queries of {name} are in {source} ({split}), which "
                    f"{', '.join(labels)} trained on, such as {leaks[0].text!r}",
                )


def _equal_passage_warnings(files: ReportFiles) -> Iterator[RunWarning]:
    """Yield a warning for each encoded corpus with equal passages. A warning of kind "unread" says which corpus could
    not be read."""
    folders = (run.workdir.embeddings(name) for run in files.runs for name in run.workdir.corpora)
    for source in sorted({encoded_source(folder) for folder in folders} - {""}):
        if problem := _unread_reason(source):
            yield RunWarning("unread", problem)
            continue
        try:
            passages = open_source(source).read(Policy("skip"))
            texts = [content_id(passage.text, passage.title) for passage in passages]
        except (OSError, ValueError) as error:
            yield RunWarning("unread", f"{source} could not be read: {error}")
            continue
        if copies := len(texts) - len(set(texts)):
            text = f"{copies:,} of {len(texts):,} passages have the text of another one"
            yield RunWarning("duplicates", f"{source}: {text}; they use up ranks")


def _unread_reason(source: str) -> str:
    """Return a sentence that says why data are not read (missing, or too large); "" if they are read."""
    path = source_path(source)
    if not path.exists():
        return f"{source} is not a file or folder here: it was not searched for leaks and equal passages."
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    if size <= READ_BYTES:
        return ""
    return f"{source} has {size / 1e6:,.0f} MB, which a report does not read through; jaxret data check {source} does."
