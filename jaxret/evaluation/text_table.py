"""Render cells as a table: plain text, Markdown, or HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

Row = Sequence[str]


class Html(str):
    """A piece of HTML, which is not escaped again."""

    __slots__ = ()


def as_html(value: str) -> Html:
    """Return text with escaped special characters; HTML is returned unchanged."""
    return value if isinstance(value, Html) else Html(html.escape(value))


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
    all_rows = ([cell.replace("|", "\\|") for cell in row] for row in [header, rule, *rows])
    return "\n".join("| " + " | ".join(row) + " |" for row in all_rows)


def html_table(header: Row, rows: Sequence[Row], left: int = 1) -> Html:
    """Return an HTML table; the first `left` columns are aligned left, the others right. Cells are escaped."""

    def line(kind: str, row: Row) -> str:
        sides = ("left" if i < left else "right" for i in range(len(row)))
        cells = (f'<{kind} style="text-align:{side}">{html.escape(cell)}</{kind}>' for side, cell in zip(sides, row))
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return Html(f"<table><thead>{line('th', header)}</thead><tbody>{body}</tbody></table>")


def html_paragraphs(parts: Sequence[str]) -> Html:
    """Return HTML of some parts: HTML is unchanged, and each text becomes a paragraph."""
    return Html("".join(part if isinstance(part, Html) else f"<p>{html.escape(part)}</p>" for part in parts))
