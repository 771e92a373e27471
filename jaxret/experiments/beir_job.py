"""Options of an evaluation on a folder of data sets, and where its result is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxret.runs.workdir import Workdir


@dataclass(frozen=True)
class BeirJob:
    """A run, and the sets that it is evaluated on. Raises ValueError for two columns of one name."""

    workdir: str
    folder: str  # folder with a folder for each set
    checkpoint: str = "best"  # "best", "last" or a step
    # query_length, passage_length: most tokens; None: as in training
    query_length: int | None = None
    passage_length: int | None = None
    bm25: bool = False  # evaluate BM25 too, and show it beside the run
    # folders with evaluations of other systems, shown beside the run; NAME=FOLDER names one
    columns: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()  # names of the sets; () for all of the folder
    split: str = "test"  # split of the judgements
    on_error: str = "error"  # at a bad record: "error", "skip", or "keep", which encodes empty passages

    def __post_init__(self) -> None:
        names = [Workdir(self.workdir).name, *(name for name, _ in map(split_column, self.columns))]
        names += ["BM25"] * self.bm25
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two columns are called {twice[0]}; --beside=NAME=FOLDER names one")

    @property
    def result(self) -> Path:
        """Return the file of the result: its name has checkpoint, split and lengths where they are not the default."""
        lengths = (
            f"q{self.query_length}" * bool(self.query_length),
            f"p{self.passage_length}" * bool(self.passage_length),
        )
        split = "" if self.split == "test" else self.split
        return Workdir(self.workdir) / "beir" / (".".join(filter(None, (self.checkpoint, split, *lengths))) + ".json")


def split_column(column: str) -> tuple[str, Path]:
    """Return the name and the folder of `FOLDER` or `NAME=FOLDER`; the name is by default the last part of the path."""
    name, _, path = column.rpartition("=")
    return name or Path(path).absolute().name, Path(path)
