"""jaxret export: a run in the files of transformers or sentence-transformers, read back and compared."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxret.data.records import Passage
from jaxret.data.tokenizer import SEPARATOR
from jaxret.models.heads.head import Side
from jaxret.runs.run import Run, open_run, with_lengths
from jaxret.runs.stock import ROUTES, layer_weights, read_back, read_states, write_encoder, write_modules
from jaxret.tools.card import write_card
from jaxret.tools.original import peer, real_texts
from jaxret.types import Ragged, Tokens

TOLERANCE = 1e-4  # of numbers of about 1: rounding, in another order of sums


def export(workdir: str | Path, kind: str, out: str | Path, checkpoint: str = "best") -> str:
    """Writes a run's checkpoint as `kind` into the new folder `out`, reads it back, and says how far the vectors (for
    "hf" the hidden states) of 64 texts are from the run's, and what the files cannot say.

    Raises FileExistsError if `out` is there, ValueError for a run that has no such form, or if the vectors differ;
    nothing is left of `out` then.
    """
    run, out = open_run(workdir, checkpoint), Path(out)
    if out.exists():
        raise FileExistsError(f"{out} is there already; give a folder that is not")
    notes = lost(run, kind)
    if kind == "sentence-transformers" and (length := one_length(run)):
        tokenizer = with_lengths(run.config, run.retriever, run.tokenizer, length, length)
        run = replace(run, tokenizer=tokenizer)
    try:
        told = write_hf(run, out) if kind == "hf" else write_sentence_transformers(run, out)
        write_card(run, kind, out, [told, *notes])
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return "\n".join([f"{out}: {told}", *notes])


def lost(run: Run, kind: str) -> list[str]:
    """What of the run the files do not say, a sentence each."""
    notes = []
    query, passage = run.config.tokens.query_length, run.config.tokens.passage_length
    if kind == "sentence-transformers" and one_length(run) and query != passage:
        notes.append(f"Queries were cut at {query} tokens and passages at {passage}; here all texts are at the larger.")
    if kind == "hf":
        own = sorted(name for name in run.params if not name.endswith("encoder"))
        head = f"its parameters ({', '.join(own)}) are not in these files" if own else "it has no parameters"
        notes.append(f"This is the encoder; head {run.config.head.name!r} is not part of it: {head}.")
    joined = "[SEP]" if run.config.tokens.title_separator == SEPARATOR else repr(run.config.tokens.title_separator)
    notes.append(f"Title and text of a passage are joined by {joined}: do so before, nothing here does.")
    return notes


def one_length(run: Run) -> int:
    """The limit where queries and passages go through the same modules: the larger of the two; 0 if they do not."""
    same = run.config.encoder.tied and layer_weights(run, "query") == layer_weights(run, "passage")
    return max(run.config.tokens.query_length, run.config.tokens.passage_length) if same else 0


def write_hf(run: Run, out: Path) -> str:
    """The encoder of each side, in a folder of its own where there are two; and how it compares."""
    tied = run.config.encoder.tied
    folders: dict[Side, Path] = {side: out if tied else out / side for side in ROUTES}
    for side, folder in folders.items():
        if side == "passage" or not tied:
            write_encoder(run, side, folder)
    return compare(run, lambda side, tokens: last_states(run, side, tokens, folders[side]), "hidden states")


def write_sentence_transformers(run: Run, out: Path) -> str:
    """The modules, and how they compare: computed here from the files, and by sentence-transformers if it is there."""
    out.mkdir(parents=True)
    write_modules(run, out)
    told = compare(run, lambda side, tokens: (vectors(run, side, tokens), read_back(out, side, tokens)), "vectors")
    if peer(out) == "sentence-transformers":
        by = "vectors in sentence-transformers"
        told += "; " + compare(run, lambda side, tokens: (vectors(run, side, tokens), theirs(out, side)), by)
    return told


def compare(run: Run, both: Callable[[Side, Ragged], tuple[np.ndarray, np.ndarray]], what: str) -> str:
    """A sentence on the largest difference; ValueError if it is more than rounding."""
    texts, largest = real_texts(), 0.0
    sides: tuple[Side, ...] = ("query", "passage")
    for side in sides:
        passages = [Passage(str(number), text) for number, text in enumerate(texts)]
        tokens = run.tokenizer.queries(texts) if side == "query" else run.tokenizer.passages(passages)
        ours, theirs = both(side, tokens)
        size = max(float(np.abs(ours).max()), 1.0)
        largest = max(largest, float(np.abs(ours - theirs).max()) / size)
    told = f"read back, {what} of {len(texts)} texts differ by {largest:.1e} at most"
    if not largest <= TOLERANCE:
        raise ValueError(f"{told}, more than {TOLERANCE:.0e}: nothing was exported")
    return told


def vectors(run: Run, side: Side, tokens: Ragged) -> np.ndarray:
    """The run's own, [rows,D]."""
    return run.embedder()(tokens, side).stacked()[:, 0]


def theirs(out: Path, side: Side) -> np.ndarray:
    """What sentence-transformers makes of the same texts."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = SentenceTransformer(str(out), device="cpu", local_files_only=True)
    encode = model.encode_query if ROUTES[side] == "query" else model.encode_document
    return encode(real_texts(), show_progress_bar=False)


def last_states(run: Run, side: Side, tokens: Ragged, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The last hidden states [rows,T,H] of the run and of the files, where there are tokens."""
    ids, mask = tokens.padded(np.arange(len(tokens)), int(tokens.lengths.max()))
    batch = Tokens(jnp.asarray(ids), jnp.asarray(mask))
    ours = np.asarray(run.retriever.hidden_states(run.params, batch, side).states[-1])
    return ours[mask], read_states(folder, tokens, run.config.encoder.ignore)[0][-1][mask]
