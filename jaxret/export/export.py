"""Exports a run to the files of another library, reads them back, and compares them (`jaxret export`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxret.data.formats import QuerySource
from jaxret.data.tokens.tokenizer import SEPARATOR
from jaxret.export.model_card import write_card
from jaxret.export.round_trip import run_in_float32
from jaxret.export.stores.store_list import STORES, import_client
from jaxret.export.stores.store_options import StoreOptions
from jaxret.export.targets.to_anserini import write_anserini
from jaxret.export.targets.to_hf import write_hf, write_sentence_transformers
from jaxret.export.targets.to_hf_cross_encoder import export_cross_encoder
from jaxret.export.targets.to_onnx import write_onnx
from jaxret.export.targets.to_orbax import export_orbax
from jaxret.export.targets.to_peft import write_peft
from jaxret.export.targets.to_pylate import write_pylate
from jaxret.export.targets.to_pyserini import write_pyserini
from jaxret.runs.run import Run, open_run, stored_config
from jaxret.runs.workdir import Workdir
from jaxret.storage.transaction import new_folder

# Library -> function that writes the library's files into an empty folder, reads them back, and returns sentences about
# how they differ from the run. It raises ValueError if vectors differ, or if the library does not support the run.
MODEL_WRITERS: dict[str, Callable[[Run, Path], list[str]]] = {
    "hf": write_hf,
    "sentence-transformers": write_sentence_transformers,
    "onnx": write_onnx,
    "pylate": write_pylate,
    "peft": write_peft,
}
OF_CORPORA = ("pyserini", "anserini", *STORES)  # exports of an encoded corpus
EXPORT_KINDS = (*MODEL_WRITERS, "orbax", *OF_CORPORA)


def export(
    workdir: str | Path,
    kind: str,
    out: str | Path,
    checkpoint: str = "best",
    encoded_name: str = "",
    queries: QuerySource | None = None,
    options: StoreOptions = StoreOptions(),
) -> str:
    """Export a checkpoint. Return sentences about how the files differ from the run.

    The files are read back, and their vectors of 64 texts (hidden states of a plain encoder, scores of an index) are
    compared with the run's. After an error or a kill, `out` does not exist, except for an export to a store, which the
    same call continues.

    Args:
        workdir: folder of the run.
        kind: one of EXPORT_KINDS.
        out: new folder to write.
        checkpoint: "best", "last", or a step.
        encoded_name: name of the encoded corpus for OF_CORPORA, required if there are several.
        queries: queries that "anserini" exports, too, and that STORES use for the comparison.
        options: options for STORES.

    Raises:
        FileExistsError: `out` exists.
        ValueError: the library does not support the run, or the vectors differ.

    It also raises the errors of `export_to_store`.
    """
    _require_fitting(kind, encoded_name, queries, options)
    out = Path(out)
    if kind in STORES and stored_config(Workdir(workdir)).task != "reranking":
        import_client(kind, "pyarrow")  # pyarrow is in an extra
        from jaxret.export.stores.fill_store import export_to_store

        return export_to_store(
            open_run(workdir, checkpoint, attention="plain"), kind, out, encoded_name, queries, options
        )
    if out.exists():
        raise FileExistsError(f"{out} exists already; give a new folder")
    if kind == "orbax":
        return export_orbax(workdir, out, checkpoint)
    if stored_config(Workdir(workdir)).task == "reranking":
        if kind != "hf":
            raise ValueError(
                f"--to={kind}: a cross-encoder is exported only by --to=hf, which other libraries read, too"
            )
        return export_cross_encoder(Path(workdir), out, checkpoint)
    run = open_run(workdir, checkpoint, attention="plain")  # plain attention runs on every machine
    with new_folder(out) as folder:
        if kind == "pyserini":
            notes = write_pyserini(run, folder, encoded_name)
        elif kind == "anserini":
            notes = write_anserini(run, folder, encoded_name, queries)
        else:
            notes = [*MODEL_WRITERS[kind](run_in_float32(run), folder), *limits_of_export(run)]
        write_card(run, kind, out.name, folder, notes)
    return "\n".join([f"{out}: {notes[0]}", *notes[1:]])


def _require_fitting(kind: str, encoded_name: str, queries: QuerySource | None, options: StoreOptions) -> None:
    """Raise ValueError for an unknown kind, and for arguments of `export` that a kind does not use."""
    if kind not in EXPORT_KINDS:
        raise ValueError(f"--to={kind}: it must be one of {', '.join(EXPORT_KINDS)}")
    if encoded_name and kind not in OF_CORPORA:
        raise ValueError(
            f"--corpus={encoded_name} is for --to={' and '.join(OF_CORPORA)}; --to={kind} cannot store passages"
        )
    if queries and kind != "anserini" and kind not in STORES:
        raise ValueError(f"--queries={queries} is for --to=anserini and stores; --to={kind} cannot store queries")
    if options != StoreOptions() and kind not in STORES:
        raise ValueError(f"--url, --table, --texts, --k and --sample are for --to={', '.join(STORES)}, not --to={kind}")


def limits_of_export(run: Run) -> list[str]:
    """Return sentences about properties of the run that encoder files cannot express."""
    separator = run.tokenizer.title_separator
    quote = separator if separator == SEPARATOR else repr(separator)
    notes = [f"The files do not join title and text of a passage: join them by {quote} before encoding."]
    if run.model.cut:
        notes.append(
            f"The run keeps the first {run.model.cut} dimensions of a vector. The files give full vectors, which "
            "truncate_dim of sentence-transformers cuts. If they had length 1, scale the cut vectors to it again."
        )
    if (dtype := run.config.encoder.dtype) != "float32":
        notes.append(f"The run computes in {dtype}; the files are float32 and are compared in float32.")
    return notes
