"""Any source -> a versioned data set of TFDS, that is read in place: tfds:FOLDER, or the folder's path alone.

FOLDER/passages/VERSION         full: the corpus
       other_passages/VERSION   full: texts that only training records have, if there are such
       queries/VERSION          full, or a split each
       judgements/VERSION       a split each
       examples/VERSION         a split each: training records, with a teacher's scores

A version is whole when its passages are there: they come last. The folder's name is the set's.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.data.errors import Policy
from jaxret.data.formats.beir import QRELS_KEYS
from jaxret.data.formats.built_records import FEATURES, OTHERS, PASSAGES, WHOLE_SPLIT
from jaxret.data.formats.convert import Conversion
from jaxret.data.formats.dataset import FullDataSet, open_data_set
from jaxret.data.libraries import tfds
from jaxret.data.lines import PathLike
from jaxret.data.records import Example, Judgement, Passage, Query
from jaxret.storage.atomic import require_folder_path, storage_errors, sync, sync_tree
from jaxret.storage.folder_kinds import DATA_SET, require_folder_kind
from jaxret.storage.lockfile import FolderLock
from jaxret.storage.unfinished import locked_folder, sweep, temporary_path

_TEXTS = {"_id": str, "title": str, "text": str}
_QUERIES = {"_id": str, "text": str, "answers": [str], "instruction": str}
_JUDGEMENTS = dict(zip(QRELS_KEYS, (str, str, int)))
Rows = dict[Passage, int]


def build_data_set(
    source: PathLike, folder: PathLike, version: str, split: str = "train", policy: Policy | None = None
) -> Conversion:
    """Write all that a source holds as a data set of TFDS. Training records are held in memory, passages are not.

    Args:
        source: a folder, file or named set.
        folder: of the data set; its name is the set's.
        version: three numbers, as "1.0.0".
        split: the split of a training file.
        policy: what to do with bad records; by default an error.

    Raises:
        ValueError: TFDS does not take the name or the version, the version exists, or the folder would be in one that
            does not.
        FileExistsError: the folder is of another kind.
        LockedError: another job builds in the folder.
        DataError: a bad record.
    """
    folder = Path(folder).absolute()
    require_folder_path(folder, "FOLDER")
    _check_names(folder, version)
    work, is_new = temporary_path(folder), not folder.exists()
    with storage_errors(folder):
        folder.mkdir(exist_ok=True)
        lock = FolderLock(folder, "building a data set")  # before a refusal, which removes leftovers of a killed job
        try:
            sweep(folder)
            _check_version(folder, version)
            data = open_data_set(source, split, policy or Policy())
            if bad := [split for split in data.splits if split == "all" or not re.fullmatch(r"[\w-]+", split)]:
                raise ValueError(f"{source}: TFDS takes no split that is called {bad[0]!r}; name its files otherwise")
            work.mkdir()
            with locked_folder(work):
                conversion, tables = _Builder(work, folder.name, version, Conversion(data.source)).write(data)
                _publish(work / folder.name, folder, tables, version)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            lock.release()
            if is_new:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # nothing was written: a job that failed leaves nothing behind
    return conversion


def _publish(work_folder: Path, folder: Path, tables: list[str], version: str) -> None:
    """Move the tables of a version into the folder, the passages last, after removing those of a killed build."""
    sync_tree(work_folder)
    for table in (PASSAGES, OTHERS, "queries", "judgements", "examples"):
        shutil.rmtree(folder / table / version, ignore_errors=True)
    for config in tables:
        (folder / config).mkdir(exist_ok=True)
        os.replace(work_folder / config / version, folder / config / version)
        sync(folder / config)
    sync(folder)


def _check_names(folder: Path, version: str) -> None:
    require_folder_kind(folder, DATA_SET)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", folder.name):
        raise ValueError(f"{folder}: a data set of TFDS is called by small letters, digits and _; name the folder so")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"--version={version}: a version of TFDS is three numbers, as 1.0.0")


def _check_version(folder: Path, version: str) -> None:
    if (folder / PASSAGES / version).exists():
        have = ", ".join(tfds.list_versions(folder / PASSAGES))
        raise ValueError(f"{folder} has version {version} already (it has {have}); give --version a higher one")


class _Builder:
    """Writes the tables one after the other, and keeps account."""

    def __init__(self, work: Path, name: str, version: str, conversion: Conversion) -> None:
        self.work, self.name, self.version, self.conversion = work, name, version, conversion
        self.tables: list[str] = []

    def write(self, data: FullDataSet) -> tuple[Conversion, list[str]]:
        """Write all tables; return the account of them and their names, in the order in which they may appear."""
        examples = {split: data.examples(split) for split in data.splits if split in data.splits_with_examples}
        rows: Rows = {
            p: 0 for records_of in examples.values() for e in records_of for p in (*e.positives, *e.negatives)
        }
        self._table(PASSAGES, _TEXTS, {WHOLE_SPLIT: _corpus(data.passages(), rows)})
        if not self.tables:
            raise ValueError(f"{data.source}: there is no passage, and a data set is of passages")
        others = _number_others(rows)
        self._table(OTHERS, _TEXTS, {WHOLE_SPLIT: map(_text, others)} if others else {})
        queries = (
            {split: data.queries(split) for split in data.splits}
            if data.queries_by_split
            else {WHOLE_SPLIT: data.queries(None)}
        )
        self._table(
            "queries", _QUERIES, {split: map(_query, records_of) for split, records_of in queries.items() if records_of}
        )
        judgements_by_split = {split: data.judgements(split) for split in data.splits}
        self._table(
            "judgements",
            _JUDGEMENTS,
            {split: map(_judgement, records_of) for split, records_of in judgements_by_split.items() if records_of},
        )
        scores = (
            s for records_of in examples.values() for e in records_of for s in (*e.positive_scores, *e.negative_scores)
        )
        self.conversion.losses["digits of scores that float32 does not have"] = sum(
            not np.isnan(score) and score != float(np.float32(score)) for score in scores
        )
        whole = data.every_positive
        records = {
            split: (_record(e, rows, whole) for e in records_of) for split, records_of in examples.items() if records_of
        }
        self._table("examples", FEATURES, records)
        return self.conversion, self.tables[::-1]

    def _table(self, config: str, features: dict[str, Any], splits: Mapping[str, Iterable[dict[str, Any]]]) -> None:
        tables = {split: _Rows(rows) for split, rows in splits.items()}
        tables = {split: rows for split, rows in tables.items() if rows}
        if not tables:
            return
        tfds.write_tfds_table(self.work, self.name, config, self.version, features, tables)
        self.tables.append(config)
        for split, rows in tables.items():
            self.conversion.records[f"{config}/{split}"] = rows.count


class _Rows:
    """Records that are counted while they are written; false if there is none."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.count, self._rest = 0, iter(rows)
        self._first = list(islice(self._rest, 1))

    def __bool__(self) -> bool:
        return bool(self._first)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in chain(self._first, self._rest):
            self.count += 1
            yield row


