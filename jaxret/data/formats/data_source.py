"""A source as a user names it: whether it is a file, a folder or a named set, and the formats of its files.

A source is opened where a user names it: in `cli/` and `api/`, or where a config is read. `Corpus`, `QuerySource`,
`JudgementSource`, `TrainingSource` and `RankingSource` open it for the records of one role.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from jaxret.data.errors import DataError
from jaxret.data.formats.detect import choose_format, parse_source
from jaxret.data.formats.file_sample import FileSample, read_sample
from jaxret.data.formats.format import DataFile
from jaxret.data.formats.source_layout import Layout, open_layout, text_folder
from jaxret.data.libraries.named import is_named, library_of, set_name
from jaxret.data.libraries.open_sets import list_files
from jaxret.data.lines import PathLike, missing_file_error
from jaxret.storage.buckets.working_copy import shown_path


@dataclass(frozen=True)
class DataSource:
    """A source of any roles. The beginning of each of its files is read once for all roles.

    Printed, it is the source as the user named it.
    """

    source: str  # As the user named it
    format_name: str  # The format that it forces; "": the content decides
    path: Path
    _samples: dict[Path, FileSample] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def open(cls, source: PathLike) -> DataSource:
        """Return the source that "PATH", "FORMAT:PATH" or the name of a set describes. Its files are read later. Raises
        ValueError for an unknown format."""
        return cls(str(source), *parse_source(source))

    def __str__(self) -> str:
        return self.source

    @property
    def name(self) -> str:
        """The name of the folder, file or named set, in one word."""
        return set_name(self.path) if is_named(self.path) else self.path.absolute().name

    @property
    def absolute(self) -> str:
        """The source with its path from the root."""
        path = self.path
        if is_named(path):
            library, set_path = library_of(path)
            path = Path(f"{library}:{Path(set_path).absolute()}") if Path(set_path).exists() else path
        else:
            path = path.absolute()
        return f"{self.format_name}:{shown_path(path)}" if self.format_name else shown_path(path)

    @cached_property
    def layout(self) -> Layout:
        """Which of the files have which roles."""
        return open_layout(self.path, self._gives)

    @property
    def is_folder(self) -> bool:
        """Whether this is a folder of files, or a named set of tables, with different contents."""
        return self.layout.is_folder

    def file(self, role: str = "") -> DataFile:
        """Return the only file of the source with its format, see `detect`."""
        return self.detect(self.path, role)

    def detect(self, path: Path, role: str = "") -> DataFile:
        """Return a file of the source with its format, see `choose_format`. Raises DataError if it is missing, or if it
        has no known format or no records of the role."""
        key = path.absolute()
        if key not in self._samples:
            if not (is_named(path) or path.exists()):
                raise missing_file_error(path)
            self._samples[key] = read_sample(path)
        return choose_format(path, self._samples[key], self.format_name, role)

    def _gives(self, path: Path, role: str) -> bool:
        try:
            return replace(self, format_name="").detect(path).format.gives(role)
        except DataError as error:
            if error.reason in ("unknown format", "wrong format"):
                return False
            raise

    def member(self, path: Path) -> DataSource:
        """Return a file or folder in the source as a separate source, which forces the same format."""
        return replace(self, source=f"{self.format_name}:{path}" if self.format_name else str(path), path=path)

    def text_source(self, path: Path) -> DataSource:
        """Return the folder or named set that has the texts for the ids in a file of the source."""
        return replace(DataSource.open(text_folder(path)), _samples=self._samples)


@dataclass(frozen=True)
class RoleSource:
    """A source that was opened for the records of a role. Printed, it is the source as the user named it."""

    data: DataSource

    def __str__(self) -> str:
        return self.source

    @property
    def source(self) -> str:
        return self.data.source

    @property
    def is_folder(self) -> bool:
        return self.data.is_folder

    def describe(self) -> str:
        """Return the format in words."""
        raise NotImplementedError


@dataclass(frozen=True)
class FileSource(RoleSource):
    """A source whose records of a role are in one file or table."""

    file: DataFile

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The files that are read. Raises DataError if a library does not say which these are."""
        return list_files(self.file.path)

    def describe(self) -> str:
        return str(self.file)
