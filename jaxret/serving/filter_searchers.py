"""Searchers of the passages that match a filter. Each has its own vectors in memory, so few are open at a time."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

from jaxret.index.metadata import frequent_values
from jaxret.index.metadata_filters import Filter, FilterError, matching_rows
from jaxret.index.shards import ShardError
from jaxret.runs.mismatch import ContractError
from jaxret.search.searcher import Searcher
from jaxret.serving.refusal import RefusalError, shown

MOST_FILTERS = 4  # filters whose searchers stay open, and filters that requests use at a time
CORPUS_ERRORS = (OSError, ContractError, ShardError)  # files removed, changed or damaged since the start
_OPERATORS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}  # keys of a range
_MOST_VALUES = 50  # values of a field that the page offers


class FilterSearchers:
    """The searchers of the last filters over a corpus. One thread opens them. A request keeps its searcher until it
    ends."""

    def __init__(self, base: Searcher) -> None:
        """Start without filters. `base` is the searcher of all passages."""
        self._base = base
        self._searchers: OrderedDict[tuple[Filter, ...], Searcher] = OrderedDict()

    @cached_property
    def fields(self) -> dict[str, list[tuple[str, int]]]:
        """The fields of the passages' metadata: field -> (value, number of passages) of its most frequent values."""
        return frequent_values(self._base.encoded_corpus, _MOST_VALUES)

    def open(self, filters: Mapping[str, Any]) -> Searcher:
        """Return the searcher of a filter {field: value, list of values, or range}. Only one thread may call this
        method.

        Raises `RefusalError` for a field, a value or a range that no passage has, and `CORPUS_ERRORS`.
        """
        conditions = [condition for name, value in filters.items() for condition in _parse_conditions(name, value)]
        if self._base.filters:
            raise RefusalError(422, "the passages of this server are already filtered; remove filter")
        key = tuple(sorted(set(conditions)))
        if key in self._searchers:
            self._searchers.move_to_end(key)
            return self._searchers[key]
        if unknown_names := [name for name in filters if name not in self.fields]:
            among = f"the fields are {', '.join(self.fields)}" if self.fields else "the passages have no metadata"
            raise RefusalError(422, f"no passage has a field {shown(unknown_names[0])}; {among}")
        try:
            rows = matching_rows(self._base.encoded_corpus, key)
        except FilterError as error:
            raise RefusalError(422, str(error)) from None
        try:
            self._searchers[key] = self._base.among(rows)
        except CORPUS_ERRORS:
            raise
        except ValueError as error:
            raise RefusalError(422, str(error)) from None
        while len(self._searchers) > MOST_FILTERS:
            self._searchers.popitem(last=False)
        return self._searchers[key]


def _parse_conditions(name: str, value: Any) -> list[Filter]:
    """Return the conditions of a field in a request. Raises `RefusalError` for another type or another key."""
    if isinstance(value, dict):
        pairs = [(_OPERATORS.get(key, ""), bound) for key, bound in value.items()]
    else:
        pairs = [(":", entry) for entry in (value if isinstance(value, list) else [value])]
    if not pairs or not all(sign and isinstance(entry, str | int | float) for sign, entry in pairs):  # bool is an int
        expected = "a text, number, true or false, or a list of these, or a range, an object with bounds for some of "
        raise RefusalError(422, f"filter.{shown(name)} is {shown(value)}; it must be {expected}{', '.join(_OPERATORS)}")
    # The index of metadata has numbers and true as in JSON.
    return [Filter(name, sign, entry if isinstance(entry, str) else json.dumps(entry)) for sign, entry in pairs]


class FilterLimit:
    """Limits the filters that requests use at a time, because each filter has a searcher. Requests with the same filter
    share it."""

    def __init__(self, limit: int = MOST_FILTERS) -> None:
        """Set the limit. limit: number of filters that requests may use at a time."""
        self._limit = limit
        self._requests: Counter[str] = Counter()  # filter -> number of its requests
        self._end = asyncio.Event()  # set when a request ends

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Wait until a request may use a filter. It uses the filter until the block ends."""
        while name not in self._requests and len(self._requests) >= self._limit:
            self._end.clear()
            await self._end.wait()
        self._requests[name] += 1
        try:
            yield
        finally:
            self._requests[name] -= 1
            if not self._requests[name]:
                del self._requests[name]
            self._end.set()
