"""FAISS's indexes by factory string, and FAISS's search parameters by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxret.search.approximate.measured_index import FACTOR
from jaxret.search.backends.faiss_backend import FaissCpu

EXAMPLES = '"IVF4096,PQ64", "HNSW32", "SQ8"'
MOST_LISTS = 2**24  # of an IVF: FAISS allocates them before it sees a vector
MOST_LINKS = 512  # of a node of HNSW
LEAST_SAMPLE = 65_536  # vectors to train on: a product quantizer of 8 bits uses no more
POINTS = 64  # vectors to train on for each list of an IVF; FAISS advises 39 to 256
_SUPPORTED = ("IndexFlatIP", "IndexFlat", "IndexScalarQuantizer", "IndexPQ", "IndexPQFastScan", "IndexHNSW", "IndexIVF")


def faiss_library() -> Any:
    """Return the module. Raises ValueError where it cannot be imported."""
    problem = FaissCpu.available()
    if problem:
        raise ValueError(f"approximate indexes need FAISS: {problem}; {FaissCpu.remedy}")
    return FaissCpu.open("index").faiss


def make_index(factory: str, dimension: int, seed: int = 0) -> Any:
    """Return an empty index for inner products of vectors [D], whose k-means begins from a seed.

    Raises ValueError for a string that FAISS does not accept, that does not fit the vectors, or whose index is not for
    inner products, or takes no vectors block by block.
    """
    faiss = faiss_library()
    for name, most in (("IVF", MOST_LISTS), ("HNSW", MOST_LINKS)):  # FAISS would allocate as many
        for digits, unit in re.findall(rf"{name}(\d+)([kM]?)", factory):
            number = int(digits) * {"": 1, "k": 2**10, "M": 2**20}[unit] if len(digits) < 12 else most + 1
            if not 1 <= number <= most:
                raise ValueError(f"factory={factory}: {name}{digits}{unit} must be from {name}1 to {name}{most}")
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(
            f"factory={factory}: FAISS makes no index of it for inner products of {dimension} numbers "
            f"({faiss_cause(error)}); strings like {EXAMPLES} are right"
        ) from error
    inner = innermost(index)
    kinds = [kind.__name__ for kind in type(inner).__mro__]
    if not any(kind in kinds for kind in _SUPPORTED):
        raise ValueError(
            f"factory={factory}: an {kinds[0]} is not taken here; IVF..., HNSW..., SQ..., PQ... are, after OPQ or PCA"
            " or without (and none needs RFlat: candidates are always scored exactly)"
        )
    if inner.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"factory={factory}: FAISS has no {kinds[0]} for inner products; take one of {EXAMPLES}")
    if hasattr(inner, "do_polysemous_training"):
        inner.do_polysemous_training = False  # minutes for a Hamming search that nothing here does
    for part in (inner, *([inner.pq] if hasattr(inner, "pq") else [])):
        if hasattr(part, "cp"):
            # Small samples are reported by `build_faiss_index`, not by a line of FAISS for each k-means.
            part.cp.seed, part.cp.min_points_per_centroid = seed, 1
    return index


def faiss_cause(error: RuntimeError) -> str:
    """Return the last part of a message of FAISS, without the function and the line."""
    text = str(error).strip().splitlines()[0]
    return re.sub(r"^.*(?:failed: |\.cpp:\d+: )", "", text) or text


def innermost(index: Any) -> Any:
    """Return the index that holds the codes, behind transforms of the vectors."""
    faiss = faiss_library()
    index = faiss.downcast_index(index)
    while hasattr(index, "chain"):
        index = faiss.downcast_index(index.index)
    return index


def effort_of(index: Any) -> tuple[str, int]:
    """Return the parameter that decides how much of an index is searched, and its largest useful value; "" if all
    vectors are searched."""
    inner = innermost(index)
    if hasattr(inner, "nlist"):
        return "nprobe", int(inner.nlist)
    return ("efSearch", max(1, int(inner.ntotal))) if hasattr(inner, "hnsw") else ("", 0)


def parse_parameters(index: Any, text: str) -> dict[str, float]:
    """Return FAISS's search parameters from its own notation, "nprobe=16,k_factor_rf=4".

    Raises ValueError for another notation, and for names that the index does not have.
    """
    names = {"nprobe": ("nprobe", "max_codes"), "efSearch": ("efSearch",)}.get(effort_of(index)[0], ())
    parameters: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in (*names, FACTOR):
            raise ValueError(f"{text}: this index has no parameter {name!r}; it has {', '.join((*names, FACTOR))}")
        number = float(value) if re.fullmatch(r"\d{1,9}(\.\d+)?" if name == FACTOR else r"\d{1,9}", value) else 0.0
        if number < 1:
            raise ValueError(f"{text}: {name}=NUMBER is expected, a number from 1, not {part!r:.60}")
        parameters[name] = number
    return parameters


def search_parameters(index: Any, parameters: Mapping[str, float]) -> Any:
    """Return FAISS's object of search parameters, which travels with a call: threads share the index."""
    faiss = faiss_library()
    kind = {"nprobe": faiss.SearchParametersIVF, "efSearch": faiss.SearchParametersHNSW}.get(effort_of(index)[0])
    if kind is None:
        return None
    inner = kind(**{name: int(value) for name, value in parameters.items() if name != FACTOR})
    return faiss.SearchParametersPreTransform(index_params=inner) if hasattr(index, "chain") else inner
