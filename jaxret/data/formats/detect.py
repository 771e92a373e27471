"""Detect the format of a file by its content, in the order of a table. The file's name counts only if the content is
damaged: it then selects the reader that reports the error.
"""

from __future__ import annotations

from pathlib import Path

from jaxret.data.compression import SUFFIXES
from jaxret.data.errors import DataError, Location
from jaxret.data.formats import (
    beir,
    built_records,
    dpr,
    dpr_results,
    flag_embedding,
    irds_records,
    msmarco,
    pylate_anserini,
    sentence_transformers_records,
    tevatron,
    texts,
    trec,
)
from jaxret.data.formats.file_sample import FileSample
from jaxret.data.formats.format import DataFile, Format
from jaxret.data.libraries import tfds
from jaxret.data.libraries.named import LIBRARIES, is_named
from jaxret.data.libraries.open_sets import open_named_set, open_table
from jaxret.data.lines import PathLike, find_file, parse_json_object, read_lines
from jaxret.storage.atomic import require_disk_path
from jaxret.storage.buckets.address import is_bucket_address
from jaxret.storage.buckets.working_copy import local_path, shown_path

# The first format that matches a file and has the requested role is chosen. Of the tables of three columns, the format
# with the strictest test comes first.
FORMATS: tuple[Format, ...] = (
    *dpr.FORMATS[:2],  # psgs.tsv comes later, because its test is the weakest
    *dpr_results.FORMATS,
    *trec.FORMATS[:2],
    msmarco.FORMATS[0],
    trec.FORMATS[2],
    *msmarco.FORMATS[1:-1],
    dpr.FORMATS[2],
    msmarco.FORMATS[-1],
    dpr.FORMATS[3],
    *built_records.FORMATS,
    *beir.FORMATS,
    *tevatron.FORMATS,
    *flag_embedding.FORMATS,
    *pylate_anserini.FORMATS,
    *irds_records.FORMATS,
    *sentence_transformers_records.FORMATS,
    *texts.FORMATS,
)
FORMATS_BY_NAME = {known_format.name: known_format for known_format in FORMATS}
_USUAL_FORMATS = {  # for damaged files: requested role -> suffix -> format
    "passages": {".jsonl": "beir.texts", ".tsv": "dpr.passages"},
    "queries": {".jsonl": "beir.texts", ".csv": "dpr.queries", ".json": "dpr.examples"},
    "judgements": {**dict.fromkeys((".tsv", ".txt", ".qrels", ".trec"), "trec.qrels"), ".json": "dpr.examples"},
    "examples": {".json": "dpr.examples", ".jsonl": "flag.examples"},
    "rankings": dict.fromkeys((".trec", ".txt", ".run", ".tsv"), "trec.run"),
}
_AGREEMENT = 0.9  # share of lines with equally many columns in an intact table; a few bad lines do not change a format
_EMPTY = Format(
    name="empty",
    title="an empty file",
    description="nothing",
    matches=lambda sample: sample.container == "empty",
    passages=lambda file, policy, digest: iter(()),
    queries=lambda file, policy: (),
    judgements=lambda file, policy: iter(()),
    examples=lambda file, policy: iter(()),
    rankings=lambda file, policy: iter(()),
)


def role_by_name(path: Path) -> str:
    """Return "passages" or "queries" by the name of a file whose content may be either."""
    return "queries" if any(word in path.name for word in ("quer", "question", "topic")) else "passages"


def parse_source(source: PathLike) -> tuple[str, Path]:
    """Split "FORMAT:PATH" into (format name, path). The name is "" if no format is forced.

    A folder that is a data set of TFDS becomes tfds:FOLDER. Raises ValueError for an unknown format.
    """
    text = str(source)
    require_disk_path(text)
    if is_bucket_address(text):
        return "", local_path(text)
    name, colon, path_text = text.partition(":")
    if tfds.is_tfds_set(Path(source)):
        return "", Path(f"tfds:{Path(source).absolute()}")
    if not colon or Path(text).exists() or "/" in name or not path_text or name in LIBRARIES:
        return "", Path(source)
    names = [*FORMATS_BY_NAME, *dict.fromkeys(full.partition(".")[0] for full in FORMATS_BY_NAME)]
    if name not in names:
        if "." in name or not name.isalpha():
            return "", Path(source)
        raise ValueError(f"{text}: there is no format {name!r}; the formats are {', '.join(names)}")
    return name, local_path(path_text)


