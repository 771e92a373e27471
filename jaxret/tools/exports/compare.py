"""What was exported, read back: how far it is from the run, on 64 real texts as queries and as passages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxret.data.records import Passage
from jaxret.models.heads.head import Side
from jaxret.models.retriever import BiEncoder
from jaxret.runs.run import Run
from jaxret.tools.original import real_texts
from jaxret.types import Ragged, Tokens

TOLERANCE = 1e-4  # of numbers of about 1: rounding, in another order of sums
SIDES: tuple[Side, ...] = ("query", "passage")
Both = Callable[[Side, Ragged], tuple[np.ndarray, np.ndarray]]  # a side's tokens -> the run's numbers, and the files'


def in_float32(run: Run) -> Run:
    """The run with products of float32: what is exported is float32, and so is what computes it elsewhere."""
    module = run.retriever.module
    exact = module.clone(compute=replace(module.compute, dtype=jnp.float32))
    return replace(run, retriever=BiEncoder(exact), compiled={})


def tokens_of(run: Run, side: Side) -> Ragged:
    """The token ids of the texts as the run reads them."""
    texts = real_texts()
    if side == "query":
        return run.tokenizer.queries(texts)
    return run.tokenizer.passages([Passage(str(number), text) for number, text in enumerate(texts)])


def padded(run: Run, side: Side, tokens: Ragged) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, which are real, which others attend to), all [rows,T]."""
    ids, mask = tokens.padded(np.arange(len(tokens)), int(tokens.lengths.max()), run.tokenizer.pad_id)
    seen = run.retriever.module.head.seen(Tokens(jnp.asarray(ids), jnp.asarray(mask)), side)
    return ids, mask, np.asarray(seen.mask)


def vectors(run: Run, side: Side, tokens: Ragged) -> np.ndarray:
    """The run's own: those of all texts, one after the other, [vectors,D]."""
    return run.embedder()(tokens, side).flat


def states(run: Run, side: Side, tokens: Ragged) -> np.ndarray:
    """The run's hidden states [L+1,tokens,H] of all real tokens, one text after the other."""
    ids, mask, _ = padded(run, side, tokens)
    batch = Tokens(jnp.asarray(ids), jnp.asarray(mask))
    return np.asarray(run.retriever.hidden_states(run.params, batch, side).states)[:, mask]


def compare(run: Run, both: Both, what: str) -> str:
    """A sentence on the largest difference; ValueError if it is more than rounding, or if there are other numbers."""
    largest = 0.0
    for side in SIDES:
        ours, theirs = both(side, tokens_of(run, side))
        if ours.shape != theirs.shape:
            raise ValueError(
                f"read back, {what} of the {side} texts are {list(theirs.shape)}, in the run {list(ours.shape)}: "
                "nothing was exported"
            )
        size = max(float(np.abs(ours).max()), 1.0)
        largest = max(largest, float(np.abs(ours - theirs).max()) / size)
    told = f"read back, {what} of {len(real_texts())} texts differ by {largest:.1e} at most"
    if not largest <= TOLERANCE:
        raise ValueError(f"{told}, more than {TOLERANCE:.0e}: nothing was exported")
    return told
