"""The checked request of `jaxret explain`. Does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.data.records import Passage


@dataclass(frozen=True)
class ExplainRequest:
    """A run, and the query and passage whose score is explained. Raises ValueError for values that are missing or
    exclude each other."""

    workdir: str  # folder of the run
    query: str = ""  # text of the query; "" for no query
    text: str = ""  # text of the passage; "" for no passage, or one of `passage_id`
    title: str = ""  # title of the passage of `text`
    passage_id: str = ""  # id of an encoded passage, instead of `text`
    encoded_name: str = ""  # the corpus of `passage_id`: its name, or the path that was encoded; "" for the only one
    rank: bool = False  # whether to search for `query` and add the rank of `passage_id`
    top: int = 10  # number of rows of a table
    checkpoint: str = "best"  # "best", "last" or a step

    def __post_init__(self) -> None:
        if not (self.query or self.text or self.passage_id) or (self.text and self.passage_id):
            raise ValueError("give a --query, and a passage as --passage=TEXT or --passage_id=ID, or one of them alone")
        if self.rank and not (self.query and self.passage_id):
            raise ValueError("--rank needs --query and --passage_id: give both")
        if self.title and not self.text:
            raise ValueError("--title needs --passage=TEXT: give both; an encoded passage has its own title")
        if self.encoded_name and not self.passage_id:
            raise ValueError(f"--corpus={self.encoded_name} needs --passage_id: give both")

    @property
    def passage(self) -> Passage | None:
        """The passage of `text`; None without a text."""
        return Passage("passage", self.text, self.title) if self.text else None
