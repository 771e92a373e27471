"""Compares an export, read back, with its run on 64 English texts, as queries and as passages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxret.export.compare_original import sample_texts, sample_tokens
from jaxret.models.heads.head import Side
from jaxret.runs.run import Run
from jaxret.types import Ragged, Tokens

TOLERANCE = 1e-4  # for numbers of about 1: the rounding error of sums in another order
TIE = 1e-5  # for scores of about 1: rounding in float32 may change the order of closer scores
SIDES: tuple[Side, ...] = ("query", "passage")
# (side, tokens) -> (numbers of the run, numbers of the export)
OutputPair = Callable[[Side, Ragged], tuple[np.ndarray, np.ndarray]]


def run_in_float32(run: Run) -> Run:
    """Return the run with products in float32, as in exports and other libraries."""
    module = run.model.module
    exact = module.clone(compute=replace(module.compute, dtype=jnp.float32))
    return replace(run, model=replace(run.model, module=exact), program_cache={})


def padded_inputs(run: Run, side: Side, tokens: Ragged) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (ids, mask of real tokens, mask of tokens that can be attended to), all [rows,T]."""
    ids, mask = tokens.padded(np.arange(len(tokens)), int(tokens.lengths.max()), run.tokenizer.pad_id)
    side_tokens = run.model.module.head.attention_tokens(Tokens(jnp.asarray(ids), jnp.asarray(mask)), side)
    return ids, mask, np.asarray(side_tokens.mask)


def run_vectors(run: Run, side: Side, tokens: Ragged) -> np.ndarray:
    """Return the run's vectors of all texts in full size, concatenated, [vectors,D]."""
    return run.with_dimension(0).embedder()(tokens, side).flat


def run_states(run: Run, side: Side, tokens: Ragged) -> np.ndarray:
    """Return the run's hidden states [L+1,tokens,H] of all real tokens, with concatenated texts."""
    ids, mask, _ = padded_inputs(run, side, tokens)
    batch = Tokens(jnp.asarray(ids), jnp.asarray(mask))
    return np.asarray(run.model.hidden_states(run.params, batch, side).states)[:, mask]


def check_vectors(run: Run, compute: Callable[[Side, Ragged], np.ndarray], values: str) -> str:
    """Compare the vectors that `compute` returns for (side, tokens) with the run's, as `check_round_trip`."""
    return check_round_trip(run, lambda side, tokens: (run_vectors(run, side, tokens), compute(side, tokens)), values)


def check_round_trip(run: Run, compute: OutputPair, values: str) -> str:
    """Compare an export with its run. Return a sentence on the largest difference. `values` is the name of the numbers.

    Raises ValueError if the numbers differ by more than rounding, or in shape.
    """
    largest = 0.0
    for side in SIDES:
        run_numbers, file_numbers = compute(side, sample_tokens(run, side))
        if run_numbers.shape != file_numbers.shape:
            raise ValueError(
                f"read back, {values} of the {side} texts have the shape {list(file_numbers.shape)}, in the run "
                f"{list(run_numbers.shape)}: nothing was exported"
            )
        size = max(float(np.abs(run_numbers).max()), 1.0)
        largest = max(largest, float(np.abs(run_numbers - file_numbers).max()) / size)
    sentence = f"read back, {values} of {len(sample_texts())} texts differ by {largest:.1e} at most"
    if not largest <= TOLERANCE:
        raise ValueError(f"{sentence}, more than {TOLERANCE:.0e}: nothing was exported")
    return sentence
