"""The page around the sections of a report: one HTML file that contains its style and script and needs no network."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, NamedTuple

from jaxret.experiments.pictures.canvas import COLOURS, NO_MATPLOTLIB, drawing_is_installed, picture_svg
from jaxret.experiments.report.html import Html, as_html, join_html, missing_note, tag
from jaxret.version import __version__

NO_PICTURES = missing_note(f"Pictures are missing: {NO_MATPLOTLIB.partition(';')[0]}.", "pip install 'jaxret[plots]'")
Drawing = tuple[Callable[[], Any], str, str]  # function that draws a figure, its title, and a prefix of its ids


class Section(NamedTuple):
    """A part of the page with an entry in its navigation."""

    name: str  # target of its link: #NAME
    title: str
    content: Html


def render_page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """Return the text of the HTML file. Its content policy forbids loading, and any script but `report.js`.

    Args:
        lead: sentence below the title.
        sections: the parts of the page in order.
    """
    style, script = _resource("report.css"), _resource("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    links = (tag("li", tag("a", section.title, href=f"#{section.name}")) for section in sections)
    parts = [
        tag("section", tag("h2", section.title, id=f"{section.name}-title"), section.content, id=section.name,
            aria_labelledby=f"{section.name}-title")
        for section in sections
    ]  # fmt: skip
    body = [
        tag("a", "Skip to the report", href="#report", class_="skip"),
        tag("header", tag("h1", title), tag("p", lead, class_="lead")),
        tag("nav", tag("ol", *links), aria_label="Sections"),
        tag("main", join_html(parts), id="report"),
        tag("footer", tag("p", f"Written by jaxret {__version__} from the files of the runs.")),
        Html(f"<script>{script}</script>"),
    ]
    head = [
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        Html('<link rel="icon" href="data:,">'),
        tag("title", title),
        Html(f"<style>\n{style}</style>"),
    ]
    html = f'<html lang="en">\n<head>\n{join_html(head)}\n</head>\n<body>\n{join_html(body)}\n</body>\n</html>\n'
    return f"<!doctype html>\n{html}"


def _resource(name: str) -> str:
    return resources.files("jaxret.experiments.report").joinpath(name).read_text(encoding="utf-8")


# Colours of canvas.py -> variables of report.css, so that pictures follow the dark mode of the page.
_VARIABLES = {"#222222": "var(--ink)", "#dadada": "var(--rule)", "#ffffff": "none"} | {
    colour.lower(): f"var(--c{number})" for number, colour in enumerate(COLOURS)
}


def gallery(drawings: Sequence[Drawing]) -> Html:
    """Return pictures side by side, as many in a row as fit on the page; a note if matplotlib is not installed."""
    if drawings and not drawing_is_installed():
        return NO_PICTURES
    figures = (_inline_figure(picture_svg(make), title, name) for make, title, name in drawings)
    return tag("div", *figures, class_="gallery") if drawings else Html("")


def _inline_figure(svg: str, title: str, name: str) -> Html:
    """Return a picture of `picture_svg` as a figure with the width and the colours of the page.

    Args:
        title: caption of the picture, and its name for screen readers.
        name: prefix that makes the ids of the picture unique in the page.
    """
    body, name = svg[svg.index("<svg") :], re.sub(r"[^A-Za-z0-9_-]", "-", name)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, variable)
    body = body.replace("'DejaVu Sans'", "system-ui, sans-serif")
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    opening = re.sub(r'\s(width|height)="[^"]*"', "", body[: body.index(">")])
    label = as_html(title)
    picture = Html(f'{opening} role="img" aria-label="{label}"{body[body.index(">") :]}')
    return tag("figure", tag("figcaption", title), picture)
