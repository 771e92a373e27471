"""Data sets of Hugging Face's library `datasets`: hf:OWNER/NAME from its cache, or hf:/FOLDER.

A folder is one of files (jsonl, csv, parquet), or one that save_to_disk wrote. Configs are tables, with their splits.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxret.data.files import DataError, Where
from jaxret.data.libraries.named import NamedSet, Record, Table, absent, library_of, module

_BLOCK = 512  # rows read at a time
_DEFAULT = "default"


def open_set(path: Path) -> NamedSet:
    """See `named.opened`."""
    library = module(path)
    parts = Path(library_of(path)[1]).parts
    for count in range(len(parts), 0, -1):
        folder = Path(*parts[:count]).expanduser()
        if folder.is_dir():
            root, rest = Path(f"hf:{Path(*parts[:count])}"), parts[count:]
            if _is_saved(folder):
                return _saved(path, root, library, folder, rest)
            configs = _told(path, partial(library.get_dataset_config_names, str(folder)), library)
            return _loaded(path, root, library, str(folder.absolute()), configs, rest)
    if len(parts) < 2 or str(path).startswith(("hf:/", "hf:.")):
        found = "this is neither a folder nor OWNER/NAME"
        raise Where(path).error(
            "missing set", found, "write hf:OWNER/NAME, as the Hugging Face hub calls it, or hf:/FOLDER"
        )
    name = "/".join(parts[:2])
    configs = sorted({Path(info).parts[-4] for info in _cached(library, name)})
    if not configs:
        every = f"[load_dataset({name!r}, c) for c in get_dataset_config_names({name!r})]"
        fetch = f'python -c "from datasets import *; {every}"'
        raise absent(path, f"the cache of datasets has no {name}", fetch)
    return _loaded(path, Path(f"hf:{name}"), library, name, configs, parts[2:])


def _cached(library: Any, name: str) -> list[str]:
    """The descriptions of what the library keeps of a set of the hub: <cache>/OWNER___NAME/CONFIG/VERSION/HASH/."""
    from datasets.naming import camelcase_to_snakecase

    owner, last = name.split("/")
    folder = Path(library.config.HF_DATASETS_CACHE).expanduser() / f"{owner}___{camelcase_to_snakecase(last)}"
    found = []
    for info in folder.glob("*/*/*/dataset_info.json"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(info.read_text(encoding="utf-8")).get("splits"):
                found.append(str(info))
    return found


def _loaded(path: Path, root: Path, library: Any, name: str, configs: Sequence[str], rest: Sequence[str]) -> NamedSet:
    def splits_of(config: str) -> dict[str, Any]:
        key = name, config, _state(library, name)
        if key not in _open:
            _open[key] = dict(_told(path, lambda: library.load_dataset(name, config), library))
        return _open[key]

    tables = {config: tuple(splits_of(config)) for config in configs}
    title = f"{root.name} of datasets {library.__version__}"
    return NamedSet(root, title, tables, lambda config, split: _table(path, splits_of(config)[split])).asked(rest)


_open: dict[tuple[str, str, tuple[Any, ...]], dict[str, Any]] = {}  # loading one again takes a tenth of a second


def _state(library: Any, name: str) -> tuple[Any, ...]:
    """What a set is loaded from, by size and time."""
    given = Path(name)
    files = sorted(given.rglob("*")) if given.is_dir() else [Path(info) for info in _cached(library, name)]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return tuple((file, found.st_size, found.st_mtime_ns) for file, found in stats)


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _saved(path: Path, root: Path, library: Any, folder: Path, rest: Sequence[str]) -> NamedSet:
    """What save_to_disk wrote: one table, with its splits, or a split without a name."""
    found = _told(path, lambda: library.load_from_disk(str(folder)), library)
    splits = dict(found) if (folder / "dataset_dict.json").is_file() else {str(found.split or "train"): found}
    title = f"{folder.name} of datasets {library.__version__}"
    return NamedSet(root, title, {_DEFAULT: tuple(splits)}, lambda _, split: _table(path, splits[split])).asked(rest)


def _told(path: Path, read: Callable[[], Any], library: Any) -> Any:
    """What the library gives, from this machine alone; its errors in a sentence."""
    with offline(library):
        try:
            return read()
        except DataError:
            raise
        except Exception as error:  # of its loaders, of pyarrow, of fsspec
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise Where(path).error(
                "unreadable set", f"datasets cannot load it ({reason})", "fetch or write it again"
            ) from error


@contextlib.contextmanager
def offline(library: Any) -> Iterator[None]:
    """Nothing is fetched inside, and no bar is drawn."""
    before = library.config.HF_HUB_OFFLINE
    library.config.HF_HUB_OFFLINE = True
    bars = library.is_progress_bar_enabled() if hasattr(library, "is_progress_bar_enabled") else False
    library.disable_progress_bars()
    level = library.logging.get_verbosity()
    library.logging.set_verbosity_error()
    try:
        yield
    finally:
        library.config.HF_HUB_OFFLINE = before
        library.logging.set_verbosity(level)
        if bars:
            library.enable_progress_bars()


def _table(path: Path, data: Any) -> Table:
    def at(rows: Sequence[int]) -> list[Record]:
        columns = data[[int(row) for row in rows]]
        return [dict(zip(columns, values)) for values in zip(*columns.values())]

    def every() -> Iterator[Record]:
        for start in range(0, len(data), _BLOCK):
            columns = data[start : start + _BLOCK]
            yield from (dict(zip(columns, values)) for values in zip(*columns.values()))

    files = tuple(Path(one["filename"]) for one in data.cache_files)
    return Table(str(path), every, files, at, len(data))
