"""Options of an evaluation on a folder of data sets, and the path of its result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxret.configs import shared_options
from jaxret.configs.options import option
from jaxret.runs.workdir import Workdir


@dataclass(frozen=True)
class BeirJob:
    """A run, and the sets that it is evaluated on. Raises ValueError for two columns of one name."""

    folder: str  # folder with a folder for each set
    workdir: str = shared_options.workdir()
    checkpoint: str = shared_options.checkpoint()
    query_length: int | None = shared_options.query_length()
    passage_length: int | None = shared_options.passage_length()
    platform: str = shared_options.platform()
    sets: tuple[str, ...] = option((), "sets to evaluate on; default: all sets of the folder", parse=tuple)
    split: str = shared_options.split("test", "split of the judgements")
    name: str = option("", "name in the names of all files, so that sets of another folder can have the same names")
    on_error: str = shared_options.on_error(keep=True)
    bm25: bool = option(False, "also evaluate BM25 on the sets, and show it in another column")
    columns: tuple[str, ...] = option(
        (),
        "system to show in another column: folder of a run, or of evaluations SET.SPLIT.json; NAME=FOLDER names it",
        flag="beside",
    )

    def __post_init__(self) -> None:
        names = [Workdir(self.workdir).name, *(name for name, _ in map(split_column, self.columns))]
        names += ["BM25"] if self.bm25 else []
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two columns have the name {duplicates[0]}; give another name with --beside=NAME=FOLDER")

    @property
    def lengths(self) -> tuple[str, str]:
        """The parts of file names with the lengths of queries and passages; "" for the default."""
        sides = {"q": self.query_length, "p": self.passage_length}
        query, passage = (f"{side}{length}" if length else "" for side, length in sides.items())
        return query, passage

    @property
    def result(self) -> Path:
        """The file of the result. Its name has the checkpoint, `name`, and split and lengths that are not the
        default."""
        split = "" if self.split == "test" else self.split
        parts = filter(None, (self.checkpoint, self.name, split, *self.lengths))
        return Workdir(self.workdir) / "beir" / f"{'.'.join(parts)}.json"


def split_column(column: str) -> tuple[str, Path]:
    """Return (name, folder) of `FOLDER` or `NAME=FOLDER`. The default name is the last part of the path."""
    name, _, path = column.rpartition("=")
    return name or Path(path).absolute().name, Path(path)
