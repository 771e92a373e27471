"""Queries, judgements and training data whose files and formats are detected once, when they are opened.

They are opened where a `Corpus` is: in `cli/` and `api/`, or where a config is read.
tests/data/formats/corpus_test.py lists the other files that open one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from jaxret.data.errors import DataError, Location, Policy
from jaxret.data.formats import beir, trec
from jaxret.data.formats.corpus import Corpus
from jaxret.data.formats.data_source import DataSource, FileSource, RoleSource
from jaxret.data.formats.examples_by_ids import join_texts
from jaxret.data.formats.format import DataFile
from jaxret.data.formats.questions import join_by_question
from jaxret.data.formats.rankings import RankingSource
from jaxret.data.formats.texts import duplicate_id_error
from jaxret.data.libraries.open_sets import list_files
from jaxret.data.lines import PathLike, find_file
from jaxret.data.records import Example, Judgement, Query


@dataclass(frozen=True)
class QuerySource(RoleSource):
    """The queries of a folder, file or named set. If a folder has a file of queries for each split, these are the
    queries of one split, or of all splits."""

    split: str | None  # Split of a folder or named set; None: all splits
    data_files: tuple[DataFile, ...]  # The files or tables with queries

    @classmethod
    def open(cls, source: PathLike, split: str | None = None) -> QuerySource:
        """Detect the files and their formats. Raises DataError for a file that is missing, or has no queries."""
        return cls.of(DataSource.open(source), split)

    @classmethod
    def of(cls, data: DataSource, split: str | None = None) -> QuerySource:
        """Return the queries of an open source. Raises DataError if it has none, or if their format is unknown."""
        return cls(data, split, tuple(data.detect(path, "queries") for path in data.layout.list_queries(split)))

    @cached_property
    def files(self) -> list[Path]:
        """The files that are read. Raises DataError if a library does not say which these are."""
        return [file for data_file in self.data_files for file in list_files(data_file.path)]

    @property
    def without_ids(self) -> bool:
        """Whether a query's id is the number of its row in every file."""
        return all(data_file.format.without_query_ids for data_file in self.data_files)

    def describe(self) -> str:
        """Return the format in words."""
        return str(self.data_files[0])

    def read(self, policy: Policy | None = None) -> list[Query]:
        """Read the queries. If they have no ids, a query's id is the number of its row, record or line, from "0".

        A query that several files have with the same text is one query.
        """
        policy = policy or Policy()
        queries: dict[str, Query] = {}
        first: dict[str, Path] = {}
        for file in self.data_files:
            for query in _read_file_queries(file, policy):
                if query.id not in queries:
                    queries[query.id], first[query.id] = query, file.path
                elif query != queries[query.id]:
                    policy.reject(_conflict(query.id, file, first[query.id]))
        return list(queries.values())


@dataclass(frozen=True)
class JudgementSource(FileSource):
    """The judgements of a split of a folder or named set, or of a file; of training records, their positives."""

    split: str | None  # Split of a folder

    @classmethod
    def open(cls, source: PathLike, split: str | None = None) -> JudgementSource:
        """Detect the file and its format. Raises DataError for a file that is missing, or has no judgements."""
        return cls.of(DataSource.open(source), split)

    @classmethod
    def of(cls, data: DataSource, split: str | None = None) -> JudgementSource:
        """Return the judgements of an open source, or the training records whose positives are judgements. Raises
        DataError if it has neither, or if a folder is given without a split."""
        return cls(data, data.detect(data.layout.require_judgements(split), "judgements"), split)

    def read(self, policy: Policy | None = None) -> list[Judgement]:
        """Read the judgements. Raises DataError for a bad record."""
        return [judgement for _, judgement in self.read_located(policy or Policy())]

    def read_located(self, policy: Policy) -> Iterator[tuple[Location, Judgement]]:
        """Yield the judgements with their locations."""
        file = self.file
        if file.format.judgements is not None:
            yield from file.format.judgements(file, policy)
            return
        if file.format.id_examples is not None:
            for location, id_example in file.format.id_examples(file, policy):
                for key in id_example.positives:
                    yield location, Judgement(id_example.query_id, key, 1)
            return
        assert file.format.examples is not None
        for location, example in file.format.examples(file, policy):
            for passage in example.positives:
                yield location, Judgement(example.query.id, passage.id, 1)


