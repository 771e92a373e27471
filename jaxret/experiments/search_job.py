"""The checked request of `jaxret search`. Does not import JAX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING

from jaxret.configs.options import given_fields
from jaxret.data.record_checks import check_question
from jaxret.experiments.evaluation_options import EvaluationOptions
from jaxret.runs.job_options import JobOptions
from jaxret.runs.ray_cluster import EngineOptions
from jaxret.search.search_options import SearchOptions

if TYPE_CHECKING:
    from jaxret.experiments.evaluation_queries import EvaluationSource

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

    workdir: str  # folder of the run
    query: str | None = None  # a question to answer; or
    interactive: bool = False  # whether questions are typed; or
    queries: str = ""  # folder or file with queries
    qrels: str = ""  # folder or file with their judgements; "" for none
    split: str = "test"  # split of `queries` and `qrels` if they are folders
    encoded_name: str = ""  # the encoded corpus: its name, or the path that was encoded; "" for the only one
    checkpoint: str = "best"  # "best", "last" or a step
    query_length: int | None = None  # largest number of tokens; None: as in training
    # dimensions of vectors to search by, 0 for all; with `queries` there may be several sizes; () for all dimensions
    sizes: tuple[int, ...] = ()
    platform: str = ""  # required platform "gpu", "tpu" or "cpu"; "" for any
    attention: str | None = None  # implementation of attention; None: as in training
    evaluation: EvaluationOptions = EvaluationOptions()  # without `queries`, only k has a meaning
    explicit_fields: tuple[str, ...] = ()  # fields that the command line sets, default values included
    options: SearchOptions = SearchOptions()
    engine: EngineOptions = field(default_factory=EngineOptions)
    processes: JobOptions = field(default_factory=JobOptions)

    def __post_init__(self) -> None:
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
        from jaxret.experiments.evaluation_queries import EvaluationSource  # it imports all formats

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
