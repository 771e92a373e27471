"""Which format a file has: asked of what is in it, in the order of the table. Names count only where what is in a file
contradicts itself: then the name says which reader is to say what is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxret.data.compression import SUFFIXES
from jaxret.data.files import DataError, PathLike, Where, missing_file
from jaxret.data.formats import (
    beir,
    built,
    dpr,
    dpr_results,
    flag_embedding,
    irds,
    msmarco,
    others,
    sentence_transformers,
    tevatron,
    trec,
)
from jaxret.data.formats.format import Format
from jaxret.data.formats.head import Head, read_head
from jaxret.data.libraries import named, tfds
from jaxret.data.libraries.named import LIBRARIES, is_named, library_of, opened

# The first that fits and gives what is asked for. Those of three columns are in the order of what they ask.
FORMATS: tuple[Format, ...] = (
    *dpr.FORMATS[:2],  # but psgs.tsv, whose columns say least
    *dpr_results.FORMATS,
    *trec.FORMATS[:2],
    msmarco.FORMATS[0],
    trec.FORMATS[2],
    *msmarco.FORMATS[1:],
    dpr.FORMATS[2],
    *built.FORMATS,
    *beir.FORMATS,
    *tevatron.FORMATS,
    *flag_embedding.FORMATS,
    *others.FORMATS,
    *irds.FORMATS,
    *sentence_transformers.FORMATS,
)
BY_NAME = {found.name: found for found in FORMATS}
_USUAL = {  # of a damaged file: what is asked for -> suffix -> format
    "passages": {".jsonl": "beir.texts", ".tsv": "dpr.passages"},
    "queries": {".jsonl": "beir.texts", ".csv": "dpr.queries", ".json": "dpr.examples"},
    "judgements": {**dict.fromkeys((".tsv", ".txt", ".qrels", ".trec"), "trec.qrels"), ".json": "dpr.examples"},
    "examples": {".json": "dpr.examples", ".jsonl": "flag.examples"},
    "rankings": dict.fromkeys((".trec", ".txt", ".run", ".tsv"), "trec.run"),
}
_AGREE = 0.9  # of the lines of a table that is whole; a few bad ones among many do not change what it is
_EMPTY = Format(
    name="empty",
    title="an empty file",
    looks="nothing",
    fits=lambda head: head.container == "empty",
    passages=lambda path, policy, digest: iter(()),
    queries=lambda path, policy: (),
    judgements=lambda path, policy: iter(()),
    examples=lambda path, policy: iter(()),
    rankings=lambda path, policy: iter(()),
)


@dataclass(frozen=True)
class Found:
    """A file and what it is. role: what is read of it; made_of: what of, in a few words ("2 columns"); in_lines:
    whether each record begins on a line of its own."""

    path: Path
    format: Format
    role: str = ""
    made_of: str = ""
    in_lines: bool = False
    others: tuple[str, ...] = ()  # keys of the first records that its reader does not look at

    def __str__(self) -> str:
        title = self.format.titles.get(self.role, self.format.title)
        others = f" (other keys: {', '.join(self.others)})" if self.others else ""
        return f"{title}{', ' * bool(self.made_of)}{self.made_of}{others}"


def by_name(path: Path) -> str:
    """Passages or queries, of a file that may be either: its content does not tell."""
    return "queries" if "quer" in path.name or "topic" in path.name else "passages"


def split_source(source: PathLike) -> tuple[str, Path]:
    """ "FORMAT:PATH" -> (its name, path); ("", path) where no format is named. The path of a folder that is a set of
    TFDS is that set's. Raises ValueError for a FORMAT that there is not."""
    text = str(source)
    name, colon, rest = text.partition(":")
    if tfds.is_set(Path(source)):
        return "", Path(f"tfds:{Path(source).absolute()}")
    if not colon or Path(text).exists() or "/" in name or not rest or name in LIBRARIES:
        return "", Path(source)
    known = [*BY_NAME, *dict.fromkeys(known.partition(".")[0] for known in BY_NAME)]
    if name not in known:
        if "." in name or not name.isalpha():
            return "", Path(source)
        raise ValueError(f"{text}: there is no format {name!r}; it must be one of {', '.join(known)}")
    return name, Path(rest)


def source_path(source: PathLike) -> Path:
    """The file or folder of a source."""
    return split_source(source)[1]


def absolute(source: PathLike) -> str:
    """The source, with its path from the root."""
    name, path = split_source(source)
    if is_named(path):
        library, rest = library_of(path)
        path = Path(f"{library}:{Path(rest).absolute()}") if Path(rest).exists() else path
    else:
        path = path.absolute()
    return f"{name}:{path}" if name else str(path)


