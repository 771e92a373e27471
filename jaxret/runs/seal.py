"""The seal of a run: digests of the files that decide its results or say where they come from, so that no edited or
damaged one is believed.

seal.json holds a digest of config.json, contract.json, data.json and env.json (of their content: how they are indented
changes nothing), of history.jsonl and every file of encoder/ (of their bytes), and of itself. Version 1 has nothing of
env.json and history.jsonl. A run without one was made by an older jaxret, or its seal was deleted to accept what the
folder holds: that is said whenever it is opened, and resuming it makes a new one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxret.contract import ContractError
from jaxret.runs.workdir import Workdir
from jaxret.storage import atomic_write, read_json, sha256_bytes, sha256_file, sha256_json, write_json

VERSION = 2


def write_sealed(workdir: Workdir, values: Mapping[Path, Any]) -> None:
    """Writes files of a run, in the order given, and its seal: a str as it is, anything else as JSON. Killed anywhere
    in between, the folder is believed all the same: until all are written, the seal allows what was there before, too
    (null: that a file is missing, because there was none).
    """
    names = {
        _name(workdir, path): sha256_bytes(value.encode()) if isinstance(value, str) else sha256_json(value)
        for path, value in values.items()
    }
    before = {_name(workdir, path): _digest(workdir, path) for path in _sealed(workdir)}
    allowed = {name: [before.get(name), names.get(name, before.get(name))] for name in before | names}
    _write(workdir, {name: list(dict.fromkeys(each)) for name, each in allowed.items()})
    for path, value in values.items():
        if isinstance(value, str):
            with atomic_write(path) as file:
                file.write(value)
        else:
            write_json(path, value)
    _write(workdir, {name: [digest] for name, digest in (before | names).items()})


def check_seal(workdir: Workdir) -> None:
    """Raises ContractError naming the first file that is missing, new, or not as the run wrote it. Where there is no
    seal, nothing can be checked, and a line on stderr says so."""
    if not workdir.seal.exists():
        told = "an older jaxret made it, or it was deleted; the files of the run are taken as they are"
        print(f"{workdir.seal} is not there: {told}", file=sys.stderr)
        return
    # Twice, because a job that goes on may have written between the reading of the seal and of a file.
    if _problem(workdir) and (problem := _problem(workdir)):
        raise ContractError(problem)


def _problem(workdir: Workdir) -> str:
    """Which file is not as the seal says, and what would be right; "" if none is."""
    remedy = f"restore it; or, if the change was meant, delete {workdir.seal}: the folder is then taken as it is"
    try:
        content = read_json(workdir.seal)
        itself = content.pop("sha256")
        sound = sha256_json(content) == itself
    except (ValueError, AttributeError, KeyError, TypeError):
        sound = False
    if not sound:
        return f"{workdir.seal} is damaged or was edited; {remedy}"
    there = {_name(workdir, path): path for path in _sealed(workdir, content["version"])}
    for name in sorted(there.keys() | content["files"].keys()):
        allowed = content["files"].get(name, [])
        if name not in there:
            if None in allowed:  # a job was killed before it wrote it
                continue
            return f"{workdir.path / name} is missing; {remedy}"
        if not allowed:
            return f"{there[name]} is not a file of this run; remove it"
        if _digest(workdir, there[name]) not in allowed:
            return f"{there[name]} is damaged or was edited; {remedy}"
    return ""


def _write(workdir: Workdir, files: Mapping[str, list[str | None]]) -> None:
    content = {"version": VERSION, "files": files}
    write_json(workdir.seal, {**content, "sha256": sha256_json(content)})


def _sealed(workdir: Workdir, version: int = VERSION) -> list[Path]:
    later = (workdir.environment, workdir.history) if version > 1 else ()
    own = [path for path in (workdir.config, workdir.contract, workdir.data, *later) if path.exists()]
    return own + sorted(p for p in workdir.encoder.glob("*") if p.is_file() and not p.name.startswith("."))


def _name(workdir: Workdir, path: Path) -> str:
    return path.relative_to(workdir.path).as_posix()


def _digest(workdir: Workdir, path: Path) -> str:
    if path.parent != workdir.path or path == workdir.history:
        return sha256_file(path)
    try:
        return sha256_json(read_json(path))
    except ValueError:
        return "not JSON"
