"""Read rankings from a file or a named set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxret.data.errors import Location, Policy
from jaxret.data.formats import trec
from jaxret.data.formats.detect import detect_path, parse_source, source_exists, source_path
from jaxret.data.formats.format import DataFile
from jaxret.data.formats.source_layout import is_folder, rankings_path
from jaxret.data.libraries.named import is_named
from jaxret.data.libraries.open_sets import list_files
from jaxret.data.lines import PathLike, missing_file_error
from jaxret.data.records import Rankings


def run_files(source: PathLike) -> list[Path]:
    """Return the files that `read_run` reads. Raises DataError for a missing file."""
    path = _run_path(source)
    if not source_exists(path):
        raise missing_file_error(path)
    return list(list_files(path))


def _run_path(source: PathLike) -> Path:
    path = source_path(source)
    return rankings_path(path) if is_named(path) and is_folder(path) else path


def detect_run(source: PathLike) -> DataFile:
    """Return the file that `read_run` reads, with its format."""
    return detect_path(_run_path(source), parse_source(source)[0], "rankings")


def require_run_scores(source: PathLike, purpose: str) -> None:
    """Raise DataError if a run has ranks without scores. `purpose` is the use of the scores, for the error."""
    file = detect_run(source)
    if file.format.without_scores:
        problem = f"this is a ranking without scores ({file}), and {purpose} are wanted"
        raise Location(file.path).error("no scores", problem, "give one with scores, as a TREC run")


def read_run_lines(source: PathLike, policy: Policy) -> Iterator[trec.RunLine]:
    """Yield the lines of a run with their locations, in the file's order."""
    file = detect_run(source)
    assert file.format.rankings is not None
    return file.format.rankings(file, policy)


def read_ranked_lines(source: PathLike, policy: Policy) -> dict[str, list[trec.RunLine]]:
    """Return query id -> the lines of its ranking with their locations, in rank order."""
    return trec.rank_lines(read_run_lines(source, policy), policy)


def read_run(source: PathLike, policy: Policy | None = None) -> Rankings:
    """Read a run: query id -> [(passage id, score)] in rank order."""
    run_lines = read_ranked_lines(source, policy or Policy())
    return {query: [(line.passage_id, line.score) for line in lines] for query, lines in run_lines.items()}
