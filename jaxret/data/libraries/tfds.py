"""Sets of TensorFlow Datasets, read and written without TensorFlow: those whose files are array_record.

<data dir>/NAME/[CONFIG/]VERSION/dataset_info.json  features.json  NAME-SPLIT.array_record-00000-of-00001

A path may stand for the name (tfds:/data/scifact), and a version may follow it (tfds:scifact:1.0.0); else it is the
newest. Of a set that has passages, every table is of their version: a set that was built in part is none.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from jaxret.data.errors import Location
from jaxret.data.libraries.named import NamedSet, Table, import_library, library_of, missing_set_error
from jaxret.data.records import Record

PASSAGES = "passages"
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_BLOCK = 512  # records read at a time
_DEFAULT = "default"  # name of the only table of a set without configs


def tfds_folder() -> Path:
    """Return where TFDS keeps sets."""
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def list_versions(folder: Path) -> list[str]:
    """Return the versions that are whole in a folder, the newest last."""
    names = [path.parent.name for path in folder.glob("*/dataset_info.json") if _VERSION.fullmatch(path.parent.name)]
    return sorted(names, key=lambda version: [int(part) for part in version.split(".")])


def is_tfds_set(folder: Path) -> bool:
    """Return whether a folder is a set of TFDS, or a config of one."""
    return folder.is_dir() and bool(
        list_versions(folder) or any(list_versions(path) for path in folder.iterdir() if path.is_dir())
    )


def open_tfds_set(path: Path) -> NamedSet:
    """Open a set of this library, see `open_named_set`. Raises DataError for a version that was not built."""
    root, folder, version, rest = _split_name(path)
    versions = {sub.name: list_versions(sub) for sub in sorted(folder.iterdir()) if sub.is_dir()}
    configs = {name: folder / name for name, numbers in versions.items() if numbers}
    if not configs:
        configs, versions = {_DEFAULT: folder}, {_DEFAULT: list_versions(folder)}
    choices = versions.get(PASSAGES) or [number for numbers in versions.values() for number in numbers]
    if version and version not in choices:
        raise Location(path).error(
            "missing version", f"there is no version {version}", f"there are {', '.join(choices)}"
        )
    common_version = version or (choices[-1] if PASSAGES in configs else "")
    folders = {
        name: config / (common_version or versions[name][-1])
        for name, config in configs.items()
        if not common_version or common_version in versions[name]
    }
    info = {name: _read_info(folder) for name, folder in folders.items()}
    tables = {name: tuple(split["name"] for split in one.get("splits", ())) for name, one in info.items()}
    newest = common_version or ", ".join(sorted({folder.name for folder in folders.values()}))

    def open_table(config: str, split: str) -> Table:
        files = _files_of_split(folders[config], info[config], split)
        for other in folders if config == "examples" else ():  # whose rows are of these tables
            if other.endswith(PASSAGES):
                files += [file for one in tables[other] for file in _files_of_split(folders[other], info[other], one)]
        return _open_table(path, folders[config], info[config], split, tuple(files))

    return NamedSet(root, f"{folder.name} {newest} of TFDS", tables, open_table).select(rest)


def _split_name(path: Path) -> tuple[Path, Path, str, tuple[str, ...]]:
    """Return (root, folder, version or "", further parts) of tfds:NAME/..., or tfds:/FOLDER/..."""
    parts = Path(library_of(path)[1]).parts
    for count in range(len(parts), 0, -1):
        last_part, colon, version = parts[count - 1].rpartition(":")
        if not (colon and _VERSION.fullmatch(version)):
            last_part, version = parts[count - 1], ""
        base = Path(*parts[: count - 1], last_part).expanduser()
        for folder in (tfds_folder() / base, base):
            if is_tfds_set(folder):
                if (config_versions := list_versions(folder)) and _read_info(folder / config_versions[-1]).get(
                    "configName"
                ):
                    return Path(f"tfds:{base.parent}"), folder.parent, version, (folder.name, *parts[count:])
                return Path(f"tfds:{Path(*parts[:count])}"), folder, version, parts[count:]
    name = parts[0].partition(":")[0] if parts else ""
    if str(path).startswith(("tfds:/", "tfds:.")):
        problem = "there is no data set of TFDS in this folder"
        raise Location(path).error("missing set", problem, "one has VERSION/dataset_info.json, or CONFIG/VERSION/...")
    fetch = f"tfds.builder('{name}', file_format='array_record').download_and_prepare()"
    problem = f"TFDS has no {name!r} in {tfds_folder()} (TFDS_DATA_DIR names another folder)"
    raise missing_set_error(path, problem, f'python -c "import tensorflow_datasets as tfds; {fetch}"')


def _read_info(folder: Path) -> dict[str, Any]:
    path = folder / "dataset_info.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Location(path).error(
            "damaged file", f"it cannot be read ({error})", "build or fetch the set again"
        ) from error


def _files_of_split(folder: Path, info: Mapping[str, Any], split: str) -> list[Path]:
    if info.get("fileFormat") != "array_record":
        problem = f"its files are {info.get('fileFormat') or 'tfrecord'}, which only TensorFlow reads"
        raise Location(folder).error("wrong format", problem, "prepare the set again with file_format='array_record'")
    shards = sorted(folder.glob(f"{info['name']}-{split}.array_record*"))
    return [*shards, folder / "features.json", folder / "dataset_info.json"]


def _open_table(path: Path, folder: Path, info: Mapping[str, Any], split: str, files: tuple[Path, ...]) -> Table:
    tfds = import_library(path)
    try:
        with _quiet_logs(tfds):
            source = tfds.builder_from_directory(str(folder)).as_data_source(split=split)
    except Exception as error:  # of TFDS, of its protocol buffers, of array_record: whatever a damaged file makes
        raise _damage_error(folder, error) from error

    def rows_at(rows: Sequence[int]) -> list[Record]:
        try:
            return [_plain_value(record) for record in source.__getitems__([int(row) for row in rows])]
        except Exception as error:
            raise _damage_error(folder, error) from error

    def every() -> Iterator[Record]:
        for start in range(0, len(source), _BLOCK):
            yield from rows_at(range(start, min(start + _BLOCK, len(source))))

    return Table(f"{folder.parent.name}/{split} of {info['name']} {folder.name}", every, files, rows_at, len(source))


def _damage_error(folder: Path, error: Exception) -> Exception:
    reason = (str(error) or type(error).__name__).strip().splitlines()[0]
    return Location(folder).error("damaged set", f"TFDS cannot read it ({reason})", "build or fetch the set again")


def _plain_value(value: Any) -> Any:
    """Return a value of TFDS as JSON has it: TFDS gives text as bytes, and lists as arrays."""
    if isinstance(value, Mapping):
        return {key: _plain_value(one) for key, one in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain_value(one) for one in value]
    return value.decode("utf-8") if isinstance(value, bytes) else value


@contextlib.contextmanager
def _quiet_logs(tfds: Any) -> Iterator[None]:
    """Run the block without the lines and bars of TFDS, which go to both streams."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.enable_progress_bar()
        logging.set_verbosity(before)


