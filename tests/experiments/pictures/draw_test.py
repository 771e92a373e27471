"""Pictures of runs: the numbers in them, files with the same bytes, and data that cannot be drawn."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxret.configs import base
from jaxret.evaluation.evaluation_report import write_evaluation
from jaxret.evaluation.metrics import Evaluation
from jaxret.experiments.pictures.canvas import new_picture, save_picture
from jaxret.experiments.pictures.draw import draw
from jaxret.experiments.pictures.picture_options import PictureOptions
from jaxret.experiments.pictures.run_pictures import (
    domain_picture,
    temperatures,
    training_picture,
    weight_picture,
    winner_picture,
)
from jaxret.experiments.pictures.sweep_picture import sweep_picture
from jaxret.experiments.pictures.word_picture import word_picture
from jaxret.runs.run import config_json
from jaxret.runs.workdir import Workdir
from jaxret.storage.atomic import write_json
from tests.pipeline import REPOSITORY, command, environment

pytest.importorskip("matplotlib")


def write_run(folder: Path, loss: float = 1.0, **keys: Any) -> Workdir:
    """Write the files that pictures read, for a run of 40 steps."""
    run, config = Workdir(folder), base.get_config()
    config.train.batch_size = 8
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in keys.items()})
    write_json(run.config, config_json(config))
    for path in (run.contract, run.encoder / "config.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {})
    write_json(run.data, {"train": {"examples": 80}})
    lines: list[dict[str, float]] = [
        {"step": step, "loss": loss / step, "learning_rate": 1e-5} for step in range(1, 41)
    ]
    lines.insert(20, {"step": 20, "validation/RR@10": 0.5 + loss / 10})
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    wins = {"wins": {"layer 12": 6, "layer 10": 3, "layer 2": 1}, "pairs": 10, "equal": False}
    weights = {"name": "scalar_mix", "weights": {"layer 12": 0.5, "layer 10": 0.3, "layer 2": 0.2}}
    write_json(run.evaluation("data.test.diversity"), {**wins, "pooling": weights})
    for name, value in (("near", loss / 4), ("far", loss / 5), ("other", loss / 10)):
        per_query = {"RR@10": {"q": value}, "nDCG@10": {"q": value / 2}}
        mean = {measure: values["q"] for measure, values in per_query.items()}
        write_evaluation(run.evaluation(name), Evaluation(mean, per_query, 1, 1), {})
    return run


def sweep_results() -> dict[str, Any]:
    """Return results of a sweep over chosen layers and a weight, with two seeds each."""
    points = [
        {
            "label": f"chosen={layer},12 local_weight={weight}",
            "values": {"head.mlr.chosen": [layer, 12], "loss.local_weight": weight},
            "scores": {"nDCG@10": [layer / 20, layer / 20 + weight / 10], "RR@10": [weight, weight]},
        }
        for layer in (2, 4)
        for weight in (0.1, 1.0)
    ]
    comparison = {"baseline": "chosen=2,12 local_weight=0.1"}
    return {
        "keys": ["head.mlr.chosen", "loss.local_weight"],
        "points": points,
        "measures": ["nDCG@10", "RR@10"],
        "comparison": comparison,
    }


def lines_of(ax: Any) -> dict[str, list[float]]:
    """Map the labels of a panel's lines to their heights."""
    return {
        line.get_label(): [float(value) for value in line.get_ydata()]
        for line in ax.get_lines()
        if not line.get_label().startswith("_")
    }


def test_a_sweep_is_drawn_by_its_means() -> None:
    (ax,) = sweep_picture(sweep_results()).axes
    lines = lines_of(ax)
    assert lines == {
        "local_weight = 0.1": pytest.approx([0.105, 0.205]),
        "local_weight = 1": pytest.approx([0.15, 0.25]),
    }
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["{2, 12}", "{4, 12}"]
    (ax,) = sweep_picture(sweep_results(), "RR@10").axes
    assert lines_of(ax)["local_weight = 1"] == [1.0, 1.0]
    with pytest.raises(ValueError, match="no measure 'AP'; it has nDCG@10, RR@10"):
        sweep_picture(sweep_results(), "AP")
    with pytest.raises(ValueError, match=r"keys, .*sweep .*0"):
        sweep_picture({**sweep_results(), "keys": []})


def test_numbers_of_a_wide_range_have_a_logarithmic_axis() -> None:
    results = sweep_results()
    results["keys"].reverse()
    (ax,) = sweep_picture(results).axes
    assert ax.get_xscale() == "linear"
    for point in results["points"]:
        point["values"]["loss.local_weight"] /= 1 if point["values"]["loss.local_weight"] == 1 else 10
    (ax,) = sweep_picture(results).axes
    assert ax.get_xscale() == "log"


def test_curves_of_training(tmp_path: Path) -> None:
    runs = {"a": [write_run(tmp_path / "a")], "b": [write_run(tmp_path / "b", 2.0)]}
    loss, rate, dev = training_picture(runs).axes
    assert lines_of(loss) == {"a": [1 / step for step in range(1, 41)], "b": [2 / step for step in range(1, 41)]}
    assert lines_of(rate)["a"] == [1e-5] * 40
    assert lines_of(dev) == {"a": [pytest.approx(0.6)], "b": [pytest.approx(0.7)]}
    assert [ax.get_title() for ax in (loss, rate, dev)] == ["training loss", "learning rate", "dev RR@10"]


