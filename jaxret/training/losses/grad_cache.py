"""Gradient caching (Gao et al. 2021): any batch size with the activation memory of one chunk.

The representations of all chunks stay in memory. Their activations do not: `jax.checkpoint` computes the forward pass
of a chunk again for its gradient. Loss and gradients equal those without chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

TreeT = TypeVar("TreeT")


def count_chunks(queries: int, chunk_size: int, devices: int) -> int:
    """Return the number of passes in which queries are encoded.

    All passes have the same number of queries, and so have all devices in a pass. A pass may therefore have more than
    `chunk_size` queries: on 8 devices it has at least 8.

    Args:
        queries: number of queries of a batch, over all devices.
        chunk_size: requested number of queries of a pass; 0: all.
        devices: number of devices that share a pass.
    """
    size = min(chunk_size or queries, queries)
    divisors = (n for n in range(size, queries) if queries % n == 0 and n % devices == 0)
    return queries // next(divisors, queries)


def describe_rounding(queries: int, chunk_size: int, devices: int) -> str:
    """Return a notice if a pass has more queries than `chunk_size`, else ""."""
    size = queries // count_chunks(queries, chunk_size, devices)
    if not 0 < chunk_size < size:
        return ""
    shares = f" and is a multiple of {devices} devices" if devices > 1 else ""
    fact = f"{size} of {queries} queries are encoded at the same time"
    return f"train.chunk_size is {chunk_size}; {fact}, the next number that divides {queries}{shares}"


def split_chunks(tree: TreeT, chunks: int) -> TreeT:
    """Reshape [B,...] to [chunks, B/chunks, ...]."""
    return jax.tree.map(lambda x: x.reshape(chunks, x.shape[0] // chunks, *x.shape[1:]), tree)


def join_chunks(tree: TreeT) -> TreeT:
    """Reshape [chunks, B/chunks, ...] to [B,...], the inverse of `split_chunks`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def encode_in_chunks(encode: Callable[..., TreeT], texts: tuple[Any, ...], chunks: int) -> TreeT:
    """Return `encode(*texts)`, computed in `chunks` passes of B/chunks texts. `texts` are trees of arrays [B,...].

    Raises ValueError if `chunks` does not divide the number of texts.
    """
    rows = len(jax.tree.leaves(texts)[0])
    if rows % chunks:
        raise ValueError(f"{rows} texts cannot be encoded in {chunks} equal chunks")
    if chunks == 1:
        return encode(*texts)

    @jax.checkpoint
    def chunk(carry: None, part: tuple[Any, ...]) -> tuple[None, TreeT]:
        return carry, encode(*part)

    _, representations = jax.lax.scan(chunk, None, split_chunks(texts, chunks))
    return join_chunks(representations)
