"""The folder of an approximate index, which is built from one state of an encoded corpus:

<corpus>/indexes/<name>/index.faiss    the index in FAISS's format, or index.seismic in Seismic's format
                        manifest.json  written last: build settings, the corpus, digests, recall
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxret.index.encoded_corpus import EncodedCorpus
from jaxret.index.shards import ShardError
from jaxret.runs.workdir import require_plain_name
from jaxret.search.search_options import IndexOptions
from jaxret.storage import atomic
from jaxret.storage.atomic import sha256_file, sha256_json, with_digest, write_json

MANIFEST_KEYS = {"factory", "training", "corpus", "vectors", "dimension", "largest_norm", "made", "index"}
BUILD = "build it again with jaxret index"


def index_folder(folder: Path, name: str) -> Path:
    """Return the folder of an index of the encoded corpus in `folder`. Raises ValueError unless the name is plain."""
    return folder / "indexes" / require_plain_name("the name of an index", name)


def identity_of(encoded_corpus: EncodedCorpus) -> dict[str, Any]:
    """Return the identity of a corpus that its indexes record: the corpus's own, and a digest of all vectors."""
    files = ("words", "weights", "offsets") if encoded_corpus.sparse else ("vectors",)
    digests = [
        [entry[file]["sha256"] for entry in part.manifest.shards for file in files] for part in encoded_corpus.shards
    ]
    return {**encoded_corpus.corpus_identity, "vectors": sha256_json(digests)}


def read_index_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of an index. Raises FileNotFoundError without one, and ShardError if it is damaged."""
    path = folder / "manifest.json"
    try:
        manifest = atomic.read_with_digest(path)
    except FileNotFoundError:
        raise
    except ValueError as error:
        raise ShardError(f"{error}; {BUILD}") from error
    if missing_keys := MANIFEST_KEYS - manifest.keys():
        raise ShardError(f"{path} has no {', '.join(sorted(missing_keys))}; {BUILD}")
    return manifest


def check_index_file(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ShardError if the file of an index is not the one that was written."""
    entry = manifest["index"]
    path = folder / entry["file"]
    if not path.is_file():
        raise ShardError(f"{path} does not exist; {BUILD}")
    if path.stat().st_size != entry["bytes"] or sha256_file(path) != entry["sha256"]:
        raise ShardError(f"{path}: damaged (its SHA-256 is not the one that was written); {BUILD}")


def indexes(folder: Path) -> Sequence[str]:
    """Return the names of the indexes of the encoded corpus in `folder`, sorted."""
    return sorted(path.parent.name for path in folder.glob("indexes/*/manifest.json"))


def write_index_manifest(
    path: Path, encoded_corpus: EncodedCorpus, options: IndexOptions, training_rows: int, facts: Mapping[str, Any]
) -> None:
    """Write the manifest of an index next to its file.

    Args:
        path: the file of the index.
        encoded_corpus: the corpus from which it was built.
        options: the options of the build.
        training_rows: the number of vectors that it was trained on.
        facts: entries that depend on the library.
    """
    manifest = {
        "factory": options.factory,
        "training": {"vectors": training_rows, "sample": options.train_vectors, "seed": options.seed},
        "corpus": identity_of(encoded_corpus),
        "dimension": encoded_corpus.dimension,
        "index": {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)},
    }
    write_json(path.with_name("manifest.json"), with_digest(manifest | dict(facts)))


def require_index(folder: Path, name: str) -> None:
    """Raise FileNotFoundError if the encoded corpus in `folder` has no index of a name."""
    names = indexes(folder)
    if name not in names:
        has = f"it has {', '.join(names)}" if names else "jaxret index --workdir=... --factory=... builds one"
        raise FileNotFoundError(f"{folder} has no index {name!r}; {has}")


def open_index_manifest(encoded_corpus: EncodedCorpus, name: str) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the manifest of an index of a corpus.

    Raises FileNotFoundError if no index has the name, ShardError if the manifest is damaged, ValueError if the index
    was built from other vectors than the corpus has now, or its recall was not measured.
    """
    folder = index_folder(encoded_corpus.folder, name)
    require_index(encoded_corpus.folder, name)
    manifest = read_index_manifest(folder)
    if manifest["corpus"] != identity_of(encoded_corpus):
        indexed_passages, current_passages = manifest["corpus"]["passages"], encoded_corpus.corpus_identity["passages"]
        raise ValueError(
            f"{folder} is an index of other vectors ({indexed_passages:,} passages). The corpus was changed since, and "
            f"has {current_passages:,}: {BUILD} "
            f"--factory={manifest['factory']} --name={name}, or search exactly, without an index"
        )
    if manifest.get("recall") is None:
        raise ValueError(f"{folder} was built, but its recall was not measured: run the same jaxret index again")
    return folder, manifest
