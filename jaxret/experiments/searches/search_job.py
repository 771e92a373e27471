"""The checked request of `jaxret search`. Does not import JAX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxret.configs import shared_options
from jaxret.configs.options import given_fields, option
from jaxret.data.record_checks import check_question
from jaxret.experiments.searches.evaluation_options import EvaluationOptions
from jaxret.runs.job_options import JobOptions
from jaxret.runs.ray_cluster import EngineOptions
from jaxret.search.search_options import SearchOptions

if TYPE_CHECKING:
    from jaxret.experiments.searches.evaluation_queries import EvaluationSource

ALL = "all"  # value of --dimension for all dimensions that are stored


def parse_sizes(texts: Sequence[str]) -> tuple[int, ...]:
    """Return the sizes of --dimension, 0 for "all". Raises ValueError for another text, and for a repeated size."""
    for text in texts:
        if text != ALL and not re.fullmatch("0*[1-9][0-9]{0,8}", text):
            raise ValueError(f"--dimension: {text!r:.60} is neither a whole number of at least 1 nor {ALL!r}")
    sizes = tuple(0 if text == ALL else int(text) for text in texts)
    if len(set(sizes)) != len(sizes):
        raise ValueError(f"--dimension={','.join(texts)} has a size twice; remove one")
    return sizes


def parse_counts(texts: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of --latency_passages. Raises ValueError for a text that is not a number."""
    if invalid := [text for text in texts if not text.isdecimal()]:
        raise ValueError(f"--latency_passages={','.join(texts)}: {invalid[0]!r} is not a number of passages")
    return tuple(map(int, texts))


@dataclass(frozen=True)
class SearchJob:
    """A search by a run: queries, corpus, options and processes. Raises ValueError for values that exclude each
    other."""

    workdir: str = shared_options.workdir()
    query: str | None = option(None, "question to answer on the terminal")
    interactive: bool = option(
        False, "answer questions from the terminal or standard input, one a line, until an empty line"
    )
    queries: str = shared_options.queries()
    qrels: str = shared_options.qrels()
    split: str = shared_options.split("test")
    encoded_name: str = shared_options.encoded_corpus()
    # k, latency_passages, measures: if they are given, they replace the fields of `evaluation`
    k: int | None = option(None, "passages per query; default: 100 for --queries, else 10", lower_bound=1)
    latency_passages: tuple[int, ...] = option(
        (), "also time searches of the first N passages, such as 1000,100000, and of all", parse=parse_counts
    )
    # 0 for all dimensions that are stored
    sizes: tuple[int, ...] = option(
        (),
        "search with the first N dimensions of vectors; several sizes, such as 64,256,all, give a table",
        flag="dimension",
        parse=parse_sizes,
    )
    checkpoint: str = shared_options.checkpoint()
    query_length: int | None = shared_options.query_length()
    measures: tuple[str, ...] | None = shared_options.measures()
    platform: str = shared_options.platform()
    attention: str | None = shared_options.attention()
    processes: JobOptions = field(default_factory=JobOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    options: SearchOptions = SearchOptions()
    evaluation: EvaluationOptions = EvaluationOptions()  # without `queries`, only k is used
    explicit_fields: tuple[str, ...] = ()  # fields that the command line sets, default values included

    def __post_init__(self) -> None:
        changes: dict[str, Any] = {
            "k": (self.evaluation.k if self.queries else 10) if self.k is None else self.k,
            "measures": self.measures or self.evaluation.measures,
            "latency_passages": self.latency_passages or self.evaluation.latency_passages,
        }
        object.__setattr__(self, "evaluation", replace(self.evaluation, **changes))
        if self.engine.engine and self.processes.coordinator:
            raise ValueError("--engine and --coordinator are two ways to search by several processes: remove one")
        if [self.query is not None, bool(self.queries), self.interactive].count(True) != 1:
            raise ValueError("give either --query (a question), --queries (a file) or --interactive")
        if self.query is not None:
            check_question(self.query)
        if self.queries:
            self._check_split()
            if self.evaluation.latency_passages and self.evaluation.latency == 0:
                raise ValueError("--latency_passages times searches, but --latency=0 times none: remove one")
        else:
            self._check_question()
        if several := "--engine" if self.engine.engine else "--coordinator" if self.processes.coordinator else "":
            self._check_several(several)

    @cached_property
    def source(self) -> EvaluationSource:
        """The queries and judgements. Raises DataError if they are missing."""
        from jaxret.experiments.searches.evaluation_queries import EvaluationSource  # slow: it imports all formats

        return EvaluationSource.open(self.queries, self.qrels, self.split)

    def _check_split(self) -> None:
        """Raise ValueError for a split that selects no queries."""
        is_given = given_fields(self, ("split",), self.explicit_fields)
        if is_given and not self.qrels and self.source.has_every_split:
            raise ValueError(
                f"--split={self.split} chooses nothing: {self.queries} has the queries of all splits in one file, "
                f"and only judgements belong to a split; give --qrels={self.queries}, too"
            )

    def _check_question(self) -> None:
        """Raise ValueError for options that need `queries`."""
        if len(self.sizes) > 1:
            sizes = ",".join(str(size or ALL) for size in self.sizes)
            raise ValueError(f"--dimension={sizes}: several sizes are for --queries; give one")
        options = [option.name for option in fields(EvaluationOptions) if option.name != "k"]
        changes = given_fields(self, ("split",), self.explicit_fields)
        changes += given_fields(self.evaluation, options, self.explicit_fields)
        if names := [*(["qrels"] if self.qrels else []), *changes]:
            raise ValueError(
                f"--{names[0]} needs --queries (a folder or file with queries); remove it with --query and "
                "--interactive"
            )

    def _check_several(self, flag: str) -> None:
        """Raise ValueError for options that need a single process. `flag` is the flag that requests several."""
        self.options.require_exact()
        if self.interactive:
            raise ValueError(f"--interactive answers in one process: remove {flag}")
        if self.evaluation.latency or self.evaluation.latency_passages:
            raise ValueError(f"--latency and --latency_passages time one process: remove them, or {flag}")
