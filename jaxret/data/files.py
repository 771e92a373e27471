"""Text files line by line, and what to do about a line that is wrong.

Every reader checks what it reads where it reads it: a bad id found here costs a line of text, found after a night of
encoding it costs the night. A `DataError` says where, what was found and what to do; a `Policy` says whether that stops
the run or is counted.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, runtime_checkable

from jaxret.data.records import Passage, Query
from jaxret.storage import atomic_write

PathLike = str | os.PathLike[str]


class DataError(ValueError):
    """Bad input. Reads "FILE:LINE: what was found; what to do"; `reason` is its short name, for counting."""

    def __init__(self, where: Where, reason: str, found: str, remedy: str) -> None:
        super().__init__(where, reason, found, remedy)
        self.where, self.reason, self.found, self.remedy = where, reason, found, remedy

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; {self.remedy}"


class Where(NamedTuple):
    """A place in a file: a line number from 1, or words where lines mean nothing ("record 7"), or the whole file."""

    path: Path
    line: int | str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.line is None else f"{self.path}:{self.line}"

    def error(self, reason: str, found: str, remedy: str) -> DataError:
        return DataError(self, reason, found, remedy)


@dataclass
class Policy:
    """What to do with a bad record: "error" raises it, "skip" leaves it out and counts it by reason.

    A place is counted once for each reason, however often the file is read (scanned, then streamed). Missing and
    truncated files are always errors: there is no record to leave out.
    """

    on_error: str = "error"
    examples_kept: int = 3
    skipped: Counter[str] = field(default_factory=Counter, init=False)
    _places: dict[str, set[Where]] = field(default_factory=dict, init=False, repr=False)
    _examples: dict[str, list[Where]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.on_error not in ("error", "skip"):
            raise ValueError(f'on_error is {self.on_error!r}; it must be "error" or "skip"')

    def reject(self, error: DataError, reason: str | None = None) -> None:
        """Raises `error`, or counts it under `reason` (default: the error's own)."""
        if self.on_error == "error":
            raise error
        reason = reason or error.reason
        places = self._places.setdefault(reason, set())
        if error.where in places:
            return
        places.add(error.where)
        self.skipped[reason] += 1
        if self.skipped[reason] <= self.examples_kept:
            self._examples.setdefault(reason, []).append(error.where)

    def report(self) -> str:
        """One line: "skipped 2 records: 1 empty passage (corpus.jsonl:7), ..."; "" if nothing was skipped."""
        if not self.skipped:
            return ""
        total = self.skipped.total()
        parts = []
        for reason, count in self.skipped.most_common():
            places = [str(where._replace(path=Path(where.path.name))) for where in self._examples[reason]]
            parts.append(f"{count} {reason} ({', '.join(places + ['...'] * (count > len(places)))})")
        return f"skipped {total} record{'s' * (total != 1)}: {', '.join(parts)}"


# Finding and opening


def find_file(folder: Path, name: str) -> Path | None:
    """`folder/name` or `folder/name.gz`, whichever is there, in this order."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def require_file(folder: Path, name: str) -> Path:
    """As `find_file`, but if there is no such file, a DataError says what there is."""
    path = find_file(folder, name)
    if path is None:
        raise missing_file(folder / name, " (nor its .gz)")
    return path


def missing_file(path: Path, variant: str = "") -> DataError:
    """The error for a file that is not there; names what its folder, or the nearest one that exists, holds."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in folder.iterdir())
    shown = ", ".join([*names[:12], "..."] if len(names) > 12 else names) or "nothing"  # 12: one line on a screen
    return Where(path).error("missing file", f"this file{variant} does not exist", f"{folder} holds {shown}")


@runtime_checkable
class Digest(Protocol):
    """What hashlib's objects can do, as far as it is needed here."""

    def update(self, data: bytes, /) -> None: ...


def read_lines(path: PathLike, digest: Digest | None = None) -> Iterator[tuple[Where, bytes]]:
    """Yields (place, line with its line end) of a plain or `.gz` file; `digest` is fed the decompressed bytes.

    Lines end at "\\n" only, so U+2028 and the like may occur inside a text. A gzip file that is cut short or damaged
    is a DataError under any policy.
    """
    path = Path(path)
    number = 0
    try:
        opener: Any = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if digest is not None:
                    digest.update(line)
                yield Where(path, number), line
    except (FileNotFoundError, NotADirectoryError):
        raise missing_file(path) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        found = f"the compressed file is damaged from this line on ({error})"
        raise Where(path, number + 1).error("damaged file", found, "fetch or write it again") from error


def decode(line: bytes, where: Where) -> str:
    """UTF-8 to text, without a byte order mark on line 1; a DataError names the first wrong byte."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} at position {error.start + 1} of the line is not UTF-8"
        raise where.error("not UTF-8", found, "convert the file to UTF-8 (iconv -t utf-8)") from error
    return text.removeprefix("\ufeff") if where.line == 1 else text


def read_json_lines(
    path: PathLike, policy: Policy, digest: Digest | None = None
) -> Iterator[tuple[Where, dict[str, Any]]]:
    """Yields (place, object) of a JSON-lines file; blank lines hold no record."""
    for where, line in read_lines(path, digest):
        try:
            text = decode(line, where)
            if not text.strip():
                continue
            record = require_object(parse_json(text, where), where)
        except DataError as error:
            policy.reject(error)
            continue
        yield where, record


def parse_json(text: str, where: Where) -> Any:
    """JSON to a value; a DataError instead of a JSONDecodeError. Of a whole file, it finds the line itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # not only JSONDecodeError: an integer can have too many digits
        where = where if where.line else where._replace(line=getattr(error, "lineno", None))
        raise where.error("broken JSON", f"this is not JSON ({error})", "write one whole JSON value") from error


@contextlib.contextmanager
def write_text(path: PathLike) -> Iterator[IO[str]]:
    """Opens `path` for atomic writing of UTF-8 text, compressed if it ends in `.gz` (same text, same bytes)."""
    path = Path(path)
    if path.suffix != ".gz":
        with atomic_write(path) as file:
            yield file
        return
    with (
        atomic_write(path, "wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as file,
    ):
        yield file


# Checking values


def require_object(value: Any, where: Where) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise where.error("wrong type", f"this is {_kind(value)}", "a JSON object {...} is expected")
    return value


def require_key(record: Mapping[str, Any], key: str, kind: type, where: Where) -> Any:
    """`record[key]`, which must be there and be a `kind`."""
    if key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise where.error("missing key", f"there is no key {key!r} (keys found: {keys})", f"add {key!r}")
    value = record[key]
    if type(value) is not kind:  # not isinstance: true and false are not numbers here
        found = f"the value of {key!r} is {_kind(value)}: {_shorten(value)}"
        raise where.error("wrong type", found, f"{_KINDS[kind]} is expected")
    return value


def require_strings(value: Any, what: str, where: Where) -> tuple[str, ...]:
    """A list of strings, as a tuple."""
    if not isinstance(value, list) or not all(isinstance(element, str) for element in value):
        found = f"{what} is {_kind(value)}: {_shorten(value)}"
        raise where.error("wrong type", found, "a list of strings is expected")
    return tuple(require_text(element, what, where) for element in value)


def require_text(value: str, what: str, where: Where) -> str:
    """Refuses half of a surrogate pair (JSON can spell one): no tokenizer and no file could take it later."""
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            found = f"{what} holds half of a surrogate pair at character {error.start + 1}: {_shorten(value)}"
            raise where.error("not UTF-8", found, "write the whole character") from error
    return value


def require_id(value: str, what: str, where: Where) -> str:
    """An id goes to files whose columns are separated by white space, so it has none and is not empty."""
    if value.split() != [value]:
        found = f"{what} is empty" if not value else f"{what} {value!r} contains white space"
        raise where.error("bad id", found, "an id is one word, because run and qrels files split at white space")
    return require_text(value, what, where)


def check_passage(passage: Passage, where: Where) -> Passage:
    """The passage, if its id is one word and its title or its text says something."""
    require_id(passage.id, "passage id", where)
    if not passage.text.strip() and not passage.title.strip():
        found = f"passage {passage.id!r} is empty (no text, no title)"
        raise where.error("empty passage", found, "give it a text, or leave it out")
    require_text(passage.title, "the title", where)
    require_text(passage.text, "the text", where)
    return passage


def check_query(query: Query, where: Where) -> Query:
    """The query, if its id is one word and its text is not blank."""
    require_id(query.id, "query id", where)
    if not query.text.strip():
        raise where.error("empty query", f"query {query.id!r} has no text", "give it a text, or leave it out")
    for text in (query.text, *query.answers):
        require_text(text, "the question or an answer", where)
    return query


def normalise_question(text: str) -> str:
    """DPR's normalisation of questions: the curly apostrophe becomes a straight one."""
    return text.replace("\u2019", "'")


_KINDS: dict[type, str] = {
    str: "a string",
    list: "a list",
    dict: "an object",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # 60: the message stays one readable line
