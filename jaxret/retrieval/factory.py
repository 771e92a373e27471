"""FAISS's indexes by factory string: which are taken, on how many vectors they are trained, how hard they search."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jaxret.retrieval.backends import FaissCpu

EXAMPLES = '"IVF4096,PQ64", "HNSW32", "SQ8"'
# What decides how much of an index a search looks at: our name of it -> FAISS's, as its ParameterSpace knows it.
EFFORTS = {"nprobe": "nprobe", "ef_search": "efSearch"}
MOST_LISTS = 2**24  # of an IVF: FAISS allocates them before it sees a vector
MOST_LINKS = 512  # of a node of HNSW
POINTS = 64  # vectors of a training sample for each centroid; FAISS advises 30 to 256
FEW_POINTS = 39  # below which FAISS warns
LEAST_SAMPLE = 65_536  # vectors: what a product quantizer of 8 bits uses of them at most
_TAKEN = ("IndexFlatIP", "IndexFlat", "IndexScalarQuantizer", "IndexPQ", "IndexPQFastScan", "IndexHNSW", "IndexIVF")


def faiss_library() -> Any:
    """The module. Raises ValueError where it cannot be imported."""
    problem = FaissCpu.available()
    if problem:
        raise ValueError(f"approximate indexes need FAISS: {problem}; {FaissCpu.remedy}")
    return FaissCpu.open("index").faiss


def make_index(factory: str, dimension: int) -> Any:
    """An empty index for inner products of vectors [D]. Raises ValueError for a string that FAISS does not know, that
    does not fit the vectors, or whose index is not for inner products, or takes no vectors bit by bit."""
    faiss = faiss_library()
    _require_sizes(factory)
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(
            f"--factory={factory}: FAISS makes no index of it for inner products of {dimension} numbers "
            f"({_cause(error)}); strings like {EXAMPLES} are right"
        ) from error
    inner = innermost(index)
    kinds = [kind.__name__ for kind in type(inner).__mro__]
    if not any(kind in kinds for kind in _TAKEN):
        raise ValueError(
            f"--factory={factory}: an {kinds[0]} is not taken here; IVF..., HNSW..., SQ..., PQ... are, after OPQ or PCA"
            " or without (and none needs RFlat: candidates are always scored exactly)"
        )
    if inner.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"--factory={factory}: FAISS has no {kinds[0]} for inner products; take one of {EXAMPLES}")
    return index


def _require_sizes(factory: str) -> None:
    """FAISS allocates what these numbers say."""
    for name, most in (("IVF", MOST_LISTS), ("HNSW", MOST_LINKS)):
        for digits, unit in re.findall(rf"{name}(\d+)([kM]?)", factory):
            number = int(digits) * {"": 1, "k": 2**10, "M": 2**20}[unit] if len(digits) < 12 else most + 1
            if not 1 <= number <= most:
                raise ValueError(f"--factory={factory}: {name}{digits}{unit} must be from {name}1 to {name}{most}")


def _cause(error: RuntimeError) -> str:
    """The last part of a message of FAISS's, without the function and the line."""
    text = str(error).strip().splitlines()[0]
    return re.sub(r"^.*(?:failed: |\.cpp:\d+: )", "", text) or text


def innermost(index: Any) -> Any:
    """What holds the codes, behind transforms of the vectors."""
    faiss = faiss_library()
    index = faiss.downcast_index(index)
    while hasattr(index, "chain"):
        index = faiss.downcast_index(index.index)
    return index


def effort_of(index: Any) -> tuple[str, int]:
    """Which of EFFORTS an index has ("": it looks at all), and the most that it may be (HNSW: no more than there are
    vectors)."""
    inner = innermost(index)
    if hasattr(inner, "nlist"):
        return "nprobe", int(inner.nlist)
    return ("ef_search", max(1, int(inner.ntotal))) if hasattr(inner, "hnsw") else ("", 0)


def set_effort(index: Any, value: int) -> None:
    """How hard an index searches from now on."""
    name, _ = effort_of(index)
    if name:
        faiss_library().ParameterSpace().set_index_parameter(index, EFFORTS[name], value)


def bytes_per_vector(index: Any) -> int:
    """Of the index in memory, about: codes, and numbers of vectors (IVF) or links (HNSW: 2M of the lowest layer, and
    a share of those above)."""
    inner = innermost(index)
    if hasattr(inner, "nlist"):
        return int(inner.code_size) + 8
    if hasattr(inner, "hnsw"):
        links = inner.hnsw.nb_neighbors(0)
        return int(faiss_library().downcast_index(inner.storage).sa_code_size()) + int(4.3 * links) + 12
    return int(inner.sa_code_size())


def sample_sizes(index: Any) -> tuple[int, int, int]:
    """How many vectors training needs at least, how many for FAISS to be content, and how many it gets by default; 0
    where nothing is trained."""
    if index.is_trained:
        return 0, 0, 0
    least = max((points for _, points in _clusterings(index)), default=1)
    return least, FEW_POINTS * least, max(LEAST_SAMPLE, POINTS * least)


def seed_training(index: Any, seed: int) -> None:
    """Every k-means of a training begins from a seed; what FAISS would print of small samples is said by others. The
    order of a product quantizer's codes, which takes minutes, is for a Hamming search that nothing here does."""
    inner = innermost(index)
    if hasattr(inner, "do_polysemous_training"):
        inner.do_polysemous_training = False
    for clustering, _ in _clusterings(index):
        clustering.seed, clustering.min_points_per_centroid = seed, 1


def _clusterings(index: Any) -> Iterator[tuple[Any, int]]:
    """(parameters, number of centroids) of each k-means that training runs."""
    faiss = faiss_library()
    inner = innermost(index)
    if hasattr(inner, "nlist"):
        yield inner.cp, int(inner.nlist)
    quantizers = [inner.pq] if hasattr(inner, "pq") else []
    chain = index.chain if hasattr(index, "chain") else None
    transforms = [faiss.downcast_VectorTransform(chain.at(i)) for i in range(chain.size())] if chain else []
    for each in quantizers:
        yield each.cp, int(each.ksub)
    for transform in transforms:
        if isinstance(transform, faiss.OPQMatrix):
            if transform.pq is None:  # the default would print a warning for each of its many rounds
                own = faiss.ProductQuantizer(transform.d_out, transform.M, 8)
                own.this.disown()  # the transform has its address alone
                transform.pq = own
            yield transform.pq.cp, int(transform.pq.ksub)
