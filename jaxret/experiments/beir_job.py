"""Options of an evaluation on a folder of data sets, and the path of its result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxret.runs.workdir import Workdir


@dataclass(frozen=True)
class BeirJob:
    """A run, and the sets that it is evaluated on. Raises ValueError for two columns of one name."""

    workdir: str  # folder of the run
    folder: str  # folder with a folder for each set
    checkpoint: str = "best"  # "best", "last" or a step
    # query_length, passage_length: largest number of tokens; None: as in training
    query_length: int | None = None
    passage_length: int | None = None
    bm25: bool = False  # whether BM25 is evaluated, too, and shown beside the run
    # folders with evaluations of other systems, shown beside the run; NAME=FOLDER names a system
    columns: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()  # names of the sets; () for all of the folder
    split: str = "test"  # split of the judgements
    on_error: str = "error"  # at a bad record: "error", "skip", or "keep", which encodes empty passages

    def __post_init__(self) -> None:
        names = [Workdir(self.workdir).name, *(name for name, _ in map(split_column, self.columns))]
        names += ["BM25"] * self.bm25
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two columns have the name {duplicates[0]}; give another name with --beside=NAME=FOLDER")

    @property
    def result(self) -> Path:
        """The file of the result. Its name has the checkpoint, and split and lengths that are not the default."""
        lengths = (
            f"q{self.query_length}" * bool(self.query_length),
            f"p{self.passage_length}" * bool(self.passage_length),
        )
        split = "" if self.split == "test" else self.split
        return Workdir(self.workdir) / "beir" / (".".join(filter(None, (self.checkpoint, split, *lengths))) + ".json")


def split_column(column: str) -> tuple[str, Path]:
    """Return (name, folder) of `FOLDER` or `NAME=FOLDER`. The default name is the last part of the path."""
    name, _, path = column.rpartition("=")
    return name or Path(path).absolute().name, Path(path)
