"""Find the folder of an encoded corpus by a name or a path that a user gives."""

from __future__ import annotations

import os
from pathlib import Path

from jaxret.index.source import encoded_source, is_source
from jaxret.runs.run import config_of_task
from jaxret.runs.workdir import Workdir


def corpus_folder(workdir: Workdir, name: str = "", flag: str = "--corpus") -> Path:
    """Return the folder of an encoded corpus. The run need not be open.

    Args:
        workdir: folder of the run.
        name: name of the encoded corpus, or path of its source; "" finds the only encoded corpus.
        flag: flag or argument that chooses one of several corpora, for the error.

    Raises:
        FileNotFoundError: the run has no such corpus, or the corpus is not finished.
        ValueError: several corpora match.
    """
    names = workdir.corpora
    if not names:
        config_of_task(workdir, "retrieval")  # only a retriever can encode
        remedy = f"jaxret encode --workdir={workdir} --corpus=... first"
        raise FileNotFoundError(f"{workdir} has no encoded corpus; {remedy}")
    if name in names:
        return workdir.embeddings(name)
    matches = [choice for choice in names if not name or is_source(encoded_source(workdir.embeddings(choice)), name)]
    if len(matches) > 1:
        several = f"several corpora{f' named {name}' if name else ''}, {', '.join(matches)}"
        raise ValueError(f"{workdir} has {several}. Choose one with {flag}")
    if not matches and os.path.basename(name) == name and workdir.embeddings(name).is_dir():
        raise FileNotFoundError(
            f"{workdir.embeddings(name)} is not finished; wait for the job that encodes it, or encode again"
        )
    if not matches:
        remedy = f"; jaxret encode --workdir={workdir} --corpus={name} first" if os.path.exists(name) else ""
        raise FileNotFoundError(f"{workdir} has no corpus {name!r}; it has {', '.join(names)}{remedy}")
    return workdir.embeddings(matches[0])
