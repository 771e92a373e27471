"""The dual encoder (DPR, Karpukhin et al. 2020): score = q[L][0] . d[L][0]."""

from __future__ import annotations

from jaxret.models.heads.head import Head


class LastLayer(Head):
    """The last layer's vector for queries and passages, V = 1."""
