"""The papers' tables: every row has commands, every config builds, and a row really runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from jaxret.cli.verbs import VERBS
from jaxret.configs import load_config, require_keys
from jaxret.experiments.recipes.stages import read_stages
from jaxret.experiments.reproduce import papers
from jaxret.experiments.reproduce import run_row as run_row_module
from jaxret.experiments.reproduce.commands import Places, case_commands, run_folder
from jaxret.experiments.reproduce.listing import list_rows, row_text
from jaxret.experiments.reproduce.page import page
from jaxret.experiments.reproduce.papers import Case, PaperRow, datasets, find_rows, paper_rows, resolved
from jaxret.experiments.reproduce.run_row import Measured, measure_case, run_row, scaled
from jaxret.search.bm25_settings import BM25Settings
from jaxret.storage.atomic import require_parent
from jaxret.training.config_check import check_config
from tests.pipeline import REPOSITORY, environment, write_data, write_encoder

PLACES = Places(Path("data"), Path("runs"))
RUNNABLE = [row for row in paper_rows().values() if row.runnable]


def cases() -> list[Case]:
    return [case for row in RUNNABLE for case in row.cases()]


def test_a_row_has_a_config_or_a_reason() -> None:
    for row in paper_rows().values():
        assert bool(row.reason) != bool(row.config or row.same_as or row.counts or row.verb == "bm25"), row.id
        if row.same_as:
            assert resolved(row).runnable, row.id


def test_a_row_has_as_many_numbers_as_measures() -> None:
    for row in paper_rows().values():
        for case in row.cases():
            assert case.row.counts or len(case.measures) == len(case.numbers), row.id
            assert all(number is None or 0 <= number <= 1 for number in case.numbers) or row.counts or row.diversity
        if row.numbers_each:
            assert len(row.numbers_each) == len(row.each), row.id
            (mean,) = row.numbers["beir"]
            assert sum(row.numbers_each) / len(row.each) == pytest.approx(mean, abs=6e-4), row.id


@pytest.mark.parametrize("row", [row for row in RUNNABLE if row.config], ids=lambda row: row.id)
def test_every_config_of_a_row_builds(row: PaperRow) -> None:
    """With the row's keys, and of a recipe in every stage: no row can name a setting that does not exist."""
    for case in row.cases():
        config = load_config(case.config)
        require_keys(config, row.set, case.config)
        if row.verb == "recipe":
            stages = read_stages(case.config, dict(row.set))
            assert row.stage in [stage.name for stage in stages], row.id
            for stage in stages:
                stage.config.data.train = stage.config.data.train or "train"
                check_config(stage.config)
        else:
            with config.unlocked():
                config.update_from_flattened_dict(
                    {key: tuple(value) if isinstance(value, tuple) else value for key, value in row.set.items()}
                )
            config.data.train = "train"
            check_config(config)


def test_every_command_has_flags_that_its_verb_has() -> None:
    helps: dict[str, str] = {}
    for case in cases():
        for command in case_commands(case, PLACES):
            verb = " ".join(command[:2]) if " ".join(command[:2]) in VERBS else command[0]
            assert verb in VERBS
            source = (REPOSITORY / "jaxret" / "cli" / f"{verb.replace(' ', '_')}.py").read_text()
            helps.setdefault(verb, source)
            for argument in command[1:]:
                if match := re.match(r"--(\w+)=", argument):
                    shared = (REPOSITORY / "jaxret" / "cli").glob("*.py")
                    settings = {field.name for field in fields(BM25Settings)} if verb == "bm25" else set()
                    assert match[1] in settings or any(f'"{match[1]}"' in path.read_text() for path in shared), argument


def test_a_flag_that_no_verb_has_would_be_found() -> None:
    with pytest.raises(ValueError, match="no such key"):
        require_keys(load_config("mlr"), {"head.mlr.layers": 1}, "mlr")


