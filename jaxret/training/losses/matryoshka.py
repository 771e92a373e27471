"""Matryoshka (Kusupati et al. 2022): the loss is summed over sizes of a vector. A smaller vector has the first
dimensions of the full one, scaled to length 1."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxret.models.retriever_model import RetrieverModel
from jaxret.models.scoring import unit_length
from jaxret.types import Embeddings


@dataclass(frozen=True)
class MatryoshkaSettings:
    """Sizes of vectors that the loss is summed over, and the weight of each."""

    sizes: tuple[int, ...] = ()  # sizes, the full one included; (): the loss uses only vectors of full size
    weights: tuple[float, ...] = ()  # weights of `sizes`, in their order; (): 1 for each

    @property
    def weight_of(self) -> dict[int, float]:
        """Size -> weight, largest size first."""
        weights = self.weights or (1.0,) * len(self.sizes)
        return dict(sorted(zip(self.sizes, weights, strict=True), reverse=True))

    @property
    def whole_weight(self) -> float:
        """Weight of the largest size, that of the full vectors; 1 without sizes."""
        return next(iter(self.weight_of.values()), 1.0)

    @property
    def smaller_sizes(self) -> tuple[int, ...]:
        """The sizes below the full size, largest first."""
        return tuple(self.weight_of)[1:]


def cut_embeddings(embeddings: Embeddings, size: int) -> Embeddings:
    """Return the first `size` dimensions of every vector, scaled to length 1."""
    return replace(embeddings, vectors=unit_length(embeddings.vectors[..., :size]))


def check_matryoshka(settings: MatryoshkaSettings, retriever: RetrieverModel) -> None:
    """Raise ValueError for sizes that the vectors of a model cannot have, and for weights that do not fit the sizes."""
    sizes, weights, key = settings.sizes, settings.weights, "loss.matryoshka.sizes"
    if not sizes:
        if weights:
            raise ValueError(f"loss.matryoshka.weights is {weights}, but {key} is (): give the sizes too")
        return
    full_size = retriever.uncut.dimension
    if problem := retriever.cut_problem():
        raise ValueError(f"{key} is {sizes}, but {problem}: set it to ()")
    if any(type(size) is not int or size < 1 for size in sizes) or len(set(sizes)) != len(sizes):
        raise ValueError(f"{key} is {sizes}; it must have different whole numbers of at least 1")
    if max(sizes) != full_size:
        raise ValueError(
            f"{key} is {sizes}, but vectors have {full_size} dimensions: the largest size must be {full_size}, or "
            "vectors of full size would not be trained"
        )
    if not retriever.module.normalize:
        raise ValueError(
            f"{key} is {sizes}, which trains vectors of length 1, but normalize is False: set it to True, so that "
            "search compares the same vectors"
        )
    if weights and (len(weights) != len(sizes) or min(weights) < 0):
        raise ValueError(
            f"loss.matryoshka.weights is {weights}; it must have a number of at least 0 for each of {sizes}"
        )
