"""Check that an output replaces no file of its sources, and no file that a run needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxret.data.errors import DataError
from jaxret.data.formats.detect import detect_file, source_path
from jaxret.data.formats.source_layout import is_folder, role_files
from jaxret.data.libraries.named import is_named
from jaxret.data.libraries.open_sets import open_table
from jaxret.data.lines import PathLike, find_file
from jaxret.storage.folder_kinds import require_no_folder_file


def require_other_output(
    out: PathLike, sources: Iterable[tuple[str, PathLike]], splits: Iterable[str | None] = ()
) -> None:
    """Raise ValueError if `out` is a file of one of the sources, or a file of a run other than rankings. Call this
    function before any work.

    A missing source is no error here, because its reader reports it.

    Args:
        out: file that will be written.
        sources: (description for the error, folder, file or named set; "" for no source).
        splits: splits that are read; their files may have any names.
    """
    require_no_folder_file(out)
    if not os.path.exists(out):
        return
    for description, source in sources:
        files = source_files(source, splits) if source else ()
        if any(os.path.exists(file) and os.path.samefile(out, file) for file in files):
            raise ValueError(
                f"the output {out} is a file of {source} ({description}), which would be lost. Give another name"
            )


def source_files(source: PathLike, splits: Iterable[str | None] = ()) -> Iterator[Path]:
    """Yield all files that may be read from a source.

    For a folder or named set, these are its files for all roles and splits. For a file, these are the file itself and
    the files beside it with the texts of its ids or the answers of its queries.
    """
    path = source_path(source)
    if is_folder(path):
        yield from role_files(path, splits)
    elif is_named(path):
        yield from open_table(path).files
    else:
        yield path
        if path.name.startswith("queries.jsonl") and (answers := find_file(path.parent, "answers.jsonl")):
            yield answers
        if _has_texts_elsewhere(source):
            yield from role_files(path.parent, splits)


def _has_texts_elsewhere(source: PathLike) -> bool:
    try:
        return detect_file(source).format.id_examples is not None
    except DataError:  # its format or its library is unknown, so it cannot be read either
        return False
