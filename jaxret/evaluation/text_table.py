"""Render cells as a plain-text or Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[str]


def aligned_table(header: Row, rows: Sequence[Row], left: int = 1) -> str:
    """Return a plain-text table; the first `left` columns are aligned left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(f"{cell:<{width}}" if i < left else f"{cell:>{width}}" for i, (cell, width) in enumerate(columns))
        for columns in (zip(row, widths) for row in [header, ["-" * width for width in widths], *rows])
    ]
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(header: Row, rows: Sequence[Row], left: int = 1) -> str:
    """Return a Markdown table; the first `left` columns are aligned left, the others right."""
    rule = [":--" if i < left else "--:" for i in range(len(header))]
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in [header, rule, *rows])
    return "\n".join("| " + " | ".join(row) + " |" for row in escaped)
