"""The journal of an export to a store. It lists the finished shards, after which a killed export continues.

<out>/_journal/begun.json    written first: the exported vectors and the table
               00000.json    written when the shard is in the store
      _manifest.json         written last: all of these, and the comparison; the journal is removed

Names begin with _, because pyarrow ignores such names when it reads a folder of Parquet files.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxret.runs.mismatch import require_equal
from jaxret.storage.atomic import read_with_digest, with_digest, write_json
from jaxret.storage.buckets.working_copy import publish

JOURNAL_MANIFEST, _JOURNAL = "_manifest.json", "_journal"


class ExportJournal:
    """The journal: `entries` of the finished shards, in order, and whether the export `has_begun`."""

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        """Read the journal in `out`, if there is one. `identity` describes the exported vectors and the table, as JSON.

        Raises FileExistsError for a folder that is not an export, ContractError for another export, and ValueError for
        a damaged file.
        """
        self.out, self._identity = out, dict(identity)
        self.entries: list[dict[str, Any]] = []
        manifest, start = out / JOURNAL_MANIFEST, out / _JOURNAL / "begun.json"
        self.has_begun = manifest.exists() or start.exists()
        if not self.has_begun:
            if any(path for path in out.iterdir() if not path.name.startswith((".", "_"))):
                raise FileExistsError(f"{out} exists already, but is no export to a store; give a new folder")
            return
        path = manifest if manifest.exists() else start
        contents = read_with_digest(path)
        remedy = "Give a new --out (and --table); the earlier export stays unchanged."
        require_equal(contents["export"], self._identity, str(path), "this export", remedy)
        if path == manifest:
            self.entries = contents["shards"]
            return
        while (path := self._entry(len(self.entries))).exists():
            self.entries.append(read_with_digest(path)["shard"])

    def _entry(self, number: int) -> Path:
        return self.out / _JOURNAL / f"{number:05d}.json"

    def begin(self) -> None:
        """Write to the journal that the export has started."""
        write_json(self.out / _JOURNAL / "begun.json", with_digest({"export": self._identity}))
        publish(self.out)
        self.has_begun = True

    def note(self, entry: Mapping[str, Any]) -> None:
        """Write to the journal that the next shard is finished."""
        write_json(self._entry(len(self.entries)), with_digest({"shard": dict(entry)}))
        publish(self.out)
        self.entries.append(dict(entry))

    def finish(self, comparison: Mapping[str, Any]) -> None:
        """Write the manifest, and remove the journal."""
        content = {"export": self._identity, "shards": self.entries, "comparison": dict(comparison)}
        write_json(self.out / JOURNAL_MANIFEST, with_digest(content))
        shutil.rmtree(self.out / _JOURNAL, ignore_errors=True)
