"""kill -9 in every step of a recipe, with two stages and with rounds, and of a row of a paper: the same command
continues, and gives the same table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.experiments.reproduce.reproduce_test import small_keys, small_squad  # noqa: F401
from tests.fault_table import Trials
from tests.faults.conftest import Tiny
from tests.faults.kills_test import leftovers
from tests.faults.scripts import Script, start
from tests.pipeline import environment

STEPS = ("mine", "score", "train", "encode", "search")
TWO_STAGES = """from jaxret.configs.base import get_config, two_stages


def stages():
    first, second = two_stages(depth=20, keep=4)
    return first, second | {"teacher": "stage1", "config": {"loss.kl.weight": 1.0}}
"""
ROUNDS = """from jaxret.configs.base import get_config


def stages():
    return ({"name": "stage", "rounds": 3, "mine": {"pools": ["bm25"], "depth": 20, "keep": 4}},)
"""
RECIPES = {
    "two_stages": (TWO_STAGES, [f"stage{n}.{step}" for n in (1, 2) for step in STEPS if (n, step) != (1, "score")]),
    "rounds": (ROUNDS, [f"stage-{n}.{step}" for n in (1, 2, 3) for step in STEPS if step != "score"]),
}


def begin(tiny: Tiny, folder: Path, recipe: str) -> Script:
    config = tiny.root / f"{recipe}.py"
    config.write_text(RECIPES[recipe][0])
    flags = [flag for flag in tiny.training(folder) if not flag.startswith("--config=")]
    more = [f"--config={config}", "--measures=RR@10", "--k=10", "--config.encode.tokens_per_batch=384"]
    return start("jaxret/__main__.py", "recipe", *more, *flags)


def made(folder: Path) -> dict[str, bytes]:
    """Return the results of a recipe: the training files, the rankings and the table."""
    files = [*folder.glob("mined/*.jsonl"), *folder.glob("stage*/runs/*.trec"), folder / "results.md"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.exists()}


@pytest.mark.faults(25)
@pytest.mark.parametrize(("recipe", "files"), [("two_stages", 6), ("rounds", 7)])
def test_every_step_of_a_recipe_is_killed(recipe: str, files: int, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    alone = begin(tiny, tmp_path / "alone", recipe)
    assert alone.wait() == 0, alone.output
    expected = made(tmp_path / "alone")
    assert len(expected) == files
    random, folder, steps = np.random.default_rng(0), tmp_path / "killed", RECIPES[recipe][1]
    for step in steps:
        process = begin(tiny, folder, recipe)
        while f"== {step}" not in process.stdout and process.poll(0.005) is None:
            pass
        process.poll(random.uniform(0, 0.3))
        process.kill()
        killed = process.wait() == -signal.SIGKILL
        done = [path.stem for path in (folder / "done").glob("*.json")]
        before = steps[: steps.index(step)]
        trials.count(killed and set(before) <= set(done), f"{step}: {process.output}")
    last = begin(tiny, folder, recipe)
    ended = last.wait() == 0
    trials.count(ended and made(folder) == expected and not leftovers(folder), f"{last.output} {leftovers(folder)}")


@pytest.mark.faults(25)
def test_every_command_of_a_row_is_killed(small_squad: Path, trials: Trials) -> None:  # noqa: F811
    """A row that splits passages has six commands: each is killed, together with `reproduce`, at a random time in its
    first second."""
    keys = small_keys(small_squad / "encoder")

    def begin(runs: Path) -> subprocess.Popen[str]:
        row = ["mvr/5/four-splits", f"--data={small_squad / 'data'}", f"--workdir={runs}", "--run"]
        return subprocess.Popen(
            [sys.executable, "-m", "jaxret", "reproduce", *row, *(f"--set={key}={keys[key]}" for key in keys)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that all processes of the recipe can be killed together
        )

    def results(runs: Path) -> dict[str, bytes]:
        patterns = ("*.jsonl", "*.trec", "vectors-*")
        files = [path for pattern in patterns for path in runs.rglob(pattern) if path.name != "metrics.jsonl"]
        return {str(path.relative_to(runs)): path.read_bytes() for path in files}

    def end(process: subprocess.Popen[str]) -> tuple[int, str]:
        output = process.communicate(timeout=300)[0]
        return process.returncode, output

    alone, killed = small_squad / "alone", small_squad / "killed"
    status, output = end(begin(alone))
    assert status == 0, output
    table, count, expected = output.splitlines()[-3:], output.count("== jaxret "), results(alone)
    assert (count, len(expected)) == (6, 5), expected.keys()
    random = np.random.default_rng(0)
    for number in range(count):
        process = begin(killed)
        assert process.stdout
        commands = (line for line in process.stdout if line.startswith("== jaxret "))
        reached = [next(commands, "") for _ in range(number + 1)]
        time.sleep(random.uniform(0, 1))
        os.killpg(process.pid, signal.SIGKILL)
        trials.count(all(reached) and end(process)[0] == -signal.SIGKILL, f"killed in {reached}")
    status, output = end(begin(killed))
    same = (output.splitlines()[-3:], results(killed)) == (table, expected)
    trials.count(status == 0 and same and not leftovers(killed), f"{output} {leftovers(killed)}")
