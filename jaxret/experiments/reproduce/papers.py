"""The tables of the papers as data: config, flags and data sets of each row, and the numbers that the paper prints.

Each paper has a file in `tables/`; `tables/datasets.toml` has the data sets. A row's id is PAPER/TABLE/NAME, for
example "mlr/2/dual-encoder". A case is one row on one data set.
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

    name: str  # key of the data set in datasets.toml
    title: str  # description for the reader
    files: Mapping[str, str]  # path -> where the file comes from
    corpus: str = ""  # the file that is encoded, or the name of the data set that has the corpus
    # train, dev: values of data.train and data.dev; "" for none
    train: str = ""
    dev: str = ""
    # settings of `jaxret mine` for BM25's negatives; {} if the training data have negatives
    mining: Mapping[str, int] = field(default_factory=dict)
    on_error: str = ""  # value of data.on_error; "" unless some training records lack a positive passage
    trained_on: str = ""  # name of the data set to train on, if this one has no training data
    folder: str = ""  # name of its folder; "" for `name`
    # queries, qrels: files of queries and judgements; without qrels, the queries have answers
    queries: str = ""
    qrels: str = ""
    k: int = 100  # passages per query
    measures: tuple[str, ...] = ()  # names of the tables' numbers, in their order
    each: tuple[str, ...] = ()  # if this is a mean over sets: their names, which are folders
    # a set of `each` -> its members, in folders of its folder (CQADupStack)
    members: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def folders(self, sets: Sequence[str]) -> dict[str, float]:
        """Return folder -> its weight in the mean over `sets`."""
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
    caption: str  # caption of the table
    config: str | Mapping[str, str] = ""  # name of the config, or training set -> name
    # keys of the config with other values; for "bm25", its settings
    set: Mapping[str, Any] = field(default_factory=dict)
    # "train" (one stage), "recipe" (stages), "diversity", "bm25" and "count" (no model), or "" (not to be run)
    verb: str = ""
    stage: str = ""  # stage of a recipe that is measured
    # config of a training on generated queries; all stages of the recipe begin with its checkpoint
    warm_up: str = ""
    chunks: str = ""  # "sentences" or "equal=N": how `jaxret data chunk` splits all passages; "" for whole passages
    seeds: int = 1  # number of runs; the row has their mean
    # "best" on the dev set or "last" (validation.best), or training set -> one of these
    checkpoint: str | Mapping[str, str] = "best"
    # query_length, passage_length: tokens on data sets that the model was not trained on; 0: as in training
    query_length: int = 0
    passage_length: int = 0
    percent: bool = False  # whether the paper's numbers are percentages
    measures: tuple[str, ...] = ()  # names of the numbers; () for the measures of the data set
    each: tuple[str, ...] = ()  # the sets of the mean; () for the sets of the data set
    # data set -> the paper's numbers ("-": none). The key "nq:squad" means: trained on nq, measured on squad.
    numbers: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    numbers_each: tuple[float, ...] = ()  # the numbers of the sets of `each`
    # data set -> the paper's standard deviations over seeds
    deviations: Mapping[str, Sequence[float | int]] = field(default_factory=dict)
    subsets: tuple[float, ...] = ()  # the paper's numbers on parts of the queries (I3, table 4)
    # data set -> perplexity and local variation, or the values of `measures`
    diversity: Mapping[str, Sequence[float | int]] = field(default_factory=dict)
    counts: Mapping[str, Sequence[float | int]] = field(default_factory=dict)  # data set -> sizes
    # data set -> "COUNT of FILE" for each size; COUNT is a key of `DataCheck.counts`
    counted: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # milliseconds, gib: times (name -> values) and storage of vectors that the paper prints
    milliseconds: Mapping[str, Sequence[float | int]] = field(default_factory=dict)
    gib: float | int = 0
    same_as: str = ""  # id of the row with the same system
    reason: str = ""  # why the row cannot be run; "" if it can
    note: str = ""  # remark for the reader

    @property
    def runnable(self) -> bool:
        """Whether commands can be printed for the row."""
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
    source: PaperData  # the data set that the model is trained on
    target: PaperData  # the data set that the model is measured on
    config: str  # "NAME" or "NAME:SUFFIX"
    checkpoint: str  # "best" or "last"
    measures: tuple[str, ...]  # names of the numbers
    numbers: tuple[float | int | None, ...]  # the paper's numbers as fractions; None if it prints none

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets if the target is a mean over sets, else ()."""
        return (self.row.each or self.target.each) if self.target.each else ()


@cache
def datasets() -> dict[str, PaperData]:
    """Return the data sets of the tables by name."""
    return {name: PaperData(name=name, **_with_tuples(values)) for name, values in _read_toml("datasets").items()}


@cache
def paper_rows() -> dict[str, PaperRow]:
    """Return the rows of all tables of all papers by id, in the papers' order."""
    return {row.id: row for paper in PAPERS for row in _read_rows(paper)}


def paper_title(paper: str) -> tuple[str, str]:
    """Return (title, authors) of a paper."""
    values = _read_toml(paper)
    return values["title"], values["authors"]


def find_rows(pattern: str) -> list[PaperRow]:
    """Return the rows whose id is `pattern` or begins with it ("mlr", "mlr/2", "mlr/2/dual-encoder").

    Raises:
        ValueError: no row matches.
    """
    parts = pattern.strip("/").split("/")
    matches = [row for row in paper_rows().values() if row.id.split("/")[: len(parts)] == parts]
    if not matches:
        raise ValueError(f"{pattern!r} is neither a row nor a table: `jaxret reproduce` lists them")
    return matches


def paper_means() -> dict[str, tuple[str, ...]]:
    """Return name of a mean that a paper prints -> its sets."""
    return {
        "mean of 14 (Aggretriever)": datasets()["beir"].each,
        "mean of 15 (MLR)": find_rows("mlr/5")[0].each,
        "BEIR small": datasets()["beir_small"].each,
    }


def resolve_row(row: PaperRow) -> PaperRow:
    """Return the row whose commands are run for `row`: `row`, or the row of `same_as`."""
    return paper_rows()[row.same_as] if row.same_as else row


def _read_rows(paper: str) -> Iterator[PaperRow]:
    names = {entry.name for entry in fields(PaperRow)} - {"id", "caption"}
    for table in _read_toml(paper)["tables"]:
        defaults = {key: value for key, value in table.items() if key not in ("number", "caption", "rows")}
        for entry in table["rows"]:
            values = {**defaults, **entry}
            name = values.pop("name")
            row_id = f"{paper}/{table['number'].replace(' ', '-')}/{name}"
            if unknown := sorted(values.keys() - names):
                raise ValueError(f"{row_id}: {unknown[0]!r} is not a field of a row")
            yield PaperRow(id=row_id, caption=table["caption"], **_with_tuples(values))


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _read_toml(name: str) -> dict[str, Any]:
    text = resources.files("jaxret.experiments.reproduce").joinpath("tables", f"{name}.toml").read_text("utf-8")
    return tomllib.loads(text)
