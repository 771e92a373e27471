"""Kinds of folders that commands make, so that none writes into one of another kind."""

from __future__ import annotations

from pathlib import Path

RUN, SWEEP, RECIPE = "the run of a model", "a sweep", "a recipe"
DATA_SET, GENERATED = "a data set that jaxret data build wrote", "what jaxret generate wrote"
_MARKS = {  # a file that only this kind has, from the first write of consequence on
    RUN: "contract.json",
    SWEEP: "sweep.json",
    RECIPE: "done/*.json",
    DATA_SET: "passages/*/dataset_info.json",
    GENERATED: "generation.json",
}


def require_folder_kind(folder: Path, kind: str) -> None:
    """Raise FileExistsError if a folder is of another kind than `kind`; one of no kind, or absent, is as good."""
    for other, mark in _MARKS.items():
        if other != kind and (path := next(folder.glob(mark), None)):
            raise FileExistsError(f"{folder} is {other} (it has {path.relative_to(folder)}); give another folder")
