"""Runs of several kinds and a corpus in parts, for tests of commands that change an encoded corpus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxret.runs.run import Run
from tests.pipeline import untrained_run, write_data, write_encoder


def write_parts(folder: Path, parts: Mapping[str, slice]) -> Path:
    """Write an encoder, a data set, and files NAME.jsonl with parts of its corpus; return the folder."""
    write_encoder(folder / "encoder")
    lines = (write_data(folder / "data") / "corpus.jsonl").read_text().splitlines(keepends=True)
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(lines[part]))
    return folder


class RunsByKind(dict[str, Run]):
    """A dictionary that trains and encodes a run of a kind when it is first used."""

    def __init__(self, root: Path, kinds: Mapping[str, dict[str, Any]], encode: Callable[[Run, Path], object]) -> None:
        self.root, self.kinds, self.encode = root, kinds, encode

    def __missing__(self, kind: str) -> Run:
        root = self.root
        self[kind] = run = untrained_run(root / kind, root / "encoder", root / "data", **self.kinds[kind])
        self.encode(run, root)
        return run
