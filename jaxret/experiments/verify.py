"""Compare a folder with its digests: a run with its checkpoints and encoded corpora, an encoded corpus, an index, or a
store of tokens. Files are not changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxret.data.formats import DataError
from jaxret.index.encoded_corpus import open_encoded
from jaxret.index.encoding.collapse import collapse_warning
from jaxret.index.parts_list import CorpusPart, read_parts
from jaxret.index.passages import unchanged_corpus
from jaxret.index.shard_set import ShardSet
from jaxret.index.shards import (
    Manifest,
    ShardError,
    file_problems,
    plan_shards,
    read_entry,
    read_manifest,
    read_shard_json,
)
from jaxret.parallel.events import emit
from jaxret.runs.encoded_steps import ANNOUNCEMENT_FILE
from jaxret.runs.mismatch import ContractError
from jaxret.runs.run import open_checkpoints, require_base, stored_config
from jaxret.runs.workdir import Workdir
from jaxret.search.approximate.index_files import check_index_file, identity_of, read_index_manifest
from jaxret.storage.atomic import require_disk_path, sha256_file
from jaxret.storage.buckets.address import is_bucket_address
from jaxret.storage.buckets.bucket_folder import MANIFEST, BucketFolder
from jaxret.storage.buckets.copy_folder import bucket_problems, unnamed_objects
from jaxret.storage.buckets.working_copy import enclosing_folder, fetch_files, local_path
from jaxret.storage.checkpoint import CheckpointError


class Verification(NamedTuple):
    """The result for one item of a folder."""

    name: str  # path of the item
    problem: str = ""  # sentence about the damage; "" if the item is intact
    warning: str = ""  # sentence about a probable mistake in an intact item; "" for none


def verify_folder(folder: str | Path, delete_unused: bool = False) -> Iterator[Verification]:
    """Verify the items of a folder, and yield a result for each.

    If the folder is in a bucket, the bytes of all files that jaxret wrote are compared first; the other checks follow
    if all bytes are intact. With `delete_unused`, objects of the bucket's folder that belong to no file are deleted; no
    job may write to it at the same time.

    Raises FileNotFoundError if the folder does not exist, ValueError if it is of a kind that cannot be verified.
    """
    require_disk_path(folder)
    if delete_unused and not is_bucket_address(folder):
        raise ValueError(f"--delete_unused: {folder} is not in a bucket; give the address of a folder in a bucket")
    bytes_in_bucket: list[Verification] = []
    if is_bucket_address(folder):
        bytes_in_bucket = list(_verify_bucket(BucketFolder(enclosing_folder(os.fspath(folder))), delete_unused))
        yield from bytes_in_bucket
        if any(result.problem for result in bytes_in_bucket):
            return
    folder = local_path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give the folder of a run, an encoded corpus or an index")
    if (folder / "config.json").exists():
        yield from _verify_run(Workdir(folder))
    elif _is_corpus(folder):
        yield from _verify_corpus(folder)
    elif folder.absolute().parent.name == "indexes":
        yield _verify_index(folder.absolute())
    elif (folder / "manifest.json").exists():
        yield from _verify_metadata(folder)
    elif not bytes_in_bucket:  # if the folder is in a bucket, all its bytes have been compared
        raise ValueError(
            f"{folder} is not a run, an encoded corpus, an index or a store of tokens: there is nothing to verify"
        )


def report_verification(folder: str | Path, delete_unused: bool = False) -> None:
    """Verify a folder (`verify_folder`), and print damages, warnings and a summary. Raises ValueError if an item is
    damaged."""
    results = list(verify_folder(folder, delete_unused))
    damages = [result.problem for result in results if result.problem]
    warnings = [result.warning for result in results if result.warning]
    for line in (*(f"bad: {damage}" for damage in damages), *(f"warning: {warning}" for warning in warnings)):
        print(line)
    emit("verification", folder=folder, items=len(results), problems=damages, warnings=warnings)
    if damages:
        raise ValueError(f"{folder}: {len(damages):,} of {len(results):,} items are damaged, listed above")
    print(f"{folder}: {len(results):,} items verified, nothing is damaged")


def _verify_bucket(folder: BucketFolder, delete_unused: bool) -> Iterator[Verification]:
    if not folder.exists() and (objects := folder.bucket.list("data")):
        raise ValueError(
            f"{folder} has {len(objects):,} data objects, but no {MANIFEST}, which lists its files: it was deleted, or "
            "the job was killed before it was written"
        )
    for name, problem in bucket_problems(folder):
        yield Verification(f"{folder}/{name}", problem)
    orphans, busy = unnamed_objects(folder)
    if orphans:
        sentence = f"{folder}/data: {len(orphans):,} objects belong to no file; killed jobs leave such objects"
        if delete_unused:
            if busy:
                raise ValueError(
                    f"--delete_unused: a job writes to {folder}, or was killed while it did so ({busy[0]}); run this "
                    "job to its end first"
                )
            folder.bucket.delete(orphans)
            sentence = f"{folder}/data: {len(orphans):,} objects belonged to no file, and are deleted"
        yield Verification(f"{folder}/data", warning=sentence)


def _is_corpus(folder: Path) -> bool:
    """Return whether a folder is an encoded corpus. It may be incomplete, or have only a manifest."""
    if any(folder.glob("shard-*.json")) or any((folder / name).exists() for name in (ANNOUNCEMENT_FILE, "parts.json")):
        return True
    return "shards" in (read_entry(folder / "manifest.json") or {})


def _verification(name: str | Path, check: Callable[[], object]) -> Verification:
    try:
        check()
    except (CheckpointError, ContractError, DataError, ShardError, OSError, ValueError) as error:
        return Verification(str(name), str(error))
    return Verification(str(name))


def _verify_run(workdir: Workdir) -> Iterator[Verification]:
    verification = _verification(workdir.seal, lambda: stored_config(workdir))
    yield verification
    if not verification.problem:
        config = stored_config(workdir)
        for path in sorted(workdir.checkpoints.glob("*")):
            if path.name.isdigit():
                yield _verification(path, lambda: _restore_checkpoint(workdir, config, int(path.name)))  # noqa: B023
        if config.lora.rank:
            yield _verification(
                config.train.start_from or config.encoder.checkpoint, lambda: require_base(workdir, config)
            )
    corpora = [path for path in sorted(workdir.path.glob("embeddings/*")) if path.is_dir()]
    for path in corpora:
        yield from _verify_corpus(path)
    yield Verification(str(workdir.path / "embeddings"), warning=_describe_mixture(corpora))


def _describe_mixture(corpora: list[Path]) -> str:
    """Return a sentence if several checkpoints of a run encoded its corpora, else ""."""
    corpus_of_checkpoint: dict[str, str] = {}  # checkpoint -> the last corpus that it encoded
    for path in corpora:
        for manifest in path.rglob("manifest.json"):
            if checkpoint := (read_entry(manifest) or {}).get("fingerprint", {}).get("checkpoint"):
                corpus_of_checkpoint[f"step {checkpoint.get('step')} ({checkpoint.get('digest')})"] = path.name
    if len(corpus_of_checkpoint) < 2:
        return ""
    listing = ", ".join(f"{name!r} by {checkpoint}" for checkpoint, name in corpus_of_checkpoint.items())
    return f"{corpora[0].parent} mixes models: {listing}; scores of different models cannot be compared"


def _restore_checkpoint(workdir: Workdir, config: Any, step: int) -> None:
    with open_checkpoints(workdir, config) as checkpoints:
        checkpoints.check(step)


def _verify_corpus(folder: Path) -> Iterator[Verification]:
    """Verify an encoded corpus: its parts and its indexes."""
    parts: list[CorpusPart] = []
    if (folder / "parts.json").exists():
        yield _verification(folder / "parts.json", lambda: parts.extend(read_parts(folder)))
    for name in [part.name for part in parts] or [""]:
        yield from _verify_shards(folder / name)
    for manifest in sorted(folder.glob("indexes/*/manifest.json")):
        yield _verify_index(manifest.parent)


def _verify_shards(folder: Path) -> Iterator[Verification]:
    manifest = folder / "manifest.json"
    read = _verification(manifest, lambda: read_manifest(manifest))
    yield read if manifest.exists() else Verification(str(manifest), f"{manifest} does not exist; run encode again")
    if not read.problem:
        contents = read_manifest(manifest)
        damaged = False
        shards = plan_shards(contents.total_rows, contents.rows_per_shard)
        for shard, entry in zip(shards, contents.shards, strict=True):
            problems = [str(problem) for problem in file_problems(folder, shard, entry, verify=True)]
            damaged |= bool(problems)
            yield from [Verification(str(shard.array(folder, "vectors")), problem) for problem in problems or [""]]
            yield _verification(shard.sidecar(folder), lambda: _require_same_model(shard.sidecar(folder), contents))  # noqa: B023
        if not damaged:
            fetch_files(folder)  # the vectors of a run in a bucket may not be on this machine yet
            yield Verification(f"{folder}: collapse", warning=collapse_warning(ShardSet(folder, contents)))
    yield _verification(folder / "corpus.json", lambda: unchanged_corpus(folder))
    for name in ("passages", "records"):
        if (folder / f"{name}.json").exists():
            yield _verification(folder / f"{name}.npy", lambda: _verify_passage_offsets(folder, name))  # noqa: B023
    if (folder / "metadata").exists():
        yield from _verify_metadata(folder / "metadata")


def _require_same_model(sidecar: Path, manifest: Manifest) -> None:
    if read_shard_json(sidecar).get("fingerprint") != manifest.fingerprint:
        raise ShardError(f"{sidecar} belongs to other vectors than the manifest; run encode again")


def _verify_index(folder: Path) -> Verification:
    """Verify an approximate index. If its corpus was changed after the build, the index is intact, but no search uses
    it."""
    warning = ""

    def check() -> None:
        nonlocal warning
        manifest = read_index_manifest(folder)
        check_index_file(folder, manifest)
        if manifest["corpus"] != identity_of(open_encoded(folder.parent.parent, verify=False)):
            warning = f"{folder} was built from other vectors than the corpus has now; build it again"

    return _verification(folder / "manifest.json", check)._replace(warning=warning)


def _verify_passage_offsets(folder: Path, name: str) -> None:
    record = read_shard_json(folder / f"{name}.json")
    for key, ending in {"sha256_index": "npy", "sha256_copy": "jsonl"}.items():
        path = folder / f"{name}.{ending}"
        if key in record and sha256_file(path) != record[key]:
            raise ShardError(f"{path}: damaged; the next search makes it again")


def _verify_metadata(folder: Path) -> Iterator[Verification]:
    """Verify a folder of columns, which is a store of tokens or the metadata that filters read."""
    record: dict[str, Any] = {}
    yield _verification(folder / "manifest.json", lambda: record.update(read_shard_json(folder / "manifest.json")))
    for name, entry in record.get("columns", {}).items():
        yield _verification(folder / f"{name}.npy", lambda: _verify_column(folder / f"{name}.npy", entry))  # noqa: B023


def _verify_column(path: Path, entry: Any) -> None:
    if path.stat().st_size != entry["bytes"] or sha256_file(path) != entry["sha256"]:
        raise ShardError(f"{path}: damaged (its SHA-256 differs from the manifest's); it is created again when needed")
