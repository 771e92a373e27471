"""Open systems that can score any passage of a corpus, from folders of runs and of BM25."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxret.index.encoding.corpus_folder import corpus_folder
from jaxret.runs.mismatch import require_equal
from jaxret.runs.run import open_run
from jaxret.runs.workdir import Workdir
from jaxret.search.bm25 import BM25
from jaxret.search.bm25_index import BM25_MANIFEST, read_bm25_manifest
from jaxret.search.bm25_settings import BM25Settings
from jaxret.search.exact_fusion import BM25System, DenseSystem, ScoringSystem
from jaxret.search.searcher import Searcher
from jaxret.storage.atomic import sha256_json


class OpenSystem(NamedTuple):
    """A system that scores passages of a corpus."""

    folder: str  # folder of the run or of BM25
    system: ScoringSystem  # returns scores of passages
    corpus_identity: dict[str, Any]  # {"sha256", "passages"}
    digest: str  # digest of the model or index that scores


def is_system_folder(path: str) -> bool:
    """Return whether a path is the folder of a run or of BM25, not a file of rankings."""
    return Path(path).is_dir() and (Workdir(path).contract.exists() or (Path(path) / "bm25").is_dir())


def open_systems(folders: Sequence[str], encoded_name: str = "") -> list[OpenSystem]:
    """Open systems of one corpus.

    Args:
        folders: folders of runs that encoded the corpus, and of `jaxret bm25`.
        encoded_name: name of the corpus in the folders; "" for the only one.

    Raises:
        ContractError: the systems have different corpora.
        FileNotFoundError, ValueError: a folder has no corpus of this name, or several.
    """
    systems = [
        (_open_run if Workdir(folder).contract.exists() else _open_bm25)(folder, encoded_name) for folder in folders
    ]
    first, first_corpus = systems[0].folder, {"corpus": systems[0].corpus_identity}
    for system in systems[1:]:
        remedy = "Fuse systems of one corpus; encode and index the same file."
        require_equal(first_corpus, {"corpus": system.corpus_identity}, first, system.folder, remedy)
    return systems


def _open_bm25(folder: str, encoded_name: str) -> OpenSystem:
    names = sorted(path.parent.name for path in Path(folder).glob(f"bm25/*/{BM25_MANIFEST}"))
    matches = [name for name in names if encoded_name in ("", name)]
    if len(matches) != 1:
        listing = ", ".join(names) or "none"
        raise ValueError(f"{folder} has the BM25 indexes {listing}: choose the corpus with --corpus=NAME")
    path = Path(folder) / "bm25" / matches[0]
    manifest = read_bm25_manifest(path)
    index = BM25(path, BM25Settings(**manifest["settings"]))
    return OpenSystem(folder, BM25System(index), manifest["corpus"], sha256_json(manifest))


def _open_run(folder: str, encoded_name: str) -> OpenSystem:
    run = open_run(folder)
    searcher = Searcher(run, corpus_folder(run.workdir, encoded_name), many=True)
    if len(searcher.encoded_corpus.parts) > 1 or searcher.encoded_corpus.selection is not None:
        raise ValueError(f"{folder}: passages were appended or deleted; encode the current corpus before fusion")
    identity = dict(searcher.encoded_corpus.corpus_identity)
    return OpenSystem(folder, DenseSystem(searcher), identity, run.checkpoint["digest"])
