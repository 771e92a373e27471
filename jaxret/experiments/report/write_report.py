"""Write a report of runs as one HTML file, which needs no network (`jaxret report`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxret.experiments.compare_runs import split_argument
from jaxret.experiments.report.quality_sections import cost_section, layer_section, quality_section, winner_section
from jaxret.experiments.report.query_section import query_section
from jaxret.experiments.report.report_options import ReportOptions
from jaxret.experiments.report.report_page import Section, render_page
from jaxret.experiments.report.run_files import ReportFiles
from jaxret.experiments.report.run_sections import (
    config_section,
    origin_section,
    overview_section,
    throughput_section,
    training_section,
)
from jaxret.experiments.report.warning_section import warning_section
from jaxret.storage.atomic import atomic_write, require_file_path


def write_report(
    arguments: Sequence[str], out: str | Path, options: ReportOptions | None = None, flag: str = "--out"
) -> Path:
    """Write a report of runs, and return its path. The same files of runs give the same bytes.

    Args:
        arguments: folders of runs, or NAME=RUN,RUN for the seeds of a system; the first one is the baseline.
        out: HTML file to write.
        options: what the report shows.
        flag: name of `out` in errors.

    Raises:
        FileNotFoundError: a folder is not a run, or no run has a result that `options.data` names.
        ContractError: a file of a run was edited.
        ValueError: a run is given twice, no result has a measure of the options, or `out` is a file of a run.
    """
    options = options or ReportOptions()
    require_file_path(out, flag)
    _require_other_files(out, arguments, flag)
    files = ReportFiles(tuple(arguments), options.data, options.measures)
    measures = dict.fromkeys(name for run in files.runs for result in run.evaluations.values() for name in result.mean)
    if unknown_measures := [name for name in options.measures if name not in measures]:
        raise ValueError(f"no run has the measure {unknown_measures[0]!r}; they have {', '.join(measures) or 'none'}")
    page = render_report(files, options)
    with atomic_write(out) as file:
        file.write(page)
    return Path(out)


def _require_other_files(out: str | Path, arguments: Sequence[str], flag: str) -> None:
    """Raise ValueError if `out` is a file of a run, and not an earlier report."""
    if not Path(out).exists() or Path(out).suffix in (".html", ".htm"):
        return
    for folder in (Path(path) for argument in arguments for path in split_argument(argument)[1]):
        if Path(out).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{flag}={out} is a file of the run {folder}, which would be lost; give another name")


def run_folders(arguments: Sequence[str]) -> list[str]:
    """Return arguments of `jaxret compare` in which each result file is replaced by the folder of its run. Raises
    ValueError for a file that is in no run."""
    folders = []
    for argument in arguments:
        name, paths = split_argument(argument)
        members = ",".join(str(_run_folder(Path(path))) for path in paths)
        folders.append(f"{name}={members}" if name else members)
    return folders


def _run_folder(path: Path) -> Path:
    if path.is_dir():
        return path
    if path.resolve().parent.name != "eval":
        raise ValueError(f"{path} is not in the folder eval/ of a run, so a report cannot show it; remove --report")
    return path.resolve().parent.parent


def render_report(files: ReportFiles, options: ReportOptions) -> str:
    """Return the text of the HTML file."""
    labels = [run.label for run in files.runs]
    names = " and ".join(filter(None, (", ".join(labels[:-1]), labels[-1])))
    title = options.title or f"Report of {names if len(labels) <= 4 else f'{len(labels)} runs'}"
    data = ", ".join(set_results.name for set_results in files.sets)
    lead = f"Evaluated on {data}." if data else "Not evaluated yet."
    sections = [
        Section("overview", "Overview", overview_section(files)),
        Section("configs", "Configs", config_section(files)),
        Section("training", "Training", training_section(files)),
        Section("throughput", "Throughput", throughput_section(files)),
        Section("quality", "Quality", quality_section(files)),
        Section("layers", "Layers", layer_section(files)),
        Section("winners", "Winning vectors", winner_section(files)),
        Section("cost", "Storage and latency", cost_section(files)),
        Section("queries", "Wins and losses", query_section(files, options.queries)),
        Section("warnings", "Warnings", warning_section(files)),
        Section("origin", "Origin", origin_section(files)),
    ]
    return render_page(title, lead, sections)
