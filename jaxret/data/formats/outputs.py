"""Check that an output replaces no file of its sources, and no file that a run needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxret.data.errors import DataError
from jaxret.data.formats.data_source import DataSource
from jaxret.data.libraries.named import is_named
from jaxret.data.lines import PathLike
from jaxret.storage.folder_kinds import require_no_folder_file


def require_other_output(
    out: PathLike, sources: Iterable[tuple[str, DataSource]], splits: Iterable[str | None] = ()
) -> None:
    """Raise ValueError if `out` is a file of one of the sources, or a file of a run other than rankings. Call this
    function before any work.

    A missing source is not an error here, because its reader reports it.

    Args:
        out: file that will be written.
        sources: (description for the error, folder, file or named set).
        splits: splits that are read; their files may have any names.
    """
    require_no_folder_file(out)
    if not os.path.exists(out):
        return
    for description, source in sources:
        if any(os.path.exists(file) and os.path.samefile(out, file) for file in _source_files(source, splits)):
            raise ValueError(
                f"the output {out} is a file of {source} ({description}), which would be lost. Give another name"
            )


def _source_files(source: DataSource, splits: Iterable[str | None]) -> Iterator[Path]:
    """Yield all files that may be read from a source: those of its layout and, for a file of ids, those of the folder
    that has the texts."""
    yield from source.layout.files(splits)
    if not (source.is_folder or is_named(source.path)) and _has_texts_elsewhere(source):
        yield from source.text_source(source.path).layout.files(splits)


def _has_texts_elsewhere(source: DataSource) -> bool:
    try:
        return source.file().format.id_examples is not None
    except DataError:  # a source of unknown format cannot be read either
        return False
