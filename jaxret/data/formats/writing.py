"""Write records and tables, and count values that a format cannot hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxret.data.formats import parquet
from jaxret.data.formats.msmarco import one_line
from jaxret.data.lines import write_text
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


def write_tab_rows(path: Path, rows: Iterable[Iterable[str]], losses: Losses) -> None:
    """Write fields between tabs, compressed if the path ends in .gz or .zst. A tab or line end inside a field becomes a
    space. `losses` counts the texts that change."""
    with write_text(path) as file:
        for row in rows:
            fields = list(row)
            flat = [one_line(text) for text in fields]
            losses["texts with tabs or line ends"] += flat != fields
            file.write("\t".join(flat) + "\n")
