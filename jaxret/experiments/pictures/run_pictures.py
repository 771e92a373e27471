"""Draw runs: curves of training and annealing, winners and weights of a passage's vectors, in-domain against zero-shot.

Everything is read from files of the runs; no model is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

Runs = Mapping[str, Sequence[Workdir]]  # name in the legend -> the runs that it stands for
_MARKERS_UP_TO = 15  # points of a curve; more markers hide each other


@dataclass(frozen=True)
class DomainChoice:
    """The results and measures of `domain_picture`."""

    # x, y: names of results (eval/NAME.json) on the axes; the mean over several
    x: tuple[str, ...]
    y: tuple[str, ...]
    measures: tuple[str, ...] = ()  # of x and of y; one for both, or "" for the first that a result has


def read_metrics(workdir: Workdir) -> list[dict[str, float]]:
    """Return the lines of a run's metrics.jsonl; a last one without an end, of a killed job, is left out. Raises
    FileNotFoundError if there is none, ValueError for a line that is not a JSON object with a step."""
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
        for number, (run, lines) in enumerate(curves[name].items()):
            _draw_curves(ax, lines, number, run)
        ax.set_xlabel("step")
        ax.set_title({"loss": "training loss", "learning_rate": "learning rate"}.get(name, f"dev {name[11:]}"))
        if name == "learning_rate":
            ax.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    return add_legend(figure, axes[0])


def metric_picture(runs: Runs, name: str) -> Figure | None:
    """Return the curves of one metric of metrics.jsonl over training steps; None if no run has logged it."""
    metrics = {
        run: [read_metrics(member) for member in members if member.metrics.exists()] for run, members in runs.items()
    }
    curves = _curves(metrics, name)
    if not any(curves.values()):
        return None
    figure, (ax,) = new_picture()
    for number, (run, lines) in enumerate(curves.items()):
        _draw_curves(ax, lines, number, run)
    ax.set_xlabel("step")
    use_whole_numbers(ax)
    if name == "learning_rate":
        ax.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    return add_legend(figure, ax)


def annealing_picture(runs: Runs) -> Figure:
    """Return the temperatures of the losses of runs at every step (MVR, section 3.3), from the function that training
    calls. Raises ValueError for a run without training data."""
    figure, (ax,) = new_picture()
    for number, (name, members) in enumerate(runs.items()):
        for kind, dash in (("temperature", "-"), ("local_temperature", (0, (5, 2)))):
            steps, values = temperatures(members[0], kind)
            label = name if len(runs) > 1 else None
            label = f"{label}: {kind.replace('_', ' ')}" if label else kind.replace("_", " ")
            colour = COLOURS[(number if len(runs) > 1 else number + (kind != "temperature")) % len(COLOURS)]
            ax.step(steps, values, where="post", color=colour, linestyle=dash, label=label_text(label))
    ax.set_xlabel("step")
    ax.set_ylabel("temperature")
    ax.set_ylim(bottom=0)
    return add_legend(figure, ax)


def temperatures(workdir: Workdir, key: str) -> tuple[list[int], list[float]]:
    """Return (steps, values of loss.KEY after annealing) of a run, from step 0 to its last logged one.

    key: "temperature" or "local_temperature". Raises ValueError for a run without training data.
    """
    config, record = stored_config(workdir), read_json(workdir.data)
    examples = (record.get("train") or {}).get("examples")
    if not examples:
        raise ValueError(f"{workdir} has no training data, so there is no annealing to draw")
    last = int(max(line["step"] for line in read_metrics(workdir)))
    settings = LossSettings(**loss_fields(config), epochs_per_step=config.train.batch_size / examples)
    steps = list(range(last + 1))
    factors = [float(settings.annealing(step * config.train.accumulate)) for step in steps]
    return steps, [config.loss[key] * factor for factor in factors]


def winner_picture(runs: Runs) -> Figure:
    """Return how often each vector of a passage has the best score with a relevant query (MLR, section 4.2.2), from
    what `jaxret diversity` wrote. Raises ValueError if the vectors of a run are equal."""
    shares = {}
    for name, members in runs.items():
        reports = [_read_diversity(run) for run in members]
        if any(one["equal"] for one in reports):
            raise ValueError(f"{name}: the vectors of a passage are equal except for rounding, so none of them wins")
        shares[name] = [{key: wins / one["pairs"] for key, wins in one["wins"].items()} for one in reports]
    return vector_bars(shares, "share of pairs won")


def weight_picture(runs: Runs) -> Figure:
    """Return the weights of a passage's vectors in the pooled one (MLR eq. 8), from what `jaxret diversity` wrote.

    Raises ValueError for a run that searches all vectors.
    """
    weights = {}
    for name, members in runs.items():
        pooling = [_read_diversity(run).get("pooling") or {} for run in members]
        if not all(one.get("weights") for one in pooling):
            raise ValueError(f"{name}: its pooling has no weights (or `jaxret diversity` is to be run again)")
        weights[name] = [one["weights"] for one in pooling]
    return vector_bars(weights, "weight in the pooled vector")


def domain_picture(runs: Runs, choice: DomainChoice) -> Figure:
    """Return a scatter of systems, in-domain quality against zero-shot quality (Aggretriever, figure 1).

    A name with several runs is their mean, with standard deviations. Raises FileNotFoundError for a missing result,
    ValueError for a measure that it does not have.
    """
    measures = choice.measures or ("",)
    figure, (ax,) = new_picture(width=4.4, height=3.6)
    labels = ["", ""]
    for number, (name, members) in enumerate(runs.items()):
        columns = []
        for side, (results, measure) in enumerate(((choice.x, measures[0]), (choice.y, measures[-1]))):
            values, names = zip(*(_mean_result(run, results, measure) for run in members), strict=True)
            columns.append(values)
            labels[side] = f"{names[0]} on {', '.join(results)}"
        means = [float(np.mean(column)) for column in columns]
        look = line_style(number)
        if len(members) > 1:
            x_error, y_error = (float(np.std(column, ddof=1)) for column in columns)
            ax.errorbar(
                means[0], means[1], y_error, x_error, fmt="none", ecolor=look["color"], elinewidth=1, capsize=2.5
            )
        ax.plot(*means, color=look["color"], marker=look["marker"], linestyle="none", markersize=7)
        ax.annotate(label_text(name), (means[0], means[1]), xytext=(7, 5), textcoords="offset points", fontsize=9)
    ax.margins(0.2)
    ax.set_xlabel(f"{labels[0]} (in domain)")
    ax.set_ylabel(f"{labels[1]} (zero-shot)")
    return figure


def _mean_result(run: Workdir, results: Sequence[str], measure: str) -> tuple[float, str]:
    """Return (mean over results of a measure, its name)."""
    values, name = [], measure
    for result in results:
        path = run.evaluation(result)
        if not path.exists():
            available = ", ".join(other.stem for other in run.evaluations)
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
    """Return run name -> (steps, values) of each of its runs that logged a metric."""
    curves: dict[str, list[tuple[list[float], list[float]]]] = {}
    for run, members in metrics.items():
        points = [[(line["step"], line[name]) for line in lines if name in line] for lines in members]
        curves[run] = [([step for step, _ in one], [value for _, value in one]) for one in points if one]
    return curves


def _draw_curves(ax: Axes, lines: Sequence[tuple[list[float], list[float]]], number: int, label: str) -> None:
    """Draw the curves of a name: seeds share colour and dash."""
    look = line_style(number)
    for index, (steps, values) in enumerate(lines):
        marker = {} if len(steps) <= _MARKERS_UP_TO else {"marker": ""}
        ax.plot(steps, values, label=label_text(label) if index == 0 else None, **{**look, "markersize": 3.5, **marker})


def _read_diversity(run: Workdir) -> dict[str, Any]:
    """Return the only report of `jaxret diversity` of a run's best checkpoint, or else of any."""
    paths = sorted(run.path.glob("eval/*.diversity.json"))
    paths = [path for path in paths if not re.search(r"\.step-\d+\.diversity$", path.stem)] or paths
    if len(paths) != 1:
        names = ", ".join(path.name for path in paths)
        problem = f"has several ({names}); keep one" if paths else "has none"
        raise ValueError(f"{run} needs one report of `jaxret diversity` in eval/, and {problem}")
    return read_json(paths[0])


