"""The papers' tables: every row has commands, every config builds, and one row runs completely."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from jaxret.__main__ import split_verb
from jaxret.configs import change_config, load_config, require_keys
from jaxret.data.formats.detect import FORMATS_BY_NAME
from jaxret.experiments.recipes.stages import read_stages
from jaxret.experiments.reproduce import papers
from jaxret.experiments.reproduce import run_row as run_row_module
from jaxret.experiments.reproduce.commands import FILE_FORMATS, Reproduction, case_commands, missing_files, run_folder
from jaxret.experiments.reproduce.listing import list_rows, row_text
from jaxret.experiments.reproduce.papers import Case, PaperRow, datasets, find_rows, paper_rows, resolve_row
from jaxret.experiments.reproduce.run_row import Measured, case_seeds, measure_case, run_row
from jaxret.runs.mismatch import ContractError
from jaxret.storage.atomic import require_parent
from jaxret.training.config_check import check_config
from tests.pipeline import REPOSITORY, environment, write_data, write_encoder

REPRODUCTION = Reproduction(Path("data"), Path("runs"))
RUNNABLE = [row for row in paper_rows().values() if row.runnable]


def cases() -> list[Case]:
    return [case for row in RUNNABLE for case in row.cases()]


def test_a_row_has_a_config_or_a_reason() -> None:
    for row in paper_rows().values():
        assert bool(row.reason) != bool(row.config or row.same_as or row.counts or row.verb == "bm25"), row.id
        if row.same_as:
            assert resolve_row(row).runnable, row.id


def test_a_row_has_as_many_numbers_as_measures() -> None:
    for row in paper_rows().values():
        for case in row.cases():
            assert case.row.counts or len(case.measures) == len(case.numbers), row.id
            assert all(number is None or 0 <= number <= 1 for number in case.numbers) or row.counts or row.diversity
        if row.numbers_each:
            assert len(row.numbers_each) == len(row.each), row.id
            (mean,) = next(values for key, values in row.numbers.items() if key.endswith("beir"))
            assert sum(row.numbers_each) / len(row.each) == pytest.approx(mean, abs=6e-4), row.id


@pytest.mark.parametrize("row", [row for row in RUNNABLE if row.config], ids=lambda row: row.id)
def test_every_config_of_a_row_builds(row: PaperRow) -> None:
    """The config has the row's keys, in every stage of a recipe: no row can name a setting that does not exist."""
    for case in row.cases():
        config = load_config(case.config)
        require_keys(config, row.set, case.config)
        if row.verb == "recipe":
            begun = {"train.start_from": "run", "data.pseudo_queries": "file"} if row.warm_up else {}
            stages = read_stages(case.config, {**row.set, **begun})
            assert row.stage in [stage.name for stage in stages], row.id
            for stage in stages:
                stage.config.data.train = stage.config.data.train or "train"
                check_config(stage.config)
            if row.warm_up:
                check_config(change_config(load_config(row.warm_up), {"data.train": "train"}, row.warm_up))
        else:
            with config.unlocked():
                config.update_from_flattened_dict(
                    {key: tuple(value) if isinstance(value, tuple) else value for key, value in row.set.items()}
                )
            config.data.train = "train"
            check_config(config)


SCRIPT = """
import importlib, json, sys
from jaxret.cli import app
module = importlib.import_module(sys.argv[1])
for arguments in json.load(sys.stdin):
    app.parse_flags(module, arguments)
"""


def parsed(verb: str, commands: list[list[str]]) -> subprocess.CompletedProcess[str]:
    """Parse the arguments of a verb's commands in a process that defines only this verb's flags."""
    module = f"jaxret.cli.{verb.replace(' ', '_')}"
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, module],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )


