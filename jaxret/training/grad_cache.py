"""Gradient caching (Gao et al. 2021): any batch size at the activation memory of one chunk.

The representations of all chunks are kept, their activations are not: `jax.checkpoint` runs a chunk's forward pass
again when its gradient is needed. Loss code and gradients are those of the plain step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxret.types import Embeddings

Tree = TypeVar("Tree")


def split(tree: Tree, chunks: int) -> Tree:
    """[B,...] -> [chunks, B/chunks, ...]. Chunk c takes rows c, c + chunks, ...: with rows split over devices, every
    device then works on every chunk."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // chunks, chunks, *x.shape[1:]).swapaxes(0, 1), tree)


def join(tree: Tree) -> Tree:
    """The inverse of `split`."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), tree)


def encode_in_chunks(
    encode: Callable[[Any, jax.Array], Embeddings], texts: Any, chunks: int, key: jax.Array
) -> Embeddings:
    """Embeddings of all texts (a tree of arrays with one row each), `chunks` passes of B/chunks texts each, every
    chunk with its own dropout key.

    Raises ValueError if `chunks` does not divide the number of texts.
    """
    rows = len(jax.tree.leaves(texts)[0])
    if rows % chunks:
        raise ValueError(f"{rows} texts cannot be encoded in {chunks} equal chunks")
    keys = jax.random.split(key, chunks)
    if chunks == 1:
        return encode(texts, keys[0])

    @jax.checkpoint
    def chunk(carry: None, inputs: tuple[Any, jax.Array]) -> tuple[None, Embeddings]:
        return carry, encode(*inputs)

    _, embeddings = jax.lax.scan(chunk, None, (split(texts, chunks), keys))
    return join(embeddings)
