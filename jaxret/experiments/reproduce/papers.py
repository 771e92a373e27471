"""The tables of the papers as data: which config, flags and data each row is, and the numbers that the paper prints.

One file of `tables/` a paper; `tables/datasets.toml` has the data sets. A row's id is PAPER/TABLE/NAME, as
"mlr/2/dual-encoder". A case is one row on one data set: what is trained, measured and compared.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any

PAPERS = ("mlr", "i3", "aggretriever", "mvr", "dpr", "language_models")
SEEDS = ("seed.init", "seed.data", "seed.dropout", "seed.negatives")


@dataclass(frozen=True)
class PaperData:
    """A data set of the tables; paths are relative to its folder below --data."""

    name: str  # its key, and its folder unless `folder` names another
    title: str  # what it is
    files: Mapping[str, str]  # path -> where the file comes from
    corpus: str = ""  # the file that is encoded, or the name of the data set that has it
    # train, dev: values of data.train and data.dev; "" where there is none
    train: str = ""
    dev: str = ""
    # settings of `jaxret mine` for BM25's negatives, where the training data has none
    mining: Mapping[str, int] = field(default_factory=dict)
    on_error: str = ""  # value of data.on_error, where training records lack a positive passage
    trained_on: str = ""  # the data set whose model is measured on this one, if it has no training data
    folder: str = ""
    # queries, qrels: what is asked and judged; without qrels, the queries have answers
    queries: str = ""
    qrels: str = ""
    k: int = 100  # passages per query
    measures: tuple[str, ...] = ()  # in the order of the tables' numbers
    each: tuple[str, ...] = ()  # the sets of which this one is the mean, each in a folder of its own
    # a set of `each` -> its own sets, in folders of its folder
    members: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def folders(self, sets: Sequence[str]) -> dict[str, float]:
        """Return the folders of sets -> the part of each in their mean."""
        parts: dict[str, float] = {}
        for name in sets:
            members = self.members.get(name, ())
            parts |= {f"{name}/{member}": 1 / len(sets) / len(members) for member in members}
            parts |= {} if members else {name: 1 / len(sets)}
        return parts


@dataclass(frozen=True)
class PaperRow:
    """A row of a table."""

    id: str  # PAPER/TABLE/NAME
    caption: str  # of the table
    config: str | Mapping[str, str] = ""  # of the row, or one for each training set
    # keys of the config that have other values; of "bm25", its settings
    set: Mapping[str, Any] = field(default_factory=dict)
    # "train" (one stage), "recipe" (stages), "diversity", "bm25" and "count" (no model), or "" (not to be run)
    verb: str = ""
    stage: str = ""  # of a recipe, the stage that is measured
    # of a recipe, the config of a training on generated queries, with whose checkpoint all stages begin
    warm_up: str = ""
    chunks: str = ""  # "sentences" or "equal=N", by which `jaxret data chunk` splits all passages; "" for whole ones
    seeds: int = 1  # runs whose mean is the row
    # "best" on the dev set or "last", or one for each training set; validation.best has it
    checkpoint: str | Mapping[str, str] = "best"
    # query_length, passage_length: tokens on data sets that the model was not trained on; 0: as in training
    query_length: int = 0
    passage_length: int = 0
    percent: bool = False  # whether the paper's numbers are percentages
    measures: tuple[str, ...] = ()  # instead of those of the data set
    each: tuple[str, ...] = ()  # the sets of a mean, where the paper took others than the data set says
    # data set -> the paper's numbers ("-": none). "nq:squad": trained on nq, measured on squad.
    numbers: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    numbers_each: tuple[float, ...] = ()  # the numbers of the sets of `each`
    # data set -> the paper's standard deviations over seeds
    deviations: Mapping[str, Sequence[float | int]] = field(default_factory=dict)
    subsets: tuple[float, ...] = ()  # numbers of parts of the queries (I3, table 4)
    # data set -> perplexity and local variation, or what `measures` names
    diversity: Mapping[str, Sequence[float | int]] = field(default_factory=dict)
    counts: Mapping[str, Sequence[float | int]] = field(default_factory=dict)  # data set -> sizes
    # data set -> "COUNT of FILE" for each size; COUNT is a name of `DataCheck.counts`
    counted: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # milliseconds, gib: times and storage that the paper prints
    milliseconds: Mapping[str, Sequence[float | int]] = field(default_factory=dict)
    gib: float | int = 0
    same_as: str = ""  # id of the row that has the same system
    reason: str = ""  # why the row cannot be run here; "" if it can
    note: str = ""  # what else a reader should know

    @property
    def runnable(self) -> bool:
        """Whether commands can be printed for it."""
        return not self.reason and bool(self.config or self.same_as or self.counts or self.verb == "bm25")

    def cases(self) -> list[Case]:
        """Return the row on each of its data sets, in the table's order."""
        return [self._case(key) for key in (self.numbers or self.diversity or self.counts)]

    def _case(self, key: str) -> Case:
        source, colon, target = key.rpartition(":")
        data = datasets()[target]
        source = source if colon else data.trained_on or target
        values = [*(self.numbers.get(key) or self.diversity.get(key) or self.counts.get(key) or ())]
        if self.numbers:
            measures = self.measures or data.measures
            values = [None if value == "-" else value / (100 if self.percent else 1) for value in values]
        elif self.diversity:
            measures = self.measures or ("perplexity", "local_variation")
        else:
            measures = tuple(self.counted[key])
        return Case(
            row=self,
            source=datasets()[source],
            target=data,
            config=self.config if isinstance(self.config, str) else self.config.get(source, ""),
            checkpoint=self.checkpoint if isinstance(self.checkpoint, str) else self.checkpoint.get(source, "best"),
            measures=tuple(measures),
            numbers=tuple(values),
        )