@pytest.mark.slow
def test_every_command_is_parsed_by_its_verb(tmp_path: Path) -> None:
    """A command is parsed for each set of flags. Keys of configs are checked by `test_every_config_of_a_row_builds`."""
    by_verb: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for case in cases():
        for command in case_commands(case, Reproduction(Path("data"), tmp_path)):
            verb, arguments = split_verb(command)
            arguments = [word for word in arguments if not word.startswith("--config.")]
            arguments = ["--config=mlr" if word.startswith("--config=") else word for word in arguments]
            names = tuple(word.partition("=")[0] if word.startswith("--") else "" for word in arguments)
            by_verb.setdefault(verb, {})[names] = arguments
    assert {"train", "recipe", "encode", "search", "beir", "bm25", "diversity", "data split"} < set(by_verb)
    for verb, commands in by_verb.items():
        done = parsed(verb, list(commands.values()))
        assert done.returncode == 0, done.stderr
    done = parsed("search", [[*next(iter(by_verb["search"].values())), "--passage_length=8"]])
    assert "--passage_length is not a flag" in done.stderr, "control: an unknown flag is refused"


def touch_sources(command: Sequence[str]) -> None:
    """Create empty files, or folders with some, at the paths from which a command reads queries and judgements."""
    for argument in command:
        flag, _, value = argument.partition("=")
        path = Path(value)
        if flag not in ("--queries", "--qrels", "--data"):
            continue
        files = [path] if path.suffix else [path / "queries.jsonl", path / "qrels" / "test.tsv"]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()


def test_results_are_read_where_each_search_writes_them(tmp_path: Path) -> None:
    """There is one evaluation per search, with the label of its options."""
    seen, reproduction = 0, Reproduction(tmp_path / "data", tmp_path / "runs")
    for case in cases():
        searches = [one for one in case_commands(case, reproduction) if one[0] in ("search", "bm25")]
        if case.row.numbers and searches and not case.row.subsets:  # subsets are named after files
            for command in searches:
                touch_sources(command)
            paths = list(run_row_module._evaluation_parts(case, reproduction, Path("run")))
            assert len(paths) == len(searches), case.row.id
            assert all(("max-passage" in path.name) == bool(resolve_row(case.row).chunks) for path in paths)
            seen += 1
    assert seen > 150


def test_control_an_unknown_flag_is_noticed() -> None:
    with pytest.raises(ValueError, match="no such key"):
        require_keys(load_config("mlr"), {"head.mlr.layers": 1}, "mlr")


def test_the_tables_of_aggretriever_search_with_long_queries_too() -> None:
    (row,) = find_rows("aggretriever/5/bert-agg")
    commands = case_commands(row.cases()[1], REPRODUCTION)
    beir = commands[-1]
    assert beir[:2] == ["beir", str(REPRODUCTION.data / "beir")]
    assert {"--query_length=512", "--passage_length=512"} < set(beir)
    (sets,) = [flag.partition("=")[2].split(",") for flag in beir if flag.startswith("--sets=")]
    assert len(sets) == 14
    assert commands[0][1] == "--config=recipes/aggretriever_open_qa:bert"


def test_aggretriever_reads_beir_at_512_tokens() -> None:
    """Aggretriever's tables measure MS MARCO with the lengths of training, and BEIR with 512 tokens."""
    (row,) = find_rows("aggretriever/8/full")
    commands = {case.target.name: case_commands(case, REPRODUCTION) for case in row.cases()}
    assert "--passage_length=512" in commands["beir_small"][-1]
    assert not [flag for command in commands["msmarco"] for flag in command if "_length=512" in flag]


def test_the_checkpoint_is_chosen_by_data_set() -> None:
    """MLR's appendix A applies to table 2, and appendix D to table 3; MS MARCO has no dev set here."""
    chosen = {
        (row.id, case.source.name): [flag for flag in case_commands(case, REPRODUCTION)[0] if "validation.best" in flag]
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
        ("mlr/4/mlr-stage-2", "msmarco_titles"): [],
    }
    assert load_config("recipes/mlr_msmarco").validation.best == "last"
    reproduction = Reproduction(REPRODUCTION.data, REPRODUCTION.workdir, {"validation.best": "metric"})
    (row,) = find_rows("mlr/3/mlr")
    assert "--config.validation.best=metric" in case_commands(row.cases()[0], reproduction)[0]


