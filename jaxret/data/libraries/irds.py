"""Sets of ir_datasets: irds:ID, whose tables are docs, queries, qrels, docpairs and scoreddocs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jaxret.data.errors import DataError, Location
from jaxret.data.libraries.named import NamedSet, Table, import_library, library_of, missing_set_error
from jaxret.data.records import Record

_TABLES = ("docs", "queries", "qrels", "docpairs", "scoreddocs")
_SPLITS = ("train", "dev", "validation", "test")


class FetchError(Exception):
    """ir_datasets was about to fetch something."""


def open_irds_set(path: Path) -> NamedSet:
    """Open a set of this library, see `open_named_set`. Raises DataError if ir_datasets has no such set."""
    library = import_library(path)
    name = library_of(path)[1]
    table_parts: tuple[str, ...] = ()
    parts = name.split("/")
    for last in range(len(parts), 0, -1):  # ids contain slashes: the longest id of a set wins
        data_set = _load_set(library, "/".join(parts[:last]))
        if data_set is not None and (last == len(parts) or parts[last] in _TABLES):
            name, table_parts = "/".join(parts[:last]), tuple(parts[last:])
            break
    else:
        similar_names = get_close_matches(name, list(library.registry), n=3)
        remedy = f"near are {', '.join(similar_names)}" if similar_names else "ir-datasets.com lists all sets"
        raise Location(path).error("unknown set", f"ir_datasets has no set {name!r}", remedy)
    split = next((part for part in parts[:last] if part in _SPLITS), parts[last - 1])
    tables = {table: (split,) for table in _TABLES if data_set.has(table)}

    def open_table(config: str, _: str) -> Table:
        return _open_table(path, library, data_set, name, config)

    root = Path(f"irds:{name}")
    named_set = NamedSet(root, f"{name} of ir_datasets {library.__version__}", tables, open_table, split=split)
    return named_set.select(table_parts)


def _load_set(library: Any, name: str) -> Any:
    with contextlib.suppress(KeyError), _DOWNLOADS.disable(library):
        return library.load(name)
    return None


def _open_table(path: Path, library: Any, data_set: Any, name: str, config: str) -> Table:
    def rows() -> Iterator[Record]:
        try:
            with _DOWNLOADS.disable(library):
                for entry in getattr(data_set, f"{config}_iter")():
                    yield _RECORDS[config](entry)
        except (GeneratorExit, DataError):
            raise
        except Exception as error:  # errors of ir_datasets, of the network, and of the libraries that read its files
            if any(isinstance(cause, FetchError) for cause in (error, *_causes(error))):
                fetch = f"ir_datasets export {name} {config} > /dev/null"
                raise missing_set_error(
                    path, f"ir_datasets does not have the {config} of {name!r} on this machine", fetch
                ) from error
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise Location(path).error(
                "damaged set", f"ir_datasets cannot read its {config} ({reason})", "fetch it again"
            ) from error

    handler = getattr(data_set, f"{config}_handler")()
    files = sorted({file.absolute() for file in _files_of(handler, set()) if file.is_file()})
    return Table(f"{config} of {name} (ir_datasets {library.__version__})", rows, tuple(files))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the causes of an error. ir_datasets puts the errors of several mirrors into the arguments of one error."""
    for cause in (error.__cause__, error.__context__):
        if cause is not None:
            yield cause
            yield from _causes(cause)
    for argument in error.args:
        for pair in argument if isinstance(argument, (list, tuple)) else ():
            yield from (
                value for value in (pair if isinstance(pair, (list, tuple)) else ()) if isinstance(value, BaseException)
            )


class _DownloadGuard:
    """Disables the library's downloads and its log during every read. The library has no option for this."""

    def __init__(self) -> None:
        self._readers, self._streams, self._log = 0, dict[Any, Any](), logging.getLogger("ir_datasets")

    @contextlib.contextmanager
    def disable(self, library: Any) -> Iterator[None]:
        self._readers += 1
        if self._readers == 1:
            downloads = library.util.download
            self._streams = {kind: kind.stream for kind in vars(downloads).values() if _is_download(kind, downloads)}
            for kind in self._streams:
                kind.stream = _refuse_download
            self._log.addFilter(_drop_record)
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                for kind, stream in self._streams.items():
                    kind.stream = stream
                self._log.removeFilter(_drop_record)


_DOWNLOADS = _DownloadGuard()


def _refuse_download(download: Any) -> Any:
    raise FetchError(getattr(download, "url", getattr(download, "uri", "")))


def _drop_record(_: logging.LogRecord) -> bool:
    return False


def _is_download(kind: Any, downloads: Any) -> bool:
    return (
        isinstance(kind, type)
        and issubclass(kind, downloads.BaseDownload)
        and kind not in (downloads.BaseDownload, downloads.LocalDownload)
        and "stream" in vars(kind)
    )


def _files_of(value: Any, visited_ids: set[int]) -> Iterator[Path]:
    """Yield the files that a handler of ir_datasets reads, by a search through all its attributes."""
    if id(value) in visited_ids:
        return
    visited_ids.add(id(value))
    if isinstance(value, (list, tuple, set, frozenset)):
        for element in value:
            yield from _files_of(element, visited_ids)
        return
    if isinstance(value, dict):
        yield from _files_of(list(value.values()), visited_ids)
        return
    if not type(value).__module__.startswith("ir_datasets") or isinstance(value, type):
        return
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    path = attributes.get("_cache_path") or attributes.get("_path") or attributes.get("_extract_path")
    if isinstance(path, (str, Path)):
        yield Path(path)
        if "_streamer" in attributes and Path(path).exists():  # a copy, which is read instead of its origin
            return
    for attribute in attributes.values():
        yield from _files_of(attribute, visited_ids)


def _doc_record(entry: Any) -> Record:
    title = getattr(entry, "title", "") or ""
    text = getattr(entry, "text", None)
    if text is None:  # a document with many fields: the library knows its text
        title, text = "", entry.default_text()
    return {"doc_id": entry.doc_id, "title": title, "text": text}


def _query_record(entry: Any) -> Record:
    text = getattr(entry, "text", None)
    answers = getattr(entry, "answers", ())
    record = {"query_id": entry.query_id, "text": entry.default_text() if text is None else text}
    return {**record, "answers": list(answers)} if answers else record


_RECORDS: dict[str, Callable[[Any], Record]] = {
    "docs": _doc_record,
    "queries": _query_record,
    "qrels": lambda entry: {"query_id": entry.query_id, "doc_id": entry.doc_id, "relevance": entry.relevance},
    "docpairs": lambda entry: {
        "query_id": entry.query_id,
        "doc_id_a": entry.doc_id_a,
        "doc_id_b": entry.doc_id_b,
    },
    "scoreddocs": lambda entry: {"query_id": entry.query_id, "doc_id": entry.doc_id, "score": entry.score},
}
