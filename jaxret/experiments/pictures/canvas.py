"""Style of all pictures, and their files: SVG and PNG with the same bytes for the same numbers.

Only this module imports matplotlib, which the extra jaxret[plots] installs.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxret.parallel.events import emit
from jaxret.storage.atomic import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NO_MATPLOTLIB = "matplotlib is not installed; pip install 'jaxret[plots]', then start the same command again"
# Okabe and Ito's colours, which readers with any colour vision can tell apart; lines differ in marker and dash, too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.2, 1.5)))
INK, FAINT = "#222222", "#DADADA"
WIDTH, HEIGHT = 5.2, 3.3  # inches of a picture with one panel: a column and a half of a paper
ON_PAGE = 0.76  # scale of width and height of a picture on a page (`picture_svg`)

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same
    "font.size": 9.5,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9.5,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "figure.facecolor": "white",  # opaque, so that the colours are readable on a dark page
    "savefig.facecolor": "white",
    "svg.hashsalt": "jaxret",  # ids of the SVG are random without it
    "svg.fonttype": "path",
}


def drawing_is_installed() -> bool:
    """Return whether matplotlib can be imported."""
    return importlib.util.find_spec("matplotlib") is not None


def new_picture(
    panels: int = 1, height: float = HEIGHT, width: float = WIDTH, share: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure and its panels, side by side.

    Args:
        height: height of the figure in inches.
        width: width of a single panel in inches; several panels are narrower.
        share: whether the panels have one vertical axis.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * panels**0.7, height))
    figure.set_layout_engine("constrained")
    return figure, list(figure.subplots(1, panels, sharey=share, squeeze=False)[0])


def add_legend(figure: Figure, ax: Axes, max_columns: int = 3) -> Figure:
    """Put a legend with at most `max_columns` columns above the panels if there is more than one label."""
    handles, labels = ax.get_legend_handles_labels()
    if len(handles) > 1:
        letters = figure.get_figwidth() * ON_PAGE * 13  # letters that fit on one line of a legend
        columns = int(letters // (max(map(len, labels)) + 6))
        figure.legend(handles, labels, loc="outside upper center", ncols=max(1, min(len(labels), max_columns, columns)))
    return figure


def label_text(name: str) -> str:
    """Return a name that matplotlib draws unchanged. A $ begins no formula, and a leading _ does not hide the name from
    a legend."""
    text = name.replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


def use_whole_numbers(ax: Axes) -> None:
    """Mark the horizontal axis only at whole numbers, such as steps and layers."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def use_log_axis(ax: Axes, ratio: float) -> None:
    """Make the horizontal axis logarithmic, with numbers that are written out. `ratio` is largest / smallest value."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if ratio < 100 else (1.0,)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))


def line_style(number: int) -> dict[str, Any]:
    """Return colour, marker and dash of the line with a number. The same combination repeats only after many lines."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[number % len(DASHES)],
    }


@contextmanager
def _style(**changes: Any) -> Iterator[None]:
    """Set the style of all pictures, with changes, inside the block. Raises ValueError if matplotlib is not
    installed."""
    if not drawing_is_installed():
        raise ValueError(NO_MATPLOTLIB)
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's matplotlibrc changes no picture
        matplotlib.rcParams.update(_STYLE | changes)
        yield


def save_picture(make: Callable[[], Figure], path: str | Path) -> str:
    """Draw a picture, write PATH.svg and PATH.png without dates and versions, and return their names.

    `make` draws with `new_picture`; it runs with settings of matplotlib that are the same for every user. Raises
    ValueError if matplotlib is not installed.
    """
    stem = Path(path).with_suffix("") if Path(path).suffix in (".svg", ".png") else Path(path)
    with _style():
        figure = make()
        for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
            name = stem.with_name(f"{stem.name}.{kind}")
            with atomic_write(name, "wb") as file:
                file.write(buffer.getvalue())
            emit("file", kind="picture", path=name)
    return f"{stem}.svg, {stem}.png"


def picture_svg(make: Callable[[], Figure]) -> str:
    """Draw a picture, and return its SVG for a page.

    Letters stay text, and the background is transparent. Letters are larger relative to the width, because the page
    shows several pictures side by side. `make` draws with `new_picture`. Raises ValueError if matplotlib is not
    installed.
    """
    with _style(**{"svg.fonttype": "none", "savefig.transparent": True}):
        figure, buffer = make(), io.StringIO()
        width, height = figure.get_size_inches()
        figure.set_size_inches(width * ON_PAGE, height * ON_PAGE)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