def _corpus(passages: Iterable[Passage], rows: Rows) -> Iterator[dict[str, Any]]:
    """Yield the records of a corpus, and note the row (from 1) of each passage that training records have."""
    for number, passage in enumerate(passages, 1):
        if passage in rows:
            rows[passage] = number
        yield _text(passage)


def _number_others(rows: Rows) -> list[Passage]:
    """Return the passages that are in no corpus; rows count from 0 then, theirs from -1 down."""
    others = [passage for passage, row in rows.items() if not row]
    for passage, row in rows.items():
        rows[passage] = row - 1
    for number, passage in enumerate(others):
        rows[passage] = ~number
    return others


def _text(passage: Passage) -> dict[str, Any]:
    return {"_id": passage.id, "title": passage.title, "text": passage.text}


def _query(query: Query) -> dict[str, Any]:
    return {
        "_id": query.id,
        "text": query.text,
        "answers": list(query.answers),
        "instruction": query.instruction,
    }


def _judgement(judgement: Judgement) -> dict[str, Any]:
    return dict(zip(QRELS_KEYS, (judgement.query_id, judgement.passage_id, judgement.relevance)))


def _record(example: Example, rows: Rows, every_positive: bool) -> dict[str, Any]:
    return {
        "query_id": example.query.id,
        "query": example.query.text,
        "answers": list(example.query.answers),
        "instruction": example.query.instruction,
        "positives": [rows[passage] for passage in example.positives],
        "negatives": [rows[passage] for passage in example.negatives],
        "positive_scores": list(example.positive_scores),
        "negative_scores": list(example.negative_scores),
        "every_positive": every_positive,
    }
