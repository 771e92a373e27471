"""Text files line by line, and what to do about a line that is wrong.

Every reader checks what it reads where it reads it: a bad id found here costs a line of text, found after a night of
encoding it costs the night. A `DataError` says where, what was found and what to do; a `Policy` says whether that stops
the run or is counted.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, runtime_checkable

from jaxret.data.compression import SUFFIXES, DamagedError, compressing, read_blocks
from jaxret.data.records import Passage, Query
from jaxret.storage import atomic_write

PathLike = str | os.PathLike[str]
# Bytes of a line, and of a record that has several. Nobody wrote a longer one, and reading one takes up to 15 times as
# much memory: the bytes, their parts, and the text in two stages, of which each character has four bytes with an emoji.
LINE_LIMIT = 16 * 2**20
_CHUNK = 2**20  # bytes read at a time


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
    """What to do with a bad record: "error" raises it, "skip" leaves it out and counts it by reason. "keep" keeps and
    counts passages without title and text, so that every row of the file is a row of vectors, and raises all else.

    `note` tells of what is left out without being wrong. A place is counted once for each reason, however often the
    file is read (scanned, then streamed). Missing and truncated files, and lines above `LINE_LIMIT`, are always errors:
    there is no record to leave out.
    """

    on_error: str = "error"
    examples_kept: int = 3
    skipped: Counter[str] = field(default_factory=Counter, init=False)  # or kept, under "keep"
    notes: dict[str, set[Where]] = field(default_factory=dict, init=False)
    _places: dict[str, set[Where]] = field(default_factory=dict, init=False, repr=False)
    _examples: dict[str, list[Where]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.on_error not in ("error", "skip", "keep"):
            raise ValueError(f'on_error is {self.on_error!r}; it must be "error", "skip" or "keep"')

    def reject(self, error: DataError, reason: str | None = None) -> None:
        """Raises `error`, or counts it under `reason` (default: the error's own)."""
        if self.on_error != "skip":
            raise error
        self._count(error, reason or error.reason)

    def reject_empty(self, error: DataError) -> None:
        """As `reject`, for an empty passage: under "keep" it is counted, and stays."""
        if self.on_error != "keep":
            raise error
        self._count(error, error.reason)

    def _count(self, error: DataError, reason: str) -> None:
        places = self._places.setdefault(reason, set())
        if error.where in places:
            return
        places.add(error.where)
        self.skipped[reason] += 1
        if self.skipped[reason] <= self.examples_kept:
            self._examples.setdefault(reason, []).append(error.where)

    def note(self, what: str, where: Where) -> None:
        """Counts what is left out without being wrong."""
        self.notes.setdefault(what, set()).add(where)

    def report(self) -> str:
        """One line: "skipped 2 records: 1 empty passage (corpus.jsonl:7), ...; noted: ..."; "" if there is nothing."""
        noted = "; ".join(self.noted())
        return "; ".join(part for part in (self._skipped(), noted and f"noted: {noted}") if part)

    def noted(self) -> list[str]:
        """What was noted, how often, and one place."""
        first = {
            what: min(places, key=lambda where: (str(where.path), str(where.line)))
            for what, places in self.notes.items()
        }
        return [
            f"{len(places):,} {what} (as {first[what]._replace(path=Path(first[what].path.name))})"
            for what, places in self.notes.items()
        ]

    def _skipped(self) -> str:
        if not self.skipped:
            return ""
        total = self.skipped.total()
        parts = []
        for reason, count in self.skipped.most_common():
            places = [str(where._replace(path=Path(where.path.name))) for where in self._examples[reason]]
            plural = "s" * (self.on_error == "keep" and count > 1)
            parts.append(f"{count} {reason}{plural} ({', '.join(places + ['...'] * (count > len(places)))})")
        if self.on_error == "keep":
            return f"kept {parts[0]}"
        return f"skipped {total} record{'s' * (total != 1)}: {', '.join(parts)}"


# Finding and opening


def find_file(folder: Path, name: str) -> Path | None:
    """`folder/name`, `folder/name.gz` or `folder/name.zst`, whichever is there, in this order."""
    return next((path for suffix in SUFFIXES if (path := folder / f"{name}{suffix}").is_file()), None)


def require_file(folder: Path, name: str) -> Path:
    """As `find_file`, but if there is no such file, a DataError says what there is."""
    path = find_file(folder, name)
    if path is None:
        raise missing_file(folder / name, " (nor its .gz or .zst)")
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


def read_chunks(path: Path, digest: Digest | None = None) -> Iterator[bytes]:
    """Yields the bytes of a plain, gzip or Zstandard file, decompressed; `digest` is fed them."""
    lines = 0
    try:
        for chunk in read_blocks(path, _CHUNK):
            if digest is not None:
                digest.update(chunk)
            lines += chunk.count(b"\n")
            yield chunk
    except (FileNotFoundError, NotADirectoryError):
        raise missing_file(path) from None
    except DamagedError as error:
        found = f"the compressed file is damaged from this line on ({error})"
        raise Where(path, lines + 1).error("damaged file", found, "fetch or write it again") from error


def too_long(where: Where, what: str) -> DataError:
    remedy = "split it, or, if it should not be so long, look for a missing line end or quote"
    return where.error("too long", f"this {what} has more than {LINE_LIMIT >> 20} MiB", remedy)


def read_lines(
    path: PathLike, digest: Digest | None = None, blank: bytes = b" \t\r\n"
) -> Iterator[tuple[Where, bytes]]:
    """Yields (place, line with its line end) of a file, compressed or not; `digest` is fed the decompressed bytes.

    Lines end at "\\n" only, so U+2028 and the like may occur inside a text. Lines of nothing but `blank` that follow
    each other may come as one, because a small gzip file can hold a billion of them. A compressed file that is cut
    short or damaged, and a line above `LINE_LIMIT`, are DataErrors under any policy.
    """
    path = Path(path)
    blank_lines = re.compile(b"[" + blank + b"]*\n").match
    number = 1
    begun: list[bytes] = []  # of a line whose end is in a later chunk
    size = 0
    for chunk in read_chunks(path, digest):
        start = 0
        while end := chunk.find(b"\n", start) + 1:
            where, lines = Where(path, number), 1
            if not begun and chunk[start] in blank and (run := blank_lines(chunk, start)):
                end = run.end()
                lines = chunk.count(b"\n", start, end)
            elif size + end - start > LINE_LIMIT:
                raise too_long(where, "line")
            line = chunk[start:end]
            if begun:
                line, begun, size = b"".join((*begun, line)), [], 0
            yield where, line
            del line  # a long one need not be held while the next is read
            number, start = number + lines, end
        if start < len(chunk):
            begun.append(chunk[start:])
            size += len(chunk) - start
            if size > LINE_LIMIT:
                raise too_long(Where(path, number), "line")
    if begun:
        yield Where(path, number), b"".join(begun)


def decode(line: bytes, where: Where) -> str:
    """UTF-8 to text, without a byte order mark on line 1; a DataError names the first wrong byte."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} at position {error.start + 1} of the line is not UTF-8"
        raise where.error("not UTF-8", found, _UTF8_REMEDY) from error
    return text.removeprefix("\ufeff") if where.line == 1 else text


_UTF8_REMEDY = "convert the file to UTF-8 (iconv -t utf-8)"


class Repeated(dict[str, Any]):
    """An object of a JSON file that has a `key` twice. json takes the last; `require_object` refuses it."""

    key = ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    repeated = Repeated(record)
    repeated.key = Counter(key for key, _ in pairs).most_common(1)[0][0]
    return repeated


_JSON = json.JSONDecoder(object_pairs_hook=_object)
_JSON_SPACE = re.compile(r"[ \t\r\n]*")


def read_json_lines(
    path: PathLike, policy: Policy, digest: Digest | None = None
) -> Iterator[tuple[Where, dict[str, Any]]]:
    """Yields (place, object) of a JSON-lines file; blank lines hold no record."""
    for where, line in read_lines(path, digest):
        try:
            record = None if line.isspace() else require_object(_parse_json(decode(line, where), where), where)
        except DataError as error:
            policy.reject(error)
            continue
        if record is not None:
            yield where, record


def _parse_json(text: str, where: Where) -> Any:
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError) as error:  # not only JSONDecodeError: an integer can have too many digits
        raise _broken_json(where, error) from error


def _broken_json(where: Where, error: object) -> DataError:
    return where.error("broken JSON", f"this is not JSON ({error})", "write one whole JSON value")


def read_json_array(path: PathLike, keyed: bool = False) -> Iterator[Any]:
    """Yields the values of a file that holds one JSON array; keyed: (key, value) of one that holds one object. One at a
    time is held in memory, so that the file may be of any size; a value may not be above `LINE_LIMIT`. What is not JSON
    is a DataError when it is reached."""
    path = Path(path)
    opening, closing = "{}" if keyed else "[]"
    text, at, line = "", 0, 1  # what is held of the file, how much of that is done with, the line it begins on
    source = _decoded(path)

    def more() -> bool:
        """Holds twice as much of what is not done with: a long value is tried a few times, not once for each chunk."""
        nonlocal text, at, line
        line += text.count("\n", 0, at)
        parts, size = [text[at:]], 0
        for part in source:
            parts.append(part)
            size += len(part)
            if size and size >= len(parts[0]):
                break
        text, at = "".join(parts), 0
        return size > 0

    def peek() -> str:
        """The next character that is not white space; "" at the end."""
        nonlocal at
        while True:
            at = _JSON_SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at < len(text) or not more():
                return text[at : at + 1]

    def broken(message: object, position: int) -> DataError:
        return _broken_json(Where(path, line + text.count("\n", 0, position)), message)

    def value() -> Any:
        nonlocal at
        while True:
            start, error = at, None
            try:
                found, end = _JSON.raw_decode(text, at)
            except (ValueError, RecursionError) as caught:
                error = caught
            if error is None and end < len(text):  # a number at the end of what is held may go on
                at = end
                return found
            if len(text) - at > LINE_LIMIT:
                raise too_long(Where(path, line + text.count("\n", 0, at)), "record, or what is broken in it,")
            if not more():  # what is held begins with the value now
                if error is None:
                    at = end - start
                    return found
                raise broken(getattr(error, "msg", error), getattr(error, "pos", start) - start) from error

    if peek() != opening:
        found = f"the file holds {_kind(value())} at its top"
        expected = 'an object of records {"0": {...}, ...}' if keyed else "a list of records [{...}, ...]"
        raise Where(path).error("wrong type", found, f"{expected} is expected")
    at += 1
    closed = peek() == closing
    while not closed:
        key = value() if keyed else None
        if keyed:
            if peek() != ":":
                raise broken("Expecting ':'", at)
            at += 1
            peek()
        yield (key, value()) if keyed else value()
        closed = peek() == closing
        if not closed:
            if peek() != ",":
                raise broken(f"Expecting ',' or '{closing}'", at)
            at += 1
            peek()
    at += 1
    if peek():
        raise broken("Extra data", at)


def _decoded(path: Path) -> Iterator[str]:
    """Yields the text of a UTF-8 file, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    for chunk in itertools.chain(read_chunks(path), [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            where = Where(path, line + error.object.count(b"\n", 0, error.start))
            found = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
            raise where.error("not UTF-8", found, _UTF8_REMEDY) from error
        yield text.removeprefix("\ufeff") if line == 1 else text
        line += chunk.count(b"\n")


@contextlib.contextmanager
def write_text(path: PathLike) -> Iterator[IO[str]]:
    """Opens `path` for atomic writing of UTF-8 text, compressed if it ends in .gz or .zst (same text, same bytes)."""
    path = Path(path)
    if path.suffix not in SUFFIXES[1:]:
        with atomic_write(path) as file:
            yield file
        return
    with atomic_write(path, "wb") as raw, compressing(raw, path.suffix) as file:
        yield file


# Checking values


def require_object(value: Any, where: Where) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise where.error("wrong type", f"this is {_kind(value)}", "a JSON object {...} is expected")
    if isinstance(value, Repeated):
        raise where.error("repeated key", f"the key {value.key!r} occurs twice in this object", "keep one of the two")
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
    """An id goes to files whose columns are separated by white space, so it has none and is not empty; nor has it
    control characters, which other tools end a word or a text at."""
    if value.split() != [value]:
        found = f"{what} is empty" if not value else f"{what} {value!r} contains white space"
        raise where.error("bad id", found, "an id is one word, because run and qrels files split at white space")
    if _CONTROL.search(value):
        remedy = "leave it out: run and qrels files are read by tools that stop at it"
        raise where.error("bad id", f"{what} {_shorten(value)} contains a control character", remedy)
    return require_text(value, what, where)


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def check_passage(passage: Passage, where: Where, policy: Policy | None = None) -> Passage:
    """The passage, if its id is one word and its title or its text says something, or `policy` keeps empty ones."""
    require_id(passage.id, "passage id", where)
    require_text(passage.title, "the title", where)
    require_text(passage.text, "the text", where)
    if _is_blank(passage.text) and _is_blank(passage.title):
        found = f"passage {passage.id!r} is empty (no text, no title)"
        remedy = "give it a text, leave it out, or encode it as it is with jaxret encode --on_error=keep"
        (policy or Policy()).reject_empty(where.error("empty passage", found, remedy))
    return passage


def check_query(query: Query, where: Where) -> Query:
    """The query, if its id is one word and its text is not blank."""
    require_id(query.id, "query id", where)
    if _is_blank(query.text):
        raise where.error("empty query", f"query {query.id!r} has no text", "give it a text, or leave it out")
    for text in (query.text, *query.answers):
        require_text(text, "the question or an answer", where)
    return query


def check_question(text: str) -> Query:
    """The query "0" of a question that somebody typed, normalised as those of files are. Raises ValueError if it is
    blank, or holds what no tokenizer can take: half of a surrogate pair, or bytes of the command line that were not
    UTF-8 (Python hands them on as such halves)."""
    if _is_blank(text):
        raise ValueError("the question is blank; write what to search for")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        byte = 0xDC80 <= code <= 0xDCFF
        found = f"byte 0x{code - 0xDC00:02x}, which is not UTF-8," if byte else "half of a surrogate pair"
        raise ValueError(f"the question holds {found} at character {error.start + 1}; write it in UTF-8") from error
    return Query("0", normalise_question(text))


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


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
