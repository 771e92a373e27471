"""Gradient caching (Gao et al. 2021): any batch size at the activation memory of one chunk.

The representations of all chunks are kept, their activations are not: `jax.checkpoint` runs a chunk's forward pass
again when its gradient is needed. Loss code and gradients are those of the plain step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


def count_chunks(queries: int, chunk_size: int, devices: int) -> int:
    """How many passes `queries` are encoded in: of `chunk_size` queries (0: all), or a little more, so that every pass
    is as long as the others and every device has part of each. One query on each of 8 devices is 8 at a time."""
    wanted = min(chunk_size or queries, queries)
    fitting = (n for n in range(wanted, queries) if queries % n == 0 and n % devices == 0)
    return queries // next(fitting, queries)


def split(tree: Tree, chunks: int) -> Tree:
    """[B,...] -> [chunks, B/chunks, ...]."""
    return jax.tree.map(lambda x: x.reshape(chunks, x.shape[0] // chunks, *x.shape[1:]), tree)


def join(tree: Tree) -> Tree:
    """The inverse of `split`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def encode_in_chunks(encode: Callable[..., Tree], texts: tuple[Any, ...], chunks: int) -> Tree:
    """`encode(*texts)` of all texts (trees of arrays with one row each), in `chunks` passes of B/chunks texts each.

    Raises ValueError if `chunks` does not divide the number of texts.
    """
    rows = len(jax.tree.leaves(texts)[0])
    if rows % chunks:
        raise ValueError(f"{rows} texts cannot be encoded in {chunks} equal chunks")
    if chunks == 1:
        return encode(*texts)

    @jax.checkpoint
    def chunk(carry: None, part: tuple[Any, ...]) -> tuple[None, Tree]:
        return carry, encode(*part)

    _, found = jax.lax.scan(chunk, None, split(texts, chunks))
    return join(found)
