"""Open a source for a role, and read all its queries, judgements, training examples or rankings."""

from __future__ import annotations

from jaxret.data.errors import Policy
from jaxret.data.formats.corpus import Corpus
from jaxret.data.formats.data_source import DataSource
from jaxret.data.formats.rankings import RankingSource
from jaxret.data.formats.sources import JudgementSource, QuerySource, TrainingSource
from jaxret.data.lines import PathLike
from jaxret.data.records import Example, Judgement, Query, Rankings


def open_role(
    data: DataSource, role: str, split: str | None = None
) -> Corpus | QuerySource | JudgementSource | TrainingSource | RankingSource:
    """Open a source for a role of `ROLES`. `split` is that of a folder or named set.

    Raises DataError if a file is missing, or has no such records.
    """
    if role == "passages":
        return Corpus.of(data)
    if role == "queries":
        return QuerySource.of(data, split)
    if role == "judgements":
        return JudgementSource.of(data, split)
    return TrainingSource.of(data, split) if role == "examples" else RankingSource.of(data)


def read_queries(source: PathLike, policy: Policy | None = None, split: str | None = None) -> list[Query]:
    """Open the queries of a folder or file, and read them, see `QuerySource`."""
    return QuerySource.open(source, split).read(policy)


def read_judgements(source: PathLike, split: str | None = None, policy: Policy | None = None) -> list[Judgement]:
    """Open the judgements of a folder's split or of a file, and read them, see `JudgementSource`."""
    return JudgementSource.open(source, split).read(policy)


def read_examples(
    source: PathLike,
    split: str | None = None,
    policy: Policy | None = None,
    negatives_run: PathLike | None = None,
    targets: bool = True,
) -> list[Example]:
    """Open the training data of a folder's split or of a file, and read its examples, see `TrainingSource`.

    Args:
        source: a folder, file or named set.
        split: split of a folder or named set.
        policy: what to do with bad records; by default an error.
        negatives_run: a run to take negatives from.
        targets: whether to return one example for each positive, see `TrainingSource.read`.
    """
    return TrainingSource.open(source, split, negatives_run).read(policy, targets)


def read_run(source: PathLike, policy: Policy | None = None) -> Rankings:
    """Open a run, and read it, see `RankingSource`."""
    return RankingSource.open(source).read(policy)
