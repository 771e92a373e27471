"""jaxret export: a run in the files of other libraries, read back and compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxret.data.tokenizer import SEPARATOR
from jaxret.runs.run import Run, open_run, stored_config
from jaxret.runs.workdir import Workdir
from jaxret.tools.card import write_card
from jaxret.tools.exports.compare import in_float32
from jaxret.tools.exports.cross_encoder import export_cross_encoder
from jaxret.tools.exports.onnx import write_onnx
from jaxret.tools.exports.pylate import write_pylate
from jaxret.tools.exports.pyserini import write_pyserini
from jaxret.tools.exports.stock import write_hf, write_sentence_transformers
from jaxret.tools.transaction import new_folder

# Whose files -> what writes them into an empty folder, reads them back, and gives sentences on how exact they are and
# what they lack. Raises ValueError if they differ from the run, or if it has no such form.
WRITERS: dict[str, Callable[[Run, Path], list[str]]] = {
    "hf": write_hf,
    "sentence-transformers": write_sentence_transformers,
    "onnx": write_onnx,
    "pylate": write_pylate,
}
KINDS = (*WRITERS, "pyserini")


def export(workdir: str | Path, kind: str, out: str | Path, checkpoint: str = "best", corpus: str = "") -> str:
    """Writes a run's checkpoint as `kind` into the new folder `out`, reads it back, and says how far the vectors (of an
    encoder alone the hidden states; of an index the scores) of 64 texts are from the run's, and what the files cannot
    say. corpus: of "pyserini", the name of the encoded corpus where there are several.

    Raises FileExistsError if `out` is there, ValueError for a run that has no such form, or if the vectors differ;
    nothing is left of `out` then, nor if the process is ended.
    """
    if kind not in KINDS:
        raise ValueError(f"--to={kind}: whose files is one of {', '.join(KINDS)}")
    if corpus and kind != "pyserini":
        raise ValueError(f"--corpus={corpus} is for --to=pyserini; --to={kind} holds no passages")
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} is there already; give a folder that is not")
    if stored_config(Workdir(workdir)).task == "reranking":
        if kind != "hf":
            raise ValueError(f"--to={kind}: a cross-encoder has the form of --to=hf alone, which others read too")
        return export_cross_encoder(Path(workdir), out, checkpoint)
    run = open_run(workdir, checkpoint, attention="plain")  # whose states can be compared on any machine
    with new_folder(out) as folder:
        if kind == "pyserini":
            notes = write_pyserini(run, folder, corpus)
        else:
            notes = [*WRITERS[kind](in_float32(run), folder), *lost(run)]
        write_card(run, kind, out.name, folder, notes)
    return "\n".join([f"{out}: {notes[0]}", *notes[1:]])


def lost(run: Run) -> list[str]:
    """What of the run no files of an encoder say, a sentence each."""
    joined = "[SEP]" if run.config.tokens.title_separator == SEPARATOR else repr(run.config.tokens.title_separator)
    notes = [f"Title and text of a passage are joined by {joined}: do so before, nothing here does."]
    if (dtype := run.config.encoder.dtype) != "float32":
        notes.append(f"The run multiplies in {dtype}; the files are float32 and are compared so.")
    return notes
