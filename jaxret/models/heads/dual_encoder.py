"""The dual encoder (DPR, Karpukhin et al. 2020): score = q[L][0] . d[L][0]."""

from __future__ import annotations

from typing import ClassVar

from jaxret.models.heads.head import Side, VectorHead


class DualEncoderHead(VectorHead):
    """The last layer's vector for queries and passages, V = 1."""

    STOCK: ClassVar[bool] = True

    def layers_of(self, side: Side) -> tuple[int, ...]:
        return (self.num_layers,)