def exists(source: PathLike) -> bool:
    """Whether what is named is there: a file, a folder, or a set on this machine."""
    path = source_path(source)
    if not is_named(path):
        return path.exists()
    try:
        opened(path)
    except DataError:
        return False
    return True


def called(source: PathLike) -> str:
    """What a data set is called: the name of its folder or file, or that of a named set, in one word."""
    path = source_path(source)
    return named.called(path) if is_named(path) else path.absolute().name


def recognise(source: PathLike, role: str = "") -> Found:
    """What a file is; role: what is wanted of it. Raises DataError if it is of no format, or of one that does not give
    that."""
    name, path = split_source(source)
    if not (is_named(path) or path.exists()):
        raise missing_file(path)
    head = read_head(path)
    in_lines = head.container in ("lines", "table", "unreadable")
    wanted = [known for known in FORMATS if not name or name in (known.name, known.name.partition(".")[0])]
    if len(wanted) == 1:  # forced: its reader says what is wrong
        return _giving(Found(path, wanted[0], role, f"as {name}: says", in_lines))
    if head.container == "empty":
        return Found(path, _EMPTY, role)
    usual, disagree = _usual(path, role), head.counts.count(head.columns) < _AGREE * len(head.counts)
    if usual in wanted and disagree and set(usual.columns) & set(head.counts):
        return Found(path, usual, role, _made_of(path, head), in_lines)
    fitting = [known for known in wanted if known.fits(head)]
    for known in fitting:
        if not role or known.gives(role):
            return Found(path, known, role, _made_of(path, head), in_lines, _others(known, head))
    if fitting:
        return _giving(Found(path, fitting[0], role))
    if usual in wanted and (disagree or head.container == "unreadable"):
        return Found(path, usual, role, in_lines=in_lines)
    raise _unknown(path, head, [known for known in wanted if not role or known.gives(role)] or wanted, name)


def _usual(path: Path, role: str) -> Format | None:
    """What a damaged file is, by its name: of a table whose lines have different numbers of columns too."""
    if role in ("passages", "queries") and path.name.startswith(("collection", "queries.")) and ".tsv" in path.suffixes:
        return BY_NAME["msmarco.texts"]
    suffix = Path(path.stem).suffix if path.suffix in SUFFIXES else path.suffix
    name = _USUAL.get(role, {}).get(suffix)
    return BY_NAME[name] if name else None


def _giving(found: Found) -> Found:
    if found.role and not found.format.gives(found.role):
        gives = ", ".join(found.format.roles())
        remedy = ", ".join(known.title for known in FORMATS if known.gives(found.role))
        what = f"this is a file of {found.format.title}, which holds {gives} and no {found.role}"
        raise Where(found.path).error("wrong format", what, f"{found.role} are in: {remedy}")
    return found


def _others(known: Format, head: Head) -> tuple[str, ...]:
    if known.any_key or not known.keys:
        return ()
    return tuple(dict.fromkeys(key for record in head.records for key in record if key not in known.keys))


def _made_of(path: Path, head: Head) -> str:
    if head.container == "rows":
        return f"table {named.table(path).title}"
    holders = {"lines": "JSON lines", "array": "a JSON array", "object": "a JSON object", "csv": "CSV"}
    if head.container != "table":
        return holders.get(head.container, head.container)
    return f"{head.columns} columns" if head.columns > 1 else f"{len(head.words[0])} words"


def _unknown(path: Path, head: Head, wanted: list[Format], name: str) -> DataError:
    found = f"this is no format that is known{f' as {name}' if name else ''}: {head.told()}"
    near = _nearest(head, wanted)
    remedy = f"the nearest is {near.title}: {near.looks} ({near.name}:PATH forces it)" if near else _NONE_NEAR
    return Where(path).error("unknown format", found, remedy)


_NONE_NEAR = "none is near; docs/data.md lists those that there are, and FORMAT:PATH forces one"


def _nearest(head: Head, wanted: list[Format]) -> Format | None:
    """The format that shares most keys, or has one column more or less; of a table without tabs, one word."""
    if head.records:
        keys = set(head.records[0])
        near = max(wanted, key=lambda known: len(keys & set(known.keys)) / max(len(keys | set(known.keys)), 1))
        return near if keys & set(near.keys) else None
    if not head.lines:
        return None
    blanks = head.columns == 1  # between words, as in TREC's files
    count = len(head.words[0]) if blanks else head.columns
    mine = [
        known for known in wanted if (known.name in ("trec.run", "trec.qrels") if blanks else known.name != "trec.run")
    ]
    sizes = {known.name: [n for n in known.columns if n > 1] for known in mine}
    far = {name: min(abs(n - count) for n in columns) for name, columns in sizes.items() if columns}
    near_name = min(far, key=far.__getitem__, default="")
    return BY_NAME[near_name] if near_name and far[near_name] <= 1 else None
