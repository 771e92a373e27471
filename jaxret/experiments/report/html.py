"""Small builders of HTML. A str is text and is escaped; an `Html`, which these functions return, is not."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxret.evaluation.text_table import Html as Html
from jaxret.evaluation.text_table import as_html as as_html


class NumberCell(NamedTuple):
    """A table cell with a number, aligned right and sorted by its value. The cell of None is empty."""

    value: float | None
    text: str = ""  # the number as the reader sees it


Cell = str | NumberCell
SHORT = 32  # a cell of at most this many characters stays on one line


def value_cell(value: float | int | None, form: str = ",.4f") -> NumberCell:
    """Return a cell with a number in a format of Python. The cell of None, NaN or an infinity is empty."""
    if value is None or not math.isfinite(value):
        return NumberCell(None)
    return NumberCell(float(value), format(value, form))


def join_html(parts: Sequence[str]) -> Html:
    """Return the parts that are not empty, each on a separate line."""
    return Html("\n".join(as_html(part) for part in parts if part))


def tag(name: str, *children: str, **attributes: str) -> Html:
    """Return an element. A _ at the end of an attribute's name is dropped (class_); any other _ becomes a hyphen."""
    pairs = (f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for key, value in attributes.items())
    inner = "".join(as_html(child) for child in children)
    return Html(f"<{name}{''.join(pairs)}>{inner}</{name}>")


def paragraph(text: str, kind: str = "") -> Html:
    """Return a paragraph, with the CSS class `kind` if it is not empty."""
    return tag("p", text, **({"class_": kind} if kind else {}))


def missing_note(sentence: str, command: str = "") -> Html:
    """Return a paragraph that says what is missing, and the command that makes it."""
    return tag("p", sentence, *([Html(" "), tag("code", command)] if command else []), class_="missing")


def bullets(items: Sequence[str]) -> Html:
    return tag("ul", *(tag("li", item) for item in items))


def collapsible(summary: str, *children: str) -> Html:
    """Return a part that is closed until the reader selects its summary."""
    return tag("details", tag("summary", summary), *children)


def data_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Html:
    """Return a table that can be sorted by each column. It has its own scroll bar on a narrow page.

    The first cell of a row is its header. A column is aligned right if its first cell is a number.

    Args:
        caption: what the table shows.
        rows: rows with a cell for each column.
    """
    first = rows[0] if rows else [""] * len(header)
    kinds = [{"class_": "n"} if isinstance(cell, NumberCell) else {} for cell in first]
    heads = (tag("th", name, scope="col", **kind) for name, kind in zip(header, kinds, strict=True))
    body = (tag("tr", *(_cell(cell, place == 0) for place, cell in enumerate(row))) for row in rows)
    table = tag(
        "table", tag("caption", caption), tag("thead", tag("tr", *heads)), tag("tbody", *body), class_="sortable"
    )
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _cell(cell: Cell, is_first: bool) -> Html:
    if isinstance(cell, NumberCell):
        value = {} if cell.value is None else {"data_value": repr(float(cell.value))}
        return tag("td", cell.text, class_="n", **value)
    short = {"class_": "short"} if len(cell) <= SHORT else {}
    return tag("th", cell, scope="row", **short) if is_first else tag("td", cell, **short)
