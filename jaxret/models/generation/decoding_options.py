"""Options of decoding queries."""

from __future__ import annotations

from dataclasses import dataclass, fields

from jaxret.configs.options import check_options, option

DECODING_METHODS = ("sample", "beam", "greedy")
# Options that only one method reads.
_READ_BY = {
    "sample": ("seed", "temperature", "top_k", "top_p"),
    "beam": ("beams", "length_penalty", "early_stopping"),
}


@dataclass(frozen=True)
class DecodingOptions:
    """Options of decoding queries. The defaults of beam search equal those of transformers' `generate`."""

    method: str = option(
        "sample",
        "greedy: the likeliest token at each step; beam: beam search; sample: random tokens",
        choices=DECODING_METHODS,
    )
    queries: int = option(1, "queries for each passage: samples, or the best beams", lower_bound=1)
    query_length: int = option(32, "tokens of a query, at most", lower_bound=1)
    seed: int = option(0, "seed of sampling", lower_bound=0)
    temperature: float = option(1.0, "sampling: divisor of the logits", lower_bound=0.0)
    top_k: int = option(10, "sampling: number of the likeliest tokens to draw from; 0: all", lower_bound=0)
    top_p: float = option(
        1.0, "sampling: draw from the likeliest tokens with at least this sum of probabilities", lower_bound=0.0
    )
    beams: int = option(4, "beam search: number of sequences", lower_bound=1)
    length_penalty: float = option(1.0, "beam search: log-probabilities are divided by the length to this power")
    early_stopping: bool = option(
        False,
        "beam search: stop when there are as many complete sequences as beams, although others might become better",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.temperature == 0:
            raise ValueError("temperature is 0; it must be above 0 (method greedy takes the likeliest token)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.method == "greedy" and self.queries > 1:
            raise ValueError(f"queries is {self.queries}; greedy decoding returns one query for each passage")
        if self.method == "beam" and self.queries > self.beams:
            raise ValueError(
                f"queries is {self.queries}; beam search with {self.beams} beams returns at most {self.beams} queries"
            )
        defaults = {field.name: field.default for field in fields(self)}
        for method, names in _READ_BY.items():
            for name in names:
                if method != self.method and (value := getattr(self, name)) != defaults[name]:
                    raise ValueError(
                        f"{name} is {value}, which method {method!r} reads, but method is {self.method!r}: "
                        f"remove {name}, or set method={method!r}"
                    )

    @property
    def sequences(self) -> int:
        """The number of sequences that are decoded together for a passage."""
        return {"greedy": 1, "sample": self.queries, "beam": self.beams}[self.method]
