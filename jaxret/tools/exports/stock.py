"""--to=hf and --to=sentence-transformers: the encoder in the files of transformers; with stock modules around it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxret.models.heads.head import Side
from jaxret.runs.exported import CONFIG, HEAD, read_export, write_head
from jaxret.runs.run import Run, with_lengths
from jaxret.runs.stock import ROUTES, one_chain, read_back, read_states, stock_problem, write_encoder, write_modules
from jaxret.tools.exports.compare import SIDES, compare, states, vectors
from jaxret.tools.original import peer, real_texts
from jaxret.types import Ragged


def write_hf(run: Run, out: Path) -> list[str]:
    """The encoder of each side, in a folder of its own where there are two, and what is not the encoder beside it."""
    tied = run.config.encoder.tied
    folders = {side: out if tied else out / side for side in SIDES}
    for side, folder in folders.items():
        if side == "passage" or not tied:
            write_encoder(run, side, folder)
    told = compare(run, lambda side, tokens: last_states(run, side, tokens, folders[side]), "hidden states")
    return [told, *beside(run, out, folders["passage"])]


def beside(run: Run, out: Path, encoder: Path) -> list[str]:
    """Writes what the encoder's files lack; read by `read_export`, the vectors are compared. `encoder`: for a sentence
    on a folder that others would take for a model of another kind."""
    own = write_head(run, out)
    exported = read_export(out)
    told = compare(
        run,
        lambda side, tokens: (vectors(run, side, tokens), exported.embedder(tokens, side).flat),
        "vectors, as jaxret.runs.exported.read_export makes them,",
    )
    what = f"its parameters ({', '.join(own)}) are in {HEAD}" if own else "it has no parameters"
    head = f"The encoder's files do not say head {run.config.head.name!r}: {what}, its settings in {CONFIG}."
    notes = [told, head]
    if encoder == out and run.config.head.token == "cls":
        notes.append("sentence-transformers would take the mean over tokens of such a folder: not this model's vector.")
    return notes


def last_states(run: Run, side: Side, tokens: Ragged, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The last hidden states [tokens,H] of the run and of the files."""
    found, mask = read_states(folder, tokens, run.config.encoder.ignore)
    return states(run, side, tokens)[-1], found[-1][mask]


def write_sentence_transformers(run: Run, out: Path) -> list[str]:
    """Stock modules; where they cannot compute the vectors, the encoder as a Transformer with the head beside it."""
    problem, notes = stock_problem(run), list[str]()
    lengths = {side: run.config.tokens[f"{side}_length"] for side in SIDES}
    if one_chain(run) and lengths["query"] != lengths["passage"]:
        run = with_one_length(run, max(lengths.values()))
        notes.append(
            f"Queries were cut at {lengths['query']} tokens and passages at {lengths['passage']}; "
            "here all texts are at the larger."
        )
    write_modules(run, out)
    if problem:
        told = compare(
            run, lambda side, tokens: last_states(run, side, tokens, transformer(out, side)), "hidden states"
        )
        own = write_head(run, out)
        parameters = f"parameters ({', '.join(own)}) in {HEAD}" if own else "no parameters"
        without = f"{problem}: here is its encoder, whose token_embeddings are right; the head has {parameters} and "
        return [told, f"{without}settings in {CONFIG}, and --to=hf writes what jaxret reads.", *notes]
    told = compare(run, lambda side, tokens: (vectors(run, side, tokens), read_back(out, side, tokens)), "vectors")
    if peer(out) == "sentence-transformers":
        by = "vectors in sentence-transformers"
        told += "; " + compare(run, lambda side, tokens: (vectors(run, side, tokens), theirs(out, side)), by)
    return [told, *notes]


def with_one_length(run: Run, length: int) -> Run:
    return replace(run, tokenizer=with_lengths(run.config, run.retriever, run.tokenizer, length, length))


def transformer(out: Path, side: Side) -> Path:
    """Where the encoder of a side is in a sentence-transformers directory."""
    own = out / f"{ROUTES[side]}_0_Transformer"
    return own if own.is_dir() else out


def theirs(out: Path, side: Side) -> np.ndarray:
    """What sentence-transformers makes of the same texts."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = SentenceTransformer(str(out), device="cpu", local_files_only=True)
    encode = model.encode_query if ROUTES[side] == "query" else model.encode_document
    return encode(real_texts(), show_progress_bar=False)