def small_msmarco(folder: Path) -> Reproduction:
    """Write a folder msmarco with six passages, and return reproduction with a model that does not exist."""
    data = folder / "data" / "msmarco"
    data.mkdir(parents=True)
    words = ["red fox", "blue whale", "green frog", "red whale", "blue frog", "green fox"]
    (data / "collection.tsv").write_text("".join(f"{n}\tA {text} was here.\n" for n, text in enumerate(words)))
    for split in ("train", "dev.small"):
        (data / f"queries.{split}.tsv").write_text("".join(f"{n}\t{text}\n" for n, text in enumerate(words)))
        judgements = "".join(f"{n}\t0\t{n}\t1\n" for n in range(5)) + "4\t0\t5\t1\n"
        (data / f"qrels.{split}.tsv").write_text(judgements)
    (folder / "runs").mkdir()
    return Reproduction(folder / "data", folder / "runs", {"encoder.checkpoint": "no-such-encoder"})


@pytest.mark.slow
def test_rows_of_ms_marco_train_on_all_queries_with_mined_negatives(tmp_path: Path) -> None:
    """The papers also train on queries without BM25 negatives in a file; a recipe that mines needs no file."""
    reproduction = small_msmarco(tmp_path)
    mined: set[str] = set()
    for row in ("aggretriever/2/bert-agg", "aggretriever/6/distilbert-agg-hard", "i3/2/dpr", "mlr/5/mlr"):
        case = find_rows(row)[0].cases()[0]
        mine, train, *_ = case_commands(case, reproduction)
        mined.add(" ".join(mine))
        assert (mine[0], train[0]) == ("mine", resolve_row(case.row).verb)
        out = mine[-1].removeprefix("--out=")
        assert f"--config.data.train={out}" in train
    assert len(mined) == 2, "one file per corpus"
    recipe = case_commands(find_rows("mlr/4/mlr-stage-2")[0].cases()[0], REPRODUCTION)[0]
    assert {"recipe", "--config.data.train=data/msmarco_titles"} < set(recipe)
    mine = case_commands(find_rows("i3/2/dpr")[0].cases()[0], reproduction)[0]
    assert {"--pool=bm25", "--depth=1000", "--keep=100"} < set(mine)
    done = subprocess.run([sys.executable, "-m", "jaxret", *mine], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in Path(mine[-1].removeprefix("--out=")).read_text().splitlines()]
    assert [record["query_id"] for record in records] == ["0", "1", "2", "3", "4"], "the file has every judged query"
    assert all(record["negative_passages"] for record in records)


