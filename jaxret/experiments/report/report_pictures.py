"""Pictures that only a report has: intervals of differences, quality against a cost, quality over layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxret.evaluation.comparison import SystemTest
from jaxret.experiments.pictures.canvas import (
    HEIGHT,
    INK,
    add_legend,
    label_text,
    line_style,
    new_picture,
    use_log_axis,
)
from jaxret.experiments.probe.probe_report import PROBE_MEASURE, draw_layers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOG_FROM = 8  # ratio of the largest and the smallest cost from which the axis is logarithmic


def interval_picture(tests: Sequence[SystemTest]) -> Figure:
    """Return the difference of each system from the first one, with its interval of 95 %."""
    figure, (ax,) = new_picture(height=1.0 + 0.42 * len(tests))
    for row, test in enumerate(tests):
        look, comparison = line_style(row + 1), test.comparison
        ax.plot([comparison.low, comparison.high], [row, row], color=look["color"], linewidth=2.2)
        ax.plot(comparison.difference, row, color=look["color"], marker=look["marker"])
    ax.axvline(0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    ax.set_yticks(range(len(tests)), [label_text(test.system) for test in tests])
    ax.set_ylim(len(tests) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"difference in {tests[0].measure}")
    return figure


def cost_picture(points: Mapping[str, tuple[float, float]], axes: tuple[str, str]) -> Figure:
    """Return a scatter of systems. `points` is name -> (cost, quality), `axes` has the names of both axes."""
    figure, (ax,) = new_picture()
    costs = [cost for cost, _ in points.values()]
    for number, (name, place) in enumerate(points.items()):
        look = {**line_style(number), "linestyle": "none"}
        ax.plot(*place, **look, markersize=8, label=label_text(name))
    if min(costs) > 0 and max(costs) / min(costs) >= _LOG_FROM:
        use_log_axis(ax, max(costs) / min(costs))
    ax.margins(0.15)
    ax.set_xlabel(axes[0])
    ax.set_ylabel(axes[1])
    return add_legend(figure, ax)


def layer_picture(results: Mapping[str, Any], normalize: bool) -> Figure:
    """Return quality over the layers of an encoder, a line for each token, from the results of `jaxret probe`."""
    figure, (ax,) = new_picture(height=HEIGHT * 1.2)
    draw_layers(ax, results, normalize)
    ax.set_ylabel(PROBE_MEASURE)
    return add_legend(figure, ax, max_columns=2)
