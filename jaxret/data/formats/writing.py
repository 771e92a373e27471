"""Write records and tables, and count values that a format cannot hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxret.data.formats import parquet
from jaxret.data.lines import PathLike, write_text
from jaxret.data.records import Passage

Losses = Counter[str]  # kind of value that a file cannot hold -> how often


def joined_text(passage: Passage) -> str:
    """Return title and text with a space between them, for a format without titles. Tevatron joins them so."""
    return f"{passage.title} {passage.text}" if passage.title.strip() else passage.text


def write_records(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines, or parquet if the name ends in .parquet."""
    if path.suffix == ".parquet":
        parquet.write_parquet(path, rows)
        return
    with write_text(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_json_array(path: PathLike, records: Iterable[Mapping[str, Any]]) -> None:
    """Write an array of JSON, a record on each line."""
    with write_text(path) as file:
        file.write("[")
        for number, record in enumerate(records):
            file.write(f"{',' if number else ''}\n{json.dumps(record, ensure_ascii=False)}")
        file.write("\n]\n")


def write_tab_rows(path: Path, rows: Iterable[Iterable[str]], losses: Losses, header: Sequence[str] = ()) -> None:
    """Write fields between tabs. A tab or line end inside a field becomes a space.

    Args:
        path: file to write, compressed if it ends in .gz or .zst.
        rows: fields of each row.
        losses: counts of the texts that change; updated.
        header: fields of the first line; () for none.
    """
    with write_text(path) as file:
        if header:
            file.write("\t".join(header) + "\n")
        for row in rows:
            fields = list(row)
            flat = [text.translate({9: " ", 10: " ", 13: " "}) for text in fields]
            losses["texts with tabs or line ends"] += flat != fields
            file.write("\t".join(flat) + "\n")


def write_csv_rows(path: Path, rows: Iterable[Iterable[str]], losses: Losses, header: Sequence[str] = ()) -> None:
    """Write CSV with tabs, as DPR reads it. Nothing is lost.

    Args:
        path, rows, losses, header: see `write_tab_rows`.
    """

    def quote(text: str) -> str:
        # Before Python 3.13 the csv module writes "\r" without quotes, and cannot read this file.
        return '"' + text.replace('"', '""') + '"' if any(sign in text for sign in '"\t\r\n') else text

    with write_text(path) as file:
        if header:
            file.write("\t".join(header) + "\n")
        for row in rows:
            file.write("\t".join(map(quote, row)) + "\n")
