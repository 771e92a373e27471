"""What was done in a folder, so that it is not done again: a file for each step, written when the step is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from jaxret.storage import read_sealed, sealed, sha256_file, sha256_json, write_json


class Ledger:
    """<folder>/done/NAME.json: a fingerprint of what the step was made from, and digests of what it made.

    A step is done if its fingerprint is the one written and its files are as they were; killed before that is written,
    it is done again."""

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        self.folder, self.say = folder, say or partial(print, flush=True)  # a log shows at once what is under way

    def do(
        self,
        name: str,
        made_from: Any,
        make: Callable[[], Iterable[Path]],
        whole: Callable[[], bool] = lambda: True,
    ) -> dict[str, str]:
        """Calls `make`, which returns the files it made, unless the step is done. made_from (JSON): settings, and
        digests of inputs. whole: whether what these files describe is there. Returns a digest by file."""
        fingerprint, path = sha256_json(made_from), self.folder / "done" / f"{name}.json"
        try:
            found = read_sealed(path)
            if found["fingerprint"] == fingerprint and self._as_written(found["files"]) and whole():
                self.say(f"== {name}: done already")
                return found["files"]
            self.say(
                f"== {name}: again, for {'its inputs' if found['fingerprint'] != fingerprint else 'its files'} changed"
            )
        except FileNotFoundError:
            self.say(f"== {name}")
        except (ValueError, KeyError, TypeError):
            self.say(f"== {name}: again, for {path} is damaged")
        files = {os.path.relpath(made, self.folder): sha256_file(made) for made in make()}
        write_json(path, sealed({"fingerprint": fingerprint, "made_from": made_from, "files": files}))
        return files

    def forget(self, name: str) -> None:
        """The step is to be done again."""
        (self.folder / "done" / f"{name}.json").unlink(missing_ok=True)

    def _as_written(self, files: dict[str, str]) -> bool:
        paths = [(self.folder / name, digest) for name, digest in files.items()]
        return all(path.is_file() and sha256_file(path) == digest for path, digest in paths)
