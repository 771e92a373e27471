"""Draw quality over a swept key: MLR's figures 2 and 3, Aggretriever's figure 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxret.experiments.config_values import format_value, short_names
from jaxret.experiments.pictures.canvas import INK, label_text, line_style, new_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOG_FROM = 15  # ratio of the largest and the smallest value from which an axis is logarithmic


def sweep_picture(results: Mapping[str, Any], measure: str = "") -> Figure:
    """Return a picture of a sweep: the first key is the horizontal axis, the second gives lines, the third panels.

    A point is the mean over seeds; its bar is the standard deviation, and small dots are the seeds. A dashed line is
    the baseline.

    Args:
        results: value of results.json of a sweep.
        measure: the measure to draw; "" for the first.
    Raises:
        ValueError: the measure is unknown, or the sweep does not have one to three keys.
    """
    name = measure or results["measures"][0]
    if name not in results["measures"]:
        raise ValueError(f"the sweep has no measure {name!r}; it has {', '.join(results['measures'])}")
    keys, points = list(results["keys"]), [point for point in results["points"] if name in point["scores"]]
    if not 1 <= len(keys) <= 3:
        raise ValueError(f"a picture of a sweep has one to three keys, and this sweep has {len(keys)}")
    names = short_names(keys)
    panels = _distinct(points, keys[2]) if len(keys) > 2 else [None]
    lines = _distinct(points, keys[1]) if len(keys) > 1 else [None]
    figure, axes = new_picture(len(panels))
    for panel, ax in zip(panels, axes, strict=True):
        inside = [point for point in points if panel is None or point["values"][keys[2]] == panel]
        for number, line in enumerate(lines):
            members = [point for point in inside if line is None or point["values"][keys[1]] == line]
            label = None if line is None else label_text(f"{names[keys[1]]} = {_show(line)}")
            _draw_line(ax, members, keys[0], name, (number, label, (number - (len(lines) - 1) / 2) * 0.06))
        _set_ticks(ax, [point["values"][keys[0]] for point in points])
        ax.set_xlabel(names[keys[0]])
        if panel is not None:
            ax.set_title(label_text(f"{names[keys[2]]} = {_show(panel)}"))
        _draw_baseline(ax, results, name)
    axes[0].set_ylabel(name)
    if len(lines) > 1:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=min(len(lines), 4))
    return figure


def _draw_line(
    ax: Axes, points: Sequence[Mapping[str, Any]], key: str, measure: str, style: tuple[int, str | None, float]
) -> None:
    """Draw the points of one line with deviations and seeds. `style` is (number, label, shift to the side)."""
    number, label, shift = style
    values = [point["values"][key] for point in points]
    is_numeric = _is_numeric(values)  # other values are at 0, 1, ...
    columns = [float(value) if is_numeric else index + shift for index, value in enumerate(values)]
    runs = [point["scores"][measure] for point in points]
    means = [float(np.mean(scores)) for scores in runs]
    spread = [float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0 for scores in runs]
    look = line_style(number)
    ax.plot(columns, means, label=label, zorder=3, **look)
    if any(spread):
        ax.errorbar(columns, means, spread, fmt="none", ecolor=look["color"], elinewidth=1, capsize=3, zorder=3)
    for x, scores in zip(columns, runs, strict=True):
        if len(scores) > 1:
            ax.plot([x] * len(scores), scores, ".", color=look["color"], alpha=0.45, markersize=4, zorder=2)


def _draw_baseline(ax: Axes, results: Mapping[str, Any], measure: str) -> None:
    """Draw a dashed line at the mean of the baseline."""
    label = results["comparison"]["baseline"]
    scores = next(point["scores"].get(measure) for point in results["points"] if point["label"] == label)
    if scores is None:  # local variation is not defined for one vector
        return
    mean = float(np.mean(scores))
    ax.axhline(mean, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.6, zorder=1)
    place: dict[str, Any] = {"xytext": (-2, 3), "textcoords": "offset points", "ha": "right", "va": "bottom"}
    ax.annotate("baseline", (1, mean), xycoords=("axes fraction", "data"), fontsize=8, alpha=0.8, **place)


def _is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _set_ticks(ax: Axes, swept_values: Sequence[Any]) -> None:
    """Set ticks at the swept values; a wide range of positive numbers has a logarithmic axis."""
    values = list({format_value(value): value for value in swept_values}.values())
    if _is_numeric(values):
        low, high = min(values), max(values)
        if low > 0 and high / low >= _LOG_FROM:
            ax.set_xscale("log")
            ax.minorticks_off()
            margin = (high / low) ** 0.06
            ax.set_xlim(low / margin, high * margin)
        ax.set_xticks([float(value) for value in values], [_show(value) for value in values])
    else:
        ax.set_xticks(range(len(values)), [_show(value) for value in values])
        ax.set_xlim(-0.4, len(values) - 0.6)
    if len(values) * max(len(_show(value)) for value in values) > 60:
        ax.tick_params(axis="x", rotation=30)


def _distinct(points: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return list({format_value(point["values"][key]): point["values"][key] for point in points}.values())


def _show(value: Any) -> str:
    """Return a value as text: a list in braces, as the papers write sets of layers."""
    return "{" + ", ".join(map(str, value)) + "}" if isinstance(value, (tuple, list)) else format_value(value)
