"""Judgements are split into those of queries whose relevant passages occur in training queries, and the others; by
functions, and by a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxret.data.formats import JudgementSource
from jaxret.data.records import Judgement
from jaxret.data.split_judgements import split_by_training, write_judgement_sets
from tests.pipeline import environment

TEST = [
    Judgement("new", "p1", 1),
    Judgement("old", "p2", 1),
    Judgement("both", "p1", 1),
    Judgement("old", "p1", 0),  # not relevant, so it does not count
    Judgement("both", "p2", 2),
    Judgement("none", "p2", 0),
]


def test_all_relevant_passages_decide_the_set_of_a_query() -> None:
    sets = split_by_training(TEST, {"p2", "other"})
    assert [[j.query_id for j in entries] for entries in sets] == [["new"], ["old", "old"], ["both", "both"]]
    without = split_by_training(TEST, set()).set0
    assert [j.query_id for j in without] == ["new", "old", "old", "both", "both"]


def jaxret(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxret", "data", "split", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "qrels").mkdir(parents=True)
    header = "query-id\tcorpus-id\tscore\n"
    (tmp_path / "data" / "qrels" / "train.tsv").write_text(f"{header}t1\tp2\t1\nt2\tp1\t0\n")
    lines = "".join(f"{j.query_id}\t{j.passage_id}\t{j.relevance}\n" for j in TEST)
    (tmp_path / "data" / "qrels" / "test.tsv").write_text(header + lines)
    (tmp_path / "other.tsv").write_text(f"{header}t1\tp9\t1\n")
    (tmp_path / "zero.tsv").write_text(f"{header}t1\tp9\t0\n")
    return tmp_path


def test_two_files_are_written(data: Path) -> None:
    done = jaxret(data, "--train=data", "--qrels=data", "--out=sets")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "1 queries without training queries for their relevant passages: sets/qrels.set0.tsv",
        "1 queries with training queries for all their relevant passages: sets/qrels.set1.tsv",
        "1 queries with training queries for some of them are in neither set",
    ]
    assert [j.query_id for j in JudgementSource.open(data / "sets" / "qrels.set0.tsv").read()] == ["new"]
    assert [(j.query_id, j.relevance) for j in JudgementSource.open(data / "sets" / "qrels.set1.tsv").read()] == [
        ("old", 1),
        ("old", 0),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--train=other.tsv", "--qrels=data"), "set1 would be empty: the judged queries of data have no relevant"),
        (("--train=zero.tsv", "--qrels=data"), "zero.tsv has no relevant passage; give training data"),
        (("--train=none", "--qrels=data"), "none"),
        (("--train=data", "--qrels=data", "--split=dev"), "dev"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], message: str, data: Path) -> None:
    done = jaxret(data, *arguments, "--out=sets")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert not (data / "sets" / "qrels.set0.tsv").exists()


@pytest.mark.parametrize("replacement", [1, 2])
def test_an_interrupted_split_leaves_no_set_of_an_earlier_one(
    replacement: int, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at the first or at the second file that gets its name."""
    replace, test = os.replace, JudgementSource.open(data / "data", "test")
    (data / "data" / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nt1\tp1\t1\n")
    files = [data / "sets" / f"qrels.set{number}.tsv" for number in (0, 1)]
    states = []
    for split in ("dev", "train"):
        write_judgement_sets(JudgementSource.open(data / "data", split), test, str(data / "sets"))
        states.append([file.read_text() for file in files])
    assert states[0][0] != states[1][0]
    write_judgement_sets(JudgementSource.open(data / "data", "dev"), test, str(data / "sets"))
    calls: list[Path] = []

    def interrupt(old: Path, new: Path) -> None:
        calls.append(new)
        if len(calls) == replacement:
            raise KeyboardInterrupt
        replace(old, new)

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_judgement_sets(JudgementSource.open(data / "data", "train"), test, str(data / "sets"))
    left = [file.read_text() if file.exists() else None for file in files]
    assert any(all(text in (None, one) for text, one in zip(left, state, strict=True)) for state in states)