def test_annealing_is_that_of_training(tmp_path: Path) -> None:
    """80 examples in batches of 8 make epochs of 10 steps."""
    run = write_run(tmp_path / "a", loss__annealing_rate=0.5, loss__temperature=0.2)
    steps, values = temperatures(run, "temperature")
    assert steps == list(range(41))
    expected = [0.2 * max(0.3, math.exp(-0.5 * (step // 10))) for step in steps]
    assert values == pytest.approx(expected, rel=1e-6)
    assert len(set(values)) == 4, "the floor is reached"
    run.metrics.write_text("")
    with pytest.raises(ValueError, match="no training step is logged"):
        temperatures(run, "temperature")


def test_bars_of_winners_and_weights(tmp_path: Path) -> None:
    runs = {"a": [write_run(tmp_path / "a")]}
    write_json(tmp_path / "a/eval/data.test.step-7.diversity.json", {})  # this checkpoint is not the best
    for picture, widths in ((winner_picture, [0.1, 0.3, 0.6]), (weight_picture, [0.2, 0.3, 0.5])):
        ax: Any = picture(runs).axes[0]
        assert [bar.get_width() for bar in ax.patches] == pytest.approx(widths)
        assert [tick.get_text() for tick in ax.get_yticklabels()] == ["layer 2", "layer 10", "layer 12"]


def test_one_of_several_reports_is_drawn(tmp_path: Path) -> None:
    runs, data = {"a": [write_run(tmp_path / "a")]}, "dev.test"
    write_json(tmp_path / f"a/eval/{data}.diversity.json", {"equal": False, "pairs": 4, "wins": {"layer 2": 1}})
    with pytest.raises(ValueError, match=r"choose .*--data=NAME"):
        winner_picture(runs)
    ax: Any = winner_picture(runs, data).axes[0]
    assert [bar.get_width() for bar in ax.patches] == [0.25]
    with pytest.raises(ValueError, match=r"on 'train' .* eval/ has data.test, dev.test"):
        winner_picture(runs, "train")


def test_domains_are_means_of_results(tmp_path: Path) -> None:
    runs = {"a": [write_run(tmp_path / "a", 1.0), write_run(tmp_path / "a2", 2.0)]}
    (ax,) = domain_picture(runs, ("near",), ("far", "other"), ("RR@10", "nDCG@10")).axes
    point: Any = ax.get_lines()[-1]
    assert (float(point.get_xdata()[0]), float(point.get_ydata()[0])) == pytest.approx((0.375, 0.1125))
    with pytest.raises(FileNotFoundError, match=r"run .*far, near"):
        domain_picture(runs, ("x",), ("far",))


def test_words_are_drawn_in_order_within_the_width() -> None:
    def make() -> Any:
        return word_picture([("the", 0.0), ("river", 0.9), ("##s", 0.3), *[("stone", 0.1)] * 30], "weight")

    texts = make().axes[0].texts
    assert [text.get_text() for text in texts[:3]] == ["the", "river", "s"]
    assert len({round(text.get_position()[1], 6) for text in texts}) > 1, "a long text takes several lines"


@pytest.mark.slow
def test_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    write_json(tmp_path / "sweep" / "results.json", sweep_results())
    code = "import sys; from jaxret.experiments.pictures.draw import draw; draw('sweep', [sys.argv[1]], sys.argv[2])"
    for name, seed in (("a", "1"), ("b", "2")):
        arguments = [sys.executable, "-c", code, str(tmp_path / "sweep"), str(tmp_path / name)]
        variables = environment() | {"PYTHONHASHSEED": seed, "MPLCONFIGDIR": str(tmp_path / name)}
        (tmp_path / name).mkdir()
        (tmp_path / name / "matplotlibrc").write_text(f"font.size: {10 * int(seed)}\n")
        subprocess.run(arguments, check=True, env=variables, cwd=REPOSITORY)
    for kind in ("svg", "png"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()
    assert b"<dc:date>" not in (tmp_path / "a.svg").read_bytes()
    other = sweep_results()
    other["points"][0]["scores"]["nDCG@10"][0] += 0.1
    save_picture(lambda: sweep_picture(other), tmp_path / "c.svg")
    assert (tmp_path / "c.svg").read_bytes() != (tmp_path / "a.svg").read_bytes()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("pie", {}, r"'pie' .*picture; .*training"),
        ("training", {"x": ("a",)}, r"^x .*not used .*training"),
        ("domains", {"x": ("a",)}, r"^y .*picture .*domains"),
        ("words", {}, "^passage must be given"),
        ("sweep", {}, r"results.json does not exist: `jaxret sweep` writes it"),
        ("training", {}, "is not a run"),
    ],
)
def test_pictures_that_cannot_be_drawn(kind: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        draw(kind, [str(tmp_path / "nothing")], str(tmp_path / "out"), PictureOptions(**options))
    assert not list(tmp_path.glob("out*"))


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxret.experiments.pictures.canvas.drawing_is_installed", lambda: False)
    with pytest.raises(ValueError, match=r"pip install 'jaxret\[plots\]'"):
        save_picture(lambda: new_picture()[0], tmp_path / "x")


@pytest.mark.slow
def test_the_verb_writes_both_files(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    done = subprocess.run(
        command("-m", "jaxret", "plot", "training", str(tmp_path / "a")),
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": os.fspath(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "picture: training.svg, training.png\n"
    assert {path.name for path in tmp_path.glob("training.*")} == {"training.svg", "training.png"}
