"""The first numbers of vectors, by the same arithmetic for stored vectors and for new ones: the bytes are the same."""

from __future__ import annotations

import numpy as np


def cut_vectors(vectors: np.ndarray, size: int, normalize: bool) -> np.ndarray:
    """Return the first `size` numbers of vectors [..., D], in their type.

    With `normalize`, they are scaled to length 1: in float64, rounded once. A vector of zeros stays one.
    """
    first = np.ascontiguousarray(vectors[..., :size])
    if not normalize or not first.size:
        return first
    numbers = first.reshape(-1, size).astype(np.float64)
    lengths = np.sqrt(np.sum(numbers**2, axis=1, keepdims=True))
    return (numbers / np.maximum(lengths, 1e-12)).astype(first.dtype).reshape(first.shape)