@pytest.mark.slow
def test_a_mined_file_is_reused_for_the_same_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Mining for half a million queries is not repeated for the next row. The training afterwards fails, because there
    is no encoder."""
    reproduction = small_msmarco(tmp_path)
    data, mined = reproduction.data / "msmarco", reproduction.workdir / "bm25-negatives-msmarco.jsonl"

    def run() -> str:
        with pytest.raises(RuntimeError, match="jaxret train ended with status 1"):
            run_row(find_rows("i3/2/dpr")[0], reproduction, "msmarco")
        return capfd.readouterr().out

    def refused(path: Path, more: str, message: str) -> None:
        before = path.read_bytes()
        path.write_bytes(before + more.encode())
        with pytest.raises(ContractError, match=message):
            run_row(find_rows("i3/2/dpr")[0], reproduction, "msmarco")
        path.write_bytes(before)

    assert f"training file: {mined}" in run()
    written = mined.stat()
    refused(data / "qrels.train.tsv", "5\t0\t5\t1\n", "queries: ")
    refused(data / "collection.tsv", "6\tA red frog was here.\n", "corpus: ")
    refused(mined, "\n", "file: ")
    assert f"{mined} is kept: it was mined from these files" in run()
    assert mined.stat().st_ino == written.st_ino


def test_bm25_rows_share_one_index_per_corpus() -> None:
    """Settings of the row are flags; judgements of subsets are split first, and searched after all queries."""
    split, *searches = case_commands(find_rows("i3/4/bm25")[0].cases()[0], REPRODUCTION)
    assert split[:2] == ["data", "split"]
    qrels = [next(flag for flag in search if flag.startswith("--qrels=")) for search in searches]
    folder = "runs/msmarco-sets"
    assert f"--out={folder}" in split
    sets = [f"--qrels={folder}/qrels.{name}.tsv" for name in ("set0", "set1")]
    assert qrels == ["--qrels=data/msmarco/qrels.dev.small.tsv", *sets]
    other = case_commands(find_rows("i3/2/bm25")[0].cases()[0], REPRODUCTION)[0]
    assert (
        searches[0][:3]
        == other[:3]
        == ["bm25", "--workdir=runs/bm25-k1-0.82-b-0.68", "--corpus=data/msmarco/collection.tsv"]
    )
    assert {"--k1=0.82", "--b=0.68", "--k=1000"} <= set(other)
    changed = replace(REPRODUCTION, overrides={"k1": 0.9})
    assert "--k1=0.9" in case_commands(find_rows("i3/4/bm25")[0].cases()[0], changed)[1]


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
        run_row(find_rows("i3/4/bm25")[0], Reproduction(tmp_path / "data", tmp_path / "new" / "runs"))
    assert len(started) == 1


@pytest.mark.slow
def test_a_row_of_bm25_runs(small_squad: Path) -> None:
    reproduction = Reproduction(small_squad / "data", small_squad / "runs")
    measured = run_row(find_rows("mlr/3/bm25")[0], reproduction, "squad")
    assert [(entry.measure, entry.paper) for entry in measured] == [("Accuracy@20", 0.688), ("Accuracy@100", 0.8)]
    assert all(0 < entry.value <= 1 for entry in measured)


def test_five_seeds_are_five_runs() -> None:
    (row,) = find_rows("mlr/3/mlr")
    case = row.cases()[0]
    folders = {run_folder(case, REPRODUCTION, seed) for seed in range(1, 6)}
    assert len(folders) == 5
    command = case_commands(case, REPRODUCTION, 3)[0]
    assert {"--config.seed.init=3", "--config.seed.negatives=3"} <= set(command)


def test_rows_that_train_alike_share_a_run() -> None:
    """Every folder has exactly one training command, and every training command one folder."""
    commands: dict[Path, list[str]] = {}
    for case in cases():
        for seed in case_seeds(case):
            flag = f"--workdir={run_folder(case, REPRODUCTION, seed)}"
            for command in case_commands(case, REPRODUCTION, seed):
                if command[0] in ("train", "recipe") and flag in command:
                    words = [word for word in command if word != flag]
                    assert commands.setdefault(run_folder(case, REPRODUCTION, seed), words) == words, case.row.id
    trained = [tuple(words) for words in commands.values()]
    assert len(set(trained)) == len(trained)


def test_stages_and_tables_share_a_run() -> None:
    def folder(row: str) -> Path:
        return run_folder(find_rows(row)[0].cases()[0], REPRODUCTION)

    assert folder("i3/2/i3-stage-1") == folder("i3/2/i3-stage-2")
    assert folder("mlr/4/mlr-stage-2") == REPRODUCTION.workdir / "mlr-4-mlr-stage-1" / "msmarco_titles"
    assert folder("mlr/section-4.2.2/mlr-4") == folder("mlr/1/bert-last-four"), "both train with the verb train"
    agg = REPRODUCTION.workdir / "aggretriever-2-distilbert-agg" / "msmarco"
    assert folder("aggretriever/7/128-640") == folder("aggretriever/8/full") == agg
    assert folder("aggretriever/8/semi") != agg


def test_missing_files_are_listed_with_their_origin() -> None:
    text = row_text(find_rows("mlr/2/mlr-10-12")[0], REPRODUCTION)
    origin = "data.retriever.nq-train of DPR's download script (format dpr.examples)"
    assert f"data/nq/biencoder-nq-train.json: {origin}" in text
    assert "Accuracy@5 0.6873" in text


def test_every_file_has_a_format_of_the_documentation() -> None:
    files = {Path(file).name for data in datasets().values() for file in data.files}
    formats = {file: [name for pattern, name in FILE_FORMATS.items() if fnmatchcase(file, pattern)] for file in files}
    assert [file for file, names in formats.items() if not names] == ["config.json"], (
        "only a model has files without a format"
    )
    assert set(FILE_FORMATS.values()) <= set(FORMATS_BY_NAME)


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"'mlr/9' .*neither .*table"):
        find_rows("mlr/9")
    with pytest.raises(ValueError, match=r"i3/2/coil cannot be run: quoted"):
        list_rows("i3/2/coil", "data", "runs", [], "")
    with pytest.raises(ValueError, match="has 8 rows; --run takes one"):
        list_rows("mlr/2", "data", "runs", [], "")
    with pytest.raises(FileNotFoundError, match=r"data/nq/nq-test.qa.csv: data.retriever.qas.nq-test"):
        list_rows("mlr/7/10-12-average", "data", "runs", [], "")
    with pytest.raises(ValueError, match=r"numbers .*'msmarco'; .*triviaqa"):
        list_rows("mlr/2/mlr-10-12", "data", "runs", [], "msmarco")
    with pytest.raises(ValueError, match=r"train.batchsize: recipes/mlr_open_qa:bert .*train"):
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
    """Write folders squad and wikipedia with a few passages in DPR's formats."""
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


