"""The dual encoder (DPR, Karpukhin et al. 2020): score = q[L][0] . d[L][0]."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxret.models.encoders.dense_modules import read_dense_modules
from jaxret.models.heads.head import HeadInput, Side, VectorHead
from jaxret.types import Embeddings, HiddenStates, Params


class DualEncoderHead(VectorHead):
    """V = 1: the last layer's state at `token`, for queries and passages, multiplied by the matrices of `dense`."""

    dense: tuple[int, ...] = ()  # output sizes of linear layers without biases, as in Dense modules

    STOCK: ClassVar[bool] = True
    DIRECTORY_KEYS: ClassVar[tuple[str, ...]] = ("dense",)

    def check(self) -> None:
        if not all(type(size) is int and size > 0 for size in self.dense):
            raise ValueError(f"head.dual_encoder.dense is {self.dense}; sizes must be whole numbers above 0")

    def dimension(self) -> int:
        return self.dense[-1] if self.dense else self.hidden_size

    def layers_of(self, side: Side) -> tuple[int, ...]:
        return (self.num_layers,)

    def projections(self) -> tuple[str, ...]:
        return tuple(f"dense_{i}" for i in range(len(self.dense)))

    def stored_parameters(self, root: Path) -> Params:
        matrices = read_dense_modules(root) if self.dense else []
        return {f"dense_{i}": {"kernel": matrix} for i, matrix in enumerate(matrices)}

    @nn.compact
    def __call__(self, hidden: HiddenStates, text: HeadInput) -> Embeddings:
        embeddings = super().__call__(hidden, text)
        for name, size in zip(self.projections(), self.dense, strict=True):
            layer = nn.Dense(size, use_bias=False, precision=jax.lax.Precision.HIGHEST, name=name)
            embeddings = replace(embeddings, vectors=layer(embeddings.vectors.astype(jnp.float32)))
        return embeddings
