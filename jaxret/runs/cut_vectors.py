"""Cut vectors to their first dimensions. Stored and new vectors are cut by the same arithmetic, so that the bytes are
equal."""

from __future__ import annotations

import numpy as np


def cut_vectors(vectors: np.ndarray, size: int, normalize: bool) -> np.ndarray:
    """Return the first `size` dimensions of vectors [..., D], in the same dtype.

    With `normalize`, they are scaled to length 1 in float64, and rounded once. A vector of zeros stays zero.
    """
    first = np.ascontiguousarray(vectors[..., :size])
    if not normalize or not first.size:
        return first
    numbers = first.reshape(-1, size).astype(np.float64)
    lengths = np.sqrt(np.sum(numbers**2, axis=1, keepdims=True))
    return (numbers / np.maximum(lengths, 1e-12)).astype(first.dtype).reshape(first.shape)
