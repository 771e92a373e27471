"""Text files line by line, compressed or not, and JSON records in them.

Readers check records while they read them, because an error before a night of encoding costs less than one after it.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from jaxret.data.compression import SUFFIXES, DamagedFileError, open_compressed_text, read_blocks
from jaxret.data.errors import DataError, Location, Policy
from jaxret.data.record_checks import ObjectWithRepeatedKey, describe_kind, require_object
from jaxret.storage.atomic import atomic_write

PathLike = str | os.PathLike[str]
# Upper bound of a line, and of a record of several lines, in bytes. Real data has no longer ones. Reading a line takes
# up to 15 times as much memory: its bytes, their parts, and the text twice, with four bytes for each character if one
# is an emoji.
LINE_LIMIT = 16 * 2**20
_CHUNK = 2**20  # bytes read at a time


def find_file(folder: Path, name: str) -> Path | None:
    """Return `folder/name`, `folder/name.gz` or `folder/name.zst`, the first that exists; None if none does."""
    return next((path for suffix in SUFFIXES if _is_readable(path := folder / f"{name}{suffix}")), None)


def _is_readable(path: Path) -> bool:
    """Return whether a path is a file, or a pipe, which `read_chunks` refuses by name."""
    return path.is_file() or path.is_fifo()


def require_file(folder: Path, name: str) -> Path:
    """Return the file, see `find_file`. Raises DataError with the names in the folder if it does not exist."""
    path = find_file(folder, name)
    if path is None:
        raise missing_file_error(folder / name, NO_VARIANT)
    return path


NO_VARIANT = "neither this file nor its .gz or .zst exists"


def missing_file_error(path: Path, problem: str = "this file does not exist") -> DataError:
    """Return the error for a file that does not exist. It lists the file's folder, or the nearest folder that
    exists."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    if folder.is_absolute() and folder == folder.parent:  # a list of the root folder would not help
        first = folder / path.parts[1]
        remedy = f"there is no {first} on this machine" if first != path else "give another path"
        return Location(path).error("missing file", problem, remedy)
    names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in folder.iterdir())
    contents = ", ".join([*names[:12], "..."] if len(names) > 12 else names) or "nothing"  # 12: one line on a screen
    matches = get_close_matches(path.name, names, 1) if folder == path.parent else []
    place = "this folder" if folder == Path() else folder
    return Location(path).error(
        "missing file", problem, f"{f'did you mean {folder / matches[0]}? ' if matches else ''}{place} holds {contents}"
    )


@runtime_checkable
class Digest(Protocol):
    """The method of hashlib's objects that readers use."""

    def update(self, data: bytes, /) -> None: ...


def read_chunks(path: Path, digest: Digest | None = None) -> Iterator[bytes]:
    """Yield the bytes of a plain, gzip or Zstandard file, decompressed, and add them to `digest`. Raises DataError for
    a pipe, a missing file, or damaged compression."""
    lines = 0
    if path.is_fifo():  # a pipe can be read only once, and may block
        remedy = "write it to a file, and give this file"
        raise Location(path).error("no file", "this is a pipe, and data are read more than once", remedy)
    try:
        for chunk in read_blocks(path, _CHUNK):
            if digest is not None:
                digest.update(chunk)
            lines += chunk.count(b"\n")
            yield chunk
    except (FileNotFoundError, NotADirectoryError):
        raise missing_file_error(path) from None
    except DamagedFileError as error:
        problem = f"the compressed file is damaged from this line on ({error})"
        raise Location(path, lines + 1).error("damaged file", problem, "fetch or write it again") from error


def too_long_error(location: Location, kind: str) -> DataError:
    remedy = "split it, or look for a missing line end or quote"
    return location.error("too long", f"this {kind} has more than {LINE_LIMIT >> 20} MiB", remedy)


def read_lines(
    path: PathLike, digest: Digest | None = None, blank: bytes = b" \t\r\n"
) -> Iterator[tuple[Location, bytes]]:
    """Yield (location, line with its line end) of a file, compressed or not. Add the decompressed bytes to `digest`.

    Lines end at "\\n" only, so U+2028 and the like may occur inside a text. Consecutive lines of `blank` bytes may come
    as one line, because a small gzip file can hold a billion of them. A compressed file that is cut short or damaged,
    and a line above `LINE_LIMIT`, raise DataError under any policy.
    """
    path = Path(path)
    blank_lines = re.compile(b"[" + blank + b"]*\n").match
    number = 1
    pieces: list[bytes] = []  # parts of a line whose end is in a later chunk
    size = 0
    for chunk in read_chunks(path, digest):
        start = 0
        while end := chunk.find(b"\n", start) + 1:
            location, lines = Location(path, number), 1
            if not pieces and chunk[start] in blank and (run := blank_lines(chunk, start)):
                end = run.end()
                lines = chunk.count(b"\n", start, end)
            elif size + end - start > LINE_LIMIT:
                raise too_long_error(location, "line")
            line = chunk[start:end]
            if pieces:
                line, pieces, size = b"".join((*pieces, line)), [], 0
            yield location, line
            del line  # frees a long line before the next one is read
            number, start = number + lines, end
        if start < len(chunk):
            pieces.append(chunk[start:])
            size += len(chunk) - start
            if size > LINE_LIMIT:
                raise too_long_error(Location(path, number), "line")
    if pieces:
        yield Location(path, number), b"".join(pieces)


