"""FAISS's indexes by factory string, and FAISS's search parameters by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxret.search.approximate.measured_index import FACTOR
from jaxret.search.backends.faiss_backend import FaissCpu

EXAMPLES = '"IVF4096,PQ64", "HNSW32", "SQ8"'
MOST_LISTS = 2**24  # largest number of lists of an IVF index: FAISS allocates them before it sees a vector
MOST_LINKS = 512  # largest number of links of an HNSW node
LEAST_SAMPLE = 65_536  # least number of training vectors: a product quantizer of 8 bits uses no more
VECTORS_PER_LIST = 64  # training vectors for each list of an IVF index; FAISS advises 39 to 256
_SUPPORTED = ("IndexFlatIP", "IndexFlat", "IndexScalarQuantizer", "IndexPQ", "IndexPQFastScan", "IndexHNSW", "IndexIVF")


def faiss_library() -> Any:
    """Return the module faiss. Raises ValueError if it cannot be imported."""
    problem = FaissCpu.available()
    if problem:
        raise ValueError(f"approximate indexes need FAISS: {problem}; {FaissCpu.remedy}")
    return FaissCpu.open("index").faiss


def make_index(factory: str, dimension: int, seed: int = 0) -> Any:
    """Return an empty index for inner products of vectors [D]; `seed` is the seed of its k-means.

    Raises ValueError if FAISS does not accept the string for vectors of this dimension, if the index is not for inner
    products, or if it cannot take vectors block by block.
    """
    faiss = faiss_library()
    # FAISS would allocate as many lists or links as the string says.
    for name, largest in (("IVF", MOST_LISTS), ("HNSW", MOST_LINKS)):
        for digits, unit in re.findall(rf"{name}(\d+)([kM]?)", factory):
            number = int(digits) * {"": 1, "k": 2**10, "M": 2**20}[unit] if len(digits) < 12 else largest + 1
            if not 1 <= number <= largest:
                raise ValueError(f"factory={factory}: {name}{digits}{unit} must be from {name}1 to {name}{largest}")
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(
            f"factory={factory}: FAISS cannot build this index for inner products of {dimension} dimensions "
            f"({faiss_cause(error)}); examples of factory strings are {EXAMPLES}"
        ) from error
    inner = innermost(index)
    kinds = [kind.__name__ for kind in type(inner).__mro__]
    if not any(kind in kinds for kind in _SUPPORTED):
        raise ValueError(
            f"factory={factory}: an {kinds[0]} is not supported. IVF..., HNSW..., SQ... and PQ... are, also after OPQ "
            "or PCA. RFlat is not needed, because candidates are always scored exactly"
        )
    if inner.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"factory={factory}: FAISS has no {kinds[0]} for inner products; use one of {EXAMPLES}")
    if hasattr(inner, "do_polysemous_training"):
        inner.do_polysemous_training = False  # takes minutes, and serves only a Hamming search, which is not used
    for part in (inner, *([inner.pq] if hasattr(inner, "pq") else [])):
        if hasattr(part, "cp"):
            # `build_faiss_index` reports the size of the sample; FAISS would print a warning for each k-means.
            part.cp.seed, part.cp.min_points_per_centroid = seed, 1
    return index


def faiss_cause(error: RuntimeError) -> str:
    """Return the cause in an error message of FAISS, without the function and the line number."""
    text = str(error).strip().splitlines()[0]
    return re.sub(r"^.*(?:failed: |\.cpp:\d+: )", "", text) or text


def innermost(index: Any) -> Any:
    """Return the part of an index that holds the codes, without the transforms of the vectors before it."""
    faiss = faiss_library()
    index = faiss.downcast_index(index)
    while hasattr(index, "chain"):
        index = faiss.downcast_index(index.index)
    return index


def effort_of(index: Any) -> tuple[str, int]:
    """Return the name of the parameter that decides how much of an index is searched, and its largest useful value.

    The name is "" if all vectors are always searched.
    """
    inner = innermost(index)
    if hasattr(inner, "nlist"):
        return "nprobe", int(inner.nlist)
    return ("efSearch", max(1, int(inner.ntotal))) if hasattr(inner, "hnsw") else ("", 0)


def parse_parameters(index: Any, text: str) -> dict[str, float]:
    """Return the search parameters in a text in FAISS's notation, "nprobe=16,k_factor_rf=4".

    Raises ValueError for another notation, and for a parameter that the index does not have.
    """
    names = {"nprobe": ("nprobe", "max_codes"), "efSearch": ("efSearch",)}.get(effort_of(index)[0], ())
    parameters: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in (*names, FACTOR):
            raise ValueError(f"{text}: this index has no parameter {name!r}; it has {', '.join((*names, FACTOR))}")
        number = float(value) if re.fullmatch(r"\d{1,9}(\.\d+)?" if name == FACTOR else r"\d{1,9}", value) else 0.0
        if number < 1:
            raise ValueError(f"{text}: {part!r:.60} must be {name}=NUMBER with a number of at least 1")
        parameters[name] = number
    return parameters


def search_parameters(index: Any, parameters: Mapping[str, float]) -> Any:
    """Return the parameters as FAISS's object for one search call: threads share the index, so it is not changed."""
    faiss = faiss_library()
    kind = {"nprobe": faiss.SearchParametersIVF, "efSearch": faiss.SearchParametersHNSW}.get(effort_of(index)[0])
    if kind is None:
        return None
    inner = kind(**{name: int(value) for name, value in parameters.items() if name != FACTOR})
    return faiss.SearchParametersPreTransform(index_params=inner) if hasattr(index, "chain") else inner