def test_the_tables_of_aggretriever_search_with_long_queries_too() -> None:
    (row,) = find_rows("aggretriever/5/bert-agg")
    commands = case_commands(row.cases()[1], PLACES)
    beir = commands[-1]
    assert beir[:2] == ["beir", str(PLACES.data / "beir")]
    assert {"--query_length=512", "--passage_length=512"} < set(beir)
    (sets,) = [flag.partition("=")[2].split(",") for flag in beir if flag.startswith("--sets=")]
    assert len(sets) == 14
    assert commands[0][1] == "--config=recipes/aggretriever_open_qa:bert"


def test_long_texts_are_read_where_the_model_was_not_trained() -> None:
    """Aggretriever's tables measure MS MARCO at the lengths of training, and BEIR at 512."""
    (row,) = find_rows("aggretriever/8/full")
    commands = {case.target.name: case_commands(case, PLACES) for case in row.cases()}
    assert "--passage_length=512" in commands["beir_small"][1]
    assert not [flag for command in commands["msmarco"] for flag in command if "_length=512" in flag]


def test_the_checkpoint_is_chosen_by_data_set() -> None:
    """MLR's appendix A for table 2 and appendix D for table 3; MS MARCO has no dev set here."""
    chosen = {
        (row.id, case.source.name): [flag for flag in case_commands(case, PLACES)[0] if "validation.best" in flag]
        for row in (find_rows("mlr/2/mlr-10-12") + find_rows("mlr/3/mlr") + find_rows("mlr/4/mlr-stage-2"))
        for case in row.cases()
    }
    rules = {key: [flag.rpartition("=")[2] for flag in flags] for key, flags in chosen.items()}
    assert rules == {
        ("mlr/2/mlr-10-12", "nq"): ["metric"],
        ("mlr/2/mlr-10-12", "triviaqa"): ["last"],
        ("mlr/2/mlr-10-12", "squad"): ["metric"],
        ("mlr/3/mlr", "nq"): ["last"],
        ("mlr/3/mlr", "triviaqa"): ["last"],
        ("mlr/3/mlr", "squad"): ["metric"],
        ("mlr/4/mlr-stage-2", "msmarco"): [],
    }
    assert load_config("recipes/mlr_msmarco").validation.best == "last"
    places = Places(PLACES.data, PLACES.workdir, {"validation.best": "metric"})
    (row,) = find_rows("mlr/3/mlr")
    assert "--config.validation.best=metric" in case_commands(row.cases()[0], places)[0]


def test_a_row_of_bm25_has_one_index_for_all_rows_and_sets_of_a_corpus() -> None:
    """Settings of the row are flags; the judgements of subsets are split first, and searched after all queries."""
    split, *searches = case_commands(find_rows("i3/4/bm25")[0].cases()[0], PLACES)
    assert split[:2] == ["data", "split"]
    qrels = [next(flag for flag in search if flag.startswith("--qrels=")) for search in searches]
    folder = "runs/msmarco-sets"
    assert f"--out={folder}" in split
    sets = [f"--qrels={folder}/qrels.{name}.tsv" for name in ("set0", "set1")]
    assert qrels == ["--qrels=data/msmarco/qrels.dev.small.tsv", *sets]
    other = case_commands(find_rows("aggretriever/2/bm25")[0].cases()[0], PLACES)[0]
    assert (
        searches[0][:3]
        == other[:3]
        == ["bm25", "--workdir=runs/bm25-k1-0.9-b-0.4", "--corpus=data/msmarco/collection.tsv"]
    )
    assert {"--k1=0.9", "--b=0.4", "--k=1000"} <= set(other)
    changed = replace(PLACES, overrides={"k1": 0.82})
    assert "--k1=0.82" in case_commands(find_rows("i3/4/bm25")[0].cases()[0], changed)[1]


