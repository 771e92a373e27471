"""Draw runs: curves of training and annealing, winners and weights of a passage's vectors, in-domain against zero-shot.

The pictures are drawn from files of the runs; no model is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxret.evaluation.evaluation_report import read_evaluation
from jaxret.experiments.pictures.canvas import (
    COLOURS,
    HEIGHT,
    INK,
    add_legend,
    label_text,
    line_style,
    new_picture,
    use_whole_numbers,
)
from jaxret.runs.run import stored_config
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import read_json
from jaxret.training.losses.group_losses import loss_fields
from jaxret.training.losses.in_batch import LossSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Mapping[str, Sequence[Workdir]]  # name in the legend -> runs of this name
_MARKERS_UP_TO = 15  # a curve with more points has no markers, because they would hide each other


def read_metrics(workdir: Workdir) -> list[dict[str, float]]:
    """Return the lines of a run's metrics.jsonl, without an unfinished last line of a killed job. Raises
    FileNotFoundError if the file is missing, ValueError for a line that is not a JSON object with a step."""
    if not workdir.metrics.exists():
        raise FileNotFoundError(f"{workdir.metrics} does not exist, so there is no training to draw")
    lines = []
    content = workdir.metrics.read_text(encoding="utf-8")
    for number, text in enumerate(content[: content.rfind("\n") + 1].splitlines(), 1):
        try:
            line = {str(name): float(value) for name, value in json.loads(text).items()}
            lines.append(line | {"step": line["step"]})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{workdir.metrics}, line {number}: not a line of metrics: {text[:60]!r}") from error
    return lines


def training_picture(runs: Runs) -> Figure:
    """Return curves of runs over training steps: loss, learning rate, and the measure of the dev set if there is one.

    Raises ValueError if no run has logged a step.
    """
    metrics = {name: [read_metrics(run) for run in members] for name, members in runs.items()}
    measures = {stored_config(run).validation.metric for members in runs.values() for run in members}
    names = ["loss", "learning_rate", *sorted(f"validation/{measure}" for measure in measures)]
    curves = {name: _curves(metrics, name) for name in names}
    curve_names = [name for name in names if any(curves[name].values())]
    if not curve_names:
        raise ValueError(f"{', '.join(runs)}: no training step is logged")
    figure, axes = new_picture(len(curve_names), share=False)
    for ax, name in zip(axes, curve_names, strict=True):
        _draw_metric(ax, curves[name], name)
        ax.set_title({"loss": "training loss", "learning_rate": "learning rate"}.get(name, f"dev {name[11:]}"))
    return add_legend(figure, axes[0])


def metric_picture(runs: Runs, name: str) -> Figure:
    """Return the curves of one metric of metrics.jsonl over training steps."""
    metrics = {
        run: [read_metrics(member) for member in members if member.metrics.exists()] for run, members in runs.items()
    }
    figure, (ax,) = new_picture()
    _draw_metric(ax, _curves(metrics, name), name)
    use_whole_numbers(ax)
    return add_legend(figure, ax)


def annealing_picture(runs: Runs) -> Figure:
    """Return the temperatures of the losses of runs at every step (MVR, section 3.3). The function that training calls
    computes them. Raises ValueError for a run without training data."""
    figure, (ax,) = new_picture()
    for number, (name, members) in enumerate(runs.items()):
        for kind, dash in (("temperature", "-"), ("local_temperature", (0, (5, 2)))):
            steps, values = temperatures(members[0], kind)
            label = (f"{name}: " if len(runs) > 1 else "") + kind.replace("_", " ")
            colour = COLOURS[(number if len(runs) > 1 else number + (kind != "temperature")) % len(COLOURS)]
            ax.step(steps, values, where="post", color=colour, linestyle=dash, label=label_text(label))
    ax.set_xlabel("step")
    ax.set_ylabel("temperature")
    ax.set_ylim(bottom=0)
    return add_legend(figure, ax)


def temperatures(workdir: Workdir, key: str) -> tuple[list[int], list[float]]:
    """Return (steps, values of loss.KEY after annealing) of a run, from step 0 to its last logged step.

    `key` is "temperature" or "local_temperature". Raises ValueError for a run without training data or logged steps.
    """
    config, record = stored_config(workdir), read_json(workdir.data)
    examples = (record.get("train") or {}).get("examples")
    if not examples:
        raise ValueError(f"{workdir} has no training data, so there is no annealing to draw")
    if not (metrics := read_metrics(workdir)):
        raise ValueError(f"{workdir}: no training step is logged, so there is no annealing to draw")
    last = int(max(line["step"] for line in metrics))
    settings = LossSettings(**loss_fields(config), epochs_per_batch=config.train.batch_size / examples)
    steps = list(range(last + 1))
    factors = [float(settings.annealing(step * config.train.accumulate)) for step in steps]
    return steps, [config.loss[key] * factor for factor in factors]


def winner_picture(runs: Runs, data: str = "") -> Figure:
    """Return bars: how often each vector of a passage has the best score with a relevant query (MLR, section 4.2.2).
    `jaxret diversity` wrote the counts, for `data` if there are several. Raises ValueError if the vectors of a run are
    equal."""
    shares = {}
    for name, members in runs.items():
        reports = [_read_diversity(run, data) for run in members]
        if any(report["equal"] for report in reports):
            raise ValueError(f"{name}: the vectors of a passage are equal except for rounding, so none of them wins")
        shares[name] = [{key: wins / report["pairs"] for key, wins in report["wins"].items()} for report in reports]
    return vector_bars(shares, "share of pairs won")


def weight_picture(runs: Runs, data: str = "") -> Figure:
    """Return bars: the weights of a passage's vectors in the pooled vector (MLR eq. 8), read from the reports of
    `jaxret diversity`, for `data` if there are several. Raises ValueError for a run that searches all vectors."""
    weights = {}
    for name, members in runs.items():
        poolings = [_read_diversity(run, data).get("pooling") or {} for run in members]
        if not all(pooling.get("weights") for pooling in poolings):
            raise ValueError(f"{name}: the pooling has no weights, or the report is old: run `jaxret diversity` again")
        weights[name] = [pooling["weights"] for pooling in poolings]
    return vector_bars(weights, "weight in the pooled vector")


def domain_picture(runs: Runs, x: Sequence[str], y: Sequence[str], measures: Sequence[str] = ()) -> Figure:
    """Return a scatter of systems, in-domain quality against zero-shot quality (Aggretriever, figure 1).

    The point of a name with several runs is their mean; its bars are standard deviations.

    Args:
        runs: name -> runs.
        x: names of results (eval/NAME.json) on the horizontal axis, which has their mean.
        y: names of results on the vertical axis.
        measures: one measure for both axes, or one for each; () for the first measure of a result.
    Raises:
        FileNotFoundError: a result is missing.
        ValueError: a result does not have the measure.
    """
    measures = measures or ("",)
    figure, (ax,) = new_picture(width=4.4, height=3.6)
    labels = ["", ""]
    for number, (name, members) in enumerate(runs.items()):
        columns = []
        for side, (results, measure) in enumerate(((x, measures[0]), (y, measures[-1]))):
            values, names = zip(*(_mean_result(run, results, measure) for run in members), strict=True)
            columns.append(values)
            labels[side] = f"{names[0]} on {', '.join(results)}"
        means = [float(np.mean(column)) for column in columns]
        look = line_style(number)
        if len(members) > 1:
            x_error, y_error = (float(np.std(column, ddof=1)) for column in columns)
            x_mean, y_mean = means
            ax.errorbar(x_mean, y_mean, y_error, x_error, fmt="none", ecolor=look["color"], elinewidth=1, capsize=2.5)
        ax.plot(*means, color=look["color"], marker=look["marker"], linestyle="none", markersize=7)
        ax.annotate(label_text(name), (means[0], means[1]), xytext=(7, 5), textcoords="offset points", fontsize=9)
    ax.margins(0.2)
    ax.set_xlabel(f"{labels[0]} (in domain)")
    ax.set_ylabel(f"{labels[1]} (zero-shot)")
    return figure


def _mean_result(run: Workdir, results: Sequence[str], measure: str) -> tuple[float, str]:
    """Return (mean of a measure over results, name of the measure)."""
    values, name = [], measure
    for result in results:
        path = run.evaluation(result)
        if not path.exists():
            available = ", ".join(evaluation.stem for evaluation in run.evaluations)
            raise FileNotFoundError(f"{path} does not exist; the run has {available or 'no result'}")
        mean = read_evaluation(path).mean
        name = name or next(iter(mean))
        if name not in mean:
            raise ValueError(f"{path} has no {name!r}; it has {', '.join(mean)}")
        values.append(mean[name])
    return float(np.mean(values)), name


def _curves(
    metrics: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], name: str
) -> dict[str, list[tuple[list[float], list[float]]]]:
    """Return name -> (steps, values) for each of its runs that logged the metric."""
    curves: dict[str, list[tuple[list[float], list[float]]]] = {}
    for run, members in metrics.items():
        points = [[(line["step"], line[name]) for line in lines if name in line] for lines in members]
        curves[run] = [([step for step, _ in curve], [value for _, value in curve]) for curve in points if curve]
    return curves


def _draw_metric(ax: Axes, curves: Mapping[str, Sequence[tuple[list[float], list[float]]]], name: str) -> None:
    """Draw the curves of a metric. The curves of runs with the same name have the same colour and dash."""
    for number, (label, lines) in enumerate(curves.items()):
        look = line_style(number)
        for index, (steps, values) in enumerate(lines):
            marker = {} if len(steps) <= _MARKERS_UP_TO else {"marker": ""}
            text = label_text(label) if index == 0 else None
            ax.plot(steps, values, label=text, **{**look, "markersize": 3.5, **marker})
    ax.set_xlabel("step")
    if name == "learning_rate":
        ax.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)


def _read_diversity(run: Workdir, data: str) -> dict[str, Any]:
    """Return the report eval/DATA.diversity.json of `jaxret diversity`; without `data`, the only report on a run's best
    checkpoint, or on another checkpoint if the best has none. Raises ValueError if there is none, or no only one."""
    paths = sorted(run.path.glob("eval/*.diversity.json"))
    reports = {path.name.removesuffix(".diversity.json"): path for path in paths}
    of_best = [name for name in reports if not re.search(r"\.step-\d+$", name)] or list(reports)
    if data not in reports and (data or len(of_best) != 1):
        kind = f"a report of `jaxret diversity`{f' on {data!r}' if data else ''}"
        problem = f"{', '.join(reports)}; choose one with --data=NAME" if reports else "none"
        raise ValueError(f"{run}: {kind} is needed; eval/ has {problem}")
    return read_json(reports[data or of_best[0]])


def vector_bars(values: Mapping[str, Sequence[Mapping[str, float]]], title: str) -> Figure:
    """Return bars for each vector, side by side for the names. Several runs of a name give a mean and a deviation."""
    names = {vector for members in values.values() for run_values in members for vector in run_values}
    vectors = sorted(names, key=_natural_key)
    figure, (ax,) = new_picture(height=max(HEIGHT * 0.85, 1.2 + 0.24 * len(vectors) * max(1, len(values) * 0.7)))
    size = 0.8 / len(values)
    for number, (name, members) in enumerate(values.items()):
        rows = np.arange(len(vectors)) + (number - (len(values) - 1) / 2) * size
        table = np.array([[run_values.get(vector, np.nan) for vector in vectors] for run_values in members])
        means, colour = table.mean(axis=0), COLOURS[number % len(COLOURS)]
        ax.barh(rows, means, height=size * 0.9, color=colour, label=label_text(name), zorder=2)
        if len(members) > 1:
            ax.errorbar(means, rows, xerr=table.std(axis=0, ddof=1), fmt="none", ecolor=INK, elinewidth=1, capsize=2)
        for row, mean in zip(rows, means, strict=True):
            if np.isfinite(mean):
                ax.annotate(f"{mean:.3f}", (mean, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
    ax.set_yticks(range(len(vectors)), map(label_text, vectors))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.12)
    ax.set_xlabel(title)
    return add_legend(figure, ax)


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers by value: layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name) if part]
