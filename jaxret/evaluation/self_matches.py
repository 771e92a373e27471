"""Detect and remove self-matches: passages with the id of their query, in data sets whose queries are passages.

BEIR's evaluation drops a passage that has the query's id, in every data set. That is right where equal ids are equal
texts (in ArguAna, a query would find itself first) and wrong where queries and passages have their own numbers.
"""

from __future__ import annotations

import re

from jaxret.data.records import Rankings

DATA_SETS = ("arguana",)  # data sets whose queries are passages


def has_passages_as_queries(dataset_name: str) -> bool:
    """Return whether the queries of the data set with this name are passages."""
    return not set(DATA_SETS).isdisjoint(re.split(r"[^a-z0-9]+", dataset_name.lower()))


def removes_self_matches(setting: str, dataset_name: str) -> bool:
    """Return whether a setting ("auto", "keep" or "remove") removes self-matches in the data set with this name."""
    return setting == "remove" or (setting == "auto" and has_passages_as_queries(dataset_name))


def self_matching_queries(rankings: Rankings) -> list[str]:
    """Return the ids of queries whose ranking has a passage with the same id."""
    return [query for query, ranking in rankings.items() if any(passage == query for passage, _ in ranking)]


def without_self_matches(rankings: Rankings, k: int) -> Rankings:
    """Return the first k passages of each ranking without the passage that has the query's id."""
    return {query: [hit for hit in ranking if hit[0] != query][:k] for query, ranking in rankings.items()}