def test_the_folder_of_runs_is_made_for_the_first_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def refused(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        started.append(command)
        out = next(word for word in command if word.startswith("--out=")).removeprefix("--out=")
        require_parent(out, "--out")
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(run_row_module, "missing_files", lambda *_: [])
    monkeypatch.setattr(run_row_module.subprocess, "run", refused)
    with pytest.raises(RuntimeError, match="jaxret data ended with status 1"):
        run_row(find_rows("i3/4/bm25")[0], Places(tmp_path / "data", tmp_path / "new" / "runs"))
    assert len(started) == 1


def test_a_row_of_bm25_runs(small_squad: Path) -> None:
    places = Places(small_squad / "data", small_squad / "runs")
    measured = run_row(find_rows("mlr/3/bm25")[0], places, "squad")
    assert [(entry.measure, entry.paper) for entry in measured] == [("Accuracy@20", 0.688), ("Accuracy@100", 0.8)]
    assert all(0 < entry.value <= 1 for entry in measured)


def test_five_seeds_are_five_runs() -> None:
    (row,) = find_rows("mlr/3/mlr")
    case = row.cases()[0]
    folders = {run_folder(case, PLACES, seed) for seed in range(1, 6)}
    assert len(folders) == 5
    command = case_commands(case, PLACES, 3)[0]
    assert {"--config.seed.init=3", "--config.seed.negatives=3"} <= set(command)


def test_what_a_row_lacks_is_listed_with_its_origin() -> None:
    text = row_text(find_rows("mlr/2/mlr-10-12")[0], PLACES)
    assert "data/nq/biencoder-nq-train.json: data.retriever.nq-train of DPR's download script" in text
    assert "Accuracy@5 0.6873" in text


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="'mlr/9' is no row and no table"):
        find_rows("mlr/9")
    with pytest.raises(ValueError, match=r"i3/2/coil cannot be run: quoted"):
        list_rows("i3/2/coil", "data", "runs", [], "")
    with pytest.raises(ValueError, match="has 8 rows; --run takes one"):
        list_rows("mlr/2", "data", "runs", [], "")
    with pytest.raises(FileNotFoundError, match=r"data/nq/nq-test.qa.csv: data.retriever.qas.nq-test"):
        list_rows("mlr/7/10-12-average", "data", "runs", [], "")
    with pytest.raises(ValueError, match="has no numbers on 'msmarco'; it has nq, triviaqa, squad"):
        list_rows("mlr/2/mlr-10-12", "data", "runs", [], "msmarco")
    with pytest.raises(
        ValueError, match=r"train.batchsize: recipes/mlr_open_qa:bert has no such key; did you mean train"
    ):
        list_rows("mlr/2/mlr-10-12", "data", "runs", ["train.batchsize=8"], None)
    with pytest.raises(ValueError, match="--set=a must be KEY=VALUE"):
        list_rows("mlr", "data", "runs", ["a"], None)
    list_rows("", "data", "runs", [], None)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(
        {row.id.rpartition("/")[0] for row in paper_rows().values()}
    )


def test_a_difference_is_in_standard_errors() -> None:
    case = find_rows("mlr/7/10-12-average")[0].cases()[0]
    assert Measured(case, "Accuracy@5", 0.66, 0.01, 0.68).difference == pytest.approx(-2)
    assert Measured(case, "Accuracy@5", 0.66, 0.0, 0.68).difference is None