def small_keys(encoder: Path) -> dict[str, Any]:
    """Write a tiny encoder, and return keys with which a row trains it for two steps."""
    return {
        "encoder.checkpoint": str(write_encoder(encoder)),
        "encoder.dtype": "float32",
        "train.batch_size": 8,
        "train.steps": 2,
        "train.epochs": 0,
        "tokens.query_length": 8,
        "tokens.passage_length": 16,
    }


@pytest.mark.exhaustive
def test_a_row_runs_and_is_compared(small_squad: Path) -> None:
    """A process trains, encodes, searches and compares; the same command again repeats no step."""
    encoder = small_squad / "encoder"
    keys = small_keys(encoder)
    layers = json.loads((encoder / "config.json").read_text())["num_hidden_layers"]
    chosen = f"({max(1, layers - 1)},{layers})" if layers > 1 else f"({layers},)"
    command = [sys.executable, "-m", "jaxret", "reproduce", "mlr/8/10-12"]
    keys["head.mlr.chosen"] = chosen
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


@pytest.mark.exhaustive
def test_a_row_of_chunks_runs(small_squad: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Corpus and training data are split once, not again in the second run."""
    reproduction = Reproduction(
        small_squad / "data", small_squad / "runs", overrides=small_keys(small_squad / "encoder")
    )
    for turn in range(2):
        measured = run_row(find_rows("mvr/5/four-splits")[0], reproduction)
        assert [entry.measure for entry in measured] == ["Accuracy@5", "Accuracy@20", "Accuracy@100"]
        assert [entry.paper for entry in measured] == pytest.approx([0.572, 0.693, 0.785])
        assert all(0 < entry.value <= 1 for entry in measured)
        assert capfd.readouterr().out.count(" is kept: it is newer than ") == 3 * turn


def test_a_trial_trains_a_part_of_the_row() -> None:
    def epochs(row: str, reproduction: Reproduction) -> dict[str, list[str]]:
        (one,) = find_rows(row)
        return {
            case.source.name: [
                word.rpartition("=")[2]
                for command in case_commands(case, reproduction)
                for word in command
                if ".epochs=" in word
            ]
            for case in one.cases()
        }

    trial = replace(REPRODUCTION, scale=0.01)
    assert epochs("mlr/7/10-12-average", trial)["nq"] == ["0.4"]
    assert epochs("aggretriever/3/distilbert-cls-1k", trial) == {"msmarco": ["0.4"]}, "the epochs are those of the row"
    assert epochs("aggretriever/2/bert-agg", trial) == {"msmarco": ["0.03"], "nq": ["0.4"], "triviaqa": ["0.4"]}
    fixed = replace(trial, overrides={"train.epochs": "3"})
    assert epochs("mlr/7/10-12-average", fixed)["nq"] == ["3"]


def test_a_trial_reaches_the_steps_and_epochs_of_its_keys() -> None:
    (case, *_) = find_rows("mlr/7/10-12-average")[0].cases()
    flags = {word for command in case_commands(case, replace(REPRODUCTION, scale=0.01)) for word in command}
    assert {"--config.train.epochs=0.4", "--config.validation.then_from=0.32"} <= flags
    assert not any("sparsity" in flag for flag in flags)


def test_printed_commands_equal_the_executed_ones() -> None:
    """The commands include those of other seeds, for a row with several runs of one system."""
    (row,) = find_rows("mvr/1/condenser")
    text = row_text(row, REPRODUCTION)
    commands = [
        shlex.join(["jaxret", *command])
        for case in row.cases()
        for seed in case_seeds(case)
        for command in case_commands(case, REPRODUCTION, seed)
    ]
    assert all(command in text.splitlines() for command in commands)
    assert {line for line in text.splitlines() if line.startswith("jaxret ")} == set(commands)


def test_a_set_of_sets_is_searched_set_by_set(tmp_path: Path) -> None:
    (row,) = find_rows("aggretriever/5/bm25")
    (case,) = [case for case in row.cases() if case.sets]
    commands = case_commands(case, REPRODUCTION)
    assert len(commands) == 13 + 12
    assert "--corpus=data/beir/cqadupstack/android" in commands[-12]
    assert all("--on_error=keep" in command for command in commands)
    assert sum(case.target.folders(case.sets).values()) == pytest.approx(1)
    assert case.target.folders(case.sets)["cqadupstack/android"] == pytest.approx(1 / 14 / 12)


def test_records_without_a_positive_are_left_out() -> None:
    """DPR's files of TriviaQA and SQuAD have such records."""
    skips = {
        case.source.name: "--config.data.on_error=skip" in case_commands(case, REPRODUCTION)[0]
        for case in find_rows("mlr/2/dual-encoder")[0].cases()
    }
    assert skips == {"nq": False, "triviaqa": True, "squad": True}


def test_counts_of_files_and_questions() -> None:
    commands = {
        case.target.name: [command[-1] for command in case_commands(case, REPRODUCTION)]
        for row in find_rows("aggretriever/1")
        for case in row.cases()
    }
    assert commands["msmarco"][0] == "data/msmarco/collection.tsv"
    assert commands["nq"] == ["data/nq/biencoder-nq-train.json", "data/nq/nq-test.qa.csv"]
    for row in paper_rows().values():
        for case in row.cases():
            assert not row.counts or len(case.measures) == len(case.numbers), row.id


def test_counts_are_printed_with_the_paper_s(small_squad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = small_squad / "data" / "squad" / "biencoder-squad1-train.json"
    records = json.loads(file.read_text())
    records.append(records[0] | {"question": "without a positive passage", "positive_ctxs": []})
    file.write_text(json.dumps(records))
    list_rows("mlr/6/squad", str(small_squad / "data"), str(small_squad / "runs"), [], "")
    *_, header, _, original, filtered, dev, test = capsys.readouterr().out.splitlines()
    assert header.split()[:5] == ["row", "data", "measure", "paper", "run"]
    assert [line.split()[-2:] for line in (original, filtered, dev, test)] == [
        ["78,713", "9"],
        ["70,096", "8"],
        ["8,886", "8"],
        ["10,570", "4"],
    ]
    measured = run_row(
        find_rows("mvr/section-4.1")[0], Reproduction(small_squad / "data", small_squad / "runs"), "squad"
    )
    assert [(entry.paper, entry.value) for entry in measured] == [(2.7, 8 / 8)]


def test_table_6_counts_questions_before_and_after_filtering() -> None:
    commands = {row.id: case_commands(row.cases()[0], REPRODUCTION) for row in find_rows("mlr/6")}
    names = ["nq-train.qa.csv", "biencoder-nq-train.json", "nq-dev.qa.csv", "nq-test.qa.csv"]
    assert commands["mlr/6/nq"] == [["data", "check", f"data/nq/{name}"] for name in names]
    train = ["data", "check", "data/triviaqa/biencoder-trivia-train.json", "--on_error=skip"]
    assert train in commands["mlr/6/triviaqa"], "bad records are skipped as in training"


def test_i3_rows_start_with_the_warm_up_on_generated_queries() -> None:
    """Section 5.3: the warm-up precedes every stage of fine-tuning; the recipe starts from its run, and learns the same
    queries."""
    (case, *_) = find_rows("i3/2/i3-distilled")[0].cases()
    generate, train, recipe, *_ = case_commands(case, replace(REPRODUCTION, scale=0.01))
    out, run = "runs/generated-msmarco_titles", "runs/recipes-i3_msmarco-warm_up/msmarco_titles"
    assert generate[:2] == ["generate", "--model=data/flan_t5_xl"]
    assert {f"--out={out}", "--write=pseudo_queries", "--write=training"} < set(generate)
    assert {f"--config.data.train={out}/training", f"--workdir={run}", "--config.train.steps=200"} < set(train)
    begun = {f"--config.train.start_from={run}", f"--config.data.pseudo_queries={out}/pseudo-queries.jsonl"}
    assert begun < set(recipe)
    assert "data/flan_t5_xl/config.json" in "".join(missing_files(case, REPRODUCTION))
    (other,) = find_rows("mlr/4/mlr-stage-2")
    assert case_commands(other.cases()[0], REPRODUCTION)[0][0] == "recipe"


def test_the_published_codes_read_titles() -> None:
    """The published code of MLR and I3 does; the numbers of BM25 and Aggretriever are for passages without titles."""
    corpora = {
        row: {
            word
            for case in find_rows(row)[0].cases()
            for command in case_commands(case, REPRODUCTION)
            for word in command
        }
        for row in ("mlr/4/mlr-stage-2", "i3/2/i3-stage-2", "i3/2/bm25", "aggretriever/2/bert-agg")
    }
    titled = {row for row, words in corpora.items() if any("msmarco_titles/collection.split" in word for word in words)}
    assert titled == {"mlr/4/mlr-stage-2", "i3/2/i3-stage-2"}
    assert "--corpus=data/msmarco/collection.tsv" in corpora["i3/2/bm25"] & corpora["aggretriever/2/bert-agg"]


def test_unused_files_are_not_required() -> None:
    (row,) = find_rows("aggretriever/4/bm25")
    missing = {Path(line.partition(":")[0]).name for line in missing_files(row.cases()[0], REPRODUCTION)}
    assert missing == {"psgs_w100.tsv", "squad1-test.qa.csv"}


def test_diversity_is_printed_with_the_papers(tmp_path: Path) -> None:
    (row,) = find_rows("mvr/6/mvr")
    reproduction = Reproduction(tmp_path / "data", tmp_path / "runs")
    (case,) = row.cases()
    path = (
        Path(case_commands(case, reproduction)[1][1].partition("=")[2]) / "eval" / "biencoder-squad1-dev.diversity.json"
    )
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"perplexity": 3.0, "local_variation": {"softmax": 0.1, "cosine": 0.2}}))
    touch_sources(case_commands(case, reproduction)[1])
    measured = [(one.measure, one.value, one.paper) for one in measure_case(case, reproduction)]
    assert measured == [("perplexity", 3.0, 3.19), ("local_variation", 0.1, 0.126)]


