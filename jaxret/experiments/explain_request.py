"""A query, a passage or both to explain as one value, which is checked before JAX is imported: `jaxret explain`."""

from __future__ import annotations

from dataclasses import dataclass

from jaxret.data.records import Passage


@dataclass(frozen=True)
class ExplainRequest:
    """A run, and the texts that it explains. Raises ValueError for values that are missing or exclude each other."""

    workdir: str  # folder of the run
    query: str = ""  # text; "" for none
    text: str = ""  # of a passage; "" for none
    title: str = ""  # of that passage
    passage_id: str = ""  # in place of `text`: of an encoded passage
    encoded_name: str = ""  # the corpus of `passage_id`: its name, or the path that was encoded; "" for the only one
    rank: bool = False  # search for `query`, and add the rank of `passage_id`
    top: int = 10  # rows of a table
    checkpoint: str = "best"  # "best", "last" or a step

    def __post_init__(self) -> None:
        if not (self.query or self.text or self.passage_id) or (self.text and self.passage_id):
            raise ValueError("give a --query, and a passage as --passage=TEXT or --passage_id=ID, or one of them alone")
        if self.rank and not (self.query and self.passage_id):
            raise ValueError("--rank is the rank of a --passage_id for a --query: give both")
        if self.title and not self.text:
            raise ValueError("--title is that of --passage=TEXT: give both; an encoded passage has its own title")
        if self.encoded_name and not self.passage_id:
            raise ValueError(f"--corpus={self.encoded_name} is the corpus of --passage_id: give both")

    @property
    def passage(self) -> Passage | None:
        """Return the passage of `text`; None if there is none."""
        return Passage("passage", self.text, self.title) if self.text else None
