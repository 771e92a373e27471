"""The kinds of folders that commands write, so that no command writes into a folder of another kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath

RUN, SWEEP, RECIPE = "the run of a model", "a sweep", "a recipe"
DATA_SET, GENERATED = "a data set that jaxret data build wrote", "what jaxret generate wrote"
JUDGEMENTS, BM25_RESULTS, MTEB = "what jaxret data split wrote", "what jaxret bm25 wrote", "mteb's results"
_MARKS = {  # kind -> pattern of a file that only folders of this kind have, and that is written early
    RUN: "contract.json",
    SWEEP: "sweep.json",
    RECIPE: "done/*.json",
    BM25_RESULTS: "bm25/*/manifest.json",
    DATA_SET: "passages/*/dataset_info.json",
    GENERATED: "generation.json",
    JUDGEMENTS: "qrels.set0.tsv",
    MTEB: "results/*/*/*.json",
}
_CONFIG, LOG = "config.json", "metrics.jsonl"  # files of a run
RANKINGS = "runs"  # folder of the rankings of a run, and of other files that a user writes there
_FIXED = {SWEEP, DATA_SET, GENERATED, JUDGEMENTS, BM25_RESULTS}  # kinds whose mark never changes


def require_folder_kind(folder: Path, kind: str) -> None:
    """Raise FileExistsError if a folder is of another kind than `kind`. A folder of no kind, or a missing one, is
    allowed."""
    for other_kind, mark in _MARKS.items():
        if other_kind != kind and (path := next(folder.glob(mark), None)):
            raise FileExistsError(_refusal(folder, other_kind, path.relative_to(folder)))


def require_no_folder_file(out: str | os.PathLike[str]) -> None:
    """Raise ValueError if an output file is in the folder of a run or of BM25 results, but not in its `runs`.

    Such a file could replace a file of the folder, for example a shard or an evaluation.
    """
    path = Path(out).resolve()
    for folder in path.parents:
        is_ranking = path.parent == folder / RANKINGS
        for kind in (RUN, BM25_RESULTS) if not is_ranking else ():
            if next(folder.glob(_MARKS[kind]), None):
                raise ValueError(
                    f"the output {out} is among the files of {folder} ({kind}), which could be lost; write it into "
                    f"{folder / RANKINGS}, or elsewhere"
                )


def require_same_kind(source: Iterable[str], destination: Iterable[str], folder: str) -> None:
    """Raise FileExistsError if a destination folder is of another kind than the source of a copy.

    `source` and `destination` are the names of the files in both; `folder` is the name of the destination for the
    error.
    """
    kinds = {kind for kind, _ in _kinds(source)}
    for kind, mark in _kinds(destination):
        if kind not in kinds:
            raise FileExistsError(_refusal(folder, kind, mark))


@dataclass(frozen=True)
class Contents:
    """The names of the files of a folder, and functions that return the digest and the first line of a file."""

    names: Set[str]
    digest: Callable[[str], str]
    first_line: Callable[[str], bytes]


def require_same_folder(source: Contents, destination: Contents, folder: str) -> None:
    """Raise FileExistsError if a folder has files of another source than that of a copy: both would be mixed.

    A source that was continued after it was copied counts as the same source, because training appends to a run's log.

    Args:
        source: files of the source.
        destination: files of the folder.
        folder: name of the folder, for the error.
    """
    common_names = source.names & destination.names
    if name := next(
        chain(_files_of_another_source(source, destination, common_names), _left(source, destination)), None
    ):
        raise FileExistsError(f"{folder} has files of another source ({name}); give another folder, or remove it")
    extra_names = sorted(destination.names - source.names)
    if not extra_names or any(_kinds(source.names | destination.names)):
        return
    if name := next((name for name in sorted(common_names) if source.digest(name) != destination.digest(name)), None):
        raise FileExistsError(
            f"{folder} has other bytes in {name}, and files that the source lacks, such as {extra_names[0]}; both "
            "would be mixed. Give another folder, or remove these files"
        )


def identifying(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of the files whose contents `require_same_folder` may compare."""
    names = set(names)
    marks = {mark for _, mark in _kinds(names)}
    yield from sorted(name for name in names if name in marks | {_CONFIG} or PurePosixPath(name).name == LOG)


def _files_of_another_source(source: Contents, destination: Contents, common_names: Set[str]) -> Iterator[str]:
    """Yield the names of files that two folders have and that are the same in all copies of one source."""
    for name in sorted(name for name in common_names if PurePosixPath(name).name == LOG):
        lines = source.first_line(name), destination.first_line(name)
        if all(lines) and lines[0] != lines[1]:
            yield name
    constant_names = {mark for kind, mark in _kinds(common_names) if kind in _FIXED}
    # A run without a log is not trained yet: all copies of it have the same config.
    if common_names >= {_CONFIG, _MARKS[RUN]} and (LOG not in common_names or not destination.first_line(LOG)):
        constant_names.add(_CONFIG)
    yield from (name for name in sorted(constant_names) if source.digest(name) != destination.digest(name))


def _left(source: Contents, destination: Contents) -> Iterator[str]:
    """Yield the names of files that an interrupted copy of another source left. (Files at the top level are copied
    last.)"""
    marks = [mark for _, mark in _kinds(source.names) if "/" not in mark]
    if marks and not destination.names & set(marks):
        folders = {name.partition("/")[0] for name in source.names if "/" in name}
        yield from sorted(name for name in destination.names - source.names if name.partition("/")[0] in folders)


def _kinds(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield (kind, file that shows it) for a folder that has files of these names."""
    for name in names:
        for kind, mark in _MARKS.items():
            if name.count("/") == mark.count("/") and PurePosixPath(name).match(mark):
                yield kind, name


def _refusal(folder: Path | str, kind: str, mark: Path | str) -> str:
    return f"{folder} is {kind} (it has {mark}); give another folder"
