"""Cells -> a table, as plain text or Markdown."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[str]


def aligned(header: Row, rows: Sequence[Row], left: int = 1) -> str:
    """Plain text: a line a row, the first `left` columns begin at the left, the others end at the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(f"{cell:<{width}}" if i < left else f"{cell:>{width}}" for i, (cell, width) in enumerate(columns))
        for columns in (zip(row, widths) for row in [header, ["-" * width for width in widths], *rows])
    ]
    return "\n".join(line.rstrip() for line in lines)


def piped(header: Row, rows: Sequence[Row], left: int = 1) -> str:
    """The same as Markdown."""
    rule = [":--" if i < left else "--:" for i in range(len(header))]
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in [header, rule, *rows])
    return "\n".join("| " + " | ".join(row) + " |" for row in escaped)
