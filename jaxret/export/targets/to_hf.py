"""Exports to transformers (--to=hf), and to sentence-transformers with stock modules around the encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxret.export.compare_original import load_sentence_transformer, original_library, sample_texts
from jaxret.export.exported import CONFIG, HEAD, read_export, write_head
from jaxret.export.round_trip import SIDES, check_round_trip, check_vectors, run_states
from jaxret.export.targets.stock_modules import (
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
    """Write the encoder, or the encoder of each side in a separate folder, with head and config."""
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

    A note warns if sentence-transformers would open `encoder`, the folder of the passage encoder, with another pooling.
    """
    names = write_head(run, out)
    embedder = read_export(out).embedder
    embedder = replace(embedder, retriever=embedder.retriever.uncut)
    reader = "vectors by jaxret.export.exported.read_export"
    sentence = check_vectors(run, lambda side, tokens: embedder(tokens, side).flat, reader)
    parameters = f"its parameters ({', '.join(names)}) are in {HEAD}" if names else "it has no parameters"
    head = f"The encoder's files do not describe head {run.config.head.name!r}: {parameters}, its settings in {CONFIG}."
    notes = [sentence, head]
    if encoder == out and run.config.head.token == "cls":
        notes.append(
            "sentence-transformers would use the mean over tokens for such a folder, which is not this model's vector."
        )
    return notes


def compare_last_states(run: Run, side: Side, tokens: Ragged, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the last hidden states [tokens,H] of the run and of the written encoder.

    Args:
        folder: folder of the written encoder.
    """
    states, mask = read_states(folder, tokens, run.config.encoder.ignore)
    return run_states(run, side, tokens)[-1], states[-1][mask]


def write_sentence_transformers(run: Run, out: Path) -> list[str]:
    """Write stock modules. If they cannot compute the vectors, write the encoder as a Transformer, and the head."""
    problem, notes = stock_problem(run), list[str]()
    lengths = {side: run.config.tokens[f"{side}_length"] for side in SIDES}
    if has_one_chain(run) and lengths["query"] != lengths["passage"]:
        longest = max(lengths.values())
        tokenizer = with_lengths(run.config, run.model, run.tokenizer, RunOverrides(longest, longest))
        run = replace(run, tokenizer=tokenizer)
        notes.append(
            f"The run cuts queries at {lengths['query']} tokens and passages at {lengths['passage']}; "
            "the export cuts all texts at the larger length."
        )
    write_modules(run, out)
    if problem:
        sentence = check_round_trip(
            run,
            lambda side, tokens: compare_last_states(run, side, tokens, transformer_folder(out, side)),
            "hidden states",
        )
        names = write_head(run, out)
        parameters = f"parameters ({', '.join(names)}) in {HEAD}" if names else "no parameters"
        contents = f"the head has {parameters} and settings in {CONFIG}. jaxret reads exports of --to=hf."
        encoder = f"{problem}: the export is its encoder, whose token_embeddings are right"
        return [sentence, f"{encoder}; {contents}", *notes]
    sentence = check_vectors(run, lambda side, tokens: stock_vectors(out, side, tokens), "vectors")
    if original_library(out) == "sentence-transformers":
        library = "vectors in sentence-transformers"
        sentence += "; " + check_vectors(run, lambda side, _: sentence_transformers_vectors(out, side), library)
    return [sentence, *notes]


def transformer_folder(out: Path, side: Side) -> Path:
    """Return the folder of a side's encoder in a sentence-transformers directory."""
    folder = out / f"{ROUTES[side]}_0_Transformer"
    return folder if folder.is_dir() else out


def sentence_transformers_vectors(out: Path, side: Side) -> np.ndarray:
    """Return the vectors of sentence-transformers for the sample texts."""
    model = load_sentence_transformer(out)
    encode = model.encode_query if ROUTES[side] == "query" else model.encode_document
    return encode(sample_texts(), show_progress_bar=False)
