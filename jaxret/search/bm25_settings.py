"""The settings of BM25, which are flags of `jaxret bm25`."""

from __future__ import annotations

from dataclasses import dataclass

import Stemmer

from jaxret.configs.options import check_options, option

NO_LANGUAGE = "none"


@dataclass(frozen=True)
class BM25Settings:
    """The settings on which the scores of BM25 depend. Raises ValueError for a value that is not allowed."""

    # The defaults are those of Pyserini and Anserini, which BEIR's baselines use.
    k1: float = option(0.9, "weight of repeated words; 0: none", lower_bound=0)
    b: float = option(0.4, "weight of a passage's length, from 0 to 1", lower_bound=0)
    language: str = option(
        "english", "language of stemmer and stop words, one of Snowball's; none: no stemmer and no stop words"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.b > 1:
            raise ValueError(f"b is {self.b}; it must be at most 1")
        languages = [*Stemmer.algorithms(), NO_LANGUAGE]
        if self.language not in languages:
            raise ValueError(f"language is {self.language!r}; it must be one of {', '.join(languages)}")
