"""A sweep in miniature: processes that are killed, one point per process, the table, and errors."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxret.evaluation.comparison import compare_systems
from jaxret.experiments.recipes.evaluation_request import EvaluationRequest
from jaxret.experiments.sweeps.grid import Grid, SweepSetup
from jaxret.experiments.sweeps.run_sweep import sweep_runs
from jaxret.storage.atomic import read_json
from tests.pipeline import REPOSITORY, command, environment, train_arguments, write_data, write_encoder

GRID = ("--grid=loss.temperature=1,0.2", "--seeds=1,2", "--measures=RR@10", "--k=10")

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[str]]:
    folder = tmp_path_factory.mktemp("sweep")
    encoder, data = write_encoder(folder / "encoder"), write_data(folder / "data")
    return lambda workdir: ["sweep", *train_arguments(encoder, data, workdir, train__steps=2, data__dev="")]


def sweep(arguments: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("-m", "jaxret", *arguments, *more),
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def values(folder: Path) -> dict[str, dict[str, float]]:
    """Map run -> query -> RR@10, from the evaluation of every run."""
    return {
        str(path.relative_to(folder).parent.parent.parent): read_json(path)["per_query"]["RR@10"]
        for path in sorted(folder.glob("*/seed-*/run/eval/*.json"))
    }


STAGES = """from jaxret.configs.mlr import get_config


def stages(suffix=""):
    return [{"name": "a", "mine": {"pools": ["bm25"], "match": "regex"}}]
"""


@pytest.mark.parametrize(("match", "expected"), [("", "regex"), ("string", "string"), ("regex", "regex")])
def test_the_flag_match_holds_for_the_mining_of_stages(match: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text(STAGES)
    request = EvaluationRequest(match=match)
    (run,) = sweep_runs(SweepSetup(str(tmp_path / "c.py"), {}, Grid({}), request, stages=True), tmp_path / "sweep")
    assert run.stage.mining
    assert run.stage.mining.match == expected


@pytest.mark.parametrize(("verb", "options"), [("sweep", '_SETUP.parts["evaluation"]'), ("recipe", "_EVALUATION")])
def test_the_flag_match_has_a_value_only_if_it_is_given(verb: str, options: str) -> None:
    script = f"""
from jaxret.cli import app, {verb} as verb
for flags in ([], ["--match=string"], ["--match=regex"]):
    app.parse_flags(verb, ["--config=base", "--workdir=x", *flags])
    print(repr(verb.{options}().match))
