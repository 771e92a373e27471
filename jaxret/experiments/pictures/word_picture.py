"""Draw the values that a passage's words have in its vector: Aggretriever's weights of words, I3's probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxret.experiments.pictures.canvas import INK, WIDTH, new_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LETTER, _LINE, _GAP = 0.082, 0.29, 0.07  # inches of a letter (DejaVu Sans Mono, 10 points), a line and a space
_FONT = 10


def word_picture(words: Sequence[tuple[str, float]], title: str = "") -> Figure:
    """Return a passage's text, each word on a colour that is darker for a larger value, and the scale of the colours.

    Values of zero and below have no colour. There is no space before later pieces of a word ("##ing").

    Args:
        words: tokens and their values, in the order of the text.
        title: label of the scale, which says what the values are.
    Raises:
        ValueError: `words` is empty.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    if not words:
        raise ValueError("the passage has no words to draw")
    width = WIDTH * 1.25
    boxes = _lay_out(words, width)
    lines = 1 + max(row for *_, row in boxes)
    figure, (ax,) = new_picture(height=lines * _LINE + 0.75, width=width)
    scale = Normalize(0, max(max(value for _, value in words), 1e-9))
    colours = colormaps["Blues"]
    for (word, value), (left, size, row) in zip(words, boxes, strict=True):
        strength = scale(value) if value > 0 else 0.0
        if value > 0:
            ax.add_patch(Rectangle((left, row * _LINE), size, _LINE * 0.82, color=colours(strength), linewidth=0))
        middle = row * _LINE + _LINE * 0.41
        colour = "white" if strength > 0.5 else INK
        ax.text(left + size / 2, middle, _plain_piece(word), color=colour, size=_FONT, family="DejaVu Sans Mono",
                ha="center", va="center")  # fmt: skip
    ax.set_xlim(0, width)
    ax.set_ylim(lines * _LINE, 0)
    ax.set_axis_off()
    bar = figure.colorbar(ScalarMappable(scale, colours), ax=ax, orientation="horizontal", aspect=45, fraction=0.1)
    bar.set_label(title)
    bar.outline.set_visible(False)
    return figure


def _lay_out(words: Sequence[tuple[str, float]], width: float) -> list[tuple[float, float, int]]:
    """Return (left edge in inches, width in inches, line number) of each word. A word that does not fit begins a new
    line."""
    boxes, left, row = [], 0.0, 0
    for index, (word, _) in enumerate(words):
        size = _LETTER * len(_plain_piece(word)) + 0.03
        if index and not word.startswith("##"):
            left += _GAP
        if left and left + size > width:
            left, row = 0.0, row + 1
        boxes.append((left, size, row))
        left += size
    return boxes


def _plain_piece(word: str) -> str:
    """Return a token without the signs of its vocabulary: ## in WordPiece, Ġ in byte-pair, ▁ in SentencePiece."""
    return word.removeprefix("##").lstrip("▁Ġ") or word
