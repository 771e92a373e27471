"""Small builders of HTML. A str is text, which is escaped; `Html`, which these functions return, is taken as it is."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxret.evaluation.text_table import Html as Html
from jaxret.evaluation.text_table import as_html as as_html


class Number(NamedTuple):
    """A cell of a table with a number: it is aligned right and sorted by its value. None is an empty cell."""

    value: float | None
    text: str = ""


Cell = str | Number
SHORT = 32  # characters of a cell that stays in one line


def value_cell(value: float | int | None, form: str = ",.4f") -> Number:
    """Return a cell with a number in a format of Python; an empty one for None and for what is not finite."""
    if value is None or not math.isfinite(value):
        return Number(None)
    return Number(float(value), format(value, form))


def join(parts: Sequence[str]) -> Html:
    """Return pieces one after the other."""
    return Html("\n".join(as_html(part) for part in parts if part))


def tag(name: str, *children: str, **attributes: str) -> Html:
    """Return an element. In names of attributes, a _ at the end is dropped, and others become hyphens: aria_label."""
    pairs = (f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for key, value in attributes.items())
    inner = "".join(as_html(child) for child in children)
    return Html(f"<{name}{''.join(pairs)}>{inner}</{name}>")


def paragraph(text: str, kind: str = "") -> Html:
    """Return a paragraph, of a class if `kind` is set."""
    return tag("p", text, **({"class_": kind} if kind else {}))


def missing(sentence: str, command: str = "") -> Html:
    """Return a sentence that names the missing files, and the command that makes them."""
    return tag("p", sentence, *([Html(" "), tag("code", command)] if command else []), class_="missing")


def bullets(items: Sequence[str]) -> Html:
    return tag("ul", *(tag("li", item) for item in items))


def details(summary: str, *children: str) -> Html:
    """Return a part that opens when its summary is chosen, by mouse or keyboard."""
    return tag("details", tag("summary", summary), *children)


def gallery(figures: Sequence[str]) -> Html:
    """Return figures side by side, as many as the page is wide."""
    return tag("div", *figures, class_="gallery") if figures else Html("")


def data_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Html:
    """Return a table that can be sorted by each column, and that scrolls within itself where the page is narrow.

    The first cell of a row is its header. A column is aligned right if its first cell is a number.

    Args:
        caption: what the table shows.
        rows: a cell for each column.
    """
    first = rows[0] if rows else [""] * len(header)
    kinds = [{"class_": "n"} if isinstance(cell, Number) else {} for cell in first]
    heads = (tag("th", name, scope="col", **kind) for name, kind in zip(header, kinds, strict=True))
    body = (tag("tr", *(_cell(cell, place == 0) for place, cell in enumerate(row))) for row in rows)
    table = tag(
        "table", tag("caption", caption), tag("thead", tag("tr", *heads)), tag("tbody", *body), class_="sortable"
    )
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _cell(cell: Cell, is_first: bool) -> Html:
    if isinstance(cell, Number):
        value = {} if cell.value is None else {"data_value": repr(float(cell.value))}
        return tag("td", cell.text, class_="n", **value)
    short = {"class_": "short"} if len(cell) <= SHORT else {}
    return tag("th", cell, scope="row", **short) if is_first else tag("td", cell, **short)
