"""Everything in a folder against its digests: a run with its checkpoints and encoded corpora, an encoded corpus, an
index of one, or a store of tokens. Nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxret.checkpoint import CheckpointError
from jaxret.contract import ContractError
from jaxret.data.formats import DataError
from jaxret.retrieval.approximate import check_index_file, identity_of, read_index_manifest
from jaxret.retrieval.collapse import alarm
from jaxret.retrieval.encoded import open_encoded
from jaxret.retrieval.parts import Part, read_parts
from jaxret.retrieval.passages import unchanged_corpus
from jaxret.retrieval.shard_set import ShardSet
from jaxret.retrieval.shards import (
    BEGUN,
    Manifest,
    ShardError,
    file_problems,
    plan_shards,
    read_entry,
    read_manifest,
    read_sealed,
)
from jaxret.runs.run import open_checkpoints, stored_config
from jaxret.runs.workdir import Workdir
from jaxret.storage import sha256_file


class Checked(NamedTuple):
    """Something that was looked at. problem: what is wrong with it, a sentence; "" if nothing is. alarm: what is as it
    was written, and can hardly be meant."""

    name: str
    problem: str = ""
    alarm: str = ""


def verify(folder: str | Path) -> Iterator[Checked]:
    """What there is in a folder, piece by piece. Raises ValueError if it is none of what can be verified."""
    folder = Path(folder)
    if (folder / "config.json").exists():
        yield from _run(Workdir(folder))
    elif _is_corpus(folder):
        yield from _corpus(folder)
    elif folder.absolute().parent.name == "indexes":
        yield _tried(folder / "manifest.json", lambda: _approximate(folder.absolute()))
    elif (folder / "manifest.json").exists():
        yield from _columns(folder)
    else:
        raise ValueError(
            f"{folder} is no run, no encoded corpus, no index and no store of tokens: there is nothing to verify"
        )


def _is_corpus(folder: Path) -> bool:
    """Whether a folder is, or was to be, of vectors; the manifest alone says so too."""
    if any(folder.glob("shard-*.json")) or any((folder / name).exists() for name in (BEGUN, "parts.json")):
        return True
    return "shards" in (read_entry(folder / "manifest.json") or {})


def _tried(name: str | Path, act: Callable[[], object]) -> Checked:
    try:
        act()
    except (CheckpointError, ContractError, DataError, ShardError, OSError, ValueError) as error:
        return Checked(str(name), str(error))
    return Checked(str(name))


def _run(workdir: Workdir) -> Iterator[Checked]:
    opened = _tried(workdir.seal, lambda: stored_config(workdir))
    yield opened
    if not opened.problem:
        config = stored_config(workdir)
        for path in sorted(workdir.checkpoints.glob("*")):
            if path.name.isdigit():
                yield _tried(path, lambda: _checkpoint(workdir, config, int(path.name)))  # noqa: B023
    corpora = [path for path in sorted(workdir.path.glob("embeddings/*")) if path.is_dir()]
    for path in corpora:
        yield from _corpus(path)
    yield Checked(str(workdir.path / "embeddings"), alarm=_mixed(corpora))


def _mixed(corpora: list[Path]) -> str:
    """A sentence if the corpora of a run were encoded by several of its checkpoints."""
    made_by: dict[str, str] = {}  # checkpoint -> the last corpus that has it
    for path in corpora:
        for manifest in path.rglob("manifest.json"):
            if checkpoint := (read_entry(manifest) or {}).get("fingerprint", {}).get("checkpoint"):
                made_by[f"step {checkpoint.get('step')} ({checkpoint.get('digest')})"] = path.name
    if len(made_by) < 2:
        return ""
    each = ", ".join(f"{name!r} by {checkpoint}" for checkpoint, name in made_by.items())
    return f"{corpora[0].parent} mixes models: {each}; scores of different models cannot be compared"


def _checkpoint(workdir: Workdir, config: Any, step: int) -> None:
    with open_checkpoints(workdir, config) as checkpoints:
        checkpoints.check(step)


def _corpus(folder: Path) -> Iterator[Checked]:
    """An encoded corpus: its parts and what is kept beside them."""
    parts: list[Part] = []
    if (folder / "parts.json").exists():
        yield _tried(folder / "parts.json", lambda: parts.extend(read_parts(folder)))
    for name in [part.name for part in parts] or [""]:
        yield from _shards(folder / name)
    for manifest in sorted(folder.glob("indexes/*/manifest.json")):
        yield _tried(manifest, lambda: _approximate(manifest.parent))  # noqa: B023


def _shards(folder: Path) -> Iterator[Checked]:
    manifest = folder / "manifest.json"
    read = _tried(manifest, lambda: read_manifest(manifest))
    yield read if manifest.exists() else Checked(str(manifest), f"{manifest} does not exist; run encode again")
    if not read.problem:
        found = read_manifest(manifest)
        damaged = False
        for shard, entry in zip(plan_shards(found.total_rows, found.rows_per_shard), found.shards, strict=True):
            problems = [str(problem) for problem in file_problems(folder, shard, entry, verify=True)]
            damaged |= bool(problems)
            yield from [Checked(str(shard.vectors(folder)), problem) for problem in problems or [""]]
            yield _tried(shard.sidecar(folder), lambda: _same_model(shard.sidecar(folder), found))  # noqa: B023
        if not damaged:
            yield Checked(f"{folder}: collapse", alarm=alarm(ShardSet(folder, found)))
    yield _tried(folder / "corpus.json", lambda: unchanged_corpus(folder))
    if (folder / "passages.json").exists():
        yield _tried(folder / "passages.npy", lambda: _index(folder))
    if (folder / "metadata").exists():
        yield from _columns(folder / "metadata")


def _same_model(sidecar: Path, manifest: Manifest) -> None:
    if read_sealed(sidecar).get("fingerprint") != manifest.fingerprint:
        raise ShardError(f"{sidecar}: made from something else than the manifest says; run encode again")


def _approximate(folder: Path) -> None:
    found = read_index_manifest(folder)
    check_index_file(folder, found)
    if found["corpus"] != identity_of(open_encoded(folder.parent.parent, verify=False)):
        raise ShardError(f"{folder} is an index of other vectors than the corpus has now; build it again")


def _index(folder: Path) -> None:
    made = read_sealed(folder / "passages.json")
    for key, name in {"sha256_index": "passages.npy", "sha256_copy": "passages.jsonl"}.items():
        if key in made and sha256_file(folder / name) != made[key]:
            raise ShardError(f"{folder / name}: damaged; the next search makes it again")


def _columns(folder: Path) -> Iterator[Checked]:
    """A folder of columns: a store of tokens, or what filters look at."""
    made: dict[str, Any] = {}
    yield _tried(folder / "manifest.json", lambda: made.update(read_sealed(folder / "manifest.json")))
    for name, written in made.get("columns", {}).items():
        yield _tried(folder / f"{name}.npy", lambda: _column(folder / f"{name}.npy", written))  # noqa: B023


def _column(path: Path, written: Any) -> None:
    if path.stat().st_size != written["bytes"] or sha256_file(path) != written["sha256"]:
        raise ShardError(f"{path}: damaged (its SHA-256 is not the one that was written); it is made again when needed")
