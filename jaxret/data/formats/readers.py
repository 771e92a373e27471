"""Open a source, and read all its queries, judgements or training examples."""

from __future__ import annotations

from jaxret.data.errors import Policy
from jaxret.data.formats.corpus import Corpus
from jaxret.data.formats.sources import JudgementSource, QuerySource, TrainingSource
from jaxret.data.lines import PathLike
from jaxret.data.records import Example, Judgement, Query


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


def describe_source(source: PathLike, role: str, split: str | None = None) -> str:
    """Return the format from which a role is read, in words: "MS MARCO collection, 2 columns".

    Args:
        source: a folder, file or named set.
        role: "passages", "queries", "judgements" or "examples".
        split: split of a folder or named set.

    Raises:
        DataError: the file is missing, or its format is unknown.
    """
    if role == "passages":
        return str(Corpus.open(source).file)
    if role == "queries":
        return QuerySource.open(source, split).describe()
    if role == "judgements":
        return JudgementSource.open(source, split).describe()
    return TrainingSource.open(source, split).describe()
