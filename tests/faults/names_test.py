"""Folders with names that other programs would read as patterns, and paths of nearly the largest length: every verb
works."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from jaxret.cli.verbs import VERBS
from tests.fault_table import Trials
from tests.faults.conftest import Tiny
from tests.faults.scripts import refusal, run
from tests.serving.servers import running

NAMES = ["run[1]", "seed=[1,2]", "a*b?", "two\nlines", "{0} %s ünï'\"", "x" * 255]
NOT_UTF8 = os.fsdecode(b"caf\xe9")
LONGEST = 3900  # bytes of a path; Linux allows 4,095
# Verbs without a folder, for runs with several vectors, with more processes, or with packages that are not installed
# here.
NOT_TRIED = {"cache", "plan", "demo", "diversity", "mteb", "track"}


def commands(tiny: Tiny, folder: Path, data: Path) -> dict[str, list[str]]:
    """Map names to arguments of every cheap verb, in an order in which each has its inputs."""
    workdir = folder / "run"
    flags, search = [f"--workdir={workdir}"], [f"--queries={data}", f"--qrels={data}", "--measures=RR@10", "--k=10"]
    (folder / "ids.txt").write_text("p1\n")
    rankings = workdir / "runs" / "data.test.trec"
    both = [f"--out={folder / 'both.trec'}", f"--queries={data}", f"--qrels={data}", "--measures=RR@10"]
    ranked = [f"--out={folder / 'ranked.trec'}", "--k=2", *search[:3]]
    settings = tiny.training(folder, train__steps=1, data__dev="")[2:]  # the slice leaves out the config and the folder
    one_step = [f"--config={folder / 'one.py'}", *settings, *search[2:]]
    (folder / "one.py").write_text("from jaxret.configs.base import get_config, one_stage as stages\n")
    return {
        "pretrain": tiny.pretraining(folder / "pretrained"),
        "train": tiny.training(workdir),
        "resume": tiny.training(workdir, train__steps=5),
        "encode": [*flags, f"--corpus={data}", "--name=data"],
        "append": [*flags, f"--corpus={tiny.root / 'more.jsonl'}", "--name=data", "--append"],
        "delete": [*flags, "--name=data", f"--delete={folder / 'ids.txt'}"],
        "index": [*flags, "--factory=IVF2,Flat"],
        "search": [*flags, *search],
        "search the index": [*flags, *search, "--index=IVF2,Flat"],
        "search for texts": [*flags, "--query=river stone"],
        "bm25": [f"--workdir={folder / 'bm25'}", f"--corpus={data}", *search],
        "mine": [f"--data={data}", f"--pool={workdir}", f"--out={folder / 'mined.jsonl'}"],
        "explain": [*flags, "--query=river", "--passage=river stone"],
        "fuse": [str(rankings), str(folder / "bm25" / "runs" / "data.test.trec"), *both],
        "rerank": [f"--model={tiny.cross_encoder}", f"--run={rankings}", f"--corpus={data}", *ranked],
        "compare": [str(folder / "bm25" / "eval" / "data.test.json"), str(folder / "ranked.trec.eval.json")],
        "generate": [f"--model={tiny.generator}", f"--corpus={data}", f"--out={folder / 'generated'}"],
        "beir": [str(folder / "sets"), *flags, "--sets=one"],
        "sweep": [*one_step, f"--workdir={folder / 'sweep'}", "--grid=loss.temperature=1,2"],
        "recipe": [*one_step, f"--workdir={folder / 'recipe'}"],
        "verify": [str(workdir)],
        "export": [*flags, "--to=sentence-transformers", f"--out={folder / 'exported'}"],
        "open": [str(folder / "exported"), f"--workdir={folder / 'opened'}"],
        "data convert": [str(data), str(folder / "dpr"), "--to=dpr"],
        "data check": [str(folder / "dpr")],
        "data chunk": [str(data), str(folder / "chunks.jsonl"), "--words=3"],
        "data split": [f"--train={data}", f"--qrels={data}", f"--out={folder / 'split'}"],
        "data build": [str(data), str(folder / "built")],
        "keywords": [f"--corpus={data}", f"--out={folder / 'words.jsonl'}"],
        "report": [str(workdir), f"--out={folder / 'report.html'}"],
        "plot": ["training", str(workdir), f"--out={folder / 'curves'}"],
        "probe": [str(data), *flags],
        "copy": [str(workdir), str(folder / "copied")],
        "reproduce": ["mlr/2/mlr-10-12", f"--data={folder}", f"--workdir={folder / 'rows'}"],
        "doctor": [*flags],
    }


def verb_words(name: str) -> list[str]:
    """Return the verb of a command."""
    words = {"resume": ["train"], "append": ["encode"], "delete": ["encode"]}.get(name, name.split())
    return ["search"] if words[0] == "search" else words


def try_every_verb(tiny: Tiny, folder: Path, trials: Trials) -> None:
    folder.mkdir(parents=True)
    data = folder / "data"
    shutil.copytree(tiny.data, data)
    shutil.copytree(tiny.data, folder / "sets" / "one")
    (tiny.root / "more.jsonl").write_text('{"_id": "more", "text": "river market"}\n')
    for name, arguments in commands(tiny, folder, data).items():
        done = run("jaxret/__main__.py", *verb_words(name), *arguments)
        trials.count(done.returncode == 0, f"{name} in {folder.name[:20]!r}: {done.output}")
    with running(folder.parent / "stderr", str(folder / "run"), "--batch=4", "--corpus=data") as server:
        status, answer = server.ask("/search", {"queries": ["river stone"], "k": 2})
        trials.count(status == 200 and len(answer["results"][0]) == 2, f"serve in {folder.name[:20]!r}: {answer}")
    steps = {path.name for path in (folder / "run" / "checkpoints").iterdir()}
    trials.count("5" in steps and len(steps) <= 2, f"checkpoints {steps}")


def test_every_verb_is_covered(tiny: Tiny, tmp_path: Path) -> None:
    tried = {" ".join(verb_words(name)) for name in commands(tiny, tmp_path, tiny.data)}
    tried.add("serve")  # `serve` does not end by itself
    assert tried | NOT_TRIED == set(VERBS)
    assert not tried & NOT_TRIED


@pytest.mark.faults(27)
@pytest.mark.parametrize("name", NAMES)
def test_names(name: str, tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    try_every_verb(tiny, tmp_path / name, trials)


@pytest.mark.faults(27)
def test_names_that_are_not_utf8(tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """Every verb refuses them, and writes nothing."""
    folder = tmp_path / NOT_UTF8
    folder.mkdir()
    for name, arguments in commands(tiny, folder, folder / "data").items():
        before = sorted(folder.rglob("*"))
        done = run("jaxret/__main__.py", *verb_words(name), *arguments)
        clean = "which is not UTF-8; rename the file or folder" in refusal(done) and sorted(folder.rglob("*")) == before
        trials.count(clean, f"{name}: {done.output}", detected=True)


@pytest.mark.faults(27)
def test_a_long_path(tiny: Tiny, tmp_path: Path, trials: Trials) -> None:
    """The path leaves room for the names of files below it."""
    folder = tmp_path
    while (room := LONGEST - 350 - len(os.fsencode(folder))) > 1:
        folder /= "y" * min(200, room - 1)
    try_every_verb(tiny, folder, trials)