@dataclass(frozen=True)
class Case:
    """A row on one data set."""

    row: PaperRow
    source: PaperData  # the data set that its model is trained on
    target: PaperData  # the data set that it is measured on
    config: str  # "NAME" or "NAME:SUFFIX"
    checkpoint: str  # "best" or "last"
    measures: tuple[str, ...]  # names of the numbers
    numbers: tuple[float | int | None, ...]  # the paper's, as fractions; None where it has none

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets that the target is the mean of; empty if it is one set."""
        return (self.row.each or self.target.each) if self.target.each else ()


@cache
def datasets() -> dict[str, PaperData]:
    """Return the data sets of the tables by name."""
    return {name: PaperData(name=name, **_frozen(values)) for name, values in _read("datasets").items()}


@cache
def paper_rows() -> dict[str, PaperRow]:
    """Return the rows of all tables of all papers by id, in the papers' order."""
    return {row.id: row for paper in PAPERS for row in _rows(paper)}


def paper_title(paper: str) -> tuple[str, str]:
    values = _read(paper)
    return values["title"], values["authors"]


def find_rows(pattern: str) -> list[PaperRow]:
    """Return the rows whose id is `pattern` or begins with it ("mlr", "mlr/2", "mlr/2/dual-encoder").

    Raises:
        ValueError: there is none.
    """
    parts = pattern.strip("/").split("/")
    matches = [row for row in paper_rows().values() if row.id.split("/")[: len(parts)] == parts]
    if not matches:
        raise ValueError(f"{pattern!r} is neither a row nor a table: `jaxret reproduce` lists them")
    return matches


def paper_means() -> dict[str, tuple[str, ...]]:
    """Return the means that papers print -> their sets, from the tables of `jaxret reproduce`."""
    return {
        "mean of 14 (Aggretriever)": datasets()["beir"].each,
        "mean of 15 (MLR)": find_rows("mlr/5")[0].each,
        "BEIR small": datasets()["beir_small"].each,
    }


def resolved(row: PaperRow) -> PaperRow:
    """Return the row with the commands of `row`: itself, or the equal row."""
    return paper_rows()[row.same_as] if row.same_as else row


def _rows(paper: str) -> Iterator[PaperRow]:
    names = {entry.name for entry in fields(PaperRow)} - {"id", "caption"}
    for table in _read(paper)["tables"]:
        defaults = {key: value for key, value in table.items() if key not in ("number", "caption", "rows")}
        for entry in table["rows"]:
            values = {**defaults, **entry}
            name = values.pop("name")
            row_id = f"{paper}/{table['number'].replace(' ', '-')}/{name}"
            if unknown := sorted(values.keys() - names):
                raise ValueError(f"{row_id}: {unknown[0]!r} is not a field of a row")
            yield PaperRow(id=row_id, caption=table["caption"], **_frozen(values))


def _frozen(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _read(name: str) -> dict[str, Any]:
    text = resources.files("jaxret.experiments.reproduce").joinpath("tables", f"{name}.toml").read_text("utf-8")
    return tomllib.loads(text)
