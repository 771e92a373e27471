"""Gradient caching (Gao et al. 2021): any batch size at the activation memory of one chunk.

The representations of all chunks stay in memory, their activations do not: `jax.checkpoint` recomputes the forward
pass of a chunk when its gradient is needed. Loss and gradients are those of the plain step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

TreeT = TypeVar("TreeT")


def count_chunks(queries: int, chunk_size: int, devices: int) -> int:
    """Return in how many passes queries are encoded.

    All passes are equally long, and each device has a part of each: passes may be longer than `chunk_size` queries. One
    query on each of 8 devices makes 8 at a time.

    Args:
        queries: of a batch, over all devices.
        chunk_size: queries to encode at a time; 0: all.
        devices: that share a pass.
    """
    size = min(chunk_size or queries, queries)
    divisors = (n for n in range(size, queries) if queries % n == 0 and n % devices == 0)
    return queries // next(divisors, queries)


def describe_rounding(queries: int, chunk_size: int, devices: int) -> str:
    """Return a notice that more queries are encoded at a time than `chunk_size`; "" if there are not more."""
    size = queries // count_chunks(queries, chunk_size, devices)
    if not 0 < chunk_size < size:
        return ""
    shares = f" and gives each of {devices} devices as many" if devices > 1 else ""
    fact = f"{size} of {queries} queries are encoded at a time"
    return f"train.chunk_size is {chunk_size}; {fact}, the next number that divides them{shares}"


def split_chunks(tree: TreeT, chunks: int) -> TreeT:
    """Reshape [B,...] to [chunks, B/chunks, ...]."""
    return jax.tree.map(lambda x: x.reshape(chunks, x.shape[0] // chunks, *x.shape[1:]), tree)


def join_chunks(tree: TreeT) -> TreeT:
    """Undo `split`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def encode_in_chunks(encode: Callable[..., TreeT], texts: tuple[Any, ...], chunks: int) -> TreeT:
    """Return `encode(*texts)` of all texts (trees of arrays by row), in `chunks` passes of B/chunks texts.

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
