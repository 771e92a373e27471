"""Matryoshka (Kusupati et al. 2022): the loss of several sizes of one vector, each its first numbers at length 1."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxret.models.retriever import RetrieverModel
from jaxret.models.scoring import unit_length
from jaxret.types import Embeddings


@dataclass(frozen=True)
class MatryoshkaSettings:
    """Sizes of vectors that the loss is summed over, and the weight of each."""

    sizes: tuple[int, ...] = ()  # the whole size is one of them; (): the loss is of whole vectors alone
    weights: tuple[float, ...] = ()  # in the order of `sizes`; (): 1 for each

    @property
    def weight_of(self) -> dict[int, float]:
        """Return the weight of each size, the largest size first."""
        weights = self.weights or (1.0,) * len(self.sizes)
        return dict(sorted(zip(self.sizes, weights, strict=True), reverse=True))

    @property
    def whole_weight(self) -> float:
        return next(iter(self.weight_of.values()), 1.0)

    @property
    def smaller_sizes(self) -> tuple[int, ...]:
        """Return the sizes below the whole one, the largest first."""
        return tuple(self.weight_of)[1:]


def cut_embeddings(embeddings: Embeddings, size: int) -> Embeddings:
    """Return the first `size` numbers of every vector, scaled to length 1."""
    return replace(embeddings, vectors=unit_length(embeddings.vectors[..., :size]))


def check_matryoshka(settings: MatryoshkaSettings, retriever: RetrieverModel) -> None:
    """Raise ValueError for sizes that the vectors of a model do not have, and for weights of other sizes."""
    sizes, weights, key = settings.sizes, settings.weights, "loss.matryoshka.sizes"
    if not sizes:
        if weights:
            raise ValueError(f"loss.matryoshka.weights is {weights}, but {key} is (): give the sizes too")
        return
    whole = retriever.uncut.dimension
    if problem := retriever.cut_problem():
        raise ValueError(f"{key} is {sizes}, but {problem}: set it to ()")
    if any(type(size) is not int or size < 1 for size in sizes) or len(set(sizes)) != len(sizes):
        raise ValueError(f"{key} is {sizes}; sizes are different whole numbers from 1 on")
    if max(sizes) != whole:
        raise ValueError(
            f"{key} is {sizes}, but vectors have {whole} numbers: the largest size must be {whole}, or whole vectors "
            "would not be trained"
        )
    if not retriever.module.normalize:
        raise ValueError(
            f"{key} is {sizes}, whose vectors have length 1, but normalize is False: set it to True, so that search "
            "compares the vectors that were trained"
        )
    if weights and (len(weights) != len(sizes) or min(weights) < 0):
        raise ValueError(f"loss.matryoshka.weights is {weights}; it must have a number from 0 on for each of {sizes}")
