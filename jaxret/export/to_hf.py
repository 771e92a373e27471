"""Export to transformers (--to=hf) and sentence-transformers: an encoder, and stock modules around it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxret.export.compare_original import original_library, sample_texts
from jaxret.export.exported import CONFIG, HEAD, read_export, write_head
from jaxret.export.round_trip import SIDES, check_round_trip, run_states, run_vectors
from jaxret.export.stock_modules import (
    ROUTES,
    has_one_chain,
    read_states,
    stock_problem,
    stock_vectors,
    write_encoder,
    write_modules,
)
from jaxret.models.heads.head import Side
from jaxret.runs.run import Run, RunOverrides, with_lengths
from jaxret.types import Ragged


def write_hf(run: Run, out: Path) -> list[str]:
    """Write the encoder of each side, in two folders if they differ, with head and config beside it."""
    tied = run.config.encoder.tied
    folders = {side: out if tied else out / side for side in SIDES}
    for side, folder in folders.items():
        if side == "passage" or not tied:
            write_encoder(run, side, folder)
    sentence = check_round_trip(
        run, lambda side, tokens: compare_last_states(run, side, tokens, folders[side]), "hidden states"
    )
    return [sentence, *write_head_and_compare(run, out, folders["passage"])]


def write_head_and_compare(run: Run, out: Path, encoder: Path) -> list[str]:
    """Write head and config, read the export back, and compare its vectors.

    encoder: folder of the passage encoder. A note warns if sentence-transformers would open it with another pooling.
    """
    own = write_head(run, out)
    whole = read_export(out).embedder
    whole = replace(whole, retriever=whole.retriever.uncut)
    sentence = check_round_trip(
        run,
        lambda side, tokens: (run_vectors(run, side, tokens), whole(tokens, side).flat),
        "vectors, as jaxret.export.exported.read_export makes them,",
    )
    what = f"its parameters ({', '.join(own)}) are in {HEAD}" if own else "it has no parameters"
    head = f"The encoder's files do not say head {run.config.head.name!r}: {what}, its settings in {CONFIG}."
    notes = [sentence, head]
    if encoder == out and run.config.head.token == "cls":
        notes.append("sentence-transformers would take the mean over tokens of such a folder: not this model's vector.")
    return notes


def compare_last_states(run: Run, side: Side, tokens: Ragged, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the last hidden states [tokens,H] of the run and of the files.

    Args:
        folder: folder of the written encoder.
    """
    states, mask = read_states(folder, tokens, run.config.encoder.ignore)
    return run_states(run, side, tokens)[-1], states[-1][mask]


def write_sentence_transformers(run: Run, out: Path) -> list[str]:
    """Write stock modules; if they cannot compute the vectors, the encoder as a Transformer with its head beside it."""
    problem, notes = stock_problem(run), list[str]()
    lengths = {side: run.config.tokens[f"{side}_length"] for side in SIDES}
    if has_one_chain(run) and lengths["query"] != lengths["passage"]:
        run = with_one_length(run, max(lengths.values()))
        notes.append(
            f"Queries were cut at {lengths['query']} tokens and passages at {lengths['passage']}; "
            "here all texts are at the larger."
        )
    write_modules(run, out)
    if problem:
        sentence = check_round_trip(
            run,
            lambda side, tokens: compare_last_states(run, side, tokens, transformer_folder(out, side)),
            "hidden states",
        )
        own = write_head(run, out)
        parameters = f"parameters ({', '.join(own)}) in {HEAD}" if own else "no parameters"
        without = f"{problem}: here is its encoder, whose token_embeddings are right; the head has {parameters} and "
        return [sentence, f"{without}settings in {CONFIG}, and --to=hf writes what jaxret reads.", *notes]
    sentence = check_round_trip(
        run, lambda side, tokens: (run_vectors(run, side, tokens), stock_vectors(out, side, tokens)), "vectors"
    )
    if original_library(out) == "sentence-transformers":
        sentence += "; " + check_round_trip(
            run,
            lambda side, tokens: (run_vectors(run, side, tokens), sentence_transformers_vectors(out, side)),
            "vectors in sentence-transformers",
        )
    return [sentence, *notes]


def with_one_length(run: Run, length: int) -> Run:
    return replace(run, tokenizer=with_lengths(run.config, run.model, run.tokenizer, RunOverrides(length, length)))


def transformer_folder(out: Path, side: Side) -> Path:
    """Return the folder of a side's encoder in a sentence-transformers directory."""
    own = out / f"{ROUTES[side]}_0_Transformer"
    return own if own.is_dir() else out


def sentence_transformers_vectors(out: Path, side: Side) -> np.ndarray:
    """Return the vectors of sentence-transformers for the sample texts."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = SentenceTransformer(str(out), device="cpu", local_files_only=True)
    model.truncate_dim = None  # whole vectors are compared
    encode = model.encode_query if ROUTES[side] == "query" else model.encode_document
    return encode(sample_texts(), show_progress_bar=False)