@pytest.fixture
def small_squad(tmp_path: Path) -> Path:
    """Folders squad and wikipedia, in DPR's formats, of a few passages."""
    write_data(tmp_path / "beir")
    passages = [json.loads(line) for line in (tmp_path / "beir" / "corpus.jsonl").read_text().splitlines()]
    data, wiki = tmp_path / "data" / "squad", tmp_path / "data" / "wikipedia"
    data.mkdir(parents=True)
    wiki.mkdir()
    lines = [f'{p["_id"]}\t"{p["text"]}"\t{p.get("title", "")}\n' for p in passages]
    (wiki / "psgs_w100.tsv").write_text("id\ttext\ttitle\n" + "".join(lines))

    def example(number: int) -> dict[str, Any]:
        positive, negative = passages[number], passages[-1 - number]
        context = lambda p: {"title": p.get("title", ""), "text": p["text"], "passage_id": p["_id"]}  # noqa: E731
        words = positive["text"].split()
        return {
            "question": " ".join(words[:3]),
            "answers": [words[0]],
            "positive_ctxs": [context(positive)],
            "negative_ctxs": [],
            "hard_negative_ctxs": [context(negative)],
        }

    for name in ("train", "dev"):
        (data / f"biencoder-squad1-{name}.json").write_text(json.dumps([example(n) for n in range(8)]))
    tests = [example(n) for n in range(4)]
    (data / "squad1-test.qa.csv").write_text("".join(f"{t['question']}\t{t['answers']!r}\n" for t in tests))
    return tmp_path


@pytest.mark.exhaustive
def test_a_row_runs_and_is_compared(small_squad: Path) -> None:
    """In a process of its own: trains, encodes, searches, compares; the same command again repeats no step."""
    encoder = write_encoder(small_squad / "encoder")
    layers = json.loads((encoder / "config.json").read_text())["num_hidden_layers"]
    chosen = f"({max(1, layers - 1)},{layers})" if layers > 1 else f"({layers},)"
    command = [sys.executable, "-m", "jaxret", "reproduce", "mlr/8/10-12"]
    keys = {
        "encoder.checkpoint": encoder,
        "encoder.dtype": "float32",
        "head.mlr.chosen": chosen,
        "train.batch_size": 8,
        "train.steps": 2,
        "train.epochs": 0,
        "tokens.query_length": 8,
        "tokens.passage_length": 16,
    }
    sets = [f"--set={key}={value}" for key, value in keys.items()]
    where = [f"--data={small_squad / 'data'}", f"--workdir={small_squad / 'runs'}"]
    row = "mlr/1/bert-last-four"
    run = [*command[:-1], row, *where, *sets, "--run", "--on=squad"]
    for _ in range(2):
        done = subprocess.run(run, cwd=small_squad, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        table = done.stdout.splitlines()[-3:]
        assert [line.split()[:4] for line in table] == [
            [row, "squad", "Accuracy@5", "0.4163"],
            [row, "squad", "Accuracy@20", "0.5868"],
            [row, "squad", "Accuracy@100", "0.7472"],
        ]
        assert 0 <= float(table[0].split()[4]) <= 1
    shutil.rmtree(small_squad / "data" / "wikipedia")
    done = subprocess.run(run, cwd=small_squad, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert "psgs_w100.tsv: data.wikipedia_split.psgs_w100" in done.stderr


def test_a_trial_trains_a_part() -> None:
    (row,) = find_rows("mlr/7/10-12-average")
    assert scaled(PLACES, row, 0.01).overrides == {"train.epochs": pytest.approx(0.4)}
    assert scaled(Places(Path("d"), Path("w"), {"train.epochs": "3"}), row, 0.01).overrides == {"train.epochs": "3"}


def test_a_key_that_a_row_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"number": "1", "caption": "", "rows": [{"name": "a", "stages": 1}]}
    monkeypatch.setattr(papers, "_read", lambda name: {"tables": [table]})
    with pytest.raises(ValueError, match="mlr/1/a: 'stages' is no field of a row"):
        list(papers._rows("mlr"))


def test_data_sets_are_named_once() -> None:
    assert all(data.trained_on in ("", *datasets()) for data in datasets().values())
    assert list(measure_case(find_rows("mlr/6/nq")[0].cases()[0], PLACES)) == []


def test_the_page_is_the_tables() -> None:
    """docs/reproduce.md: python -m jaxret.experiments.reproduce.page > docs/reproduce.md"""
    assert (REPOSITORY / "docs" / "reproduce.md").read_text(encoding="utf-8") == page()
