"""Kinds of folders that commands make, so that none writes into one of another kind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

RUN, SWEEP, RECIPE = "the run of a model", "a sweep", "a recipe"
DATA_SET, GENERATED = "a data set that jaxret data build wrote", "what jaxret generate wrote"
JUDGEMENTS, BM25_RESULTS, MTEB = "what jaxret data split wrote", "what jaxret bm25 wrote", "mteb's results"
_MARKS = {  # a file that only this kind has, from the first write of consequence on
    RUN: "contract.json",
    SWEEP: "sweep.json",
    RECIPE: "done/*.json",
    BM25_RESULTS: "bm25/*/manifest.json",
    DATA_SET: "passages/*/dataset_info.json",
    GENERATED: "generation.json",
    JUDGEMENTS: "qrels.set0.tsv",
    MTEB: "results/*/*/*.json",
}


def require_folder_kind(folder: Path, kind: str) -> None:
    """Raise FileExistsError if a folder is of another kind than `kind`; one of no kind, or absent, is as good."""
    for other, mark in _MARKS.items():
        if other != kind and (path := next(folder.glob(mark), None)):
            raise FileExistsError(_refusal(folder, other, path.relative_to(folder)))


def require_same_kind(source: Iterable[str], destination: Iterable[str], folder: str) -> None:
    """Raise FileExistsError if a folder that has the files `destination` is of a kind that a copy of `source` is not.

    `folder` names it in the error.
    """
    kinds = {kind for kind, _ in _kinds(source)}
    for kind, mark in _kinds(destination):
        if kind not in kinds:
            raise FileExistsError(_refusal(folder, kind, mark))


def _kinds(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield the kind of a folder that has files of these names, and the file that shows it."""
    for name in names:
        for kind, mark in _MARKS.items():
            if name.count("/") == mark.count("/") and PurePosixPath(name).match(mark):
                yield kind, name


def _refusal(folder: Path | str, kind: str, mark: Path | str) -> str:
    return f"{folder} is {kind} (it has {mark}); give another folder"
