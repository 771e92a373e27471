"""The seal of a run: digests of the files that decide its results or record their origin, to detect edits and damage.

seal.json has digests of the values in config.json, contract.json, data.json, env.json and parameters.json (indentation
does not count), of the bytes of history.jsonl and of every file in encoder/, and of itself. A user who deletes it
accepts the files as they are: opening the run then prints a warning on stderr, and resuming it writes a new seal.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxret.runs.mismatch import ContractError
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import (
    atomic_write,
    read_json,
    read_with_digest,
    sha256_bytes,
    sha256_file,
    sha256_json,
    with_digest,
    write_json,
)


def write_sealed(workdir: Workdir, values: Mapping[Path, Any]) -> None:
    """Write files of a run in the order of `values`, and its seal. A str is written as it is, other values as JSON.

    If the job is killed before the end, the folder passes `check_seal`: until all files are written, the seal also
    allows their previous digests (null for a file that did not exist).
    """
    names = {
        _name(workdir, path): sha256_bytes(value.encode()) if isinstance(value, str) else sha256_json(value)
        for path, value in values.items()
    }
    old = {_name(workdir, path): _digest(workdir, path) for path in _sealed_files(workdir)}
    new = old | names
    _write(workdir, {name: [old.get(name), digest] for name, digest in new.items()})
    for path, value in values.items():
        if isinstance(value, str):
            with atomic_write(path) as file:
                file.write(value)
        else:
            write_json(path, value)
    _write(workdir, {name: [digest] for name, digest in new.items()})


def check_seal(workdir: Workdir) -> None:
    """Raise ContractError with the path of the first file that is missing, new or changed.

    Without a seal, nothing is checked, and a warning is printed on stderr.
    """
    if not workdir.seal.exists():
        print(f"{workdir.seal} was deleted; the files of the run are accepted unchanged", file=sys.stderr)
        return
    # Checked twice: a job that resumes may have written between reading the seal and reading a file.
    if _problem(workdir) and (problem := _problem(workdir)):
        raise ContractError(problem)


def _problem(workdir: Workdir) -> str:
    """Return an error message for the first file that does not match the seal; "" if all do."""
    remedy = f"restore it; or, if you meant the change, delete {workdir.seal}: the folder is then accepted as it is"
    try:
        content = read_with_digest(workdir.seal)
    except ValueError:
        return f"{workdir.seal} is damaged or was edited; {remedy}"
    paths = {_name(workdir, path): path for path in _sealed_files(workdir)}
    for name in sorted(paths.keys() | content["files"].keys()):
        digests = content["files"].get(name, [])
        if name not in paths:
            if None in digests:  # a job was killed before it wrote the file
                continue
            return f"{workdir.path / name} is missing; {remedy}"
        if not digests:
            return f"{paths[name]} is not a file of this run; remove it"
        if _digest(workdir, paths[name]) not in digests:
            return f"{paths[name]} is damaged or was edited; {remedy}"
    return ""


def _write(workdir: Workdir, files: Mapping[str, list[str | None]]) -> None:
    write_json(workdir.seal, with_digest({"files": files}))


def _sealed_files(workdir: Workdir) -> list[Path]:
    records = (workdir.config, workdir.contract, workdir.data, workdir.environment, workdir.parameters, workdir.history)
    encoder = sorted(path for path in workdir.encoder.glob("*") if path.is_file() and not path.name.startswith("."))
    return [path for path in records if path.exists()] + encoder


def _name(workdir: Workdir, path: Path) -> str:
    return path.relative_to(workdir.path).as_posix()


def _digest(workdir: Workdir, path: Path) -> str:
    if path.parent != workdir.path or path == workdir.history:
        return sha256_file(path)
    try:
        return sha256_json(read_json(path))
    except ValueError:
        return "not JSON"