def source_path(source: PathLike) -> Path:
    """Return the file or folder of a source."""
    return parse_source(source)[1]


def source_exists(source: PathLike) -> bool:
    """Return whether the file, the folder, or the named set on this machine exists."""
    path = source_path(source)
    if not is_named(path):
        return path.exists()
    try:
        open_named_set(path)
    except DataError:
        return False
    return True


def choose_format(path: Path, sample: FileSample, format_name: str, role: str) -> DataFile:
    """Return a file with its format.

    Args:
        path: the file.
        sample: beginning of the file.
        format_name: the format, or the family of formats, that the source forces; "": none.
        role: the kind of records that will be read from it; "": any kind.

    Raises:
        DataError: the file has no known format, or its format has no records of this kind.
    """
    formats = [
        choice for choice in FORMATS if not format_name or format_name in (choice.name, choice.name.partition(".")[0])
    ]
    if format_name == "beir":
        formats.append(FORMATS_BY_NAME["trec.qrels"])  # the format of qrels/SPLIT.tsv in a BEIR folder

    def as_format(match: Format, contents: str = "", unread_keys: tuple[str, ...] = ()) -> DataFile:
        return DataFile(path, match, sample.container, role, contents, unread_keys)

    if len(formats) == 1:  # the format is forced: its reader reports errors
        roles = formats[0].column_roles(sample)
        return _require_role(as_format(formats[0], ", ".join(filter(None, (f"as {format_name}: says", roles)))))
    if sample.container == "empty":
        return as_format(_EMPTY)
    usual, is_mixed = _usual_format(path, role), sample.counts.count(sample.columns) < _AGREEMENT * len(sample.counts)
    if usual in formats and is_mixed and set(usual.columns) & set(sample.counts):
        return as_format(usual, _describe_contents(path, sample))
    matches = [choice for choice in formats if choice.matches(sample)]
    for match in matches:
        if not role or match.gives(role):
            return as_format(match, _describe_contents(path, sample), _unread_keys(match, sample))
    if matches:
        return _require_role(as_format(matches[0]), sample)
    if usual in formats and (is_mixed or sample.container == "unreadable"):
        return as_format(usual)
    choices = [choice for choice in formats if not role or choice.gives(role)] or formats
    raise _unknown_format_error(path, sample, choices, format_name)


def _usual_format(path: Path, role: str) -> Format | None:
    """Return the format that the name of a damaged file, or of a table with uneven lines, suggests."""
    if role in ("passages", "queries") and path.name.startswith(("collection", "queries.")) and ".tsv" in path.suffixes:
        return FORMATS_BY_NAME["msmarco.texts"]
    suffix = Path(path.stem).suffix if path.suffix in SUFFIXES else path.suffix
    name = _USUAL_FORMATS.get(role, {}).get(suffix)
    return FORMATS_BY_NAME[name] if name else None


def _require_role(file: DataFile, sample: FileSample | None = None) -> DataFile:
    if file.role and not file.format.gives(file.role):
        roles = ", ".join(file.format.roles())
        problem = f"this is a file of {file.format.title}, which holds {roles} and no {file.role}"
        folder = file.path.absolute().parent
        if folder.name == "qrels" and find_file(folder.parent, "corpus.jsonl"):
            remedy = f"give the folder of the data set, {shown_path(folder.parent)}, or another file of it"
            raise Location(file.path).error("wrong format", problem, remedy)
        if file.role == "examples" and file.format.gives("rankings"):
            remedy = (
                "rankings do not say which passages are relevant: add judgements of these queries to the folder "
                "(docs/training.md, distillation); this file can then be data.negatives_run and data.teacher_run"
            )
            raise Location(file.path).error("wrong format", problem, remedy)
        choices = [choice for choice in FORMATS if choice.gives(file.role)]
        nearest = _nearest(sample, [choice for choice in choices if getattr(choice, file.role)]) if sample else None
        force = f"; if it is {nearest.title}, give {nearest.name}:PATH" if nearest else ""
        choices.sort(key=lambda choice: len(choice.roles()))  # formats with only this role come first
        titles = ", ".join(choice.title for choice in choices[:4])
        suffix = ", ... (docs/data.md lists all)" if len(choices) > 4 else ""
        raise Location(file.path).error("wrong format", problem, f"{file.role} are in: {titles}{suffix}{force}")
    return file