"""
    done = subprocess.run(command("-c", script), cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    assert done.stdout.split() == ["''", "'string'", "'regex'"], done.stderr


@pytest.mark.daily("key")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "message"),
    [
        pytest.param(
            ("--grid=loss.temperatur=1,2",), "loss.temperatur: the config has no such key; did you mean", id="key"
        ),
        pytest.param(
            ("--grid=train.batch_size=4,8",),
            "train.batch_size is set by --grid and by --config.train.batch_size",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(("--grid=loss.temperature=1,0",), "temperature=0: ", marks=pytest.mark.exhaustive),
        (("--grid=head.mvr.count=4,8",), "are the same system: head dual_encoder reads no key"),
        pytest.param(
            ("--grid=loss.temperature=1,2", "--baseline=x"),
            "--baseline=x is not a point; points are 'temperature=1'",
            marks=pytest.mark.exhaustive,
        ),
        (("--grid=loss.temperature=1,2", "--index=3"), "--index=3: the sweep has the runs 1 to 2"),
    ],
)
def test_settings_are_refused_before_anything_runs(
    more: tuple[str, ...], message: str, arguments: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    done = sweep(arguments(tmp_path / "sweep"), *more)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert message in done.stderr
    assert not (tmp_path / "sweep").exists()


@pytest.mark.exhaustive
def test_single_points_and_a_killed_job_give_the_same_table(
    arguments: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    """The job is killed in the second point; then two points run in one process each; then the same command completes
    the table."""
    folder = tmp_path / "sweep"
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command("-m", "jaxret", *arguments(folder), *GRID), cwd=REPOSITORY, env=environment(), stdout=file
        )
        while "[2/4] temperature=1 seed=2 == run.train" not in log.read_text() and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert len(values(folder)) == 1
    assert not (folder / "results.md").exists()

    listed = sweep(arguments(folder), *GRID, "--list")
    states = [re.split(r"\s{2,}", line)[-1] for line in listed.stdout.splitlines()[2:]]
    assert states == ["measured", "begun", "-", "-"], listed.stdout
    for index in (3, 4):
        alone = sweep(arguments(folder), *GRID, f"--index={index}")
        assert alone.returncode == 0, alone.stderr
        assert f"[{index}/4]" in alone.stdout
        assert not (folder / "results.md").exists(), "one point cannot be compared"
    collected = sweep(arguments(folder), *GRID)
    assert collected.returncode == 0, collected.stderr
    assert re.findall(r"^\[(\d)/4\]", collected.stdout, re.MULTILINE) == ["2"] * 3, "the killed point continues"

    runs = values(folder)
    systems = {
        label: [{"RR@10": runs[f"{label}/seed-{seed}"]} for seed in (1, 2)]
        for label in ("temperature=1", "temperature=0.2")
    }
    (test,) = compare_systems(systems, ["RR@10"]).tests
    results = read_json(folder / "results.json")
    for point in results["points"]:
        expected = [np.mean(list(run["RR@10"].values())) for run in systems[point["label"]]]
        np.testing.assert_allclose(point["scores"]["RR@10"], expected, rtol=1e-12)
        mean, deviation = np.mean(expected), np.std(expected, ddof=1)
        assert f"{mean:.4f} ± {deviation:.4f}" in collected.stdout
    assert results["comparison"]["tests"][0]["holm_permutation"] == test.holm_permutation
    assert f"{test.comparison.difference:+.4f}" in collected.stdout

    again = sweep(arguments(folder), *GRID, "--baseline=temperature=0.2")
    assert "[" not in again.stdout.split("\n\n")[0].replace("[--", ""), "no step is repeated"
    assert f"{-test.comparison.difference:+.4f}" in again.stdout
    other = sweep(arguments(folder), *GRID, "--config.train.steps=3")
    assert other.returncode == 1
    assert "train.steps: 2 in " in other.stderr
    shutil.rmtree(folder / "temperature=1" / "seed-1" / "run" / "eval")
    remade = sweep(arguments(folder), *GRID)
    assert re.findall(r"^\[(\d)/4\].*== run.(\w+)", remade.stdout, re.MULTILINE) == [("1", "search")]


def write_pairs(data: Path, path: Path) -> Path:
    """Write DPR records with two questions for each of six passages."""
    passages = [json.loads(line) for line in (data / "corpus.jsonl").read_text().splitlines()][:6]
    records = [
        {
            "question": " ".join(words),
            "answers": [],
            "positive_ctxs": [{"title": passage["title"], "text": passage["text"], "passage_id": passage["_id"]}],
            "negative_ctxs": [],
            "hard_negative_ctxs": [],
        }
        for passage in passages
        for words in (passage["text"].split()[:2], passage["text"].split()[-2:])
    ]
    path.write_text(json.dumps(records))
    return path


@pytest.mark.exhaustive
def test_local_variation_and_perplexity_are_measured_at_every_point(
    arguments: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    """The numbers are those of `jaxret diversity`; a passage with one vector has none. A later command may add them."""
    folder, pairs = tmp_path / "sweep", write_pairs(write_data(tmp_path / "data"), tmp_path / "pairs.json")
    layers = ["--config.head.name=mlr", "--measures=RR@10", "--k=10"]
    chosen = "--grid=head.mlr.chosen=(3);(1,3)"
    refused = sweep(arguments(folder), *layers[1:], "--grid=loss.temperature=1,2", f"--diversity={pairs}")
    assert "no point has several vectors of a passage" in refused.stderr
    refused = sweep(arguments(folder), *layers, chosen, f"--diversity={tmp_path / 'other.json'}")
    assert (refused.returncode, "other.json: this file does not exist" in refused.stderr) == (1, True), refused.stderr
    assert not folder.exists()

    assert sweep(arguments(folder), *layers, chosen, "--index=1").returncode == 0
    report = folder / "chosen=1-3" / "run" / "eval" / "pairs.diversity.json"
    alone = sweep(arguments(folder), *layers, chosen, f"--diversity={pairs}", "--index=2")
    assert alone.returncode == 0, alone.stderr
    before = report.stat()
    done = sweep(arguments(folder), *layers, chosen, f"--diversity={pairs}")
    assert done.returncode == 0, done.stderr
    assert (report.stat().st_ino, "== run" in done.stdout) == (before.st_ino, False), "no measurement is repeated"
    pairs.write_text(json.dumps(json.loads(pairs.read_text())[:-2]))  # other data in a file with the same name
    done = sweep(arguments(folder), *layers, chosen, f"--diversity={pairs}")
    assert (done.returncode, read_json(report)["pairs"]) == (0, 10), done.stderr
    refused = sweep(arguments(folder), *layers, chosen, f"--diversity={tmp_path / 'gone' / 'pairs.json'}")
    assert "gone/pairs.json: this file does not exist" in refused.stderr, "a report with this name exists"

    one, two = (point["scores"] for point in read_json(folder / "results.json")["points"])
    assert (set(one), set(two)) == ({"RR@10"}, {"RR@10", "local_variation", "perplexity"})
    assert 1 <= two["perplexity"][0] <= 2
    apart = sweep(["diversity", f"--workdir={folder / 'chosen=1-3' / 'run'}", f"--data={pairs}"])
    assert f"local variation (softmax): {two['local_variation'][0]:.4f}\n" in apart.stdout, apart.stdout
    assert f"perplexity of the winner: {two['perplexity'][0]:.4f} " in apart.stdout
    row = next(line for line in (folder / "results.md").read_text().splitlines() if line.startswith("| 3 |"))
    assert [cell.strip() for cell in row.split("|")][4:6] == ["-", "-"]
    other = tmp_path / "other" / "pairs.json"
    other.parent.mkdir()
    other.write_text(json.dumps(json.loads(pairs.read_text())[:-2]))
    refused = sweep(arguments(folder), *layers, chosen, f"--diversity={other}")
    assert "give another --name" in refused.stderr
    named = sweep(arguments(folder), *layers, chosen, f"--diversity={other}", "--name=other")
    assert named.returncode == 0, named.stderr
    assert read_json(report.with_name("other.diversity.json"))["pairs"] == 8

    pytest.importorskip("matplotlib")
    drawn = sweep(["plot", "sweep", str(folder), "--measures=perplexity", f"--out={tmp_path / 'picture'}"])
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "picture.svg").exists()