@dataclass(frozen=True)
class TrainingSource(RoleSource):
    """The training examples of a split of a folder or named set, or of a file.

    The examples of a folder are in its file of training records for the split. If there is no such file, or with
    `negatives_run`, they are made from judgements. Positives are the relevant passages of a query. Negatives are the
    passages that are judged not relevant or, with `negatives_run`, the retrieved passages that are not judged relevant,
    in rank order. For records of ids, the texts are read from other files of the folder.
    """

    split: str | None  # Split of a folder
    negatives_run: RankingSource | None  # A run to take negatives from
    file: DataFile | None  # The file or table of training records; None: examples are made from judgements

    @classmethod
    def open(cls, source: PathLike, split: str | None = None, negatives_run: PathLike | None = None) -> TrainingSource:
        """Detect the file of training records and its format.

        Raises:
            DataError: a file is missing or has no examples, or a run is given for records that name their own
                negatives.
        """
        return cls.of(DataSource.open(source), split, RankingSource.open(negatives_run) if negatives_run else None)

    @classmethod
    def of(
        cls, data: DataSource, split: str | None = None, negatives_run: RankingSource | None = None
    ) -> TrainingSource:
        """Return the training records of an open source, or its judgements, from which examples are made. With a run of
        negatives, the records of a folder are not used. Judgements are detected when they are read.

        Raises:
            DataError: the records have an unknown format, or they name their own negatives and a run is given.
        """
        records = None if data.is_folder and negatives_run else data.layout.find_examples(split)
        file = data.detect(records, "examples") if records else None
        if file and negatives_run:
            problem = "this file has its own negatives, but a run of negatives was also given"
            raise Location(data.path).error("two sources", problem, "use a run with a folder that has judgements")
        return cls(data, split, negatives_run, file)

    @classmethod
    def find(cls, data: DataSource, split: str) -> TrainingSource | None:
        """Return the training data of a source, or None if it has queries without positives."""
        if data.is_folder:
            has_some = (data.layout.find_examples(split) or data.layout.find_judgements(split)) is not None
        else:
            has_some = data.file().format.gives("examples")
        return cls.of(data, split) if has_some else None

    @cached_property
    def queries(self) -> QuerySource:
        """The queries in the folder of judgements, or of records that name ids. Raises DataError if there are none."""
        return QuerySource.of(self._text_source, self.split)

    @cached_property
    def judgements(self) -> JudgementSource:
        """The judgements from which examples are made. Raises DataError if there are none."""
        return JudgementSource.of(self.data, self.split)

    @cached_property
    def corpus(self) -> Corpus:
        """The passages of judgements, or of records that name ids. Raises DataError if there are none."""
        return Corpus.of(self._text_source)

    @cached_property
    def _text_source(self) -> DataSource:
        return self.data.text_source(self.file.path) if self.file else self.data

    @cached_property
    def files(self) -> list[Path]:
        """The files that are read, also by libraries. Raises DataError if one is missing."""
        run = self.negatives_run.files if self.negatives_run else []
        files: list[Path | None] = [self.file.path if self.file else None]
        if not self.has_texts:
            files += [self.judgements.file.path] if self.file is None else []
            queries = [data_file.path for data_file in self.queries.data_files]
            files += [*queries, self.corpus.file.path]
            files += [
                find_file(path.parent, "answers.jsonl") for path in queries if path.name.startswith("queries.jsonl")
            ]
        return [*(file for place in files if place for file in list_files(place)), *run]

    @property
    def has_texts(self) -> bool:
        """Whether the examples are records with the texts of their passages."""
        return self.file is not None and self.file.format.examples is not None

    @property
    def first_target_only(self) -> bool:
        """Whether only the first positive of each training record is a target, as in DPR's records."""
        return self.file is not None and not self.file.format.every_positive

    def describe(self) -> str:
        """Return the format in words. Raises DataError if there are neither records nor judgements."""
        return str(self.file or f"{self.judgements.file}; {self.corpus.file}")

    def read(self, policy: Policy | None = None, targets: bool = True) -> list[Example]:
        """Read the examples, which share their passages (equal id, same object).

        `targets`: whether to make one example for each positive, its target; the query's other positives follow the
        target. (A DPR record gives only one example.) If False, there is one example for each query or record, as in
        the file.
        """
        policy = policy or Policy()
        if self.file is None:
            examples = self._read_judged(policy)
        elif self.file.format.examples is not None:
            examples = [example for _, example in self.file.format.examples(self.file, policy)]
        else:
            assert self.file.format.id_examples is not None
            records = list(self.file.format.id_examples(self.file, policy))
            has_queries = all(record.query for _, record in records)
            queries = {} if has_queries else {query.id: query for query in self.queries.read(policy)}
            examples = join_texts(records, queries, self.corpus.read(policy), policy)
        if targets and not self.first_target_only:
            return [target_example for example in examples for target_example in examples_by_target(example)]
        return examples

    def _read_judged(self, policy: Policy) -> list[Example]:
        queries, judgements = read_judged_queries(self.queries, self.judgements, policy)
        run = self.negatives_run.read_ranked(policy) if self.negatives_run else None
        return beir.examples_of_judgements(queries, judgements, self.corpus.read(policy), run, policy)

    def has_teacher_scores(self, policy: Policy) -> bool:
        """Return whether a record has a teacher's scores of a target and a negative. The file is only read up to the
        first such record."""
        examples = self.stream(policy)
        if not self.first_target_only:
            examples = (target_example for example in examples for target_example in examples_by_target(example))
        return any(example.is_distillable for example in examples)

    def stream(self, policy: Policy) -> Iterator[Example]:
        """Yield the examples of records with texts, as the file has them. Judgements and records by ids yield
        nothing."""
        if self.file is not None and self.file.format.examples is not None:
            for _, example in self.file.format.examples(self.file, policy):
                yield example