def write_tfds_table(
    data_dir: Path,
    name: str,
    config: str,
    version: str,
    features: Mapping[str, Any],
    splits: Mapping[str, Iterable[Record]],
) -> Path:
    """Write <data_dir>/NAME/CONFIG/VERSION, the records in their order; return its path.

    Args:
        data_dir: of TFDS.
        name: of the data set.
        config: of the table.
        version: as "1.0.0".
        features: key -> its type (str, int, float, bool), or a list of one.
        splits: split -> its records, of which there must be one at least.
    """
    path = Path(f"tfds:{name}")
    tfds = import_library(path)
    kinds = {str: tfds.features.Text(), int: np.int64, float: np.float32, bool: np.bool_}

    def feature(kind: Any) -> Any:
        return tfds.features.Sequence(feature(kind[0])) if isinstance(kind, list) else kinds[kind]

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[name-defined, misc, call-arg]
        VERSION = tfds.core.Version(version)
        code_path = None  # there is no file of checksums beside it
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)]  # noqa: RUF012

        def _info(self) -> Any:  # a name of TFDS, as those below
            feature_types = tfds.features.FeaturesDict({key: feature(kind) for key, kind in features.items()})
            return tfds.core.DatasetInfo(builder=self, features=feature_types, disable_shuffling=True)

        def _split_generators(self, _: Any) -> dict[str, Iterator[tuple[int, Record]]]:
            return {split: enumerate(rows) for split, rows in splits.items()}  # type: ignore[misc]

        def _generate_examples(self) -> Any:
            raise AssertionError("the splits are generators")

    Builder.name = name
    with _quiet_logs(tfds):
        builder = Builder(config=config, data_dir=str(data_dir), file_format="array_record")
        builder.download_and_prepare()
    return Path(str(builder.data_path))
