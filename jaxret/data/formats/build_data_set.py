"""Build a versioned data set of TFDS from any source. It is read as tfds:FOLDER, or by the folder's path without a
prefix.

FOLDER/passages/VERSION         split "full": the corpus
       other_passages/VERSION   split "full": texts that only training records have, if such texts exist
       queries/VERSION          split "full", or one for each split
       judgements/VERSION       one for each split
       examples/VERSION         one for each split: training records, with a teacher's scores

The passages are written last, so a version with passages is complete. The data set has the folder's name.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.errors import Policy
from jaxret.data.formats.beir import QRELS_KEYS
from jaxret.data.formats.built_records import FEATURES, OTHER_PASSAGES, PASSAGES, WHOLE_SPLIT
from jaxret.data.formats.convert import Conversion, CountedRecords, no_records_error
from jaxret.data.formats.data_source import DataSource
from jaxret.data.formats.dataset import FullDataSet, open_data_set
from jaxret.data.libraries import tfds
from jaxret.data.lines import PathLike
from jaxret.data.records import Example, Judgement, Passage, Query
from jaxret.storage.atomic import require_folder_path, storage_errors, sync, sync_tree
from jaxret.storage.folder_kinds import DATA_SET, require_folder_kind
from jaxret.storage.lockfile import FolderLock
from jaxret.storage.unfinished import locked_folder, sweep, temporary_path

# BEIR's keys
_TEXTS = {"_id": str, "title": str, "text": str}
_QUERIES = {"_id": str, "text": str, "answers": [str], "instruction": str}
_JUDGEMENTS = dict(zip(QRELS_KEYS, (str, str, int), strict=True))
Rows = dict[Passage, int]


def build_data_set(
    source: DataSource, folder: PathLike, version: str, split: str = "train", policy: Policy | None = None
) -> Conversion:
    """Write all records of a source as a data set of TFDS. Training records are held in memory, passages are not.

    Args:
        source: a folder, file or named set.
        folder: folder of the data set, which gets the folder's name.
        version: three numbers, such as "1.0.0".
        split: the split of a training file.
        policy: what to do with bad records; by default an error.

    Raises:
        ValueError: TFDS does not allow the name or the version, the version exists, or the parent folder does not.
        FileExistsError: the folder is of another kind.
        LockedError: another job builds in the folder.
        DataError: a bad record, or no record.
    """
    folder, policy = Path(folder).absolute(), policy or Policy()
    require_folder_path(folder, "FOLDER")
    _check_names(folder, version)
    work, is_new = temporary_path(folder), not folder.exists()
    with storage_errors(folder):
        folder.mkdir(exist_ok=True)
        lock = FolderLock(folder, "building a data set")  # before the checks, because `sweep` removes leftovers
        try:
            sweep(folder)
            _check_version(folder, version)
            data = open_data_set(source, split, policy)
            if bad := [split for split in data.splits if split == "all" or not re.fullmatch(r"[\w-]+", split)]:
                raise ValueError(f"{source}: TFDS does not allow a split named {bad[0]!r}; rename its files")
            work.mkdir()
            with locked_folder(work):
                conversion, tables = _Builder(work, folder.name, version, Conversion(data.source)).write(data)
                if not any(conversion.records.values()):
                    raise no_records_error(source.path, policy)
                _publish(work / folder.name, folder, tables, version)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            lock.release()
            if is_new:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # empty only if the job failed
    return conversion


def _publish(work_folder: Path, folder: Path, tables: list[str], version: str) -> None:
    """Move the tables of a version into the folder, the passages last. First remove the tables of a killed build."""
    sync_tree(work_folder)
    for table in (PASSAGES, OTHER_PASSAGES, "queries", "judgements", "examples"):
        shutil.rmtree(folder / table / version, ignore_errors=True)
    for config in tables:
        (folder / config).mkdir(exist_ok=True)
        os.replace(work_folder / config / version, folder / config / version)
        sync(folder / config)
    sync(folder)


def _check_names(folder: Path, version: str) -> None:
    require_folder_kind(folder, DATA_SET)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", folder.name):
        raise ValueError(
            f"{folder}: the name of a data set of TFDS has lowercase letters, digits and _. Give the folder such a name"
        )
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"--version={version}: a version of TFDS has three numbers, such as 1.0.0")


def _check_version(folder: Path, version: str) -> None:
    if (folder / PASSAGES / version).exists():
        versions = ", ".join(tfds.list_versions(folder / PASSAGES))
        raise ValueError(f"{folder} has version {version} already (it has {versions}); give --version a higher one")


class _Builder:
    """Writes the tables one after the other, and counts their records."""

    def __init__(self, work: Path, name: str, version: str, conversion: Conversion) -> None:
        self.work, self.name, self.version, self.conversion = work, name, version, conversion
        self.tables: list[str] = []

    def write(self, data: FullDataSet) -> tuple[Conversion, list[str]]:
        """Write all tables. Return the counts of records and lost values, and the names of the tables in the order in
        which `_publish` moves them."""
        examples = {split: data.examples(split) for split in data.splits if split in data.splits_with_examples}
        rows: Rows = {
            p: 0 for records_of in examples.values() for e in records_of for p in (*e.positives, *e.negatives)
        }
        self._write_table(PASSAGES, _TEXTS, {WHOLE_SPLIT: _corpus(data.passages(), rows)})
        if not self.tables:
            raise ValueError(f"{data.source} has no passage, and a data set needs passages")
        other_passages = _number_other_passages(rows)
        self._write_table(OTHER_PASSAGES, _TEXTS, {WHOLE_SPLIT: map(_text, other_passages)} if other_passages else {})
        queries = (
            {split: data.queries(split) for split in data.splits}
            if data.queries_by_split
            else {WHOLE_SPLIT: data.queries(None)}
        )
        self._write_table(
            "queries", _QUERIES, {split: map(_query, records_of) for split, records_of in queries.items()}
        )
        judgements_by_split = {split: data.judgements(split) for split in data.splits}
        self._write_table(
            "judgements",
            _JUDGEMENTS,
            {split: map(_judgement, records_of) for split, records_of in judgements_by_split.items()},
        )
        scores = (
            s for records_of in examples.values() for e in records_of for s in (*e.positive_scores, *e.negative_scores)
        )
        self.conversion.losses["digits of scores that float32 does not have"] = sum(
            not np.isnan(score) and score != float(np.float32(score)) for score in scores
        )
        every_positive = data.every_positive
        records = {
            split: (_record(example, rows, every_positive) for example in records_of)
            for split, records_of in examples.items()
        }
        self._write_table("examples", FEATURES, records)
        return self.conversion, self.tables[::-1]

    def _write_table(
        self, config: str, features: dict[str, Any], splits: Mapping[str, Iterable[dict[str, Any]]]
    ) -> None:
        tables = {split: rows for split, records in splits.items() if (rows := CountedRecords(records))}
        if not tables:
            return
        tfds.write_tfds_table(self.work, self.name, config, self.version, features, tables)
        self.tables.append(config)
        for split, rows in tables.items():
            self.conversion.records[f"{config}/{split}"] = len(rows)


def _corpus(passages: Iterable[Passage], rows: Rows) -> Iterator[dict[str, Any]]:
    """Yield the records of a corpus, and note the row (from 1) of each passage that also is in training records."""
    for number, passage in enumerate(passages, 1):
        if passage in rows:
            rows[passage] = number
        yield _text(passage)


def _number_other_passages(rows: Rows) -> list[Passage]:
    """Return the passages that are not in the corpus. Renumber `rows`: passages of the corpus have rows from 0 up, the
    other passages rows from -1 down."""
    other_passages = [passage for passage, row in rows.items() if not row]
    for passage, row in rows.items():
        rows[passage] = row - 1
    for number, passage in enumerate(other_passages):
        rows[passage] = ~number
    return other_passages


def _text(passage: Passage) -> dict[str, Any]:
    return dict(zip(_TEXTS, (passage.id, passage.title, passage.text), strict=True))


def _query(query: Query) -> dict[str, Any]:
    return dict(zip(_QUERIES, (query.id, query.text, list(query.answers), query.instruction), strict=True))


def _judgement(judgement: Judgement) -> dict[str, Any]:
    return dict(zip(_JUDGEMENTS, (judgement.query_id, judgement.passage_id, judgement.relevance), strict=True))


def _record(example: Example, rows: Rows, every_positive: bool) -> dict[str, Any]:
    sides = ([rows[passage] for passage in side] for side in (example.positives, example.negatives))
    scores = example.positive_scores, example.negative_scores
    values = (*_query(example.query).values(), *sides, *map(list, scores), every_positive)
    return dict(zip(FEATURES, values, strict=True))