def _conflict(query_id: str, file: DataFile, first: Path) -> DataError:
    """Return the error of an id that belongs to another query in an earlier file."""
    if not file.format.without_query_ids:
        return duplicate_id_error(query_id, "query id", Location(file.path), Location(file.path, first.name))
    problem = f"these queries have no ids, and their numbers are those of other queries in {first.name}"
    return Location(file.path).error("duplicate id", problem, "name a split, or give one of the files")


def _read_file_queries(file: DataFile, policy: Policy) -> Iterable[Query]:
    if file.format.queries is not None:
        return file.format.queries(file, policy)
    assert file.format.examples is not None
    return {example.query.id: example.query for _, example in file.format.examples(file, policy)}.values()


def read_judged_queries(
    queries: QuerySource, judgements: JudgementSource, policy: Policy, judged: bool = True
) -> tuple[list[Query], list[tuple[Location, Judgement]]]:
    """Read queries, and judgements with their locations. Judgements of other queries are not removed.

    Judgements name queries by ids. Training records without ids, such as DPR's, may be in another file than the
    queries. They are then joined with the queries by the text of the question (`join_by_question`).

    Args:
        queries: any queries.
        judgements: judgements of the same source, or of another one.
        policy: what to do with bad records.
        judged: whether these are the judgements of these queries. In a folder, training records without ids may belong
            to other queries than the queries with ids in that folder.
    """
    query_list = queries.read(policy)
    records = None
    if judged or queries.without_ids:
        records = joined_examples(judgements.file, queries, query_list, policy)
    if records is None:
        return query_list, list(judgements.read_located(policy))
    relevant = (
        (location, Judgement(example.query.id, passage.id, 1))
        for location, example in records
        for passage in example.positives
    )
    return query_list, list(trec.reject_contradictions(relevant, policy))


def joined_examples(
    file: DataFile, source: QuerySource, queries: Iterable[Query], policy: Policy
) -> Iterator[tuple[Location, Example]] | None:
    """Return the records of a file with the queries of a source. Return None if the records have ids, or if the queries
    are in the same file.

    Args:
        file: file of judgements or training records.
        source: source of the queries.
        queries: the queries that were read from this source.
        policy: what to do with a record whose question the source does not have.
    """
    if not file.format.without_query_ids or file.format.examples is None:
        return None
    paths = [data_file.path for data_file in source.data_files]
    if [str(path.absolute()) for path in paths] == [str(file.path.absolute())]:
        return None
    return join_by_question(file.format.examples(file, policy), queries, paths, policy)


def examples_by_target(example: Example) -> Iterator[Example]:
    """Yield a copy of an example for each of its positives, with this positive first."""

    def with_first(values: tuple, position: int) -> tuple:
        return (values[position], *values[:position], *values[position + 1 :]) if values else ()

    for position in range(len(example.positives)):
        yield replace(
            example,
            positives=with_first(example.positives, position),
            positive_scores=with_first(example.positive_scores, position),
        )
