"""A ledger of the completed steps in a folder, so that no step runs twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from jaxret.storage.atomic import read_with_digest, sha256_file, sha256_json, with_digest, write_json


class Ledger:
    """Record of completed steps. Each has a file FOLDER/done/NAME.json with a fingerprint of its inputs and digests of
    its outputs.

    A step is complete if its inputs have the stored fingerprint and its files have the stored digests. A step that is
    killed before its file is written runs again.
    """

    def __init__(self, folder: Path, log: Callable[[str], None] | None = None) -> None:
        # Lines are flushed, so that a log file shows the current step.
        self.folder, self.log = folder, log or partial(print, flush=True)

    def run_step(
        self, name: str, inputs: Any, make: Callable[[], Iterable[Path]], is_complete: Callable[[], bool] = lambda: True
    ) -> dict[str, str]:
        """Run a step unless it is complete, and return {file: digest} of its outputs.

        Args:
            name: name of the step.
            inputs: JSON value with the settings of the step and the digests of its inputs.
            make: runs the step and returns the files that it wrote.
            is_complete: returns whether the data that the files describe exist, such as shards of a manifest.
        """
        fingerprint, path = sha256_json(inputs), self.folder / "done" / f"{name}.json"
        try:
            record = read_with_digest(path)
            same_inputs = record["fingerprint"] == fingerprint
            if same_inputs and self._are_unchanged(record["files"]) and is_complete():
                self.log(f"== {name}: already done")
                return record["files"]
            self.log(f"== {name}: runs again, because its {'files' if same_inputs else 'inputs'} changed")
        except FileNotFoundError:
            self.log(f"== {name}")
        except (ValueError, KeyError, TypeError):
            self.log(f"== {name}: runs again, because {path} is damaged")
        files = {os.path.relpath(output, self.folder): sha256_file(output) for output in make()}
        write_json(path, with_digest({"fingerprint": fingerprint, "inputs": inputs, "files": files}))
        return files

    def has(self, name: str, inputs: Any) -> bool:
        """Return whether a step is complete with these inputs."""
        try:
            record = read_with_digest(self.folder / "done" / f"{name}.json")
            return record["fingerprint"] == sha256_json(inputs) and self._are_unchanged(record["files"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False

    def forget(self, name: str) -> None:
        """Delete the entry of a step, so that it runs again."""
        (self.folder / "done" / f"{name}.json").unlink(missing_ok=True)

    def _are_unchanged(self, files: dict[str, str]) -> bool:
        paths = [(self.folder / name, digest) for name, digest in files.items()]
        return all(path.is_file() and sha256_file(path) == digest for path, digest in paths)
