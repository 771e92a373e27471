"""The checked request of `jaxret explain`. Does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.configs import shared_options
from jaxret.configs.options import option
from jaxret.data.records import Passage


@dataclass(frozen=True)
class ExplainRequest:
    """A run, and the query and passage whose score is explained. Raises ValueError for values that are missing or
    exclude each other."""

    workdir: str = shared_options.workdir()
    query: str = option("", "text of a query")
    text: str = option("", "text of a passage", flag="passage")
    title: str = option("", "title of the passage")
    passage_id: str = option("", "instead of --passage: id of an encoded passage")
    rank: bool = option(False, "with --query and --passage_id: search the corpus, and print the passage's rank")
    encoded_name: str = shared_options.encoded_corpus()  # the corpus of `passage_id`
    top: int = option(10, "rows of a table", lower_bound=1)
    checkpoint: str = shared_options.checkpoint()

    def __post_init__(self) -> None:
        if not (self.query or self.text or self.passage_id) or (self.text and self.passage_id):
            raise ValueError("give --query, a passage (--passage=TEXT or --passage_id=ID), or both")
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
