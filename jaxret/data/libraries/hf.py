"""Data sets of Hugging Face's library `datasets`: hf:OWNER/NAME from its cache, or hf:/FOLDER.

A folder has files (jsonl, csv, parquet) or was written by save_to_disk. Configs are tables, with their splits.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxret.data.errors import DataError, Location
from jaxret.data.libraries.named import NamedSet, Table, import_library, library_of, missing_set_error
from jaxret.data.records import Record

_BLOCK = 512  # rows read at a time
_DEFAULT = "default"


def open_hf_set(path: Path) -> NamedSet:
    """Open a set of this library, see `open_named_set`. Raises DataError for an unknown name, or a set that is not in
    the cache."""
    library = import_library(path)
    parts = Path(library_of(path)[1]).parts
    for count in range(len(parts), 0, -1):
        folder = Path(*parts[:count]).expanduser()
        if folder.is_dir():
            root, table_parts = Path(f"hf:{Path(*parts[:count])}"), parts[count:]
            if _is_saved(folder):
                return _open_saved_set(path, root, library, folder, table_parts)
            configs = _offline_result(path, partial(library.get_dataset_config_names, str(folder)), library)
            return _open_cached_set(path, root, library, str(folder.absolute()), configs, table_parts)
    if len(parts) < 2 or str(path).startswith(("hf:/", "hf:.")):
        problem = "this is neither a folder nor OWNER/NAME"
        raise Location(path).error(
            "missing set", problem, "write hf:OWNER/NAME, as the Hugging Face hub calls it, or hf:/FOLDER"
        )
    name = "/".join(parts[:2])
    configs = sorted({Path(info).parts[-4] for info in _cached_infos(library, name)})
    if not configs:
        load_all = f"[load_dataset({name!r}, c) for c in get_dataset_config_names({name!r})]"
        fetch = f'python -c "from datasets import *; {load_all}"'
        raise missing_set_error(path, f"the cache of datasets has no {name}", fetch)
    return _open_cached_set(path, Path(f"hf:{name}"), library, name, configs, parts[2:])


def _cached_infos(library: Any, name: str) -> list[str]:
    """Return the dataset_info.json files of a set of the hub in the library's cache:
    <cache>/OWNER___NAME/CONFIG/VERSION/HASH/dataset_info.json."""
    from datasets.naming import camelcase_to_snakecase

    owner, last = name.split("/")
    folder = Path(library.config.HF_DATASETS_CACHE).expanduser() / f"{owner}___{camelcase_to_snakecase(last)}"
    infos = []
    for info in folder.glob("*/*/*/dataset_info.json"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(info.read_text(encoding="utf-8")).get("splits"):
                infos.append(str(info))
    return infos


def _open_cached_set(
    path: Path, root: Path, library: Any, name: str, configs: Sequence[str], table_parts: Sequence[str]
) -> NamedSet:
    def splits_of(config: str) -> dict[str, Any]:
        key = name, config, _cache_state(library, name)
        if key not in _open:
            _open[key] = dict(_offline_result(path, lambda: library.load_dataset(name, config), library))
        return _open[key]

    tables = {config: tuple(splits_of(config)) for config in configs}
    title = f"{root.name} of datasets {library.__version__}"
    named_set = NamedSet(root, title, tables, lambda config, split: _open_table(path, splits_of(config)[split]))
    return named_set.select(table_parts)


# (name, config, state of its files) -> splits: loading a config again would take a tenth of a second.
_open: dict[tuple[str, str, tuple[Any, ...]], dict[str, Any]] = {}


def _cache_state(library: Any, name: str) -> tuple[Any, ...]:
    """Return the files from which a set is loaded, with size and time."""
    folder = Path(name)
    files = sorted(folder.rglob("*")) if folder.is_dir() else [Path(info) for info in _cached_infos(library, name)]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _open_saved_set(path: Path, root: Path, library: Any, folder: Path, table_parts: Sequence[str]) -> NamedSet:
    """Return the set that save_to_disk wrote: one table, with its splits or with one split that may have no name."""
    data = _offline_result(path, lambda: library.load_from_disk(str(folder)), library)
    splits = dict(data) if (folder / "dataset_dict.json").is_file() else {str(data.split or "train"): data}
    title = f"{folder.name} of datasets {library.__version__}"
    named_set = NamedSet(root, title, {_DEFAULT: tuple(splits)}, lambda _, split: _open_table(path, splits[split]))
    return named_set.select(table_parts)


def _offline_result(path: Path, read: Callable[[], Any], library: Any) -> Any:
    """Return a result of the library, offline. Its errors become DataErrors with one line of the reason."""
    with offline(library):
        try:
            return read()
        except DataError:
            raise
        except Exception as error:  # the library's loaders, pyarrow and fsspec raise errors of many classes
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise Location(path).error(
                "unreadable set", f"datasets cannot load it ({reason})", "fetch or write it again"
            ) from error


@contextlib.contextmanager
def offline(library: Any) -> Iterator[None]:
    """Run the block without downloads and progress bars."""
    offline_setting = library.config.HF_HUB_OFFLINE
    library.config.HF_HUB_OFFLINE = True
    bars = library.is_progress_bar_enabled() if hasattr(library, "is_progress_bar_enabled") else False
    library.disable_progress_bars()
    level = library.logging.get_verbosity()
    library.logging.set_verbosity_error()
    try:
        yield
    finally:
        library.config.HF_HUB_OFFLINE = offline_setting
        library.logging.set_verbosity(level)
        if bars:
            library.enable_progress_bars()


def _open_table(path: Path, data: Any) -> Table:
    def rows_at(rows: Sequence[int]) -> list[Record]:
        columns = data[[int(row) for row in rows]]
        return [dict(zip(columns, values)) for values in zip(*columns.values())]

    def read_rows() -> Iterator[Record]:
        for start in range(0, len(data), _BLOCK):
            columns = data[start : start + _BLOCK]
            yield from (dict(zip(columns, values)) for values in zip(*columns.values()))

    files = tuple(Path(entry["filename"]) for entry in data.cache_files)
    return Table(str(path), read_rows, files, rows_at, len(data))