def decode_line(line: bytes, location: Location) -> str:
    """Return the text of a line of UTF-8, without a byte order mark on line 1. Raises DataError with the first byte
    that is not UTF-8."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"byte 0x{line[error.start]:02x} at position {error.start + 1} of the line is not UTF-8"
        raise location.error("not UTF-8", problem, _UTF8_REMEDY) from error
    return text.removeprefix("\ufeff") if location.line == 1 else text


_UTF8_REMEDY = "convert the file to UTF-8 (iconv -t utf-8)"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    value = ObjectWithRepeatedKey(record)
    value.key = Counter(key for key, _ in pairs).most_common(1)[0][0]
    return value


_JSON = json.JSONDecoder(object_pairs_hook=_object)
_JSON_SPACE = re.compile(r"[ \t\r\n]*")


def read_json_lines(
    path: PathLike, policy: Policy, digest: Digest | None = None
) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Yield (location, object) of a JSON-lines file. Blank lines hold no record."""
    lines = ((location, line) for location, line in read_lines(path, digest) if not line.isspace())
    return policy.parse_records(lines, parse_json_object)


def parse_json_object(line: bytes, location: Location) -> dict[str, Any]:
    """Return the object of a line of JSON. Raises DataError for anything else."""
    return require_object(_parse_json(decode_line(line, location), location), location)


def _parse_json(text: str, location: Location) -> Any:
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError) as error:  # ValueError, because an integer can have too many digits
        raise _broken_json(location, error) from error


def _broken_json(location: Location, error: object) -> DataError:
    cause = str(error)
    if cause.startswith("Exceeds the limit"):  # Python's message describes a setting of Python, not the file
        cause = "a whole number in it has more than 4,300 digits"
    return location.error("broken JSON", f"this is not JSON ({cause})", "write one whole JSON value")


def read_json_array(path: PathLike, keyed: bool = False) -> Iterator[Any]:
    """Yield the values of a file that holds one JSON array, or (key, value) of one JSON object if `keyed`.

    One value at a time is held in memory, so the file may be of any size. ijson does not replace this reader: its
    errors have no line, its C backend turns half of a surrogate pair into "?", and it does not bound a string.

    Raises:
        DataError: the file is not JSON (raised at the broken value), or a value is above `LINE_LIMIT`.
    """
    text = _JsonText(Path(path))
    start, end = "{}" if keyed else "[]"
    if text.peek() != start:
        problem = f"the file holds {describe_kind(text.value())}"
        expected = 'an object of records {"0": {...}, ...}' if keyed else "a list of records [{...}, ...]"
        raise Location(text.path).error("wrong type", problem, f"{expected} is expected")
    text.skip(start)
    closed = text.peek() == end
    while not closed:
        if keyed:
            key = text.value()
            text.skip(":")
            yield key, text.value()
        else:
            yield text.value()
        closed = text.peek() == end
        if not closed:
            text.skip(",", f"Expecting ',' or '{end}'")
    text.skip(end)
    if text.peek():
        raise text.error("Extra data")


class _JsonText:
    """A reader of the JSON text of a file. Only the part that is not parsed yet is held in memory."""

    def __init__(self, path: Path) -> None:
        self.path, self._parts = path, _decode_file(path)
        self._text, self._position = "", 0  # the text in memory, and the current position in it
        self._line = 1  # number of the line on which the text in memory begins

    def peek(self) -> str:
        """Move to the next character that is not white space, and return it, or "" at the end of the file."""
        while True:
            self._position = _JSON_SPACE.match(self._text, self._position).end()  # type: ignore[union-attr]
            if self._position < len(self._text) or not self._extend():
                return self._text[self._position : self._position + 1]

    def skip(self, sign: str, message: str = "") -> None:
        """Move past a sign, which must come next."""
        if self.peek() != sign:
            raise self.error(message or f"Expecting '{sign}'")
        self._position += 1

    def value(self) -> Any:
        """Move past the next value, and return it."""
        self.peek()
        while True:
            start, error = self._position, None
            try:
                value, end = _JSON.raw_decode(self._text, start)
            except (ValueError, RecursionError) as failure:
                error = failure
            if error is None and end < len(self._text):  # at the end of the text, a number may have more digits
                self._position = end
                return value
            if len(self._text) - start > LINE_LIMIT:
                raise too_long_error(self._location(start), "record, or its broken part,")
            if not self._extend():  # after this call the text in memory begins with the value
                if error is None:
                    self._position = end - start
                    return value
                raise self.error(getattr(error, "msg", error), getattr(error, "pos", start) - start) from error

    def error(self, message: object, position: int | None = None) -> DataError:
        """Return the error of broken JSON at a position of the text in memory, by default the current one."""
        return _broken_json(self._location(self._position if position is None else position), message)

    def _location(self, position: int) -> Location:
        return Location(self.path, self._line + self._text.count("\n", 0, position))

    def _extend(self) -> bool:
        """Double the text that is not parsed, and return whether the file had more. Because of the doubling a long
        value is parsed a few times, not once for each chunk."""
        self._line += self._text.count("\n", 0, self._position)
        parts, size = [self._text[self._position :]], 0
        for part in self._parts:
            parts.append(part)
            size += len(part)
            if size and size >= len(parts[0]):
                break
        self._text, self._position = "".join(parts), 0
        return size > 0


def _decode_file(path: Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    for chunk in itertools.chain(read_chunks(path), [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            location = Location(path, line + error.object.count(b"\n", 0, error.start))
            problem = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
            raise location.error("not UTF-8", problem, _UTF8_REMEDY) from error
        yield text.removeprefix("\ufeff") if line == 1 else text
        line += chunk.count(b"\n")


@contextlib.contextmanager
def write_text(path: PathLike) -> Iterator[IO[str]]:
    """Open `path` for atomic writing of UTF-8 text, compressed if it ends in .gz or .zst. Equal texts give equal
    bytes."""
    path = Path(path)
    if path.suffix not in SUFFIXES[1:]:
        with atomic_write(path) as file:
            yield file
        return
    with atomic_write(path, "wb") as raw, open_compressed_text(raw, path.suffix) as file:
        yield file