def test_wins_of_the_last_layer_are_printed_with_the_papers(tmp_path: Path) -> None:
    (row,) = find_rows("mlr/section-4.2.2/mlr-2")
    reproduction = Reproduction(tmp_path / "data", tmp_path / "runs")
    (case,) = row.cases()
    path = run_folder(case, reproduction) / "eval" / "biencoder-squad1-dev.diversity.json"
    path.parent.mkdir(parents=True)
    stored = {"perplexity": None, "local_variation": {"softmax": 0.1}, "wins": {"layer 12": 3, "layer 8": 1}}
    path.write_text(json.dumps(stored))
    touch_sources(case_commands(case, reproduction)[1])
    measured = [(one.measure, one.value, one.paper) for one in measure_case(case, reproduction)]
    assert measured == [("last_layer_wins", 0.75, 1.0)]


def test_a_key_that_a_row_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"number": "1", "caption": "", "rows": [{"name": "a", "stages": 1}]}
    monkeypatch.setattr(papers, "_read_toml", lambda name: {"tables": [table]})
    with pytest.raises(ValueError, match=r"mlr/1/a: 'stages' .*field"):
        list(papers._read_rows("mlr"))


def test_data_set_names_are_unique() -> None:
    assert all(data.trained_on in ("", *datasets()) for data in datasets().values())
    assert list(measure_case(find_rows("mlr/6/nq")[0].cases()[0], REPRODUCTION)) == []
