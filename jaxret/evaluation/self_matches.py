"""Queries that are passages of the corpus themselves: finding oneself is no answer.

BEIR's evaluation drops a passage that has the query's id, in every data set. That is right where equal ids are equal
texts (ArguAna: BM25 then has nDCG@10 .414 instead of .315) and wrong where both are numbered for themselves.
"""

from __future__ import annotations

import re

from jaxret.data.records import Rankings

DATA_SETS = ("arguana",)  # whose queries are passages


def of_passages(dataset: str) -> bool:
    """Whether the data set of this name is known for queries that are passages."""
    return not set(DATA_SETS).isdisjoint(re.split(r"[^a-z0-9]+", dataset.lower()))


def found_themselves(rankings: Rankings) -> list[str]:
    """The queries that found the passage of their own id."""
    return [query for query, found in rankings.items() if any(passage == query for passage, _ in found)]


def without_self_matches(rankings: Rankings, k: int) -> Rankings:
    """The first k passages of each ranking that have another id than their query."""
    return {query: [one for one in found if one[0] != query][:k] for query, found in rankings.items()}