def vector_bars(values: Mapping[str, Sequence[Mapping[str, float]]], title: str) -> Figure:
    """Return bars of vectors side by side for each name; several runs of a name are their mean and deviation."""
    vectors = sorted({vector for members in values.values() for one in members for vector in one}, key=_natural)
    figure, (ax,) = new_picture(height=max(HEIGHT * 0.85, 1.2 + 0.24 * len(vectors) * max(1, len(values) * 0.7)))
    size = 0.8 / len(values)
    for number, (name, members) in enumerate(values.items()):
        rows = np.arange(len(vectors)) + (number - (len(values) - 1) / 2) * size
        table = np.array([[one.get(vector, np.nan) for vector in vectors] for one in members])
        means, colour = table.mean(axis=0), COLOURS[number % len(COLOURS)]
        ax.barh(rows, means, height=size * 0.9, color=colour, label=label_text(name), zorder=2)
        if len(members) > 1:
            ax.errorbar(means, rows, xerr=table.std(axis=0, ddof=1), fmt="none", ecolor=INK, elinewidth=1, capsize=2)
        for row, mean in zip(rows, means, strict=True):
            if np.isfinite(mean):
                ax.annotate(
                    f"{mean:.3f}", (mean, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
                )
    ax.set_yticks(range(len(vectors)), map(label_text, vectors))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.12)
    ax.set_xlabel(title)
    return add_legend(figure, ax)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key with numbers by their value: layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name) if part]
