"""Open a source for a role."""

from __future__ import annotations

from jaxret.data.formats.corpus import Corpus
from jaxret.data.formats.data_source import DataSource
from jaxret.data.formats.rankings import RankingSource
from jaxret.data.formats.sources import JudgementSource, QuerySource, TrainingSource


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
