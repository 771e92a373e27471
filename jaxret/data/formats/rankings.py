"""Rankings of a file or a named set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxret.data.errors import Location, Policy
from jaxret.data.formats import trec
from jaxret.data.formats.data_source import DataSource, FileSource
from jaxret.data.lines import PathLike
from jaxret.data.records import Rankings


@dataclass(frozen=True)
class RankingSource(FileSource):
    """A run, whose file and format are detected once, when it is opened."""

    @classmethod
    def open(cls, source: PathLike) -> RankingSource:
        """Detect the file and its format. Raises DataError for a file that is missing, or has no rankings."""
        return cls.of(DataSource.open(source))

    @classmethod
    def of(cls, data: DataSource) -> RankingSource:
        """Return the rankings of an open source. Raises DataError if it has none, or if their format is unknown."""
        return cls(data, data.detect(data.layout.require_rankings(), "rankings"))

    @property
    def without_scores(self) -> bool:
        """Whether the file has only ranks; the scores are then 1 / rank."""
        return self.file.format.without_scores

    def require_scores(self, purpose: str) -> None:
        """Raise DataError if there are ranks without scores. `purpose` is the use of the scores, for the error."""
        if self.without_scores:
            problem = f"this is a ranking without scores ({self.file}), but {purpose} are needed"
            raise Location(self.file.path).error("no scores", problem, "give one with scores, as a TREC run")

    def read_lines(self, policy: Policy) -> Iterator[trec.RunLine]:
        """Yield the lines with their locations, in the file's order."""
        assert self.file.format.rankings is not None
        return self.file.format.rankings(self.file, policy)

    def read_ranked(self, policy: Policy) -> dict[str, list[trec.RunLine]]:
        """Return query id -> the lines of its ranking with their locations, in rank order."""
        return trec.rank_lines(self.read_lines(policy), policy)

    def read(self, policy: Policy | None = None) -> Rankings:
        """Return query id -> [(passage id, score)] in rank order."""
        run_lines = self.read_ranked(policy or Policy())
        return {query: [(line.passage_id, line.score) for line in lines] for query, lines in run_lines.items()}
