"""The part that all approximate indexes share: their measured recall, and how it is stated."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

CANDIDATES = 200  # vectors that an index returns for a query at least, unless FACTOR is given
FACTOR = "k_factor_rf"  # FAISS's name, of IndexRefine: this times k vectors of an index are scored exactly


class MeasuredIndex:
    """An index whose recall of exact search is known."""

    factory: str  # How it was built, in the notation of `IndexOptions.factory`
    parameters: str  # How it is searched, "nprobe=16,k_factor_rf=4"
    recall_record: Mapping[str, Any] | None  # The recall in its manifest; None while it is measured

    def candidates(self, k: int) -> int:
        """Return how many vectors the index returns for each query of a search for k passages, at least."""
        factor = re.search(rf"(?:^|,){FACTOR}=([0-9.]+)", self.parameters)
        return math.ceil(k * float(factor[1])) if factor else max(k, CANDIDATES)

    def recall(self, k: int) -> dict[str, float] | None:
        """Return the recall that was measured with these parameters, by depth; None if it was not measured."""
        if self.candidates(k) > CANDIDATES and FACTOR not in self.parameters:
            return None
        rows = (self.recall_record or {}).get("measured", [])
        return next((dict(row["recall"]) for row in rows if row["parameters"] == self.parameters), None)

    def to_json(self, k: int) -> dict[str, Any]:
        """Return the entry of this index in the results of a search for k passages."""
        return {
            "factory": self.factory,
            "parameters": self.parameters,
            "candidates": self.candidates(k),
            "recall": self.recall(k),
        }

    def describe(self, k: int) -> str:
        """Return a line on a search for k passages: parameters, candidates, recall."""
        parts = [self.factory, self.parameters, f"{self.candidates(k):,} candidates scored exactly"]
        line = ", ".join(part for part in parts if part)
        if (recall := self.recall(k)) is None:
            return f"{line}; its recall with these settings was not measured"
        depths = ", ".join(f"@{depth} {value:.3f}" for depth, value in recall.items())
        questions = (self.recall_record or {})["questions"]
        return f"{line}; recall of exact search {depths}, measured with {questions['count']:,} {questions['source']}"
