"""Options of a search, and options of building an approximate index."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import NamedTuple

from jaxret.configs import shared_options
from jaxret.configs.options import check_options, given_fields, option
from jaxret.runs.ray_cluster import RayWorkers
from jaxret.storage.atomic import sha256_json

BACKEND_NAMES = ("auto", "faiss-gpu", "faiss-cpu", "xla", "scipy")
FLOAT32_BACKENDS = ("faiss-gpu", "faiss-cpu", "scipy")  # backends without other precisions
PRECISION_NAMES = ("float32", "float16", "bfloat16", "int8")
PROXY_NAMES = ("mean", "muvera")


class CandidateSpec(NamedTuple):
    """The value of `--candidates`: a proxy, and the number of passages that it proposes for exact scoring."""

    proxy: str
    passages: int

    def __str__(self) -> str:
        return f"{self.proxy}:{self.passages}"

    def require(self, k: int) -> None:
        """Raise ValueError if k is above the number of proposed passages."""
        if self.passages < k:
            raise ValueError(f"candidates={self} proposes fewer passages than the {k} that are requested")

    def require_several(self, vectors: int | None) -> None:
        """Raise ValueError if passages have one vector, because their exact search needs no proxies.

        `vectors` is the number of vectors of each passage; None if the numbers differ.
        """
        if vectors == 1:
            raise ValueError(f"candidates={self} is for passages with several vectors; these have one: remove it")


def parse_candidates(text: str) -> CandidateSpec:
    """Return the spec in a text like `mean:1000`. Raises ValueError for anything else."""
    proxy, _, count = text.partition(":")
    if proxy not in PROXY_NAMES or not re.fullmatch("0*[1-9][0-9]{0,8}", count):
        examples = ", ".join(f"{name}:1000" for name in PROXY_NAMES)
        raise ValueError(
            f"candidates is {text!r:.60}; it must be a proxy and the number of passages that it proposes: {examples}"
        )
    return CandidateSpec(proxy, int(count))


@dataclass(frozen=True)
class SearchOptions:
    """The options of how a search finds candidates. Raises ValueError for unknown names and for options that
    exclude each other. `Searcher` checks the options that depend on the corpus and the machine."""

    backend: str = option(
        "auto", "auto, faiss-gpu, faiss-cpu or xla; for sparse vectors auto, scipy or xla", choices=BACKEND_NAMES
    )
    precision: str = option(
        "float32",
        "precision of the search for candidates: float32, or with XLA float16, bfloat16 or int8; results are the same",
        choices=PRECISION_NAMES,
    )
    candidates: str = option(
        "",
        "mean:N or muvera:N, for passages with several vectors: rank all passages by one vector each, and "
        "score the first N; approximate, and the recall is printed",
    )
    index: str = option(
        "", "name of an approximate index that finds candidates (jaxret index builds it); default: exact search"
    )
    index_parameters: str = option(
        "",
        "with --index: FAISS's search parameters, such as nprobe=16 or efSearch=64; k_factor_rf=4 scores the "
        "best 4 k vectors of the index exactly; default: the measured ones with *",
    )
    dimension: int = 0  # number of leading dimensions of the vectors to search with; 0: all that are stored
    filters: tuple[str, ...] = option(
        (),
        "FIELD:VALUE, or a range such as 'FIELD>=BOUND': search only passages with such a value in their metadata; of "
        "several values of a field, one must match",
        flag="filter",
    )
    max_passage: bool = option(
        False, "rank documents by their best passage; passages of document ID are ID#0, ID#1, ... (jaxret data chunk)"
    )
    # Whether all processes of a JAX job search together, each in a range of the shards (`process_group.py`).
    all_processes: bool = False
    workers: RayWorkers | None = None  # Ray workers that search ranges of the shards, instead of this process

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "filters", tuple(self.filters))
        if self.dimension < 0:
            raise ValueError(f"dimension is {self.dimension}; it must be at least 1, or 0 for all dimensions")
        if self.candidate_spec and self.index:
            raise ValueError(f"candidates are found by {self.candidates} or by the index {self.index}, not by both")
        if self.index and (self.backend, self.precision) != ("auto", "float32"):
            raise ValueError("backend and precision are for exact search: remove them or the index")
        if self.index and self.filters:
            raise ValueError("filters need exact search: remove the index, which was built from all passages")
        if self.precision != "float32" and self.backend in FLOAT32_BACKENDS:
            raise ValueError(f"search backend {self.backend!r} computes in float32, not in {self.precision}: use xla")
        if invalid_filters := [text for text in self.filters if not re.search("[:<>]", text)]:
            expected = "FIELD:VALUE, or a range in quotes such as 'FIELD>=BOUND', is expected"  # a shell reads > and <
            raise ValueError(f"filter {invalid_filters[0]!r:.99}: {expected}")
        if self.max_passage and (self.candidates or self.index):
            raise ValueError("max_passage needs exact search: remove candidates and index")
        if self.several:
            self.require_exact()
        if self.index_parameters and not self.index:
            raise ValueError("index_parameters are for an approximate index: give index=NAME too")

    @functools.cached_property
    def candidate_spec(self) -> CandidateSpec | None:
        """Return the parsed value of `candidates`; None if it is empty."""
        return parse_candidates(self.candidates) if self.candidates else None

    @property
    def several(self) -> bool:
        """Return whether several processes search together."""
        return self.all_processes or self.workers is not None

    def require_exact(self) -> None:
        """Raise ValueError for an approximate search, which several processes cannot do together."""
        if self.candidates or self.index:
            raise ValueError("several processes search exactly: remove candidates and index, or coordinator and engine")

    def require_plain(self, reason: str) -> None:
        """Raise ValueError with a reason if a backend, a precision, or a way to find candidates is set."""
        if names := given_fields(self, ("backend", "precision", "candidates", "index")):
            flags = " and ".join(f"--{name}={getattr(self, name)}" for name in names)
            raise ValueError(f"{reason}: remove {flags}")

    @property
    def label(self) -> str:
        """Return the part of the names of result files that shows how the search differs from an exact search."""
        index = "-".join([self.index, *self.index_parameters.replace("=", "").split(",")]).strip("-")
        parts = (
            "max-passage" if self.max_passage else "",
            f"filtered-{sha256_json(sorted(set(self.filters)))[:8]}" if self.filters else "",
            self.candidates.replace(":", "-"),
            index,
        )
        return ".".join(filter(None, (*parts, f"dimension-{self.dimension}" if self.dimension else "")))


@dataclass(frozen=True)
class IndexOptions:
    """The options of building an approximate index and of measuring its recall. Raises ValueError for a value that is
    not allowed. `index_corpus` checks the options that depend on the vectors."""

    factory: str = option(
        "",
        "FAISS's factory string: IVF4096,PQ64, HNSW32, SQ8, OPQ64,IVF4096,PQ64, ...; for sparse vectors "
        "seismic, or seismic,n_postings=2000,...",
    )
    name: str = option("", "name of the index; default: the factory string")
    queries: str = option("", "folder or file with queries to measure recall; default: vectors of passages")
    qrels: str = option("", "folder or file with judgements: only judged queries of --queries measure recall")
    split: str = shared_options.split("test")
    sample: int = option(1000, "queries to measure recall, at most", lower_bound=1)
    parameters: tuple[str, ...] = option(
        (),
        "FAISS's search parameters to measure recall, such as nprobe=16 or efSearch=64,k_factor_rf=4; "
        "default: several values of nprobe or efSearch",
    )
    train_vectors: int = option(0, "vectors to train on; default: 64 for each list, at least 65536", lower_bound=0)
    seed: int = option(0, "seed of the samples and of k-means", lower_bound=0)
    checkpoint: str = option("best", "checkpoint of the run that encodes --queries: best, last, or a step")
    explicit_fields: tuple[str, ...] = ()  # fields on the command line, even with the default value

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "parameters", tuple(self.parameters))
        if not self.factory.strip():
            raise ValueError(f"factory is {self.factory!r}; it must be a string like IVF4096,PQ64, HNSW32 or seismic")
        query_fields = given_fields(self, ("qrels", "split", "checkpoint"), self.explicit_fields)
        if query_fields and not self.queries:
            raise ValueError(f"{query_fields[0]} needs queries: without queries, vectors of passages measure recall")
