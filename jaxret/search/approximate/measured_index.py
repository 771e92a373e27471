"""The base class of approximate indexes, with their measured recall."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

CANDIDATES = 200  # least number of vectors that an index returns for a query, unless FACTOR is set
FACTOR = "k_factor_rf"  # name of a parameter of FAISS's IndexRefine: FACTOR * k vectors are scored exactly


class MeasuredIndex:
    """An index whose recall, compared with exact search, was measured."""

    factory: str  # build settings in the notation of `IndexOptions.factory`
    parameters: str  # search parameters, "nprobe=16,k_factor_rf=4"
    recall_record: Mapping[str, Any] | None  # the recall in its manifest; None while it is measured

    def candidates(self, k: int) -> int:
        """Return the least number of vectors that the index returns for each query of a search for k passages."""
        factor = re.search(rf"(?:^|,){FACTOR}=([0-9.]+)", self.parameters)
        return math.ceil(k * float(factor[1])) if factor else max(k, CANDIDATES)

    def recall(self, k: int) -> dict[str, float] | None:
        """Return the measured recall at each depth with these parameters; None if it was not measured."""
        if self.candidates(k) > CANDIDATES and FACTOR not in self.parameters:
            return None
        rows = (self.recall_record or {}).get("measured", [])
        return next((dict(row["recall"]) for row in rows if row["parameters"] == self.parameters), None)

    def to_json(self, k: int) -> dict[str, Any]:
        """Return the JSON entry of this index in the results of a search for k passages."""
        return {
            "factory": self.factory,
            "parameters": self.parameters,
            "candidates": self.candidates(k),
            "recall": self.recall(k),
        }

    def describe(self, k: int) -> str:
        """Return a line about a search for k passages: its parameters, candidates and recall."""
        parts = [self.factory, self.parameters, f"{self.candidates(k):,} candidates scored exactly"]
        line = ", ".join(part for part in parts if part)
        if (recall := self.recall(k)) is None:
            return f"{line}; its recall with these settings was not measured"
        depths = ", ".join(f"@{depth} {value:.3f}" for depth, value in recall.items())
        questions = (self.recall_record or {})["questions"]
        return f"{line}; recall of exact search {depths}, measured with {questions['count']:,} {questions['source']}"
