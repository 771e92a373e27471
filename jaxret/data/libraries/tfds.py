"""Sets of TensorFlow Datasets in array_record files, read and written without TensorFlow.

<data dir>/NAME/[CONFIG/]VERSION/dataset_info.json  features.json  NAME-SPLIT.array_record-00000-of-00001

A path may stand for the name (tfds:/data/scifact). A version may follow the name (tfds:scifact:1.0.0); the default is
the newest. If a set has passages, all its tables are read in the version of the passages, which are written last. So
a version that was built in part is not read.
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

_PASSAGES = "passages"
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_BLOCK = 512  # records read at a time
_DEFAULT = "default"  # name of the only table of a set without configs


def tfds_folder() -> Path:
    """Return the folder where TFDS keeps data sets."""
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def list_versions(folder: Path) -> list[str]:
    """Return the complete versions in a folder, the newest last."""
    names = [path.parent.name for path in folder.glob("*/dataset_info.json") if _VERSION.fullmatch(path.parent.name)]
    return sorted(names, key=lambda version: [int(part) for part in version.split(".")])


def is_tfds_set(folder: Path) -> bool:
    """Return whether a folder is a data set of TFDS, or a config of such a set."""
    return folder.is_dir() and bool(
        list_versions(folder) or any(list_versions(path) for path in folder.iterdir() if path.is_dir())
    )


def open_tfds_set(path: Path) -> NamedSet:
    """Open a set of this library, see `open_named_set`. Raises DataError for a version that was not built."""
    root, folder, version, table_parts = _split_name(path)
    versions = {sub.name: list_versions(sub) for sub in sorted(folder.iterdir()) if sub.is_dir()}
    configs = {name: folder / name for name, numbers in versions.items() if numbers}
    if not configs:
        configs, versions = {_DEFAULT: folder}, {_DEFAULT: list_versions(folder)}
    choices = versions.get(_PASSAGES) or [number for numbers in versions.values() for number in numbers]
    if version and version not in choices:
        raise Location(path).error(
            "missing version", f"this set has no version {version}", f"its versions are {', '.join(choices)}"
        )
    common_version = version or (choices[-1] if _PASSAGES in configs else "")
    folders = {
        name: config / (common_version or versions[name][-1])
        for name, config in configs.items()
        if not common_version or common_version in versions[name]
    }
    info = {name: _read_info(folder) for name, folder in folders.items()}
    tables = {name: tuple(split["name"] for split in table.get("splits", ())) for name, table in info.items()}
    newest = common_version or ", ".join(sorted({folder.name for folder in folders.values()}))

    def open_table(config: str, split: str) -> Table:
        files = _files_of_split(folders[config], info[config], split)
        for table in folders if config == "examples" else ():  # examples refer to rows of the tables of passages
            if table.endswith(_PASSAGES):
                files += [file for name in tables[table] for file in _files_of_split(folders[table], info[table], name)]
        return _open_table(path, folders[config], info[config], split, tuple(files))

    return NamedSet(root, f"{folder.name} {newest} of TFDS", tables, open_table).select(table_parts)


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
        problem = "this folder has no data set of TFDS"
        raise Location(path).error("missing set", problem, "a set has VERSION/dataset_info.json, or CONFIG/VERSION/...")
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
    except Exception as error:  # a damaged file raises errors of TFDS, protobuf or array_record
        raise _damage_error(folder, error) from error

    def rows_at(rows: Sequence[int]) -> list[Record]:
        try:
            return [_plain_value(record) for record in source.__getitems__([int(row) for row in rows])]
        except Exception as error:
            raise _damage_error(folder, error) from error

    def read_rows() -> Iterator[Record]:
        for start in range(0, len(source), _BLOCK):
            yield from rows_at(range(start, min(start + _BLOCK, len(source))))

    return Table(
        f"{folder.parent.name}/{split} of {info['name']} {folder.name}", read_rows, files, rows_at, len(source)
    )


def _damage_error(folder: Path, error: Exception) -> Exception:
    reason = (str(error) or type(error).__name__).strip().splitlines()[0]
    return Location(folder).error("damaged set", f"TFDS cannot read it ({reason})", "build or fetch the set again")


def _plain_value(value: Any) -> Any:
    """Return a value of TFDS in JSON's types. TFDS gives texts as bytes, and lists as arrays."""
    if isinstance(value, Mapping):
        return {key: _plain_value(member) for key, member in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain_value(member) for member in value]
    return value.decode("utf-8") if isinstance(value, bytes) else value


@contextlib.contextmanager
def _quiet_logs(tfds: Any) -> Iterator[None]:
    """Run the block without log lines and progress bars of TFDS, which go to stdout and stderr."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.enable_progress_bar()
        logging.set_verbosity(verbosity)


def write_tfds_table(
    data_dir: Path,
    name: str,
    config: str,
    version: str,
    features: Mapping[str, Any],
    splits: Mapping[str, Iterable[Record]],
) -> Path:
    """Write a table of a data set to <data_dir>/NAME/CONFIG/VERSION, and return this path. Records keep their order.

    Args:
        data_dir: folder where TFDS keeps data sets.
        name: name of the data set.
        config: name of the table.
        version: version number with two points, such as "1.0.0".
        features: key -> type of its value (str, int, float, bool); a list of one type means a list of such values.
        splits: split -> its records, one or more.
    """
    path = Path(f"tfds:{name}")
    tfds = import_library(path)
    kinds = {str: tfds.features.Text(), int: np.int64, float: np.float32, bool: np.bool_}

    def feature(kind: Any) -> Any:
        return tfds.features.Sequence(feature(kind[0])) if isinstance(kind, list) else kinds[kind]

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[name-defined, misc, call-arg]
        VERSION = tfds.core.Version(version)
        code_path = None  # TFDS looks for a file of checksums next to this path
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)]  # noqa: RUF012

        def _info(self) -> Any:  # TFDS calls this method and the two below
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