def _unread_keys(match: Format, sample: FileSample) -> tuple[str, ...]:
    if match.any_key or not match.keys:
        return ()
    return tuple(dict.fromkeys(key for record in sample.records for key in record if key not in match.keys))


def _describe_contents(path: Path, sample: FileSample) -> str:
    if sample.container == "rows":
        return f"table {open_table(path).title}"
    holders = {"lines": "JSON lines", "array": "a JSON array", "object": "a JSON object", "csv": "CSV"}
    if sample.container != "table":
        return holders.get(sample.container, sample.container)
    return f"{sample.columns} columns" if sample.columns > 1 else f"{len(sample.words[0])} words"


def _unknown_format_error(path: Path, sample: FileSample, formats: list[Format], format_name: str) -> DataError:
    location = Location(path)
    if sample.container == "unreadable":
        blank = b"\xef\xbb\xbf \t\r\n"
        nonblank = ((place, line.strip(blank)) for place, line in read_lines(path) if line.strip(blank))
        location, first = next(nonblank, (location, b""))
        if first[:1] in (b"{", b"["):
            parse_json_object(first, location)  # raises an error with the place where the first record breaks
    problem = f"this is not a known format{f' as {format_name}' if format_name else ''}: {sample.describe()}"
    nearest = _nearest(sample, formats)
    if nearest is None:
        remedy = _NONE_NEAR
    elif sample.records:  # keys are missing, so that FORMAT:PATH would not help
        remedy = f"the nearest is {nearest.title}: {nearest.description}; rename the keys to these"
    else:
        remedy = f"the nearest is {nearest.title}: {nearest.description} ({nearest.name}:PATH forces it)"
    tuples = FORMATS_BY_NAME["st.tuples"]
    if tuples in formats and _has_several_texts(path, sample):
        if sample.records:
            remedy += f"; {tuples.name}:PATH reads the columns in their order: {tuples.column_roles(sample)}"
        else:
            remedy += (
                "; pairs and triples of texts must be CSV (commas, names of columns in the first line) or JSON lines"
            )
    return location.error("unknown format", problem, remedy)


def _has_several_texts(path: Path, sample: FileSample) -> bool:
    """Return whether the first record, or a row of a table, has two values of several words, as a query with a passage.
    Return True for a table that is called .csv."""
    rows = [sample.records[0].values()] if sample.records else sample.rows
    return (not sample.records and ".csv" in path.suffixes) or any(
        sum(isinstance(value, str) and len(value.split()) > 1 for value in row) > 1 for row in rows
    )


_NONE_NEAR = "no format is near; docs/data.md lists all formats, and FORMAT:PATH forces one"


def _nearest(sample: FileSample, formats: list[Format]) -> Format | None:
    """Return the format that shares most keys with a sample of records. For a table, return a format with the same
    number of columns (words, if the table has no tabs), or with one more or less."""
    if sample.records:
        keys = set(sample.records[0])
        nearest = max(formats, key=lambda choice: len(keys & set(choice.keys)) / max(len(keys | set(choice.keys)), 1))
        return nearest if keys & set(nearest.keys) else None
    if not sample.lines:
        return None
    has_spaces = sample.columns == 1  # TREC's files have spaces between words instead of tabs
    count = len(sample.words[0]) if has_spaces else sample.columns
    tables = [
        table
        for table in formats
        if (table.name in ("trec.run", "trec.qrels") if has_spaces else table.name != "trec.run")
    ]
    sizes = {table.name: [n for n in table.columns if n > 1] for table in tables}
    distances = {name: min(abs(n - count) for n in columns) for name, columns in sizes.items() if columns}
    name = min(distances, key=lambda name: (distances[name], name != "msmarco.texts"), default="")
    return FORMATS_BY_NAME[name] if name and distances[name] <= 1 else None
